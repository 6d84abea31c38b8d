"""One ingest session: from taking the lease to the loss of any of its connections.

The thread that calls :meth:`IngestSession.run` reads the stream, sends feedback and nothing else; the orderer's thread
does the SQL. When either connection is lost the whole session is thrown away and the next one reads the order again
(rule 4), so nothing here outlives a connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from walstream.config import Settings
from walstream.errors import DecodeError, LedgerError
from walstream.protocol.messages import Received

from .intake import Intake
from .liveness import Liveness, Look, Progress
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

    def read(self, consume: Callable[[Iterator[Received]], None], limit: int) -> int: ...
    def wait(self, timeout: float) -> None: ...
    def wakeup(self) -> None: ...
    def note_commit(self, end_lsn: int) -> None: ...
    def confirm(self, lsn: int) -> None: ...
    def feedback(self) -> None: ...
    def progress(self, connection: Connection) -> Progress | None: ...
    def close(self) -> None: ...
    @property
    def passed(self) -> int: ...
    @property
    def confirmed(self) -> int: ...
    @property
    def last_heard(self) -> float: ...
    @property
    def drained(self) -> bool: ...


class IngestSession:
    """Reads one stream into one orderer until it is told to stop or something breaks.

    Args:
        settings: of the stream.
        stream: opened at the end of the order.
        intake: fresh, with the same resume position.
        orderer: not yet started.
        look: at the walsender, once the stream is silent (:class:`~walstream.engine.liveness.Liveness`).
    """

    def __init__(
        self,
        settings: Settings,
        stream: MessageStream,
        intake: Intake,
        orderer: Orderer,
        look: Callable[[], Look | None],
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._intake = intake
        self._orderer = orderer
        self._liveness = Liveness(settings.slot, settings.liveness_seconds, stream, look)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self.ended_in_time = True
        """Whether the orderer's thread has ended; if not, it waits for its connection, which has to be cut."""
        self.handed_over = 0
        """Position of the stream up to which everything has been submitted to the orderer."""
        self.idle_position = 0
        """Where the slot may be moved to because nothing is outstanding; confirmed once it is written down."""
        self.persisted = 0, 0
        """The newest idle position that is written down (by the heartbeat), and a WAL position behind that."""

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
                read = stream.read(self._intake.consume, _DRAIN_LIMIT)
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
            self._liveness.check()
        return not stream.drained  # what lies in the driver's buffer already would not end a wait

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
            position, behind = self.persisted
            if position > self._stream.confirmed and behind <= passed:
                self._stream.confirm(min(position, passed))

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
