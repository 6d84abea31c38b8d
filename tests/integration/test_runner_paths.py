"""Hot, cold and back: neither gap nor double at the crossing, whatever the buffer does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.integration.test_runner_failures import Effect, effects
from tests.runner_world import World, eventually, world_on
from walstream.engine import runner, supply
from walstream.engine.context import Context
from walstream.engine.source import EventBatch, StreamSource
from walstream.event import Event
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute("CREATE TABLE public.effect (n bigserial, projector text, event_offset bigint)")
        yield made


def cold_connections(world: World) -> int:
    rows = world.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walstream:walstream:cold'"
        " AND datname = current_database()"
    )
    return int(rows[0][0])


def test_a_slow_projector_falls_out_of_the_buffer_and_comes_back(world: World) -> None:
    world.make_hot(20_000)  # forty events
    slow, quick = Effect("slow", batch=10), FaultyProjector("quick")
    slow.open.clear()
    world.start(slow, quick)
    world.add_many(5)
    eventually(lambda: slow.batches)
    states = set()
    last = 0
    for _ in range(20):
        last = world.add_many(30, transaction=3)
        eventually(lambda: world.reached("quick", last), what="the quick one keeps up")  # noqa: B023
        states.add(world.state("quick"))
    slow.open.set()
    eventually(lambda: world.reached("slow", last))
    assert cold_connections(world) == 1
    assert states <= {"hot", "starting"}
    eventually(lambda: world.state("slow") == "hot")
    more = world.add_many(30)
    eventually(lambda: world.reached("slow", more) and world.reached("quick", more))
    assert effects(world, "slow") == list(range(1, more + 1))
    assert quick.done == list(range(1, more + 1))


def test_what_stood_before_the_buffer_is_read_cold(world: World) -> None:
    world.add_many(50)
    world.make_hot()
    projector = FaultyProjector("p")
    world.start(projector)
    last = world.add_many(50)
    eventually(lambda: world.reached("p", last) and world.state("p") == "hot")
    assert projector.done == list(range(1, last + 1))


def test_while_another_process_ingests_the_order_is_read(world: World) -> None:
    """A process whose ingest stands by has a hot buffer that nobody feeds."""
    hot = world.make_hot()
    hot.suspend()
    world.hot = None
    projector = FaultyProjector("p")
    group = world.group(projector)
    group._supply._hot = hot
    group.start()
    last = world.add_many(30)
    eventually(lambda: world.reached("p", last))
    assert world.state("p") in ("cold", "starting")
    # Now it is this process's turn to ingest.
    world.hot = hot
    hot.reset(last + 1)
    last = world.add_many(30)
    eventually(lambda: world.reached("p", last) and world.state("p") == "hot")
    # And no longer.
    hot.suspend()
    world.hot = None
    last = world.add_many(30)
    eventually(lambda: world.reached("p", last))
    assert projector.done == list(range(1, last + 1))


@pytest.mark.parametrize("transactional", [True, False])
def test_when_ingest_begins_anew_the_cursor_is_read_again(world: World, transactional: bool) -> None:
    """Rule 4: the server crashed. The end of an order that was written asynchronously is gone, and so are the cursors
    beyond it; the process lives and remembers both."""
    hot = world.make_hot()
    make = Effect if transactional else FaultyProjector
    projector = make("p")
    world.start(projector)
    seqs = [world.insert("x") for _ in range(10)]
    world.order(*seqs)
    eventually(lambda: world.reached("p", 10))
    # The crash, as the database shows it afterwards.
    world.execute("DELETE FROM walstream.commit_order")
    world.hot = None
    world.writer.tail()
    world.order(*seqs[:6])
    world.execute("UPDATE walstream.cursors SET position = 6")
    if transactional:
        world.execute("DELETE FROM public.effect WHERE event_offset > 6")
    world.hot = hot
    hot.reset(7)
    world.order(*seqs[6:])
    last = world.add_many(5)
    eventually(lambda: world.reached("p", last))
    if transactional:
        assert effects(world, "p") == list(range(1, last + 1))
    else:
        assert list(dict.fromkeys(projector.done)) == list(range(1, last + 1))
        assert projector.done.count(8) == 2  # delivered again, with the same key
        assert len(set(projector.keys)) == last


def test_a_cursor_never_passes_the_end_of_the_order(world: World) -> None:
    """The buffer still holds what the server has lost, and ingest has not noticed yet."""
    held: list[int] = []

    class Slow(Effect):
        def effect(self, event: Event, ctx: Context) -> None:
            super().effect(event, ctx)
            if event.offset == 8 and not held:
                held.append(8)
                world.execute("DELETE FROM walstream.commit_order WHERE first_offset > 5")

    world.make_hot()
    world.order(*[world.insert("x") for _ in range(5)])
    lost = [world.insert("x") for _ in range(5)]
    world.order(*lost)
    world.start(Slow("p"))
    eventually(lambda: held)
    with pytest.raises(AssertionError):
        eventually(lambda: any(position > 5 for position in world.positions("p")), timeout=1.0)
    assert [offset for offset in effects(world, "p") if offset > 5] == []
    world.hot = None
    world.order(*lost)
    eventually(lambda: world.reached("p", 10))
    assert effects(world, "p") == list(range(1, 11))


def test_a_cursor_that_passed_over_events_is_written_at_the_stop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FLUSH_SECONDS", 3600.0)
    asked: list[int] = []

    class Watched(StreamSource):
        def read(self, after: int, *, limit: int, timeout: float) -> EventBatch:
            asked.append(after)
            return super().read(after, limit=limit, timeout=timeout)

    monkeypatch.setattr(supply, "StreamSource", Watched)
    group = world.start(FaultyProjector("p", events=("signal",)))
    last = world.add_many(30, event_type="noise")
    eventually(lambda: asked and asked[-1] == last)
    assert world.positions("p") == [0]
    group.stop(5)
    assert world.positions("p") == [last]
