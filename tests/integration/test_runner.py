"""Runners on a real server: what a projector receives, and what stands in the database afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import Server
from tests.runner_world import KEY_PREFIX, SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.projector import FunctionProjector, Projector
from walstream.errors import RetryLater
from walstream.event import Event
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


class Copy(Projector):
    """Copies offsets into a table of its own."""

    transactional = True

    def __init__(self, name: str = "copy", **options: Any) -> None:
        self.name = name
        for option, value in options.items():
            setattr(self, option, value)

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute(f'CREATE TABLE IF NOT EXISTS "{self.name}" (n bigserial, event_offset bigint, key text)')

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            ctx.cursor.execute(
                f'INSERT INTO "{self.name}" (event_offset, key) VALUES (%s, %s)', (event.offset, event.key)
            )


def copied(world: World, name: str = "copy") -> list[int]:
    return [int(row[0]) for row in world.execute(f'SELECT event_offset FROM public."{name}" ORDER BY n')]


def test_an_external_projector_receives_everything_once_and_in_order(world: World) -> None:
    last = world.add_many(1200, transaction=3)
    projector = FaultyProjector("p")
    group = world.start(projector)
    eventually(lambda: world.reached("p", last))
    more = world.add_many(10)
    eventually(lambda: world.reached("p", more))
    assert projector.done == list(range(1, more + 1))
    assert projector.keys[0] == f"{KEY_PREFIX}:{world.events()[0].seq}"
    assert group.healthy
    group.stop(5)
    assert world.state("p") == "stopped"


def test_a_transactional_projector_commits_effect_and_cursor_together(world: World) -> None:
    last = world.add_many(1200, transaction=7)
    world.start(Copy())
    eventually(lambda: world.reached("copy", last))
    assert copied(world) == list(range(1, last + 1))


def test_it_goes_on_where_it_stood(world: World) -> None:
    last = world.add_many(20)
    first = FaultyProjector("p")
    group = world.start(first)
    eventually(lambda: world.reached("p", last))
    group.stop(5)
    more = world.add_many(5)
    second = FaultyProjector("p")
    world.start(second)
    eventually(lambda: world.reached("p", more))
    assert second.done == list(range(last + 1, more + 1))


def test_only_the_events_it_wants_and_a_cursor_that_passes_over_the_rest(world: World) -> None:
    world.add_many(50, event_type="noise")
    wanted = world.add("signal")
    last = world.add_many(50, event_type="noise")
    projector = FaultyProjector("p", events=("signal",))
    world.start(projector)
    eventually(lambda: world.reached("p", last))
    assert projector.done == [wanted]


def test_where_a_new_projector_starts(world: World) -> None:
    head = world.add_many(10)
    latest, seventh = FaultyProjector("latest", start="latest"), FaultyProjector("seventh", start=7)
    world.start(latest, seventh)
    eventually(lambda: world.reached("seventh", head))
    last = world.add_many(3)
    eventually(lambda: world.reached("latest", last) and world.reached("seventh", last))
    assert latest.done == [head + 1, head + 2, head + 3]
    assert seventh.done == list(range(7, last + 1))


def test_a_transaction_is_not_split_unless_it_is_larger_than_the_batch(world: World) -> None:
    last = world.add_many(96, transaction=8)  # 12 transactions
    large = world.add_many(25, transaction=25)
    projector = FaultyProjector("p", batch=20)
    world.start(projector)
    eventually(lambda: world.reached("p", large))
    assert all(len(batch) <= 20 for batch in projector.batches)
    small = [batch for batch in projector.batches if batch[0] <= last]
    assert all(batch[0] % 8 == 1 and batch[-1] % 8 == 0 for batch in small)
    assert [offset for batch in projector.batches for offset in batch] == list(range(1, large + 1))


def test_an_async_function(world: World) -> None:
    seen: list[int] = []

    async def note(event: Event, ctx: Context) -> None:
        assert (ctx.projector, ctx.lane, ctx.rebuilding) == ("note", 0, False)
        seen.append(event.offset)

    last = world.add("a", "b", "a")
    world.start(FunctionProjector(note, ("a",)))
    eventually(lambda: world.reached("note", last))
    assert seen == [1, 3]


def test_an_async_transactional_projector(world: World) -> None:
    world.execute("CREATE TABLE public.seen (event_offset bigint)")

    async def note(event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO seen VALUES (%s)", (event.offset,))

    last = world.add_many(20)
    world.start(FunctionProjector(note, transactional=True))
    eventually(lambda: world.reached("note", last))
    assert world.execute("SELECT count(*), count(DISTINCT event_offset) FROM public.seen") == [(20, 20)]


def test_lanes_share_the_sessions_and_keep_each_in_order(world: World) -> None:
    last = world.add_many(400, sessions=8)
    by_lane: dict[int, list[Event]] = {0: [], 1: [], 2: []}

    def note(event: Event, ctx: Context) -> None:
        by_lane[ctx.lane].append(event)

    world.start(FunctionProjector(note, lanes=3))
    eventually(lambda: len(world.positions("note")) == 3 and world.reached("note", last))
    offsets = [[event.offset for event in lane] for lane in by_lane.values()]
    assert all(lane == sorted(lane) for lane in offsets)
    assert sorted(offset for lane in offsets for offset in lane) == list(range(1, last + 1))
    sessions = [{event.session_id for event in lane} for lane in by_lane.values()]
    assert set.union(*sessions) == set(SESSIONS)
    assert sum(map(len, sessions)) == len(SESSIONS)


def test_two_projectors_do_not_wait_for_each_other(world: World) -> None:
    slow, quick = FaultyProjector("slow"), FaultyProjector("quick")
    slow.open.clear()
    last = world.add_many(100)
    world.start(slow, quick)
    eventually(lambda: world.reached("quick", last))
    assert slow.done == []
    slow.open.set()
    eventually(lambda: world.reached("slow", last))
    assert slow.done == quick.done


def test_a_setup_that_was_tried_again_is_forgotten_once_it_went_well(world: World) -> None:
    class Reluctant(Projector):
        name = "reluctant"
        tries = 0

        def setup(self, ctx: Context) -> None:
            self.tries += 1
            if self.tries == 1:
                raise RetryLater(f"{ctx.projector} is not ready")

        def project(self, events: Sequence[Event], ctx: Context) -> None:
            raise AssertionError(f"{ctx.projector} has nothing to do, and got {events}")

    projector = Reluctant()
    world.start(projector)
    eventually(lambda: projector.tries == 2, what="it is set up")
    eventually(lambda: world.state("reluctant") in ("hot", "cold"), what="and well, though nothing comes")
