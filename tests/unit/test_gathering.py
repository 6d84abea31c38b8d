"""When the orderer lets transactions gather: under load, and never otherwise."""

from __future__ import annotations

import pytest

from walstream.engine.gathering import FULL_EVENTS_PER_SECOND, GATHER_SECONDS, Gathering


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pauses(rate: float, every: float, flushes: int) -> list[float]:
    """The pauses after each of so many flushes, ``every`` seconds, of what a rate brings in that time."""
    clock = Clock()
    gathering = Gathering(clock)
    found = []
    for _ in range(flushes):
        clock.now += every
        gathering.flushed(round(rate * every))
        found.append(gathering.pause)
    return found


@pytest.mark.parametrize("rate", [0.0, 500.0, 1_000.0, 3_000.0])
def test_no_pause_at_ordinary_rates(rate: float) -> None:
    assert set(pauses(rate, 0.002, 200)) == {0.0}


def test_a_pause_under_load_and_none_once_that_is_over() -> None:
    clock = Clock()
    gathering = Gathering(clock)
    for _ in range(20):
        clock.now += 0.002
        gathering.flushed(round(FULL_EVENTS_PER_SECOND * 0.002 * 2))
    assert gathering.pause == GATHER_SECONDS
    for _ in range(2):  # the first one still counts what came before
        clock.now += 0.1
        gathering.flushed(1)
    assert gathering.pause == 0.0


def test_the_pause_grows_with_the_rate() -> None:
    found = [pauses(rate, 0.002, 100)[-1] for rate in (5_000, 10_000, 20_000, 200_000)]
    assert found == pytest.approx([0.00125, 0.005, GATHER_SECONDS, GATHER_SECONDS], rel=0.2)


def test_what_a_stall_held_up_is_no_load() -> None:
    """At 1,000 a second everything stands still for 50 ms; then all of that comes at once."""
    clock = Clock()
    gathering = Gathering(clock)
    found = []
    for number in range(100):
        stalled = number == 50
        clock.now += 0.05 if stalled else 0.001
        gathering.flushed(1)
        if stalled:
            clock.now += 0.001
            gathering.flushed(40)
        found.append(gathering.pause)
    assert set(found) == {0.0}
