"""The deadline of a delivery, enforced from outside the thread that it concerns.

An open transaction pins the slot's ``restart_lsn``: a projector that hangs in the middle of one would, after a while,
hold the WAL that the whole design sets free. So one thread of the process watches all deliveries. When one is overdue,
its server process is ended from another connection, by the recorded process id *and* start time. That frees the
server at once, and it also wakes a projector that waits for a statement. A projector that hangs in Python cannot be
stopped; it is marked as hung, and when it comes back it finds its transaction dead.

(``idle_in_transaction_session_timeout`` of the connection does the same from the server's side when this whole process
is stopped; it does not see a statement that runs too long.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .leadership import Backend, end_backend
from .retry import Backoff

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.deadline")

_LONGEST_NAP = 60.0


class Ticket:
    """One delivery under watch.

    Attributes:
        what: names it in logs.
        backend: the server process that holds its transaction; ``None`` if it has none.
        due: when its time is over, on the monotonic clock.
        overdue: its time is over.
        ended: its server process was ended (or had gone).
    """

    __slots__ = ("attempt", "backend", "due", "ended", "overdue", "retry_at", "what")

    def __init__(self, what: str, backend: Backend | None, due: float) -> None:
        self.what = what
        self.backend = backend
        self.due = due
        self.overdue = False
        self.ended = False
        self.attempt = 0
        self.retry_at = due


class Watchdog:
    """Watches the deliveries of a process.

    Args:
        connect: makes the connection through which server processes are ended; called when the first is overdue.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._tickets: set[Ticket] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._wakes_at = float("-inf")
        self._backoff = Backoff(0.1, 5.0)

    @contextlib.contextmanager
    def watch(self, what: str, seconds: float, backend: Backend | None) -> Iterator[Ticket]:
        """Watch what happens inside the ``with``; it has ``seconds``."""
        ticket = Ticket(what, backend, time.monotonic() + seconds)
        with self._changed:
            self._tickets.add(ticket)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="walstream-deadline", daemon=True)
                self._thread.start()
            elif ticket.due < self._wakes_at:
                self._changed.notify_all()  # otherwise the thread wakes early enough: no switch on the hot path
        try:
            yield ticket
        finally:
            with self._changed:
                self._tickets.discard(ticket)

    def end_now(self, what: str) -> None:
        """Treat the deliveries called ``what`` as overdue (a shutdown that has waited long enough)."""
        with self._changed:
            for ticket in self._tickets:
                if ticket.what == what:
                    ticket.due = ticket.retry_at = 0.0
            self._changed.notify_all()

    def stop(self) -> None:
        """Watch no more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._stopping:
                        return
                    overdue = self._overdue()
                    if not overdue:
                        now = time.monotonic()
                        due = (ticket.retry_at for ticket in self._tickets if not ticket.ended)
                        self._wakes_at = min(due, default=now + _LONGEST_NAP)
                        self._changed.wait(max(self._wakes_at - now, 0.0))
                        self._wakes_at = float("-inf")  # it is awake: nobody needs to wake it
                        continue
                for ticket in overdue:
                    self._end(ticket)
        finally:
            if self._connection is not None:
                with contextlib.suppress(Exception):
                    self._connection.close()

    def _overdue(self) -> list[Ticket]:
        now = time.monotonic()
        found = []
        for ticket in self._tickets:
            if ticket.due <= now and not ticket.overdue:
                ticket.overdue = True
                log.error("%s has run past its deadline", ticket.what)
                ticket.ended = ticket.backend is None
            if ticket.overdue and not ticket.ended and ticket.retry_at <= now:
                found.append(ticket)
        return found

    def _end(self, ticket: Ticket) -> None:
        assert ticket.backend is not None
        try:
            if self._connection is None or self._connection.closed:
                self._connection = self._connect()
            with self._connection.cursor() as cur:
                if end_backend(cur, ticket.backend):
                    log.warning("ended server process %d of %s", ticket.backend.pid, ticket.what)
            ticket.ended = True
        except Exception as error:
            # A server that cannot be reached has no open transaction of ours for long; until then, again and again.
            ticket.attempt += 1
            ticket.retry_at = time.monotonic() + self._backoff.pause(ticket.attempt)
            log.warning("cannot end server process %d of %s yet: %s", ticket.backend.pid, ticket.what, error)
            if self._connection is not None:
                with contextlib.suppress(Exception):
                    self._connection.close()
                self._connection = None
