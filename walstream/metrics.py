"""Numbers about the running process: counters that rise and gauges that are set, by name and labels.

In memory and small: writers touch it once a batch, `status`, `demo` and an exporter read :meth:`Metrics.snapshot`.
Names follow Prometheus' conventions (a unit as suffix, ``_total`` for counters), so an exporter has nothing to rename.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number at one moment.

    Attributes:
        name: such as ``projector_events_total``.
        labels: sorted pairs, such as ``(("projector", "router"),)``.
        value: the number.
        counter: whether it only ever rises.
    """

    name: str
    labels: Labels
    value: float
    counter: bool


class Metrics:
    """A set of counters and gauges, safe to use from any thread.

    >>> metrics = Metrics()
    >>> metrics.add("events_total", 3, projector="router")
    >>> metrics.add("events_total", 2, projector="router")
    >>> metrics.set("lag_events", 7, projector="router")
    >>> metrics.value("events_total", projector="router"), metrics.value("lag_events", projector="router")
    (5.0, 7.0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter (made at 0 on first use) by ``amount``.

        Raises:
            ValueError: ``amount`` is negative: what can fall is a gauge.
        """
        if amount < 0:
            raise ValueError(f"the counter {name} cannot fall by {-amount}")
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[(name, tuple(sorted(labels.items())))] = float(value)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a counter or gauge; 0 if nobody has touched it."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            return self._counters.get(key, self._gauges.get(key, 0.0))

    def snapshot(self) -> list[Sample]:
        """All of them at this moment, sorted by name and labels."""
        return sorted(self._samples(), key=lambda sample: (sample.name, sample.labels))

    def _samples(self) -> Iterator[Sample]:
        with self._lock:
            counters, gauges = dict(self._counters), dict(self._gauges)
        for (name, labels), value in counters.items():
            yield Sample(name, labels, value, counter=True)
        for (name, labels), value in gauges.items():
            yield Sample(name, labels, value, counter=False)


METRICS: Final = Metrics()
"""The process's own set, unless a component was given another."""
