"""How long the orderer lets transactions gather before it flushes them.

A flush costs the same few round trips whatever its size, and behind each one every projector wakes, works and moves its
cursor. Flushes that follow each other at once are therefore small ones: they take in what came during the last, and
the process spends its time on handing over. Under load a pause between them makes a quarter of the work disappear; at
ordinary rates there is none, so that an event waits for nothing but its own transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

GATHER_SECONDS: Final = 0.02
"""The longest pause. Longer ones bring no more."""

FULL_EVENTS_PER_SECOND: Final = 20_000.0
"""From this rate on the pause is the longest. Below, it falls with the square of the rate: 5 ms at 10,000 a second,
1.2 ms at 5,000."""

_LEAST: Final = 0.0005  # at less than 3,200 a second there is time for every event


class Gathering:
    """Tells from the rate of late how long to wait.

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

        The rate is that of at least as long a stretch as the longest pause: what a slow statement held up for a moment
        arrives at once and is no load.
        """
        self._events += events
        now = self._clock()
        elapsed = now - self._since
        if elapsed >= GATHER_SECONDS:
            share = min(1.0, self._events / elapsed / FULL_EVENTS_PER_SECOND)
            pause = GATHER_SECONDS * share * share
            self.pause = pause if pause >= _LEAST else 0.0
            self._since, self._events = now, 0
