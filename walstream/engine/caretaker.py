"""The chores of an ingest session, on a connection and a thread of their own so that they never hold it up.

- Is the table still the ledger, and is it published? (every few seconds)
- Does every ledger row have an offset? (at the start, and on a timer: the reconciler)
- Merge small segments of the order. (now and then)

A chore that cannot reach the server tries again later: whether the session lives on is for its own connections to say.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from walstream.errors import Fenced, WalstreamError

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.chores")

_TICK = 0.5
_AGAIN_AFTER_FAILURE = 5.0


@dataclass(slots=True)
class Chore:
    """Something to be done again and again.

    Attributes:
        name: for the log.
        work: does it. What it raises and is transient only postpones it; anything else ends the session.
        every: seconds between the end of one run and the start of the next.
        due: on the monotonic clock.
    """

    name: str
    work: Callable[[], None]
    every: float
    due: float = 0.0


class SharedConnection:
    """A connection that is made when it is needed, and again after it was closed."""

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._made: Connection | None = None

    @property
    def connection(self) -> Connection:
        if self._made is None or self._made.closed:
            self._made = self._make()
        return self._made

    def close(self) -> None:
        """Close it, if there is one."""
        made, self._made = self._made, None
        if made is not None:
            with contextlib.suppress(Exception):  # what fails here has been reported by what came before
                made.close()


class Caretaker:
    """Does chores, one at a time, until it is stopped.

    Args:
        chores: what to do.
        fail: called with an error that must end the session.
        stopping: set when the session ends; a chore that takes long looks at it.
        close: gives back what the chores share (their connection); called after each failure and at the end.
    """

    def __init__(
        self,
        chores: list[Chore],
        fail: Callable[[BaseException], None],
        stopping: threading.Event,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._chores = chores
        self._fail = fail
        self._close = close
        self._stopping = stopping
        self._thread = threading.Thread(target=self._run, name="walstream-chores", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the chore at work to end, and wait for it a while."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_TICK):
                for chore in self._chores:
                    if self._stopping.is_set():
                        return
                    if time.monotonic() >= chore.due:
                        self._do(chore)
        finally:
            self._close()

    def _do(self, chore: Chore) -> None:
        try:
            chore.work()
        except Fenced as error:
            self._fail(error)
        except WalstreamError as error:
            self._close()
            if not error.transient:
                self._fail(error)
                return
            log.warning("%s is tried again in %.0f s: %s", chore.name, _AGAIN_AFTER_FAILURE, error)
            chore.due = time.monotonic() + _AGAIN_AFTER_FAILURE
        except BaseException as error:
            self._close()
            self._fail(error)
        else:
            chore.due = time.monotonic() + chore.every
