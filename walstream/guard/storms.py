"""Retry storms: something that happens many times more often than in its own recent past. Pure.

A loop that retries without a pause shows first as WAL and as events of one agent, long before a disk is full or a bill
is high. What is normal differs from agent to agent, so each is compared with itself: with the median of its own rates
in the last looks. A storm that goes on becomes the past, and the alarm ends; a new agent has none, and is not judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

MEMORY: Final = 60  # looks; at 15 s each, a quarter of an hour
WARM: Final = 6  # looks before anything is judged
_MOST: Final = 2000  # names that are remembered


@dataclass(frozen=True, slots=True)
class Storm:
    """Something that is far above its own recent past.

    Attributes:
        kind: ``wal`` or ``agent``.
        name: which agent; ``""`` for the WAL.
        rate: a second, now.
        usual: a second, in its past.
    """

    kind: str
    name: str
    rate: float
    usual: float

    @property
    def times(self) -> float:
        """How many times the usual; of nothing, the rate itself."""
        return self.rate / self.usual if self.usual else self.rate


class Baselines:
    """The recent past of many rates.

    Args:
        kind: what they are rates of.
        factor: how many times its past is a storm; 0 switches it off.
        least: a rate below this never is one.
    """

    def __init__(self, kind: str, factor: float, least: float) -> None:
        self._kind = kind
        self._factor = factor
        self._least = least
        self._past: dict[str, deque[float]] = {}

    def judge(self, rates: Mapping[str, float]) -> list[Storm]:
        """Compare these rates with their past, and remember them. A name that is missing has the rate 0."""
        storms = []
        for name in self._past.keys() | rates.keys():
            rate = rates.get(name, 0.0)
            past = self._past.get(name)
            if past is None:
                if len(self._past) >= _MOST:
                    continue
                past = self._past[name] = deque(maxlen=MEMORY)
            elif self._factor and len(past) >= WARM:
                usual = median(past)
                if rate >= self._least and rate > self._factor * usual:
                    storms.append(Storm(self._kind, name, rate, usual))
            past.append(rate)
        for name in [name for name, past in self._past.items() if not any(past)]:
            del self._past[name]
        return sorted(storms, key=lambda storm: (-storm.times, storm.name))
