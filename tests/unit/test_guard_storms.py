"""What is a storm: far above its own recent past, and nothing else."""

from __future__ import annotations

import random

from walstream.guard.storms import MEMORY, WARM, Baselines


def test_an_agent_that_goes_wild_is_told_and_no_other() -> None:
    past = Baselines("agent", 5, least=10)
    for _ in range(WARM + 1):
        assert past.judge({"calm": 3, "busy": 400}) == []
    assert past.judge({"calm": 40, "busy": 1900}) != []
    (storm,) = past.judge({"calm": 40, "busy": 450})
    assert (storm.kind, storm.name, storm.rate, storm.usual) == ("agent", "calm", 40, 3)
    assert 13 < storm.times < 14


def test_ordinary_unrest_is_none() -> None:
    draw = random.Random(1)
    past = Baselines("wal", 5, least=1.0)
    for _ in range(500):
        assert past.judge({"": draw.uniform(100, 400)}) == []


def test_what_is_small_is_none_however_much_it_grew() -> None:
    past = Baselines("agent", 5, least=10)
    for _ in range(WARM + 1):
        past.judge({"a": 0.1})
    assert past.judge({"a": 9.9}) == []


def test_what_is_new_has_no_past_and_is_not_judged() -> None:
    past = Baselines("agent", 5, least=10)
    for _ in range(WARM + 1):
        past.judge({"old": 100})
    assert past.judge({"old": 100, "new": 5000}) == []


def test_a_storm_that_goes_on_becomes_the_past() -> None:
    past = Baselines("agent", 5, least=10)
    for _ in range(MEMORY):
        past.judge({"a": 10})
    looks = 0
    while past.judge({"a": 1000}):
        looks += 1
    assert MEMORY // 2 - 1 <= looks <= MEMORY // 2 + 1


def test_it_can_be_switched_off_and_silence_is_forgotten() -> None:
    off = Baselines("agent", 0, least=10)
    for _ in range(WARM + 1):
        off.judge({"a": 1})
    assert off.judge({"a": 1e9}) == []
    past = Baselines("agent", 5, least=10)
    past.judge({f"agent {number}": 1 for number in range(100)})
    for _ in range(MEMORY + 1):
        past.judge({})
    assert past._past == {}
