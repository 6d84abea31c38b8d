"""A stream that plays a script, in place of the replication connection."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from walstream.engine.liveness import Progress


class ScriptedMessage(NamedTuple):
    """A message of the stream."""

    payload: bytes
    data_start: int


class ScriptedStream:
    """Plays messages as they are added; records what is confirmed. Satisfies the engine's ``MessageStream``.

    Args:
        messages: (payload, LSN) pairs to begin with.
    """

    backend_pid = 0
    backend_start = "1970-01-01 00:00:00+00"
    patience = 0.0

    def __init__(self, messages: Iterable[tuple[bytes, int]] = ()) -> None:
        self._messages = deque(messages)
        self._woken = threading.Event()
        self._failure: BaseException | None = None
        self.passed = 0
        self.confirmed = 0
        self.confirmations: list[int] = []
        self.feedbacks = 0
        self.last_heard = time.monotonic()
        self.drained = True
        self.closed = False

    def feed(self, *messages: tuple[bytes, int]) -> None:
        """Let these arrive."""
        self._messages.extend(messages)
        self._woken.set()

    def keepalive(self, wal_end: int) -> None:
        """Let the server say how far it has come."""
        self.passed = max(self.passed, wal_end)
        self.last_heard = time.monotonic()
        self._woken.set()

    def fail(self, error: BaseException) -> None:
        """Let the next read raise ``error``."""
        self._failure = error
        self._woken.set()

    def read(self, consume: Callable[[Iterator[ScriptedMessage]], None], limit: int) -> int:
        if self._failure is not None:
            raise self._failure
        before = len(self._messages)
        self.drained = False
        consume(self._play(limit))
        return before - len(self._messages)

    def _play(self, limit: int) -> Iterator[ScriptedMessage]:
        while limit > 0:
            if not self._messages:
                self.drained = True
                return
            limit -= 1
            self.last_heard = time.monotonic()
            yield ScriptedMessage(*self._messages.popleft())

    def wait(self, timeout: float) -> None:
        self._woken.wait(timeout)
        self._woken.clear()

    def wakeup(self) -> None:
        self._woken.set()

    def note_commit(self, end_lsn: int) -> None:
        self.passed = max(self.passed, end_lsn)

    def confirm(self, lsn: int) -> None:
        if lsn > self.passed:
            raise AssertionError(f"confirmed {lsn}, but the stream has only passed {self.passed}")
        if lsn > self.confirmed:
            self.confirmed = lsn
            self.confirmations.append(lsn)

    def feedback(self) -> None:
        self.feedbacks += 1

    def progress(self, connection: object) -> Progress | None:
        del connection
        return None

    def close(self) -> None:
        self.closed = True
