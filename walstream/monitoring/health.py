"""What a process says about itself: health for probes, samples for metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from walstream.metrics import Sample

Source = Callable[[], Iterable[Sample]]
"""Gives the samples of the moment; quickly, and without waiting for anything."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a process is.

    Attributes:
        live: it works as far as it can; a restart would change nothing for the better.
        parts: name to what there is to say of that part; each has ``ready`` (a bool).
        starting: not everything is there yet.
    """

    live: bool
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    starting: bool = False

    @property
    def ready(self) -> bool:
        return self.live and not self.starting and all(part["ready"] for part in self.parts.values())
