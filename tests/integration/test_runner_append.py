"""A projector that appends events itself: whatever is replayed, reset or rebuilt, each answer is there once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import Server
from tests.runner_world import KEY_PREFIX, SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.projector import Projector
from walstream.engine.rebuild import Rebuild
from walstream.errors import ConfigError
from walstream.event import Event
from walstream.testing import make_context, make_event


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute("CREATE TABLE public.routed (seq bigint PRIMARY KEY, answer bigint)")
        yield made


class Router(Projector):
    """Answers every handoff twice: in its own session, and in the one that it is for."""

    name = "router"
    events = ("handoff.emitted",)
    transactional = True
    tables = ("routed",)
    retry_first = 0.01
    max_attempts = 2

    def __init__(self, bad: int = 0) -> None:
        self._bad = bad
        self.results: list[Any] = []

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            first = ctx.append(event, "handoff.received", {"message": event.payload})
            second = ctx.append(event, "note", {"from": event.seq}, session_id=SESSIONS[7], agent_id="other")
            if event.seq == self._bad:
                raise ValueError("bad")
            self.results += [first, second]
            answer = None if first is None else first.seq
            ctx.cursor.execute("INSERT INTO routed VALUES (%s, %s) ON CONFLICT DO NOTHING", (event.seq, answer))


def answers(world: World) -> list[tuple[Any, ...]]:
    return world.execute(
        "SELECT session_id::text, agent_id, event_type, payload FROM agent_events"
        " WHERE event_type <> 'handoff.emitted' ORDER BY payload::text"
    )


def expected(world: World) -> list[tuple[Any, ...]]:
    found = []
    for seq, session, payload in world.execute(
        "SELECT seq, session_id::text, payload FROM agent_events WHERE event_type = 'handoff.emitted'"
    ):
        found.append((session, "router", "handoff.received", {"message": payload}))
        found.append((SESSIONS[7], "other", "note", {"from": seq}))
    return sorted(found, key=lambda row: json.dumps(row[3]))


def test_a_replay_and_a_reset_append_nothing_twice(world: World) -> None:
    last = world.add_many(40, event_type="handoff.emitted")
    group = world.start(Router())
    eventually(lambda: world.reached("router", last))
    group.stop(5)
    assert answers(world) == expected(world)
    assert len(answers(world)) == 80

    # The same events once more, and some new ones; in batches of another size, so that they are cut differently.
    world.execute("UPDATE walstream.cursors SET position = 0 WHERE projector = 'router'")
    more = world.add_many(5, event_type="handoff.emitted")
    again = Router()
    group = world.start(again, projectors={"router": {"batch": 7}})
    eventually(lambda: world.reached("router", more))
    group.stop(5)
    assert answers(world) == expected(world)
    assert [each.appended for each in again.results].count(False) == 80
    assert [each.appended for each in again.results].count(True) == 10


def test_what_a_failed_batch_appended_is_not_there(world: World) -> None:
    last = world.add_many(10, event_type="handoff.emitted")
    world.start(Router(bad=4))
    eventually(lambda: world.reached("router", last))
    assert [offset for offset, *_ in world.parked("router")][:1] == [4]
    done = {row[3]["from"] for row in answers(world) if row[2] == "note"}
    assert 4 not in done
    assert done == {seq for (seq,) in world.execute("SELECT seq FROM public.routed")}
    assert len(answers(world)) == 2 * len(done)


def test_a_rebuild_appends_nothing_and_sees_what_was_appended(world: World) -> None:
    last = world.add_many(20, event_type="handoff.emitted")
    group = world.start(Router())
    eventually(lambda: world.reached("router", last))
    group.stop(5)
    before = answers(world)
    again = Router()
    outcome = Rebuild(world.settings, again, KEY_PREFIX).run()
    assert answers(world) == before
    assert [each.appended for each in again.results] == [False] * 40
    assert [(found.rows, found.missing, found.surplus) for found in outcome.differences] == [(20, 0, 0)]


def test_an_answer_that_the_live_one_never_gave_is_none_in_a_rebuild(world: World) -> None:
    (seq,) = world.insert("handoff.emitted")
    event = make_event(1, "handoff.emitted", payload={}, seq=seq, session_id=SESSIONS[0])
    ctx = make_context("router", connection=world.connect(), rebuilding=True)
    assert ctx.append(event, "note", {}) is None
    assert answers(world) == []


def test_answers_are_told_apart_by_number_or_by_name(world: World) -> None:
    (seq,) = world.insert("handoff.emitted")
    event = make_event(1, "handoff.emitted", payload={}, seq=seq, session_id=SESSIONS[0])
    on = world.connect()

    rounds: list[tuple[list[str | None], list[bool]]] = [
        ([None, None, "last"], [True, True, True]),
        ([None, None, "last"], [False, False, False]),
        (["last", None, "new"], [False, False, True]),
    ]
    for names, appended in rounds:
        ctx = make_context("router", connection=on)  # as each delivery begins: the count is its own
        results = [ctx.append(event, "note", {"n": n}, name=name) for n, name in enumerate(names)]
        assert [each.appended for each in results if each is not None] == appended
    on.commit()
    assert len(answers(world)) == 4


def test_an_external_projector_has_no_transaction_to_append_in() -> None:
    with pytest.raises(ConfigError, match="external"):
        make_context("router").append(make_event(1), "note", {})


class Announcer(Projector):
    """Announces each event, and fails at one of them the first time."""

    name = "announcer"
    retry_first = 0.01

    def __init__(self, transactional: bool) -> None:
        self.transactional = transactional
        self.failed = False

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            ctx.notify("news", str(event.seq))
            ctx.notify("news", str(event.seq))
            if event.seq == 2 and not self.failed:
                self.failed = True
                raise ValueError("once")


@pytest.mark.parametrize("transactional", [True, False])
def test_what_is_announced_is_heard_after_the_commit_and_once(world: World, transactional: bool) -> None:
    heard = world.connect()
    heard.autocommit = True
    with heard.cursor() as cur:
        cur.execute("LISTEN news")
    last = world.add("note", "note", "note")
    world.start(Announcer(transactional))
    eventually(lambda: world.reached("announcer", last))

    def news() -> list[str]:
        heard.poll()
        return [each.payload for each in heard.notifies]

    eventually(lambda: {"1", "2", "3"} <= set(news()))
    assert len(news()) <= 6, "what is said many times in a delivery is sent once"
    ctx = make_context("announcer", connection=world.connect(), rebuilding=True)
    ctx.notify("news", "x")
    assert ctx.announcements == ()
