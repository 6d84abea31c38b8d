"""What the orderer writes besides segments, all under the same lease: violations, and the heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from walstream.config import MiB, quote
from walstream.errors import WalstreamError
from walstream.lsn import format_lsn
from walstream.metrics import METRICS
from walstream.order.segment import Segment
from walstream.order.writer import OrderWriter, Snapshot

from .backlog import Noticed
from .leadership import Lease
from .liveness import CANARY
from .violation_store import Policy, ViolationStore
from .violations import Violation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from .ingest import IngestSession, MessageStream
    from .orderer import Orderer

COUNTERS: Final = ("ingest_events_total", "ingest_recovered_total", "ingest_violations_total")
"""What the heartbeat counts, as metrics of the process."""

_IDLE_PERSIST_BYTES: Final = 16 * MiB
"""An idle position is written down when it moved by a WAL segment, or by time. Never by change alone: what is written
moves the WAL itself (rule 10)."""


class FencedStore:
    """The order's writer, violations and heartbeat on one connection, which is the one that holds the lease."""

    def __init__(
        self,
        writer: OrderWriter,
        connection: Connection,
        namespace: str,
        lease: Lease,
        stream: MessageStream,
        classify: Callable[..., WalstreamError],
        *,
        idle_persist_seconds: float,
        policy: Policy = "record",
    ) -> None:
        self._writer = writer
        self._connection = connection
        self._schema = quote(namespace)
        self._lease = lease
        self._stream = stream
        self._classify = classify
        self._idle_persist_seconds = idle_persist_seconds
        self._violations = ViolationStore(namespace, lease, policy)
        self._counted = (0, 0, 0)
        self._idle_written = 0
        self._idle_written_at = 0.0

    def snapshot(self) -> Snapshot:
        return self._writer.snapshot()

    def append(self, segment: Segment, durable: bool = False) -> None:
        self._writer.append(segment, durable=durable)

    def append_if_finished(self, segment: Segment, xids: Sequence[int]) -> bool:
        return self._writer.append_if_finished(segment, xids)

    def wal_position(self) -> int:
        return self._writer.wal_position()

    def note_position(self, lsn: int) -> None:
        """Write down that everything up to ``lsn`` was read, for commits that no order row ends at.

        What is confirmed and written down nowhere is what somebody else has moved the slot over, at the next start.

        Raises:
            Fenced: another process took over.
        """
        self._execute("confirmed_lsn = GREATEST(confirmed_lsn, %s::pg_lsn)", (format_lsn(lsn),))

    def record_violations(self, violations: Sequence[Violation]) -> int:
        """Write down those that no erasure explains, durably; return how many changes that were. The same ones come
        again after a resend, and are the same rows then.
        """
        try:
            with self._connection.cursor() as cur:
                return self._violations.record(cur, violations)
        except Exception as error:
            raise self._classify(error, doing="recording a violation of the ledger") from error

    def record_noticed(self, noticed: Noticed) -> int:
        """Write down what the catalogue told, and what it says now; return how many violations that is."""
        try:
            with self._connection.cursor() as cur:
                return self._violations.record_noticed(cur, noticed)
        except Exception as error:
            raise self._classify(error, doing="recording what was noticed about the ledger") from error

    def announce(self, *, nothing_proven: bool) -> None:
        """Write down who ingests now, with the walsender's pid and start, by which a take-over would end it.

        Args:
            nothing_proven: somebody else has moved the slot. That can be seen only until the first position of ours is
                written down, and the comparison of the whole ledger takes longer.

        Raises:
            LedgerTouched: violations are not acknowledged, and ingest halts for them.
        """
        with self._connection.cursor() as cur:
            self._violations.record_unwatched(cur)  # before a position of this session is written down
            self._violations.refuse_if_open(cur)
        self._execute(
            "state = 'streaming', error = NULL, started_at = clock_timestamp(), heartbeat_at = clock_timestamp(),"
            " lease_until = clock_timestamp() + make_interval(secs => %s),"
            " walsender_pid = %s, walsender_start = %s::timestamptz,"
            " proven_seq = CASE WHEN %s THEN NULL ELSE proven_seq END",
            (self._lease.seconds, self._stream.backend_pid, self._stream.backend_start, nothing_proven),
        )

    def heartbeat(self, orderer: Orderer, session: IngestSession) -> None:
        """Renew the lease, count, and write down an idle position before it is confirmed.

        Raises:
            Fenced: another process took over.
        """
        counts = (orderer.events, orderer.recovered, orderer.violations)
        events, recovered, violations = (now - before for now, before in zip(counts, self._counted, strict=True))
        idle = session.idle_position if self._idle_is_due(session.idle_position) else 0
        position = max(self._stream.confirmed, idle, self._idle_written)
        self._execute(
            "lease_until = clock_timestamp() + make_interval(secs => %s), heartbeat_at = clock_timestamp(),"
            " events = events + %s, recovered = recovered + %s, violations = violations + %s,"
            " confirmed_lsn = GREATEST(confirmed_lsn, %s::pg_lsn)",
            (self._lease.seconds, events, recovered, violations, format_lsn(position)),
        )
        self._counted = counts
        for name, risen in zip(COUNTERS, (events, recovered, violations), strict=True):
            METRICS.add(name, risen)
        if session.silence >= self._lease.seconds / 8:
            self._emit_canary()
        if idle:
            self._idle_written, self._idle_written_at = idle, time.monotonic()
            session.persisted = idle, self.wal_position()

    def _emit_canary(self) -> None:
        """The stream is quiet: something has to come through it, or it is not alive."""
        try:
            with self._connection.cursor() as cur:
                cur.execute(CANARY)
        except Exception as error:
            raise self._classify(error, doing="testing the stream") from error

    def _idle_is_due(self, position: int) -> bool:
        if position <= self._idle_written:
            return False
        waited = time.monotonic() - self._idle_written_at
        return waited >= self._idle_persist_seconds or position - self._idle_written >= _IDLE_PERSIST_BYTES

    def _execute(self, assignments: str, values: tuple[object, ...]) -> None:
        try:
            with self._connection.cursor() as cur:
                cur.execute(
                    f"UPDATE {self._schema}.ingest SET {assignments} WHERE only_row AND generation = %s",
                    (*values, self._lease.generation),
                )
                renewed = cur.rowcount == 1
        except Exception as error:
            raise self._classify(error, doing="renewing the lease of ingest") from error
        if not renewed:
            raise self._lease.fenced()
