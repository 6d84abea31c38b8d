"""Completeness: every committed ledger row gets an offset, also those that the slot did not deliver.

A chore of the ingest session: the comparison itself is :mod:`walstream.order.reconcile`, and what it finds is handed to
the orderer, which alone gives offsets. A pass compares what is not *proven* yet, so that its cost follows what is new
and not the size of the ledger. "Proven up to seq N" takes two passes: N was the highest seq when the first one began,
and every transaction that could hold a lower one was finished when the second began. Where seqs are not drawn one by
one (a sequence with CACHE) nothing is proven and every pass compares everything. When somebody else has moved the slot,
what was proven is taken back before the stream begins, so that no end of a session forgets it.

Rows can also appear below what was proven:

- Those of a table that is attached as a partition. So the lowest and the highest row of each partition are looked up
  once a session, and when one of them has no offset, everything is compared.
- Those of anybody, after somebody has chosen a seq himself that is far above all others. So when the slot delivers a
  seq that is not above what was proven, the proof is taken back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from walstream.config import Settings, quote
from walstream.errors import ConnectionLost
from walstream.ledger.identity import Identity
from walstream.lsn import parse_lsn
from walstream.order.reconcile import MissingRow, in_commit_order, missing_seqs
from walstream.order.table import ordered_seqs, query

from . import episodes
from .backlog import Recovered
from .ingest import IngestSession
from .orderer import Orderer

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.reconciler")

_POLL = 0.02


class Reconciler:
    """Compares ledger and order, a pass a call.

    Args:
        settings, identity: of the ledger.
        session, orderer: of the ingest it works for.
        generation: of that ingest.
        connection: gives the connection for the comparison (in autocommit).
        stopping: set when the session ends.
        check: raises if the table is not the ledger (any more): rows of another one are no events.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        session: IngestSession,
        orderer: Orderer,
        generation: int,
        connection: Callable[[], Connection],
        stopping: threading.Event,
        check: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._session = session
        self._orderer = orderer
        self._generation = generation
        self._connection = connection
        self._stopping = stopping
        self._check_table = check
        self._candidate: tuple[int, int] | None = None  # (highest seq, xmax) when the last pass began
        self._partitions: frozenset[int] = frozenset()  # whose ends were looked up
        self._recorded: int | None = None  # the offset up to which everything that was recovered is in an episode

    def run(self) -> None:
        """One pass.

        Raises:
            WalstreamError: of the connection; the pass is repeated later, and nothing was lost by that.
        """
        connection = self._connection()
        settings = self._settings
        self._catch_up(connection)
        top, xmin, xmax = self._look(connection)
        proven = self._proven(connection)
        if proven is not None and (
            self._came_below(connection, proven) or self._something_attached(connection, proven)
        ):
            proven = None
        recovered = 0
        given_up = episodes.given_up(connection, settings)
        began_at = episodes.now(connection)
        cause = f"slot {settings.slot} did not deliver them"
        if self._recorded is None:
            self._record(connection, f"{cause}; the comparison that ordered them was cut short", began_at)
        for seqs in missing_seqs(
            connection,
            settings.ledger,
            lambda wanted: ordered_seqs(connection, settings.namespace, wanted) | given_up.intersection(wanted),
            wait=self._wait,
            floor_seq=self._identity.floor_seq,
            after_seq=proven,
        ):
            rows = in_commit_order(connection, settings.ledger, seqs)
            self._check_table()
            self._order(rows)
            self._record(connection, cause, began_at)
            recovered += len(rows)
            log.warning(
                "%d rows between seq %d and %d had no offset and got one now, flagged recovered: the slot %r did not"
                " deliver them",
                len(rows),
                seqs[0],
                seqs[-1],
                settings.slot,
            )
        if recovered:
            log.warning("the reconciler recovered %d events in all", recovered)
        # All that is not above the new bound was ordered before this pass ended; what comes after it counts anew.
        candidate, self._candidate = self._candidate, None if top is None else (top, xmax)
        if (
            candidate is not None
            and candidate[1] <= xmin
            and self._drawn_one_by_one(connection)
            and not self._came_below(connection, proven)
        ):
            self._prove(connection, candidate[0])

    # -- what it asks the server ----------------------------------------------------------------------------------

    def _catch_up(self, connection: Connection) -> None:
        """Let the slot deliver what it has: after a stop that would else be compared twice, while it is being ordered,
        and takes as much of the process's time as a tenth of the ordering."""
        rows = query(connection, "SELECT pg_current_wal_insert_lsn()::text", doing="reading the WAL's position")
        self._wait(parse_lsn(rows[0][0]))

    def _look(self, connection: Connection) -> tuple[int | None, int, int]:
        ledger = self._settings.ledger
        rows = query(
            connection,
            # The snapshot first: a seq that is drawn after it belongs to a transaction at or behind its xmax.
            "WITH s AS MATERIALIZED (SELECT pg_current_snapshot() AS s)"
            f" SELECT (SELECT max({_sql(quote(ledger.columns.seq))}) FROM {_sql(ledger.qualified)}),"
            " pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint FROM s",
            doing="looking at the end of the ledger",
        )
        top, xmin, xmax = rows[0]
        return (None if top is None else int(top)), int(xmin), int(xmax)

    def _proven(self, connection: Connection) -> int | None:
        rows = query(
            connection,
            f"SELECT proven_seq FROM {_sql(quote(self._settings.namespace))}.ingest",
            doing="reading how far the order is proven",
        )
        return rows[0][0] if rows else None

    def _something_attached(self, connection: Connection, proven: int) -> bool:
        """Whether a partition that is new here holds rows without an offset among what was proven.

        Each is read through the partitioned table, on which alone this login has its rights, by its own constraint;
        a default or a hash partition cannot be picked out that way, and is left out.
        """
        ledger = self._settings.ledger
        seq = _sql(quote(ledger.columns.seq))
        partitions: dict[int, str] = dict(
            query(
                connection,
                "SELECT c.oid::bigint, pg_get_partition_constraintdef(c.oid)"
                " FROM pg_partition_tree(%s::oid::regclass) AS t JOIN pg_class AS c ON c.oid = t.relid"
                " WHERE t.isleaf AND pg_get_expr(c.relpartbound, c.oid) ~ '^FOR VALUES (FROM|IN)'",
                (self._identity.table_oid,),
                doing="looking for new partitions",
            )
        )
        floor = self._identity.floor_seq
        ends: set[int] = set()
        for constraint in (partitions[oid] for oid in partitions.keys() - self._partitions):
            rows = query(
                connection,
                f"SELECT min({seq}), max({seq}) FROM {_sql(ledger.qualified)} WHERE {_sql(constraint)}",
                doing="looking at the ends of a partition",
            )
            ends.update(end for end in rows[0] if end is not None and end <= proven and (floor is None or end > floor))
        missing = ends - ordered_seqs(connection, self._settings.namespace, list(ends))
        if missing:  # they are looked up again until they have an offset: this pass may be cut short
            log.warning("rows appeared below what was proven (seq %d): everything is compared", min(missing))
            return True
        self._partitions = frozenset(partitions)
        return False

    def _drawn_one_by_one(self, connection: Connection) -> bool:
        ledger = self._settings.ledger
        rows = query(
            connection,
            "SELECT s.seqcache = 1 AND s.seqincrement > 0 FROM pg_sequence s"
            " WHERE s.seqrelid = pg_get_serial_sequence(%s, %s)::regclass",
            (ledger.qualified, ledger.columns.seq),
            doing="looking at the ledger's sequence",
        )
        return rows == [(True,)]

    def _came_below(self, connection: Connection, proven: int | None) -> bool:
        """Whether the slot has delivered a seq that is not above what was proven; nothing counts as proven then."""
        lowest = self._orderer.take_lowest_seq()
        if lowest is None or proven is None or lowest > proven:
            return False
        log.warning("seq %d came although everything to seq %d was proven: everything is compared", lowest, proven)
        with connection.cursor() as cur:
            cur.execute(
                f"UPDATE {quote(self._settings.namespace)}.ingest SET proven_seq = NULL WHERE generation = %s",
                (self._generation,),
            )
        return True

    def _prove(self, connection: Connection, seq: int) -> None:
        with connection.cursor() as cur:
            cur.execute(
                f"UPDATE {quote(self._settings.namespace)}.ingest SET proven_seq = GREATEST(proven_seq, %s)"
                " WHERE generation = %s AND proven_seq IS DISTINCT FROM GREATEST(proven_seq, %s)",
                (seq, self._generation, seq),
            )

    def _record(self, connection: Connection, cause: str, began_at: str) -> None:
        """Write down what was recovered so far: part by part, because a pass may be cut short at any moment."""
        self._recorded = episodes.record_from_order(
            connection,
            self._settings,
            "reconciler",
            cause,
            began_at=began_at,
            generation=self._generation,
            behind=self._recorded or 0,
        )

    # -- what it asks of ingest -----------------------------------------------------------------------------------

    def _wait(self, position: int) -> None:
        """Until everything that the slot delivers up to ``position`` has been ordered."""
        while self._session.handed_over < position:
            self._check()
            self._stopping.wait(_POLL)
        self._order(())

    def _order(self, rows: tuple[MissingRow, ...] | list[MissingRow]) -> None:
        """Have rows ordered behind all that was submitted before; without rows, only wait for that."""
        found = Recovered(rows, threading.Event())
        self._orderer.submit(found)
        while not found.done.wait(_POLL):
            self._check()

    def _check(self) -> None:
        if self._stopping.is_set() or self._orderer.error is not None:
            raise ConnectionLost("the ingest session ended while ledger and order were compared")


def _sql(text: str) -> str:
    """For a statement with parameters: the driver reads ``%`` as the mark of one."""
    return text.replace("%", "%%")
