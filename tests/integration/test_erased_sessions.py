"""What was erased is passed by everybody who reads, on purpose; what is gone undeclared still stops them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Server
from tests.integration.test_snapshots import Driver, rebuilt, rows
from tests.ledger_oracle import check
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream import Context, Event, Projector
from walstream.engine.erasure_watch import ErasureWatch
from walstream.errors import LedgerError, RetryLater, RowMissing
from walstream.event import ERASED_ERROR, ERASED_PAYLOAD
from walstream.ledger.fold import Fold, FoldEvent
from walstream.testing import FaultyProjector

ONE, OTHER, CHILD = SESSIONS[:3]
MiB = 1 << 20
WINDOW = {"messages": [{"role": "user", "content": "my name is Ada"}]}


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


def erase(world: World, session: str = ONE, **more: Any) -> None:
    arguments = {"session_id": session, "reason": "asked for", "mode": "redact", **more}
    names = ", ".join(f"{name} => %s" for name in arguments)
    world.execute(f"SELECT * FROM walstream.erase_session({names})", *arguments.values())


def talk(world: World, session: str = ONE) -> None:
    """A session with everything that a fold remembers."""
    world.execute(
        "SELECT walstream.append(%s, 'a', 'context.loaded', %s, store_messages => true)",
        session,
        '{"messages": [{"role": "user", "content": "my name is Ada"}]}',
    )
    for event_type, payload in (
        ("model.responded", {"message": {"role": "assistant", "content": "hello Ada"}}),
        ("tool.invoked", {"call_id": "c1", "name": "mail", "arguments": {}}),
        ("handoff.emitted", {"to": "b"}),
    ):
        world.insert(event_type, session=session, payload=payload)
    world.order(
        *([seq] for (seq,) in world.execute("SELECT seq FROM agent_events ORDER BY 1") if not ordered(world, seq))
    )


def ordered(world: World, seq: int) -> bool:
    return world.cold().offset_of(seq) is not None


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_a_cold_reader_passes_it(world: World, mode: str) -> None:
    world.add_many(10, sessions=2)
    before = world.events()
    kept = [event for event in before if event.session_id != ONE]
    erase(world, mode=mode)
    assert [(e.offset, e.payload) for e in world.events()] == [(e.offset, e.payload) for e in kept]
    assert world.cold().read(0, 1, MiB).through == 1  # a redacted one alone: no event, and progress


def test_only_what_is_declared_is_passed(world: World) -> None:
    """An agent may have written what a redacted payload looks like, and a row that is gone is still missed."""
    world.add("note", payload_text=ERASED_PAYLOAD.decode())
    world.add_many(5, sessions=1)
    world.execute("DELETE FROM agent_events WHERE seq = 4")
    assert [event.offset for event in world.cold().read(0, 100, MiB).events] == [1, 2, 3]
    erase(world)
    with pytest.raises(RowMissing, match="seq = 4, and no erasure declares that"):
        world.cold().read(3, 100, MiB)
    assert [event.offset for event in world.cold().read(0, 3, MiB).events] == [1]


class Counter(Projector):
    """Counts what it is given."""

    name = "counter"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def project(self, events: list[Event], _ctx: Context) -> None:  # type: ignore[override]
        self.seen += [event.offset for event in events]


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_a_projector_goes_on_hot_and_cold(world: World, mode: str) -> None:
    world.make_hot()
    world.add_many(6, sessions=2)
    erase(world, mode=mode)  # while it is in the buffer
    hot = Counter()
    world.start(hot)
    eventually(lambda: world.reached("counter", 6), what="the end")
    late = Counter()
    late.name = "late"
    world.hot = None
    world.start(late)
    eventually(lambda: world.reached("late", 6), what="the end, from the ledger")
    assert late.seen == [2, 4, 6]
    assert set(late.seen) <= set(hot.seen)


def test_a_projector_that_tries_again_does_not_write_down_what_was_erased(world: World) -> None:
    """The lane has the event in memory for as long as the target is away, and its error says what was in it."""
    world.add("note", payload={"name": "Ada"})
    tries = itertools.count()
    world.start(FaultyProjector("p", lambda e, _t: RetryLater(f"try {next(tries)} of {e.payload['name']}", delay=0.05)))
    shown = "SELECT coalesce(error, '') FROM walstream.projectors"
    eventually(lambda: any("Ada" in error for (error,) in world.execute(shown)), what="the error")
    erase(world)
    assert world.execute(shown) == [(ERASED_ERROR,)]
    until, seen = next(tries) + 30, set()
    while next(tries) < until:
        seen.add(world.execute(shown)[0][0])
        time.sleep(0.02)
    assert seen == {ERASED_ERROR}


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_ingest_stops_handing_out_what_it_has_in_memory(world: World, mode: str) -> None:
    buffer = world.make_hot()
    watch = ErasureWatch(world.settings, lambda: world.connection, buffer)
    world.add_many(4, sessions=2)
    watch.look()
    assert buffer.read(0, 10, 0) is not None, "nothing was erased"
    erase(world, mode=mode)
    watch.look()
    assert buffer.read(0, 10, 0) is None
    world.add("late", session=OTHER)
    for _ in range(10):
        watch.look()
    world.add("later", session=OTHER)
    watch.look()
    assert [event.event_type for event in buffer.read(5, 10, 0) or ()] == ["later"]
    counter = Counter()
    world.start(counter)
    eventually(lambda: world.reached("counter", 6), what="the end")
    assert counter.seen == [2, 4, 5, 6]


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_its_context_is_empty_and_goes_on(world: World, mode: str) -> None:
    talk(world)
    writer = Driver(world, every_events=2)
    writer.run()
    assert rebuilt(world)["messages"][0]["content"] == "my name is Ada"
    assert rows(world)
    erase(world, mode=mode)
    assert rows(world) == []
    empty = Fold().empty()
    assert rebuilt(world) == rebuilt(world, snapshots=False) == empty
    world.add("tool.observed", payload={"call_id": "c1", "result": 1})  # of a call that nobody knows any more
    world.add("context.loaded", payload={"messages": [{"role": "user", "content": "again"}]})
    writer.run()
    assert [message["content"] for message in rebuilt(world)["messages"]] == ["again"]
    check(world.connection, world.settings)


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_a_writer_that_holds_the_session_saves_nothing_of_it(world: World, mode: str) -> None:
    """Its memory, and the buffer that its events come from, still have what is gone."""
    talk(world)
    talk(world, OTHER)
    events = world.events()
    writer = Driver(world, every_events=3)
    writer.ctx.begin()
    writer.projector.project(events[:2], writer.ctx)  # held, and not saved yet
    writer.connection.commit()
    erase(world, mode=mode)
    writer.ctx.begin()
    writer.projector.project(events[2:], writer.ctx)  # from a buffer
    writer.connection.commit()
    assert world.execute("SELECT count(*) FROM agent_snapshots WHERE context::text LIKE %s", "%Ada%") == [(1,)]
    assert rows(world, session=OTHER) != []
    check(world.connection, world.settings)


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_a_fork_that_is_kept_goes_on_from_nothing(world: World, mode: str) -> None:
    talk(world)
    world.execute("SELECT * FROM walstream.fork(%s, 99, 'a', %s)", ONE, CHILD)
    world.insert("handoff.emitted", session=CHILD, payload={"to": "c"})
    writer = Driver(world, every_events=1)
    world.order(*([seq] for (seq,) in world.execute("SELECT seq FROM agent_events WHERE session_id = %s", CHILD)))
    writer.run()
    assert rebuilt(world, CHILD)["messages"][0]["content"] == "my name is Ada"
    erase(world, mode=mode, forks="keep")
    found = rebuilt(world, CHILD)
    assert (found["messages"], len(found["handoffs"])) == ([], 1)
    assert rows(world, session=CHILD) == []
    Driver(world, every_events=1).run()
    assert rows(world, session=CHILD) != []
    assert rebuilt(world, CHILD) == found
    check(world.connection, world.settings)


def test_a_parent_that_is_gone_undeclared_is_still_an_error(world: World) -> None:
    talk(world)
    world.execute("SELECT * FROM walstream.fork(%s, 99, 'a', %s)", ONE, CHILD)
    world.execute("DELETE FROM agent_events WHERE session_id = %s", ONE)
    with pytest.raises(LedgerError, match="has no event of that session"):
        rebuilt(world, CHILD)


def test_messages_that_are_gone_undeclared_are_still_an_error(world: World) -> None:
    talk(world)
    world.execute("DELETE FROM walstream.messages")
    with pytest.raises(LedgerError, match="not stored"):
        rebuilt(world)


def test_functions_of_an_application_never_see_what_was_erased() -> None:
    fold, seen = Fold(), []

    @fold.on("note.added")
    def note_added(_context: dict[str, Any], event: FoldEvent) -> None:
        seen.append(event.payload["text"])

    raw = [b'{"text": "a"}', ERASED_PAYLOAD, b'{"text": "b"}']
    fold.fold(FoldEvent(n, ONE, "a", "note.added", payload) for n, payload in enumerate(raw))
    assert seen == ["a", "b"]
