"""Where the hands of a worker wait for work.

One knock wakes one hand: where many wait for one job, all but one would look in vain. The hand that finds a job knocks
again before it begins. A knock that nobody waits for is kept for the next one who does.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from typing import Final, Protocol

log = logging.getLogger("walstream.worker")


class Announcements(Protocol):
    """Where it is announced that jobs wait (walstream.order.wake.Listener)."""

    def wait(self, timeout: float) -> bool: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


_LONGEST_WAIT: Final = 60.0
_TROUBLE_SECONDS: Final = 1.0


class Knocks:
    """Lets hands wait, and wakes them: when somebody says so, when a job that failed is due, and now and then.

    Args:
        announcements: where other processes are heard. Its own poll is the safety net: it ends each wait.
    """

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._changed = threading.Condition()
        self._knocks = 0
        self._due: list[float] = []
        self._over = False
        self._thread = threading.Thread(target=self._run, name="walstream-knocks", daemon=True)

    def start(self) -> None:
        """Start the thread that listens."""
        self._thread.start()

    def stop(self) -> None:
        """Send everybody home who waits."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._announcements.wake()
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def wait(self) -> None:
        """Wait for a knock, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._knocks > 0 or self._over)
            self._knocks = 0  # who comes next waits for the knock of whoever finds something

    def knock(self) -> None:
        """Wake one hand."""
        with self._changed:
            self._knocks += 1
            self._changed.notify()

    def knock_at(self, moment: float) -> None:
        """Knock when ``time.monotonic()`` is ``moment``."""
        with self._changed:
            heapq.heappush(self._due, moment)
        self._announcements.wake()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    now = time.monotonic()
                    while self._due and self._due[0] <= now:
                        heapq.heappop(self._due)
                    left = self._due[0] - now if self._due else _LONGEST_WAIT
                    if self._over:
                        return
                try:
                    self._announcements.wait(left)
                except Exception:  # whatever it is: should this thread end, nobody would be woken any more
                    log.exception("the worker cannot listen at present, and looks by itself")
                    time.sleep(_TROUBLE_SECONDS)
                self.knock()
        finally:
            self._announcements.close()
