"""How long this process stood still, as on a machine that has other work: what a test of times compares with."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

_STEP: Final = 0.02


class Stalls:
    """A thread that sleeps in short steps, and measures how much longer they take.

    Attributes:
        longest: seconds by which the longest step was late so far.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _measure(self) -> None:
        began = time.monotonic()
        while not self._over.wait(_STEP):
            now = time.monotonic()
            self.longest = max(self.longest, now - began - _STEP)
            began = now
