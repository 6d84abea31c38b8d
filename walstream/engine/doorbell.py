"""One LISTEN connection for all the lanes of a process that read cold.

A lane that finds nothing new waits here. A ring between its look and its wait is not missed: each lane remembers which
rings it has answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("walstream.doorbell")

_WAIT_SECONDS = 5.0


class Announcements(Protocol):
    """Where growth of the order is announced (walstream.order.wake.Listener)."""

    def wait(self, timeout: float) -> bool: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Doorbell:
    """Wakes any number of threads when the order may have grown.

    Args:
        listen: makes the source of announcements; called when a lane waits for the first time, since lanes that stay
            hot need none.
        poll_seconds: no wait is longer than this, in case an announcement was lost.
    """

    def __init__(self, listen: Callable[[], Announcements], poll_seconds: float) -> None:
        self._listen = listen
        self._poll_seconds = poll_seconds
        self._changed = threading.Condition()
        self._rings = 0
        self._announcements: Announcements | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def waiter(self) -> Waiter:
        """A place to wait, for one thread."""
        return Waiter(self)

    def stop(self) -> None:
        """Ring once more and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._announcements is not None:
            self._announcements.wake()
        if self._thread is not None:
            self._thread.join(5.0)

    def wait_for_ring(self, after: int, timeout: float) -> int:
        """Wait until there were more than ``after`` rings; return how many there were."""
        with self._changed:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="walstream-doorbell", daemon=True)
                self._thread.start()
            if self._rings == after:
                self._changed.wait_for(lambda: self._rings != after or self._stopping, min(timeout, self._poll_seconds))
            return self._rings

    def _run(self) -> None:
        announcements = self._announcements = self._listen()
        try:
            while not self._stopping:
                if announcements.wait(_WAIT_SECONDS):
                    with self._changed:
                        self._rings += 1
                        self._changed.notify_all()
        except Exception:  # the poll remains
            log.exception("readers are no longer woken; they look every %s s", self._poll_seconds)
        finally:
            announcements.close()


class Waiter:
    """Where one thread waits (see :meth:`Doorbell.waiter`)."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._answered = -1

    def wait(self, timeout: float) -> bool:
        """Wait for a ring that was not answered yet, at most ``timeout`` seconds. Look at the order whatever comes."""
        rings = self._bell.wait_for_ring(self._answered, timeout)
        rang = rings != self._answered
        self._answered = rings
        return rang
