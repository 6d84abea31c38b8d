"""How long the orderer lets transactions gather before it flushes them.

A flush costs the same few round trips whatever its size, and behind each one every projector wakes, works and moves its
cursor. Flushes that follow each other at once are therefore small ones: they take in what came during the last, and
the process spends its time on handing over. Under load a pause between them makes a third of the work disappear; at
lower rates there is none, so that an event waits for nothing but its own transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

GATHER_SECONDS: Final = 0.02
"""The pause under load. Longer ones bring no more, and it is what an event waits longer at such a rate."""

BUSY_EVENTS_PER_SECOND: Final = 20_000.0
"""What counts as load: twenty events a millisecond cannot each be somebody's answer."""


class Gathering:
    """Tells from the flushes of late whether there is load.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._events = 0
        self.pause = 0.0
        """Seconds to wait before the next flush."""

    def flushed(self, events: int) -> None:
        """Note a flush of so many events.

        Judged over stretches that are as long as the pause: what a slow statement held up for a moment arrives at once
        and is no load.
        """
        self._events += events
        now = self._clock()
        elapsed = now - self._since
        if elapsed >= GATHER_SECONDS:
            self.pause = GATHER_SECONDS if self._events > elapsed * BUSY_EVENTS_PER_SECOND else 0.0
            self._since, self._events = now, 0
