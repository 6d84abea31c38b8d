"""What a projector does by time: called while nothing comes, and under the same rules as a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import Server
from tests.runner_world import World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.projector import Options, Projector
from walstream.errors import ConfigError, ProjectorHalted, RetryLater
from walstream.event import Event


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


class Clock(Projector):
    """Notes its ticks and its batches, and that they never meet."""

    name = "clock"
    tick_seconds = 0.1
    retry_first = retry_cap = 0.05

    def __init__(self, fault: Callable[[int], Exception | None] = lambda _tick: None, **options: Any) -> None:
        for option, value in options.items():
            setattr(self, option, value)
        self.fault = fault
        self.ticks: list[float] = []
        self.seen: list[int] = []
        self.lanes_seen: set[int] = set()
        self.met = False
        self.ticked_in = ""
        self._busy = threading.Lock()

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        with self._alone(ctx):
            self.seen += [event.offset for event in events]

    def tick(self, ctx: Context) -> None:
        with self._alone(ctx):
            self.lanes_seen.add(ctx.lane)
            self.ticks.append(time.monotonic())
            error = self.fault(len(self.ticks))
            if error is not None:
                raise error

    def _alone(self, ctx: Context) -> Any:
        if ctx.lane == 0 and self._busy.locked():
            self.met = True
        return self._busy


def test_it_ticks_while_nothing_comes_and_between_batches(world: World) -> None:
    clock = Clock(batch=5)
    group = world.start(clock)
    eventually(lambda: len(clock.ticks) >= 3)
    last = world.add_many(400)
    eventually(lambda: world.reached("clock", last))
    before = len(clock.ticks)
    eventually(lambda: len(clock.ticks) > before)
    assert clock.seen == list(range(1, last + 1))
    assert not clock.met
    assert min(b - a for a, b in zip(clock.ticks, clock.ticks[1:], strict=False)) >= 0.1
    group.stop(5)
    ended = len(clock.ticks)
    time.sleep(0.5)
    assert len(clock.ticks) == ended


def test_only_lane_0_ticks(world: World) -> None:
    clock = Clock(lanes=3)
    world.start(clock)
    eventually(lambda: len(clock.ticks) >= 4)
    assert clock.lanes_seen == {0}


def test_who_was_replaced_ticks_no_more(world: World) -> None:
    clock = Clock()
    world.start(clock)
    eventually(lambda: len(clock.ticks) >= 2)
    world.execute(
        "UPDATE walstream.projectors SET generation = generation + 1, owner = 'another',"
        " lease_until = now() + interval '1 hour' WHERE name = 'clock'"
    )
    ended = len(clock.ticks)
    time.sleep(0.6)
    assert len(clock.ticks) <= ended + 1  # the one that was going on


def test_what_cannot_be_done_now_is_tried_until_it_can(world: World) -> None:
    clock = Clock(lambda tick: RetryLater("the disk is full", delay=0.05) if tick < 12 else None, tick_seconds=60.0)
    world.start(clock)
    eventually(lambda: world.execute("SELECT error FROM walstream.projectors WHERE state = 'retrying'") != []
               or len(clock.ticks) >= 12)  # fmt: skip
    last = world.add_many(3)
    eventually(lambda: world.reached("clock", last))
    assert len(clock.ticks) == 12


def test_one_that_halts_does_so_in_a_tick_too(world: World) -> None:
    clock = Clock(lambda _tick: ValueError("broken"), on_poison="halt", max_attempts=2)
    world.start(clock)
    eventually(lambda: world.state("clock") == "halted")
    assert len(clock.ticks) == 2
    assert world.execute("SELECT error, error_offset FROM walstream.projectors WHERE name = 'clock'") == [
        ("ValueError: broken", None)
    ]


def test_one_that_asks_for_it_halts_at_once(world: World) -> None:
    clock = Clock(lambda _tick: ProjectorHalted("enough"))
    world.start(clock)
    eventually(lambda: world.state("clock") == "halted")
    assert len(clock.ticks) == 1


def test_one_that_parks_gives_the_tick_up_and_goes_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(lambda tick: ValueError("broken") if tick <= 2 else None, max_attempts=2)
    world.start(clock)
    last = world.add_many(5)
    eventually(lambda: world.reached("clock", last) and len(clock.ticks) >= 4)
    assert "gives its tick up until the next one, after 2 attempts: ValueError: broken" in caplog.text
    assert world.parked("clock") == []


def test_an_async_tick_is_awaited(world: World) -> None:
    class Async(Projector):
        name = "async-clock"
        tick_seconds = 0.1
        ticks = 0

        async def tick(self, _ctx: Context) -> None:
            self.ticks += 1

    projector = Async()
    world.start(projector)
    eventually(lambda: projector.ticks >= 2)


@pytest.mark.parametrize("options", [{"tick_seconds": 0.0}, {"tick_seconds": 1.0, "transactional": True}])
def test_ticks_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tick_seconds"):
        Options.of(Clock(**options))
