"""``walstream handoffs dead`` and ``reroute``: what could not be routed is seen, and routed later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import Called, call, ok
from tests.conftest import Server
from tests.runner_world import SESSIONS, World, world_on
from walstream import Context, Stream
from walstream.projectors.handoff_router import HandoffRouter

stream = Stream()
stream.add(HandoffRouter(agents=("writer",), routes={"ghost": "writer"}))


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


def bury(world: World, to: str, session: str = SESSIONS[0], **payload: Any) -> int:
    """A handoff that was routed while only the writer was served; its seq."""
    (seq,) = world.insert("handoff.emitted", session=session, payload={"to": to, **payload})
    world.order([seq])
    connection = world.connect()
    router = HandoffRouter(agents=("writer",))
    with connection:
        ctx = Context(router.name, connection=connection, settings=world.settings)
        router.project([event for event in world.events() if event.seq == seq], ctx)
    return seq


def handoffs(world: World, *words: str, code: int = 0) -> Called:
    called = call("handoffs", *words, dsn=world.database.dsn)
    assert called.exit_code == code, called
    return called


def dead(world: World, *words: str) -> list[int]:
    return [letter["event_seq"] for letter in handoffs(world, "dead", "--json", *words).json["letters"]]


def jobs(world: World) -> list[Any]:
    return world.execute("SELECT event_seq, agent_id, hops FROM agent_jobs ORDER BY event_seq")


def test_the_dead_are_listed_with_their_reason(world: World) -> None:
    assert "no handoff is waiting" in handoffs(world, "dead").stdout
    first, second = bury(world, "ghost"), bury(world, "[red]x", session=SESSIONS[1])
    document = handoffs(world, "dead", "--json").json
    assert document["dead"] == 2
    assert [letter["event_seq"] for letter in document["letters"]] == [first, second]
    assert document["letters"][0]["session_id"] == SESSIONS[0]
    assert "nobody serves the agent 'ghost'" in document["letters"][0]["reason"]
    assert document["letters"][0]["age"] >= 0
    shown = handoffs(world, "dead").stdout
    assert "'ghost'" in shown
    assert "'[red]x'" in shown
    assert SESSIONS[1] in shown
    assert "handoffs without a job: 2" in shown
    assert dead(world, "--session", SESSIONS[1]) == [second]
    assert "the oldest 1 are shown" in handoffs(world, "dead", "--limit", "1").stdout


def test_status_says_that_somebody_has_to_look(world: World) -> None:
    def problems() -> list[str]:
        return [each for each in call("status", "--json", dsn=world.database.dsn).json["problems"] if "job" in each]

    assert problems() == []
    seq = bury(world, "ghost")
    assert problems() == ["handoffs without a job, which wait for a person: 1 (`walstream handoffs dead`)"]
    handoffs(world, "reroute", str(seq), "--to", "b")
    assert problems() == []
    world.execute("ALTER TABLE walstream.dead_letters RENAME TO gone")  # as before `walstream migrate`
    try:
        assert problems() == []
    finally:
        world.execute("ALTER TABLE walstream.gone RENAME TO dead_letters")


def test_they_are_routed_by_the_rules_of_a_stream(world: World) -> None:
    seqs = [bury(world, "ghost"), bury(world, "nobody"), bury(world, "ghost")]
    target = ("--stream", "tests.integration.test_cli_handoffs:stream")
    called = handoffs(world, "reroute", "--all", *target, "--json", code=1)
    outcomes = called.json["handoffs"]
    assert [(each["event_seq"], each["agent"], each["job_id"] is None) for each in outcomes] == [
        (seqs[0], "writer", False),
        (seqs[1], None, True),
        (seqs[2], "writer", False),
    ]
    assert "nobody serves" in outcomes[1]["reason"]
    assert jobs(world) == [(seqs[0], "writer", 1), (seqs[2], "writer", 1)]
    assert dead(world) == [seqs[1]]
    # A second time there is nothing to do, and no job comes of it.
    again = handoffs(world, "reroute", str(seqs[0]), *target).stdout
    assert "has job" in again
    assert len(jobs(world)) == 2


def test_they_are_routed_by_the_configuration(world: World, tmp_path: Path) -> None:
    seq = bury(world, "ghost")
    config = tmp_path / "walstream.toml"
    config.write_text(
        '[projectors.handoff-router.options]\nagents = ["writer"]\ndefault = "writer"\n'
        # Not made: this command has no business with it.
        "[projectors.json-lines-file.options]\npath = 7\n"
    )
    assert "for writer" in handoffs(world, "reroute", str(seq), "--config", str(config)).stdout
    assert jobs(world) == [(seq, "writer", 1)]


def test_a_person_sends_one_on_whatever_the_rules_and_the_limit_say(world: World) -> None:
    seq, other = bury(world, "ghost", hops=99), bury(world, "ghost")
    assert "for anybody" in handoffs(world, "reroute", str(seq), "--to", "anybody").stdout
    assert jobs(world) == [(seq, "anybody", 1)]
    assert dead(world) == [other]
    assert "for anybody" in handoffs(world, "reroute", "--all", "--session", SESSIONS[0], "--to", "anybody").stdout
    assert dead(world) == []
    assert "no handoff is waiting" in handoffs(world, "reroute", "--all", "--to", "anybody").stdout


def test_one_that_got_a_job_otherwise_is_dead_no_longer(world: World) -> None:
    seq = bury(world, "ghost")
    world.execute("SELECT walstream.submit_job(%s, 'b', event_seq => %s)", SESSIONS[0], seq)
    assert dead(world) == []


def test_what_cannot_be_routed_again_says_why(world: World) -> None:
    seqs = [bury(world, "ghost") for _ in range(3)]
    world.execute("DELETE FROM agent_events WHERE seq = ANY (%s)", seqs[:2])
    world.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (%s, %s, 'x')", seqs[0], seqs[0])
    (unordered,) = world.insert("handoff.emitted", payload={"to": "writer"})
    alive = world.insert("handoff.emitted", payload={"to": "writer"})
    world.order(alive)
    words = [str(seq) for seq in (seqs[0], seqs[1], unordered, alive[0], 999999)]
    outcomes = handoffs(world, "reroute", *words, "--to", "b", "--json", code=1).json["handoffs"]
    reasons = [outcome["reason"] for outcome in outcomes]
    assert reasons[0] == "its event was erased"
    assert "has no row any more" in reasons[1]
    assert reasons[2] == reasons[4] == "it has no place in the order of commits"
    assert reasons[3] == "it is no dead letter"
    assert jobs(world) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reroute",), "which handoffs?"),
        (("reroute", "1", "--all"), "which handoffs?"),
        (("reroute", "1"), "there is no handoff router in the configuration"),
        (("reroute", "1", "--stream", "tests.integration.streams:Installed"), "a stream is needed"),
        (("reroute", "1", "--to", ""), "--to: '' is no agent's name"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(world: World, words: tuple[str, ...], message: str) -> None:
    called = handoffs(world, *words, "--json", code=3)
    assert message in called.error["message"]


def test_a_schema_without_jobs_is_named(world: World) -> None:
    with world.at_version(2):
        called = handoffs(world, "dead", "--json", code=3)
        assert "needs version 3" in called.error["message"]


def test_a_copy_in_another_environment_starts_nobody(world: World) -> None:
    seq = bury(world, "ghost")
    called = call(
        "handoffs", "reroute", str(seq), "--to", "b", "--environment", "staging", "--json", dsn=world.database.dsn
    )
    assert called.exit_code != 0
    assert jobs(world) == []
    assert ok("handoffs", "dead", "--json", dsn=world.database.dsn).json["dead"] == 1
