"""One lane's hands: give a batch to the projector, and move the cursor with its effect.

A transactional projector's effect, the entries of sessions that wait, and the cursor commit in one transaction. An
external projector acts first, then entries and cursor commit: after a crash in between, the same events come again
with the same keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import psycopg2

from walstream.config import Settings
from walstream.event import Event

from .context import Context
from .cursors import Cursors
from .deadline import Ticket, Watchdog
from .event_loop import LoopThread
from .leadership import Backend, end_backend
from .parking import Entry, Parking
from .projector import Options, Projector
from .retry import DeadlineExceeded, ended_by_idle_timeout

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

T = TypeVar("T")
Write = Callable[["Cursor"], None]


class Delivery:
    """Delivers to one projector over one connection.

    Args:
        projector, options: to whom.
        connection: of this lane alone, not in autocommit.
        cursors, parking: its rows, under this process's generation.
        watchdog: enforces the deadline.
        loop: runs what is async.
        lane: whose cursor it is.
        environment: for the context.
        abandoned: true once an async projector shall be cancelled.
        rebuilding: for the context.
        announce: told a channel and a payload after the commit of a delivery that wanted them announced.
        guard: asked about what a transactional projector did, before its transaction commits; may refuse it.
        settings: for the context.
    """

    def __init__(
        self,
        projector: Projector,
        options: Options,
        connection: Connection,
        cursors: Cursors,
        parking: Parking,
        watchdog: Watchdog,
        loop: LoopThread,
        *,
        lane: int,
        environment: str,
        abandoned: Callable[[], bool],
        rebuilding: bool = False,
        announce: Callable[[str, str], None] | None = None,
        guard: Callable[[Cursor], None] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._projector = projector
        self._options = options
        self._connection = connection
        self._cursors = cursors
        self._parking = parking
        self._watchdog = watchdog
        self._loop = loop
        self._lane = lane
        self._abandoned = abandoned
        self._ticket: Ticket | None = None
        self.name = name_of(options.name, lane)
        self._announce = announce
        self._guard = guard
        self._context = Context(
            options.name,
            lane=lane,
            environment=environment,
            rebuilding=rebuilding,
            connection=connection if options.transactional else None,
            settings=settings,
        )
        with connection.cursor() as cur:
            cur.execute("SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()")
            pid, start = cur.fetchone() or (0, "")
            self._backend = Backend(int(pid), str(start))
            # Where only we know that the connection before is lost, the server still keeps its transaction, and with it
            # this lane's row and the slot's restart_lsn.
            former = cursors.former_backend(cur, lane)
            if former is not None:
                end_backend(cur, former)
            cursors.sign_in(cur, lane, self._backend)  # first: only whose turn it is can be sure of a cursor
            self.position = cursors.position(cur, lane)
            """The stored cursor."""
        connection.commit()

    # -- deliveries ------------------------------------------------------------------------------------------------

    def deliver(self, events: Sequence[Event], waiting: Sequence[Event], through: int) -> None:
        """Project ``events``, line up ``waiting``, and move the cursor to ``through``.

        Raises:
            BaseException: whatever failed; nothing of it stands in the database, and the cursor is where it was.
        """

        def step(cur: Cursor, mark: str | None = None) -> None:
            self._parking.wait(cur, waiting)
            prepared = not self._options.transactional
            self._cursors.step(cur, self._lane, self.position, through, mark, prepared=prepared)

        self._project_and_write(events, step, alone=not waiting)
        self.position = through

    def deliver_parked(self, event: Event, entry: Entry) -> None:
        """Project one parked event and remove its entry.

        Raises:
            BaseException: as for :meth:`deliver`.
        """

        def remove(cur: Cursor, mark: str | None) -> None:
            if mark is not None:
                self._cursors.require_mark(cur, mark, f"the parked event at offset {entry.offset}")
            self._parking.remove(cur, entry)

        self._project_and_write([event], remove)

    def write(self, write: Write, through: int | None = None) -> None:
        """Write something of the runner's own, and move the cursor to ``through`` with it, in one transaction."""
        with self._rolling_back(), self._connection.cursor() as cur:
            write(cur)
            if through is not None:
                self._cursors.step(cur, self._lane, self.position, through)
            self._connection.commit()
        if through is not None:
            self.position = through

    def read(self, question: Callable[[Cursor], T]) -> T:
        """Ask the database something outside of any delivery."""
        with self._rolling_back(), self._connection.cursor() as cur:
            answer = question(cur)
            self._connection.rollback()
        return answer

    def setup(self) -> None:
        """Call the projector's ``setup`` and commit what it did."""
        with self._rolling_back(), self._watched():
            self._context.begin()
            self._run(self._projector.setup(self._context))
            self._connection.commit()

    def tick(self) -> None:
        """Call the projector's ``tick``, if it is still this process's turn.

        Raises:
            Fenced: another process runs the projector now.
            BaseException: whatever the projector raised.
        """
        with self._rolling_back():
            self._context.begin()
            with self._connection.cursor() as cur:
                self._cursors.require_turn(cur)
            self._connection.rollback()  # an external projector holds no transaction open
            with self._watched():
                self._run(self._projector.tick(self._context))
        self._announce_all()

    @property
    def done(self) -> Event | None:
        """The last event of the failed batch that the projector said it had finished."""
        return self._context.finished

    @property
    def overdue(self) -> bool:
        """Whether a delivery is going on that has run past its deadline."""
        ticket = self._ticket
        return ticket is not None and ticket.overdue

    @property
    def broken(self) -> bool:
        """Whether the connection no longer works. After a failed delivery it was rolled back, which tells."""
        return bool(self._connection.closed)

    def close(self) -> None:
        """Give the connection back."""
        with contextlib.suppress(Exception):
            self._connection.close()

    # -- how -------------------------------------------------------------------------------------------------------

    def _project_and_write(
        self, events: Sequence[Event], step: Callable[[Cursor, str | None], None], *, alone: bool = False
    ) -> None:
        """Project, and write what is the runner's.

        Args:
            step: writes it.
            alone: it is one statement, which needs no transaction around it where no projector wrote anything: one
                round trip to the server instead of three.
        """
        context = self._context
        context.begin()
        with self._rolling_back():
            if not events:
                self._write_step(step, alone=alone)
            elif self._options.transactional:
                mark = secrets.token_hex(8)
                with self._watched(), self._connection.cursor() as cur:
                    self._cursors.mark_batch(cur, mark)
                    self._run(self._projector.project(events, context))
                    if self._guard is not None:
                        self._guard(cur)
                    step(cur, mark)
                    self._connection.commit()
            else:
                with self._watched():
                    self._run(self._projector.project(events, context))
                self._write_step(step, alone=alone)
        self._announce_all()

    def _announce_all(self) -> None:
        if self._announce is not None:
            for channel, payload in self._context.announcements:
                self._announce(channel, payload)

    def _write_step(self, step: Callable[[Cursor, str | None], None], *, alone: bool) -> None:
        connection = self._connection
        connection.autocommit = alone
        try:
            with connection.cursor() as cur:
                step(cur, None)
                if not alone:
                    connection.commit()
        finally:
            if alone and not connection.closed:
                connection.autocommit = False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        backend = self._backend if self._options.transactional else None
        with self._watchdog.watch(self.name, self._options.deadline, backend) as ticket:
            self._ticket = ticket
            try:
                yield
            except psycopg2.Error as error:
                if ticket.overdue or ended_by_idle_timeout(error):
                    raise self._overdue() from error
                raise
            except Exception as error:
                if ticket.overdue and backend is not None:
                    raise self._overdue() from error
                raise
            finally:
                self._ticket = None

    def _overdue(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.name}: the batch took longer than its deadline of {self._options.deadline:g} s, and its transaction"
            " was ended",
            hint="make it faster, take smaller batches (`batch`), or do the slow part in an external projector",
        )

    @contextlib.contextmanager
    def _rolling_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            try:
                self._connection.rollback()
            except psycopg2.Error:
                self.close()  # a connection that cannot roll back is gone, whatever `closed` said (C50)
            if isinstance(error, asyncio.CancelledError):
                # Leaked out of a plain function that runs a loop of its own: nobody's wish, so a failure like others.
                raise RuntimeError(f"{self.name}: the projector let a cancellation escape") from error
            raise

    def _run(self, outcome: object) -> None:
        if inspect.isawaitable(outcome):
            self._loop.run(outcome, abandoned=self._is_abandoned)

    def _is_abandoned(self) -> bool:
        # What is async can be ended: at a shutdown, and when its transaction is dead anyway.
        return self._abandoned() or (self._options.transactional and self.overdue)


def name_of(projector: str, lane: int) -> str:
    """What a lane is called in logs and messages, and under which the watchdog knows its deliveries."""
    return f"projector {projector!r}, lane {lane}"
