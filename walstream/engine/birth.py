"""How a slot is born: in durable states, so that a birth that was cut short is begun again and never believed.

``creating``: there is no slot, or one that nobody relies on. What stands in the table is ordered in chunks first,
because a slot would hold WAL for the whole length of a long fill. ``filling``: the slot is there; what is visible in
the snapshot that it exported, and has no offset yet, is ordered before the first streamed transaction. ``ready``: the
slot sends everything that its snapshot did not show.

Rows that have an offset keep it through every new attempt: they are committed rows of the ledger that were ordered
once. So an attempt goes on with the rows that are missing, and the union of fill and stream is every row exactly once.

`walstream init` gives a slot its first birth; a running ingest gives it another one when it was lost
(:mod:`walstream.engine.rebirth`). Both hold the ledger's lease all the while, and renew it with every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg2

from walstream.config import Settings, quote
from walstream.errors import Unavailable
from walstream.ledger.identity import SlotState
from walstream.lsn import format_lsn
from walstream.metrics import METRICS
from walstream.order.reconcile import fill, missing_seqs
from walstream.order.table import query
from walstream.order.writer import OrderWriter
from walstream.source.connection import connect
from walstream.source.failures import classify

from . import episodes
from .episodes import Filled
from .leadership import Lease

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

LEASE_SECONDS: Final = 60.0
"""Longer than any single step of a birth. Should this process die, its connection ends, and with it the lease."""

SMALL_REST: Final = 20_000
"""Rows that may be left for the snapshot of the new slot, which holds WAL while they are ordered: about a second. A
pass before the slot that found no more than this is the last one."""

MOST_PASSES: Final = 5
"""Passes before the slot, at the most: under a load that outruns the fill another one would find as much again."""


class InTheWay(Protocol):
    """An open transaction that the creation of a slot waits for; as text it says whose it is."""

    @property
    def remedy(self) -> str:
        """The statement that ends it."""


class MadeSlot(Protocol):
    """A slot that was just made (walstream.source.slots)."""

    @property
    def consistent_point(self) -> int: ...
    @property
    def snapshot(self) -> str: ...
    @property
    def backend_pid(self) -> int: ...


class SlotMaker(Protocol):
    """What makes and drops the slot of a stream (walstream.wiring), so that the engine knows no replication class."""

    def drop(self, settings: Settings, connection: Connection) -> None:
        """Drop the stream's slot, if there is one and it is ours to drop."""

    def create(
        self, settings: Settings, *, timeout: float, on_wait: Callable[[Sequence[InTheWay]], None]
    ) -> AbstractContextManager[MadeSlot]:
        """Make it; its snapshot is good while the context is open."""


class Progress(Protocol):
    """Where a birth says how far it is."""

    def begin(self, what: str, total: int | None) -> None:
        """A pass over the table begins; it will order about ``total`` rows."""

    def advance(self, rows: int) -> None:
        """So many more rows are ordered, durably."""

    def waiting(self, blockers: Sequence[InTheWay]) -> None:
        """The slot cannot be made yet: these transactions are open."""


@dataclass(frozen=True)
class Born:
    """A slot that is ready.

    Attributes:
        consistent_point: LSN from which it sends commits.
        filled: rows that were ordered because they stood in the table.
        floor_seq: rows up to here are not events; ``None`` for all.
    """

    slot: str
    consistent_point: int
    filled: Filled
    floor_seq: int | None


class BirthStopped(Unavailable):
    """Told to stop in the middle; the next attempt begins again."""


class Birth:
    """One birth, from whatever state the last attempt left.

    Args:
        settings: of the stream.
        conn: in autocommit, on a database where everything but the slot is set up. The lease was taken on it.
        lease: of ingest, held under its present generation.
        maker: makes the slot.
        timeout: seconds that its creation may wait for open transactions.
        progress: is told how far it is.
        state: what `walstream status` shows of ingest meanwhile.
        cause: why the slot is made anew, for the same.
        stopped: asked at every step.
        on_filled: called after each durable segment: others can read it from then on.
    """

    def __init__(
        self,
        settings: Settings,
        conn: Connection,
        lease: Lease,
        maker: SlotMaker,
        *,
        timeout: float,
        progress: Progress,
        state: str = "init",
        cause: str | None = None,
        stopped: Callable[[], bool] = lambda: False,
        on_filled: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._conn = conn
        self._lease = lease
        self._maker = maker
        self._timeout = timeout
        self._progress = progress
        self._shown = (state, cause)
        self._stopped = stopped
        self._on_filled = on_filled
        self._namespace = quote(settings.namespace)
        self._writer = OrderWriter(conn, settings.namespace, lease.generation)
        self._floor_seq: int | None = None
        self._proven_seq: int | None = None
        self._given_up: frozenset[int] = frozenset()
        self.filled = Filled()
        """What was ordered so far, also by an attempt that failed."""

    def run(self) -> Born:
        """Make the slot.

        Raises:
            Unavailable: transactions stood in the way until the end, the server is away, or :class:`BirthStopped`.
            SlotError, ConfigError: the slot cannot be made; the message says why.
            Fenced: another process took over.
        """
        settings, conn = self._settings, self._conn
        began_at = episodes.now(conn)
        state, cause = self._shown
        kind: episodes.Kind = "birth" if state == "init" else "rebirth"
        episodes.record_from_order(
            conn,
            settings,
            kind,
            "what ordered them was cut short, and begins again",
            began_at=began_at,
            generation=self._lease.generation,
        )
        self._become("creating")
        ((self._floor_seq, self._proven_seq),) = query(
            conn,
            f"SELECT floor_seq, (SELECT proven_seq FROM {self._namespace}.ingest) FROM {self._namespace}.identity",
            doing="reading from where on rows are compared",
        )
        self._given_up = episodes.given_up(conn, settings)
        self._maker.drop(settings, conn)
        self._before_the_slot()
        with self._maker.create(settings, timeout=self._timeout, on_wait=self._wait) as made:
            self._renew()
            self._become("filling", made)
            self._on_snapshot(made.snapshot)
            self._become("ready", made)
            position = made.consistent_point
        episodes.record(
            conn,
            settings,
            kind,
            cause or "walstream init",
            self.filled,
            began_at=began_at,
            generation=self._lease.generation,
            slot_lsn=position,
        )
        return Born(settings.slot, position, self.filled, self._floor_seq)

    # -- the passes ------------------------------------------------------------------------------------------------

    def _before_the_slot(self) -> None:
        """Order rows until only a small rest is left for the slot's snapshot."""
        for number in range(MOST_PASSES):
            expected = self._estimate() if number == 0 else None
            before = self.filled.events
            self._order("ordering the rows of the table" if number == 0 else "ordering new rows", expected, self._conn)
            if self.filled.events - before <= SMALL_REST:
                break

    def _on_snapshot(self, snapshot: str) -> None:
        """Order what the exported snapshot shows and the order does not have."""
        settings = self._settings
        reader = connect(
            settings.require_dsn(),
            application_name=f"walstream:{settings.namespace}:snapshot",
            connect_timeout=settings.connect_timeout,
            options={"statement_timeout": "0", "idle_in_transaction_session_timeout": "0"},
        )
        try:
            with reader.cursor() as cur:
                if reader.server_version >= 170000:
                    cur.execute("SET transaction_timeout = 0")
                cur.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                cur.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
            self._order("ordering the rest", None, reader)
        except psycopg2.Error as error:
            raise classify(error, doing="reading what the new slot's snapshot shows") from error
        finally:
            reader.close()

    def _order(self, what: str, expected: int | None, source: Connection) -> None:
        self._progress.begin(what, expected)
        ledger = self._settings.ledger
        missing = missing_seqs(
            source, ledger, self._known, wait=None, floor_seq=self._floor_seq, after_seq=self._proven_seq
        )
        for segment in fill(self._writer, source, ledger, missing):
            rows = len(segment.seqs)
            self.filled = self.filled.plus(segment)
            self._renew(rows)
            METRICS.add("ingest_events_total", rows)
            METRICS.add("ingest_recovered_total", rows)
            self._progress.advance(rows)
            self._on_filled()

    def _known(self, seqs: Sequence[int]) -> set[int]:
        self._renew()
        return self._writer.known(seqs) | self._given_up.intersection(seqs)

    def _wait(self, blockers: Sequence[InTheWay]) -> None:
        self._renew()
        self._progress.waiting(blockers)

    def _estimate(self) -> int | None:
        """About how many rows have no offset yet; ``None`` if nobody knows."""
        if self._floor_seq is not None or self._proven_seq is not None:
            return None
        ((rows,),) = query(
            self._conn,
            f"""
            SELECT sum(c.reltuples)::bigint - (SELECT coalesce(sum(events), 0) FROM {self._namespace}.commit_order)
              FROM pg_catalog.pg_class AS c
             WHERE c.relkind = 'r' AND c.reltuples >= 0 AND (c.oid = pg_catalog.to_regclass(%s)
                OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree(pg_catalog.to_regclass(%s))))""",
            (self._settings.ledger.qualified,) * 2,
            doing="asking how large the table is",
        )
        return None if rows is None else max(0, int(rows))

    # -- lease and state -------------------------------------------------------------------------------------------

    def _renew(self, rows: int = 0) -> None:
        """Extend the lease, and count what was ordered with it."""
        if self._stopped():
            raise BirthStopped("told to stop while the slot was being made; the next start begins with it again")
        self._execute(
            f"UPDATE {self._namespace}.ingest SET lease_until = clock_timestamp() + make_interval(secs => %s),"
            " heartbeat_at = clock_timestamp(), events = events + %s, recovered = recovered + %s"
            " WHERE only_row AND generation = %s",
            (LEASE_SECONDS, rows, rows, self._lease.generation),
        )

    def _become(self, state: SlotState, made: MadeSlot | None = None) -> None:
        """Write the state down, durably and fenced: who was replaced must not call another's slot ready."""
        values: list[Any]
        assignments, values = "state = %s, error = %s", list(self._shown)
        if state == "filling" and made is not None:
            # So that whoever replaces this process ends the session that may still drop the slot.
            assignments = (
                "walsender_pid = %s,"
                " walsender_start = (SELECT backend_start FROM pg_stat_get_activity(%s::integer) LIMIT 1)"
            )
            values = [made.backend_pid] * 2
        elif state == "ready" and made is not None:
            # Without the position, the first start would take the slot for one that somebody has moved. And nothing is
            # proven until everything was compared once: rows may have come below, which no slot has delivered.
            assignments, values = "confirmed_lsn = %s, proven_seq = NULL", [format_lsn(made.consistent_point)]
        self._execute(
            f"WITH fence AS (SELECT 1 FROM {self._namespace}.generation WHERE generation = %s FOR SHARE),"
            f" noted AS (UPDATE {self._namespace}.ingest SET {assignments} WHERE only_row AND generation = %s)"
            f" UPDATE {self._namespace}.identity SET slot_state = %s FROM fence",
            (self._lease.generation, *values, self._lease.generation, state),
            durable=True,
        )

    def _execute(self, statement: str, values: tuple[Any, ...], *, durable: bool = False) -> None:
        """Run an update that only the holder of the lease may make.

        Raises:
            Fenced: another process took over.
        """
        try:
            with self._conn.cursor() as cur:
                if durable:
                    cur.execute("BEGIN; SET LOCAL synchronous_commit = local")
                try:
                    cur.execute(statement, values)
                    held = cur.rowcount == 1
                    if durable:
                        cur.execute("COMMIT")
                except BaseException:
                    if durable:
                        with contextlib.suppress(psycopg2.Error):
                            cur.execute("ROLLBACK")
                    raise
        except psycopg2.Error as error:
            raise classify(error, doing="making the slot") from error
        if not held:
            raise self._lease.fenced()
