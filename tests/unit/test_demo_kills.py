"""When the demo kills: spread over the way, never a process that is not at work, and nobody runs past a kill."""

from __future__ import annotations

import math
import random

import pytest

from walstream.demo.driving import Schedule


@pytest.mark.parametrize("kills", [1, 3, 20])
def test_kills_are_spread_over_the_way(kills: int) -> None:
    for seed in range(50):
        marks = Schedule(kills, 1000, random.Random(seed)).marks
        part = 870 / kills
        assert len(marks) == kills
        assert all(50 + part * n - 1 <= mark <= 50 + part * (n + 1) for n, mark in enumerate(marks))


def test_a_kill_is_due_at_its_mark_once_the_process_has_worked_for_a_moment() -> None:
    schedule = Schedule(2, 1000, random.Random(1))
    first, second = schedule.marks
    assert not schedule.due(first - 1, 10.0)
    assert not schedule.due(first, -1.0)
    assert schedule.due(first, 0.1)
    assert first < schedule.gate < math.inf
    schedule.done()
    assert not schedule.due(first, 10.0)
    assert schedule.due(second, 10.0)
    assert schedule.gate > second
    schedule.done()
    assert schedule.gate == math.inf
    assert not schedule.due(1000, 10.0)


def test_no_kills_hold_nobody_up() -> None:
    schedule = Schedule(0, 1000, random.Random(1))
    assert schedule.gate == math.inf
    assert not schedule.due(1000, 10.0)
