"""One ingest session: from taking the lease to the loss of any of its connections.

The thread that calls :meth:`IngestSession.run` reads the stream, sends feedback and nothing else; the orderer's thread
does the SQL. When either connection is lost the whole session is thrown away and the next one reads the order again
(rule 4), so nothing here outlives a connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from walstream.config import Settings
from walstream.errors import ConnectionLost, DecodeError, LedgerError
from walstream.lsn import format_lsn

from .intake import Intake
from .orderer import Orderer

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_DRAIN_LIMIT = 4000  # messages between two looks at everything else
_IDLE_WAIT = 0.25
_LAST_FLUSH = 10.0  # seconds for what came before a message that ends the session for good


class MessageStream(Protocol):
    """The slot's stream (walstream.source.stream; a scripted one in tests)."""

    backend_pid: int
    backend_start: str
    patience: float

    def drain(self, handle: Callable[[bytes, int], bool], limit: int) -> int: ...
    def wait(self, timeout: float) -> None: ...
    def wakeup(self) -> None: ...
    def note_commit(self, end_lsn: int) -> None: ...
    def confirm(self, lsn: int) -> None: ...
    def feedback(self) -> None: ...
    def progress(self, connection: Connection) -> object | None: ...
    def close(self) -> None: ...
    @property
    def passed(self) -> int: ...
    @property
    def confirmed(self) -> int: ...
    @property
    def last_heard(self) -> float: ...


class IngestSession:
    """Reads one stream into one orderer until it is told to stop or something breaks.

    Args:
        settings: of the stream.
        stream: opened at the end of the order.
        intake: fresh, with the same resume position.
        orderer: not yet started.
        canary: emits a logical message on another connection, and returns what the walsender is at (the stream's
            ``progress``), or ``None`` if it could not find out. It raises nothing.
    """

    def __init__(
        self,
        settings: Settings,
        stream: MessageStream,
        intake: Intake,
        orderer: Orderer,
        canary: Callable[[], object | None],
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._intake = intake
        self._orderer = orderer
        self._canary = canary
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._canary_sent = 0.0
        self._walsender_at: object | None = None
        self._walsender_moved = 0.0
        self.ended_in_time = True
        """Whether the orderer's thread has ended; if not, it waits for its connection, which has to be cut."""
        self.handed_over = 0
        """Position of the stream up to which everything has been submitted to the orderer."""
        self.idle_position = 0
        """Where the slot may be moved to because nothing is outstanding; confirmed once it is written down."""
        self.persisted_position = 0
        """The newest idle position that is written down (by the heartbeat)."""

    @property
    def silence(self) -> float:
        """Seconds since anything arrived on the stream."""
        return time.monotonic() - self._stream.last_heard

    def stop(self) -> None:
        """Ask :meth:`run` to order what it has received, confirm it as far as possible, and return."""
        self._stopping.set()
        self._stream.wakeup()

    def fail(self, error: BaseException) -> None:
        """End the session with an error that was found elsewhere (the caretaker's)."""
        self._failure = error
        self._stream.wakeup()

    def run(self) -> None:
        """Read until stopped.

        Raises:
            WalstreamError: what ended it; :class:`ConnectionLost` and its kind are worth another session.
        """
        self._orderer.start()
        try:
            while not self._stopping.is_set():
                if not self._turn():
                    self._stream.wait(_IDLE_WAIT)
            self._finish()
        finally:
            self._stream.close()
            self.ended_in_time = self._orderer.stop(timeout=5.0)

    def _turn(self) -> bool:
        """One round; ``True`` if there may be more to read at once."""
        orderer, stream = self._orderer, self._stream
        if orderer.error is not None:
            raise orderer.error
        if self._failure is not None:
            raise self._failure
        read = 0
        if orderer.has_room:
            try:
                read = stream.drain(self._intake.handle, _DRAIN_LIMIT)
            except (DecodeError, LedgerError):
                # It comes again at every start, until somebody corrects something; what came before it must not wait
                # for that, nor be read under what was corrected.
                self._hand_on()
                orderer.drain(_LAST_FLUSH)
                raise
            self._hand_on()
        self.handed_over = stream.passed
        self._confirm()
        stream.feedback()
        if not orderer.has_room:
            # Back-pressure by not reading more, never by going silent: this returns to send feedback.
            orderer.wait_for_room(0.05)
            return True
        if read == 0:
            self._check_liveness()
        return read >= _DRAIN_LIMIT

    def _hand_on(self) -> None:
        burst = self._intake.take()
        if burst is not None:
            self._orderer.submit(burst)
        if self._intake.passed:
            self._stream.note_commit(self._intake.passed)

    def _confirm(self) -> None:
        """Move the acknowledgement, but only behind the flushed order (rule 3)."""
        confirmable = self._orderer.confirmable
        passed = self._stream.passed
        while confirmable and confirmable[0][0] <= passed:
            self._stream.confirm(confirmable[0][1])
            confirmable.popleft()
        if not self._intake.in_transaction and self._orderer.idle:
            # An idle ledger in a busy database: the position moves on, but only after it was written down (rule 10).
            self.idle_position = passed
            if self.persisted_position > self._stream.confirmed:
                self._stream.confirm(min(self.persisted_position, passed))

    def _check_liveness(self) -> None:
        """Liveness is judged by what arrives. When nothing has, a canary must come through the stream.

        A walsender that decodes a long transaction of other tables, or catches up through other databases' WAL, is
        silent for minutes and lets no canary pass, and to drop it would only make it begin again, for ever. So it is
        given up when nothing came *and* it was not seen to move (``patience``: as long as it may look the same while
        it is well).
        """
        now = time.monotonic()
        silence = now - self._stream.last_heard
        limit = self._settings.liveness_seconds
        if silence < limit:
            self._canary_sent = 0.0
            return
        if not self._canary_sent:
            self._walsender_moved = now
        if now - self._canary_sent >= limit:
            if self._canary_sent and now - self._walsender_moved >= max(2 * limit, self._stream.patience):
                raise ConnectionLost(
                    f"nothing arrived on slot {self._settings.slot!r} for {silence:.0f} s, not even the message sent to"
                    f" test it, and its walsender (pid {self._stream.backend_pid}) was not seen to move; last position"
                    f" {format_lsn(self._stream.passed)}",
                    hint="the connection is half-open (a firewall, a stopped walsender); it is made anew",
                )
            # On a thread of its own: making a connection can take as long as the network likes, and feedback is due.
            threading.Thread(target=self._probe, name="walstream-canary", daemon=True).start()
            self._canary_sent = now

    def _probe(self) -> None:
        found = self._canary()
        if found is not None and found != self._walsender_at:
            self._walsender_at = found
            self._walsender_moved = time.monotonic()

    def _finish(self) -> None:
        """A bounded goodbye: order what was received, then confirm as much of it as the stream has passed."""
        deadline = time.monotonic() + self._settings.drain_seconds
        grace = time.monotonic() + 1.0
        while (self._orderer.confirmable or not self._orderer.idle) and time.monotonic() < min(grace, deadline):
            self._turn()  # the stream must pass the order's own WAL position before the last commits can be confirmed
            self._stream.wait(0.02)
        self._hand_on()
        while not self._orderer.drain(0.1) and time.monotonic() < deadline:
            self._stream.feedback()
        self._confirm()
        self._stream.feedback()
