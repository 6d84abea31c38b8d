"""The simulated agents: the same seed, the same work; and what they write is what the taxonomy says."""

from __future__ import annotations

import json
import random

import pytest

from walstream.demo.scenario import (
    ROLES,
    Role,
    Step,
    Task,
    events_after,
    new_task,
    numbers_of,
    shaped,
    turn,
    turn_after,
)
from walstream.ledger.append import NewEvent
from walstream.ledger.json_lines import parse_event

HANDED_ON = Task("11111111-2222-4333-8444-555555555555", "Verify the log")


def played(role: Role, seed: int, task: Task = HANDED_ON, *, alone: bool = False) -> list[Step]:
    return list(turn(role, f"{role}-1", task, random.Random(seed), alone=alone))


def events(steps: list[Step]) -> list[NewEvent]:
    return [event for step in steps for event in step.events]


@pytest.mark.parametrize("role", ROLES)
def test_the_same_seed_gives_the_same_turn(role: Role) -> None:
    assert played(role, 7) == played(role, 7)
    assert played(role, 7) != played(role, 8)
    assert new_task(random.Random(1)) == new_task(random.Random(1))


@pytest.mark.parametrize("role", ROLES)
def test_a_turn_ends_with_the_next_handoff_or_the_task(role: Role) -> None:
    for seed in range(50):
        turn_events = events(played(role, seed))
        assert "handoff.received" not in {event.event_type for event in turn_events}  # that comes with the claim
        last = turn_events[-1]
        if role == "reviewer":
            assert last.event_type in ("handoff.emitted", "task.completed", "task.failed")
        else:
            assert last.event_type == "handoff.emitted"
            assert json.loads(last.payload)["to"] == ROLES[ROLES.index(role) + 1]
        assert all(event.session_id == HANDED_ON.session_id for event in turn_events)


def test_a_turn_that_is_tried_again_does_the_same() -> None:
    handoff = json.loads(events(played("planner", 1))[-1].payload)
    assert turn_after(handoff, HANDED_ON.session_id) == turn_after(handoff, HANDED_ON.session_id)
    assert turn_after(handoff, HANDED_ON.session_id) != turn_after(handoff, "11111111-2222-4333-8444-555555555556")


def test_it_is_known_beforehand_how_many_events_follow_a_handoff() -> None:
    lengths = set()
    for seed in range(50):
        steps = played("planner", seed, new_task(random.Random(seed)))
        follow = events_after(steps)
        written = 0
        while (last := events(steps)[-1]).event_type == "handoff.emitted":
            steps = turn_after(json.loads(last.payload), last.session_id)
            written += 1 + len(events(steps))
        assert written == follow
        lengths.add(follow)
    assert len(lengths) > 10
    assert events_after(steps) == 0  # the session is over


def test_a_session_is_not_sent_back_for_ever() -> None:
    task = Task(HANDED_ON.session_id, "x", rounds=2)
    assert all(events(played("reviewer", seed, task))[-1].event_type.startswith("task.") for seed in range(100))


def test_who_works_alone_hands_nothing_on() -> None:
    task = new_task(random.Random(3))
    for seed in range(50):
        types = [event.event_type for event in events(played("planner", seed, task, alone=True))]
        assert types[0] == "context.loaded"
        assert types[-1] in ("task.completed", "task.failed")
        assert not any(kind.startswith("handoff") for kind in types)


def test_every_tool_call_is_observed_after_it_was_invoked() -> None:
    for seed in range(50):
        pending = ""
        for event in events(played("researcher", seed)):
            if event.event_type == "tool.invoked":
                pending = json.loads(event.payload)["call_id"]
            if event.event_type == "tool.observed":
                assert json.loads(event.payload)["call_id"] == pending


def test_what_agents_write_can_be_imported() -> None:
    for event in events(played("writer", 1)):
        line = json.dumps(event._asdict() | {"payload": None}).replace("null", event.payload)
        assert parse_event(line.encode()) == event


def test_all_accidents_happen_and_steps_are_never_empty() -> None:
    steps = [step for seed in range(200) for step in played("researcher", seed)]
    assert {step.undo for step in steps} == {"nothing", "transaction", "savepoint"}
    assert all(step.events for step in steps)
    assert all(bool(step.undone) == (step.undo != "nothing") for step in steps)
    assert any(step.hold for step in steps)


def test_recorded_events_keep_their_order_whatever_the_cut() -> None:
    recorded = [NewEvent("s", "a", "t", str(n)) for n in range(57)]
    for seed in range(20):
        assert events(list(shaped(recorded, random.Random(seed)))) == recorded


@pytest.mark.parametrize("agents", range(1, 20))
def test_every_role_has_an_agent(agents: int) -> None:
    numbers = numbers_of(agents)
    assert set(numbers) == set(ROLES)
    assert min(numbers.values()) >= 1
    assert sum(numbers.values()) == max(agents, len(ROLES))
