"""The writer of the commit order. One connection, one generation, one statement a segment (rule 7)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

import psycopg2
from psycopg2.errors import UniqueViolation
from psycopg2.extensions import connection as Connection

from walstream.errors import Fenced, LedgerError
from walstream.lsn import format_lsn, parse_lsn
from walstream.order.segment import Segment, encode_body
from walstream.order.snapshot import Snapshot as Snapshot
from walstream.order.snapshot import full_xid
from walstream.order.table import array_literal, order_table, ordered_seqs, own_table, query
from walstream.source.failures import classify

_INSERT: Final = """INSERT INTO {order}
 (first_offset, events, last_lsn, partial_inserts, min_seq, max_seq, recovered, generation, body)
 SELECT {values} FROM {generation} g{more} WHERE g.generation = {own}{condition} FOR SHARE OF g"""

# Prepared, because to parse and plan it takes the server as long as to run it, and events wait for it.
_PREPARE: Final = (
    "PREPARE {name} (bigint, int, pg_lsn, int, bigint, bigint, boolean, bigint, bytea, bigint{type}) AS " + _INSERT
)
_PLACES: Final = "$1, $2, $3, $4, $5, $6, $7, $8, $9"
_EXECUTE: Final = "EXECUTE {name} (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s{more})"
_FINISHED: Final = (
    " AND (SELECT bool_and(pg_visible_in_snapshot(xid, pg_current_snapshot())) FROM unnest($11) AS xids (xid))"
)
_VALUES: Final = "%s, %s, %s::pg_lsn, %s, %s, %s, %s, %s, %s"
_XID_SECONDS: Final = 60.0
"""How long a snapshot tells which ids are near. The ledger may be quiet while others use up ids by the million, and
2^31 of them later an id would be taken for one of the past."""

_numbers: Final = count(1)  # one connection may have several writers

# `local` and not `on`: `on` also waits for synchronous standbys, so a standby that is away would stop ingest. What is
# lost with the primary is found again by the reconciler, under a new epoch (docs/architecture.md, "Identity").
# The setting is made inside the statement, so that it stays one statement: it holds until this transaction's commit.
_DURABLE_WITH: Final = "WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'local', true) AS level) "


@dataclass(frozen=True, slots=True)
class Tail:
    """Where the order ends, which is where the stream is to go on.

    Attributes:
        next_offset: the first free offset (1 in an empty order).
        last_lsn: every commit that ends at or before it is ordered whole; 0 in an empty order.
        partial_lsn: LSN of the commit that is ordered only in part (then also ``last_lsn``), else 0.
        partial_inserts: how many of that commit's rows are ordered; 0 if ``partial_lsn`` is.
        max_seq: the highest seq that has an offset; ``None`` in an empty order.
    """

    next_offset: int
    last_lsn: int
    partial_lsn: int
    partial_inserts: int
    max_seq: int | None


class OrderWriter:
    """Writes the commit order under one generation.

    Args:
        connection: in autocommit, with ``synchronous_commit = off`` as a setting of the session: an order row that is
            lost with the server is streamed again, because the slot is confirmed only behind the flushed order.
        namespace: schema of walstream's tables.
        generation: what the take-over returned. Whoever takes over later makes every write of this one fail.
    """

    def __init__(self, connection: Connection, namespace: str, generation: int) -> None:
        if not connection.autocommit:
            raise ValueError("the order is written in autocommit: no lock may be held across round trips")
        self._connection = connection
        self._namespace = namespace
        self._generation = generation
        self._next: int | None = None
        names = {"order": order_table(namespace), "generation": own_table(namespace, "generation")}
        number = next(_numbers)
        name, name_finished = f"walstream_append_{number}", f"walstream_append_finished_{number}"
        prepare = partial(_PREPARE.format, **names, values=_PLACES, own="$10", more="")
        self._prepare = (
            prepare(name=name, type="", condition=""),
            prepare(name=name_finished, type=", xid8[]", condition=_FINISHED),
        )
        self._prepared = False
        self._append = _EXECUTE.format(name=name, more="")
        self._append_finished = _EXECUTE.format(name=name_finished, more=", %s")
        self._xid = 0  # a transaction id of 64 bits that is near to those of the stream
        self._xid_until = 0.0  # by the monotonic clock
        self._append_durably = _DURABLE_WITH + _INSERT.format(
            **names, values=_VALUES, own="%s", more=" CROSS JOIN durable", condition=" AND durable.level = 'local'"
        )
        try:
            # In a stricter isolation a take-over would end FOR SHARE with a serialization failure, which looks as if
            # it could be retried. Read committed looks at the new row and finds that the generation is another.
            with connection.cursor() as cursor:
                cursor.execute("SET default_transaction_isolation = 'read committed'")
        except psycopg2.Error as error:
            raise classify(error, doing="preparing to write the order") from error

    @property
    def generation(self) -> int:
        return self._generation

    def tail(self) -> Tail:
        """Read where the order ends. To be asked *after* the take-over has committed, and on every new connection.

        Raises:
            WalstreamError: of the connection.
        """
        order = order_table(self._namespace)
        rows = query(
            self._connection,
            "SELECT first_offset + events, last_lsn::text, COALESCE(partial_inserts, 0),"
            f" (SELECT max(max_seq) FROM {order}) FROM {order} ORDER BY first_offset DESC LIMIT 1",
            doing="reading the end of the order",
        )
        if not rows:
            self._next = 1
            return Tail(1, 0, 0, 0, None)
        next_offset, lsn_text, inserts, max_seq = rows[0]
        lsn = parse_lsn(lsn_text)
        self._next = next_offset
        return Tail(next_offset, lsn, lsn if inserts else 0, inserts, max_seq)

    def snapshot(self) -> Snapshot:
        """Take a fresh snapshot, to see which transactions are finished (rule 2).

        Raises:
            WalstreamError: of the connection.
        """
        rows = query(self._connection, "SELECT pg_current_snapshot()::text", doing="taking a snapshot")
        snapshot = Snapshot.parse(rows[0][0])
        self._xid, self._xid_until = snapshot.xmax, time.monotonic() + _XID_SECONDS
        return snapshot

    def append(self, segment: Segment, durable: bool = False) -> None:
        """Write a segment. When this returns its offsets are final: its row has committed.

        Args:
            segment: must begin where the order ends.
            durable: wait until the commit is flushed on this server (rule 11).

        Raises:
            Fenced: another process took over; nothing was written.
            LedgerError: the offsets do not continue the order, or are given already.
            ValueError: the segment is empty or contradicts itself.
            WalstreamError: of the connection. Whether the row was written is then unknown: read the tail again.
        """
        statement = self._append_durably if durable else self._append
        if not self._write(segment, statement, ()):
            raise Fenced(
                f"generation {self._generation} of ingest was replaced; the segment at offset {segment.first_offset} "
                "was not written",
                hint="another walstream took over this ledger; this one stands by",
            )

    def append_if_finished(self, segment: Segment, xids: Sequence[int]) -> bool:
        """Write a segment if all of its transactions are finished for everybody who looks from now on: what
        :meth:`snapshot` and :meth:`append` do, in one round trip.

        The statement asks the snapshot that it runs under, which was taken after this was called; whoever is shown the
        segment looks later still.

        Args:
            segment: as for :meth:`append`.
            xids: of its transactions, as the stream has them (32 bits).

        Returns:
            ``False`` if nothing was written, because one of them is not finished, another process took over, or the
            last snapshot is too old to tell what the ids are in full: to ask for one and then to append tells which.

        Raises: as :meth:`append`, but for ``Fenced``.
        """
        if time.monotonic() > self._xid_until:
            return False
        full = array_literal(full_xid(xid, self._xid) for xid in xids)
        return self._write(segment, self._append_finished, (full,))

    def _write(self, segment: Segment, statement: str, more: tuple[str, ...]) -> bool:
        if self._next is not None and segment.first_offset != self._next:
            raise LedgerError(
                f"a segment at {segment.first_offset} does not continue the order, which goes on at {self._next}"
            )
        values = (
            segment.first_offset,
            len(segment.seqs),
            format_lsn(segment.last_lsn),
            segment.partial_inserts,
            min(segment.seqs, default=0),
            max(segment.seqs, default=0),
            segment.recovered,
            self._generation,
            psycopg2.Binary(encode_body(segment)),
            self._generation,
            *more,
        )
        try:
            with self._connection.cursor() as cursor:
                if not self._prepared:
                    for each in self._prepare:
                        cursor.execute(each, ())
                    self._prepared = True
                cursor.execute(statement, values)
                written = cursor.rowcount == 1
        except UniqueViolation as error:
            raise LedgerError(
                f"offset {segment.first_offset} is given already, and not by generation {self._generation}",
                hint="nothing was delivered under it. If this repeats, compare walstream's commit_order with the "
                "backup it came from: rows of another history are in it",
            ) from error
        except psycopg2.Error as error:
            raise classify(error, doing=f"writing the order at offset {segment.first_offset}") from error
        if written:
            self._next = segment.next_offset
        return written

    def wal_position(self) -> int:
        """Return ``pg_current_wal_insert_lsn()``: what has committed by now lies before it (rule 3).

        Raises:
            WalstreamError: of the connection.
        """
        rows = query(self._connection, "SELECT pg_current_wal_insert_lsn()::text", doing="reading the WAL's position")
        return parse_lsn(rows[0][0])

    def known(self, seqs: Sequence[int]) -> set[int]:
        """Return those of ``seqs`` that have an offset already (rule 6).

        Raises:
            LedgerError: a segment is damaged.
            WalstreamError: of the connection.
        """
        return ordered_seqs(self._connection, self._namespace, seqs)
