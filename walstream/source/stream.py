"""The replication stream: what the server sends, and the acknowledgement that goes back.

What holds in this file (rule 9 of the design, and the facts behind it):

1. psycopg2 acknowledges by itself. On every keepalive its C code moves a cursor's flush position to the server's, if
   the last position that *this cursor* flushed explicitly is at or past the start of the *last message it read*. Rows
   of a long transaction start below commits that are confirmed already, so a keepalive that comes inside a transaction
   would confirm complete transactions whose order is not durable: lost events. Therefore two cursors share the
   connection: one reads and never flushes anything, the other sends our feedback and never reads.
2. That leaves relation messages, and the Begin of a transaction with an origin: they start at 0/0, and everything is
   past that. Keepalives inside a transaction come for two reasons only: a reply was requested (``reply=True``), or the
   server heard nothing from us for half of ``wal_sender_timeout``. So a reply is never requested, and feedback leaves
   at least every sixth of the timeout; every message that is read is preceded by a look at the clock.
3. If the last feedback is older than a third of the timeout, this process stood still, and such a keepalive may already
   lie in the socket: the connection is dropped *unread* (:class:`~walstream.errors.Stalled`). What was not confirmed
   comes again.
4. A network that stands still while both ends live has the same effect; therefore the kernel gives the connection up
   when sent bytes stay unacknowledged for a quarter of the timeout (a sixth and a quarter are less than half).
5. Nothing above what was received is ever acknowledged: a position beyond the end of the WAL is accepted by the server
   in silence and loses events.
6. One thread uses a stream; :meth:`ReplicationStream.wakeup` alone may be called from others.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

import psycopg2
from psycopg2.errorcodes import OBJECT_IN_USE, UNDEFINED_OBJECT
from psycopg2.extensions import connection as Connection
from psycopg2.extras import LogicalReplicationConnection

from walstream.config import Settings
from walstream.errors import ConnectionLost, SlotError, Stalled, WalstreamError
from walstream.lsn import format_lsn, parse_lsn
from walstream.protocol.messages import Received
from walstream.source.answers import answered_within
from walstream.source.connection import FIRST_ANSWERS, give_up_unacknowledged, replication_connect
from walstream.source.facts import WalsenderProgress, slot_facts, walsender_progress
from walstream.source.failures import classify, younger_publication
from walstream.source.slots import create_on, start_command

MIN_TIMEOUT: Final = 30.0
"""Seconds. A ``wal_sender_timeout`` below this is raised for the session: a third of it must be more than an ordinary
pause (a garbage collection, a slow flush)."""

DEFAULT_TIMEOUT: Final = 60.0
"""Seconds. The server's default; the pace of feedback where the timeout is off or longer."""

FEEDBACK_SECONDS: Final = 1.0
FEEDBACK_CONFIRMS: Final = 100
"""A new position is sent after this long or after this many confirmations; forced feedback on every commit costs a
fifth of the throughput."""

NAP_SECONDS: Final = 0.00025
BUSY_MESSAGES_PER_SECOND: Final = 10_000.0
"""A client that wakes at every send makes a busy walsender slower, by twice on TCP; so above this rate it sleeps a
moment before it looks again. 0.2 to 0.3 ms pay; 1 ms is too long. At lower rates there is no nap, so no latency."""

_NEVER: Final = 86_400.0  # status_interval: psycopg2's own timer for feedback stays out of the way of ours


class ReplicationStream:
    """An open stream of one slot.

    Attributes:
        backend_pid: the walsender's process id.
        backend_start: its start time (timestamptz as text, UTC): with the pid it names one backend for ever.
        system_identifier, timeline: of the server that sends.
        passed: the stream's own position: the highest commit end that was noted, or a later keepalive's.
        confirmed: the position that was last acknowledged; 0 before the first.
        last_heard: ``time.monotonic()`` when anything last arrived.
        drained: whether the last :meth:`read` left nothing. :meth:`wait` does not see what it left.
        patience: seconds after which equal answers of :meth:`progress` prove that the walsender stands still.
    """

    def __init__(self, connection: LogicalReplicationConnection, settings: Settings) -> None:
        """Use :meth:`open`."""
        self._connection = connection
        self._reader: Any = connection.cursor()
        self._acknowledger: Any = connection.cursor()
        self._slot = settings.slot
        self._publication = settings.publication
        self._doing = f"reading slot {settings.slot}"
        self._closed = False
        self._wake_lock = threading.Lock()
        self._wake_pending = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._warns = connection.server_version >= 180000

        self.backend_pid = 0
        self.backend_start = ""
        self.system_identifier = ""
        self.timeline = 0
        self.passed = 0
        self.confirmed = 0
        self.last_heard = time.monotonic()
        self.drained, self.patience = True, DEFAULT_TIMEOUT
        self._wanted = self._confirms = 0
        self._sent_passed = 0
        self._sent_at = self._due = self._last_wait = self.last_heard
        self._burst = self._count = 0
        self._feedback_every = DEFAULT_TIMEOUT / 6
        self._stall_after = float("inf")

    @classmethod
    def open(cls, settings: Settings, *, start_lsn: int, generation: int) -> ReplicationStream:
        """Connect and start streaming.

        Args:
            start_lsn: transactions that ended before it are not sent; 0 begins at what the slot has confirmed. Give
                only a position whose order is *durable*: the server's keepalives may confirm it at once.
            generation: shown in ``application_name``, so that two sessions can be told apart.

        Raises:
            ConfigError: login, privileges, publication or options.
            SlotError: the slot is missing, lost, another's, or ``start_lsn`` is beyond the server's WAL.
            Unavailable: the server is away or another session reads the slot.
        """
        return cls._open(settings, start_lsn, f"walstream:stream:{generation}", temporary=False)

    @classmethod
    def open_temporary(cls, settings: Settings) -> ReplicationStream:
        """Make ``settings.slot`` as a temporary slot, which ends with this stream, and read from now on (`tail`).

        Errors as for :meth:`open`, and :class:`Unavailable` naming the open transactions that the slot has to wait for.
        """
        return cls._open(settings, 0, "walstream:tail", temporary=True)

    @classmethod
    def _open(cls, settings: Settings, start_lsn: int, application_name: str, *, temporary: bool) -> ReplicationStream:
        connection = replication_connect(
            settings.replication_dsn or settings.require_dsn(),
            application_name=application_name,
            connect_timeout=settings.connect_timeout,
            options={"lock_timeout": "2s"} if temporary else None,
        )
        stream = cls(connection, settings)
        try:
            if temporary:
                create_on(connection, settings.slot, temporary=True, timeout=settings.connect_timeout)
            stream._start(start_lsn)
        except psycopg2.Error as error:
            failure = classify(error, doing=f"starting slot {settings.slot}{stream._holder(error)}")
            stream.close()
            raise failure from error
        except BaseException:
            stream.close()
            raise
        return stream

    # -- reading ------------------------------------------------------------------------------------------------------

    def drain(self, handle: Callable[[bytes, int], bool], limit: int) -> int:
        """As :meth:`read`, with each message's payload and position for ``handle``, until that returns False."""

        def consume(messages: Iterator[Received]) -> None:
            all(handle(message.payload, message.data_start) for message in messages)

        return self.read(consume, limit)

    def read(self, consume: Callable[[Iterator[Received]], None], limit: int) -> int:
        """Read what is there; return how many messages that were.

        Args:
            consume: is given an iterator that reads a message at each step, and ends when nothing is left to read now
                or after ``limit`` messages. It may stop before.

        Raises:
            Stalled: this process stood still for too long; the connection is closed, unread.
            ConnectionLost, SlotError, DecodeError, …: as :mod:`walstream.source.failures` has it; the connection is
                closed, whatever psycopg2 thinks of it.
        """
        self._require_open()
        self._count, self.drained = 0, False
        with contextlib.closing(self._messages(limit)) as messages:
            consume(messages)
        self._burst += self._count
        if self._warns:
            self._look_at_warnings()
        position = self._reader.wal_end
        if position > self.passed:  # a keepalive's; a message's own is below the commits that came before it
            self.passed = position
            self.last_heard = time.monotonic()
        return self._count

    def _messages(self, limit: int) -> Generator[Received, None, None]:
        clock, read = time.monotonic, self._reader.read_message
        due, now = self._due, self.last_heard
        count = 0
        try:
            while count < limit:
                now = clock()
                if now >= due:
                    due = self._beat(now)
                message = read()
                if message is None:
                    self.drained = True
                    return
                count += 1
                yield message
        except psycopg2.Error as error:
            raise self._failed(error) from error
        finally:
            self._count = count
            if count:
                self.last_heard = now

    def wait(self, timeout: float) -> None:
        """Wait until something arrives, :meth:`wakeup` is called, feedback is due, or ``timeout`` (seconds) is over.

        After a busy burst it only naps for a quarter of a millisecond, for the walsender's sake.
        """
        self._require_open()
        now = time.monotonic()
        burst, since, self._burst, self._last_wait = self._burst, now - self._last_wait, 0, now
        if burst > since * BUSY_MESSAGES_PER_SECOND and timeout >= NAP_SECONDS:
            time.sleep(NAP_SECONDS)
            return
        timeout = min(timeout, self._due - now)
        try:
            ready = self._poll.poll(max(0.0, timeout * 1000))
        except OSError as error:
            raise self._failed(error) from error
        for descriptor, _ in ready:
            if descriptor == self._wake_read:
                with self._wake_lock:
                    self._wake_pending = False
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
            else:
                self.last_heard = time.monotonic()

    def wakeup(self) -> None:
        """End a :meth:`wait` from any thread, now or the next one. Harmless after :meth:`close`."""
        with self._wake_lock:
            if not self._closed and not self._wake_pending:
                self._wake_pending = True
                os.write(self._wake_write, b"\0")

    def progress(self, connection: Connection) -> WalsenderProgress | None:
        """Ask over an SQL ``connection`` what the walsender is at; ``None`` if it is gone.

        Silence alone proves nothing (see :func:`~walstream.source.facts.walsender_progress`); equal answers that are
        :attr:`patience` apart prove that it stands still.
        """
        return walsender_progress(connection, self.backend_pid, self.backend_start)

    # -- acknowledging ------------------------------------------------------------------------------------------------

    def note_commit(self, end_lsn: int) -> None:
        """Tell the stream that a commit was received whole, up to its *end* LSN."""
        if end_lsn > self.passed:
            self.passed = end_lsn

    def confirm(self, lsn: int) -> None:
        """Remember that everything up to ``lsn`` is durable. It is sent when due; never above :attr:`passed`."""
        lsn = min(lsn, self.passed)
        if lsn > self._wanted:
            self._wanted = lsn
            self._confirms += 1

    def feedback(self, *, force: bool = False) -> None:
        """Send the confirmed position if that is due (or ``force``): something changed and the last was sent a second
        or a hundred confirmations ago, or nothing was sent for a sixth of the timeout.

        Raises:
            Stalled: this process stood still for too long.
            ConnectionLost: the server is gone.
        """
        now = time.monotonic()
        if now >= self._due:
            self._beat(now)
            return
        changed = self._wanted > self.confirmed or self.passed > self._sent_passed
        if force or (changed and (now - self._sent_at >= FEEDBACK_SECONDS or self._confirms >= FEEDBACK_CONFIRMS)):
            self._send(now)

    def close(self) -> None:
        """Close the connection without reading from it. The slot keeps what was acknowledged."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)
        with contextlib.suppress(psycopg2.Error):
            self._connection.close()

    def __enter__(self) -> ReplicationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self, start_lsn: int) -> None:
        with answered_within(self._connection, FIRST_ANSWERS):
            timeout = self._identify(start_lsn)
            self._reader.start_replication_expert(
                start_command(self._slot, start_lsn, self._publication), decode=False, status_interval=_NEVER
            )
        descriptor = self._connection.fileno()
        if timeout:
            self._feedback_every = min(timeout, DEFAULT_TIMEOUT) / 6
            self._stall_after = timeout / 3
            self.patience = timeout
            give_up_unacknowledged(descriptor, timeout / 4)
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self.last_heard = self._sent_at = self._last_wait = time.monotonic()
        self._due = self._sent_at + self._feedback_every

    def _identify(self, start_lsn: int) -> float:
        """Learn who sends, refuse a position that it does not have, and return its timeout in seconds (0: off)."""
        execute, fetch = self._reader.execute, self._reader.fetchone
        execute("IDENTIFY_SYSTEM")
        self.system_identifier, self.timeline, written, _ = fetch()
        if start_lsn > parse_lsn(written):
            raise SlotError(
                f"slot {self._slot}: position {format_lsn(start_lsn)} is from another history; this server's WAL ends "
                f"at {written} (system {self.system_identifier}, timeline {self.timeline})",
                hint="the server was restored, replaced or failed over with a loss: if that was on purpose, "
                "`walstream adopt` accepts it",
            )
        execute(
            "SELECT pid, backend_start::text,"
            " (SELECT setting::bigint FROM pg_settings WHERE name = 'wal_sender_timeout')"
            " FROM pg_stat_get_activity(pg_backend_pid())"
        )
        self.backend_pid, self.backend_start, milliseconds = fetch()
        timeout = max(milliseconds / 1000, MIN_TIMEOUT) if milliseconds else 0.0
        execute(f"SET wal_sender_timeout = {timeout * 1000:.0f}")  # in any case: no reload may change it meanwhile
        return timeout

    def _holder(self, error: psycopg2.Error) -> str:
        """Who reads the slot, for the message that it is in use (55006); the connection is still good for SQL then."""
        if error.pgcode == OBJECT_IN_USE:
            with contextlib.suppress(psycopg2.Error):
                found = slot_facts(self._connection, self._slot)
                return f" (held by {found.holder})" if found and found.holder else ""
        return ""

    def _beat(self, now: float) -> float:
        """Feedback is due: send it, or, if it is long overdue, drop the connection. Return when the next one is due."""
        silent = now - self._sent_at
        if silent > self._stall_after:
            self.close()
            raise Stalled(
                f"{self._doing}: this process stood still for {silent:.1f} s, more than a third of wal_sender_timeout; "
                "the connection was dropped unread",
                hint="it was stopped, swapped or suspended, or something blocked the ingest thread; walstream connects "
                "again by itself",
            )
        return self._send(now)

    def _send(self, now: float) -> float:
        passed = self.passed
        try:
            self._acknowledger.send_feedback(write_lsn=passed, flush_lsn=self._wanted, force=True)
        except psycopg2.Error as error:
            raise self._failed(error) from error
        self.confirmed, self._sent_passed, self._confirms = self._wanted, passed, 0
        self._sent_at = now
        self._due = now + self._feedback_every
        return self._due

    def _require_open(self) -> None:
        if self._closed:
            raise ConnectionLost(f"{self._doing}: the stream is closed")

    def _failed(self, error: BaseException) -> WalstreamError:
        failure = classify(error, doing=self._doing)
        if isinstance(error, psycopg2.Error) and error.pgcode == UNDEFINED_OBJECT and "publication" in str(error):
            failure = younger_publication(str(failure), self._slot)
        self.close()
        return failure

    def _look_at_warnings(self) -> None:
        """From 18 on the server only warns when the publication does not exist at a position, and goes on without it.
        psycopg2 takes notices in when a transaction ends; there is none here, so nothing is sent for that."""
        self._connection.commit()
        notices = self._connection.notices
        if notices:
            found = next((notice for notice in notices if f'"{self._publication}"' in notice), "")
            notices.clear()
            if found:
                self.close()
                raise younger_publication(f"{self._doing}: {' '.join(found.split())}", self._slot)
