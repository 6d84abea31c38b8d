"""How a slot is born: in durable states, so that a birth that was cut short is begun again and never believed.

``creating``: there is no slot, or one that nobody relies on. What stands in the table is ordered in chunks first,
because a slot would hold WAL for the whole length of a long fill. ``filling``: the slot is there; what is visible in
the snapshot that it exported, and has no offset yet, is ordered before the first streamed transaction. ``ready``: the
slot sends everything that its snapshot did not show. `walstream run` starts from ``ready`` only.

Rows that have an offset keep it through every new attempt: they are committed rows of the ledger that were ordered
once. So an attempt goes on with the rows that are missing, and the union of fill and stream is every row exactly once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from walstream.config import Settings, quote
from walstream.errors import Unavailable
from walstream.ledger.identity import set_slot_state
from walstream.lsn import format_lsn

from .plan import floor_query
from .session import PATIENT, database

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.source.facts import Blocker

LEASE_SECONDS: Final = 600.0
"""Longer than any single step of a birth. Should this process die, its connection ends, and with it the lease."""

SMALL_REST: Final = 20_000
"""Rows that may be left for the snapshot of the new slot, which holds WAL while they are ordered: about a second. A
pass before the slot that found no more than this is the last one."""

MOST_PASSES: Final = 5
"""Passes before the slot, at the most: under a load that outruns the fill another one would find as much again."""

_RENEW_EVERY: Final = 20.0


class Progress(Protocol):
    """Where a birth says how far it is."""

    def begin(self, what: str, total: int | None) -> None:
        """A pass over the table begins; it will order about ``total`` rows."""

    def advance(self, rows: int) -> None:
        """So many more rows are ordered, durably."""

    def waiting(self, blockers: Sequence[Blocker]) -> None:
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
    filled: int
    floor_seq: int | None


def bear(settings: Settings, conn: Connection, *, from_now: bool, timeout: float, progress: Progress) -> Born:
    """Make the slot, from whatever state the last attempt left.

    Args:
        conn: in autocommit, on a database where the steps of the plan are done.
        from_now: rows that are there already are never events.
        timeout: seconds that the creation of the slot may wait for open transactions.

    Raises:
        Unavailable: a consumer works on the ledger, or transactions stood in the way until the end.
        SlotError, ConfigError: the slot cannot be made; the message says why.
        Fenced: another set-up took over.
    """
    from walstream.source import slots

    namespace = quote(settings.namespace)
    with _lease(settings, conn) as (generation, renew), conn.cursor() as cur:
        set_slot_state(cur, settings.namespace, "creating")
        if from_now:
            cur.execute(f"UPDATE {namespace}.identity SET floor_seq = {floor_query(settings)} WHERE floor_seq IS NULL")
        cur.execute(f"SELECT floor_seq FROM {namespace}.identity")
        row: Any = cur.fetchone()
        slots.drop(conn, settings.slot)
        filling = _Filling(settings, conn, generation, row[0], renew, progress)
        filled = filling.before_the_slot()
        with slots.create(
            settings.replication_dsn or settings.require_dsn(),
            settings.slot,
            timeout=timeout,
            connect_timeout=settings.connect_timeout,
            on_wait=progress.waiting,
        ) as made:
            renew()
            set_slot_state(cur, settings.namespace, "filling")
            filled += filling.on_snapshot(made.snapshot)
            renew()
            # Position and state in one statement: without the position, the first start would take the slot for one
            # that somebody has moved, and compare the whole ledger.
            cur.execute(
                f"WITH position AS (UPDATE {namespace}.ingest SET confirmed_lsn = %s)"
                f" UPDATE {namespace}.identity SET slot_state = 'ready'",
                (format_lsn(made.consistent_point),),
            )
        return Born(settings.slot, made.consistent_point, filled, row[0])


@contextlib.contextmanager
def _lease(settings: Settings, conn: Connection) -> Iterator[tuple[int, Callable[[], None]]]:
    """Hold the ledger's lease: while a slot is born, nobody else writes the order. Yields generation and renewal.

    Raises:
        Unavailable: a consumer, or another set-up, has it.
    """
    from walstream.engine.leadership import Lease, owner_name

    lease = Lease.for_ingest(settings.namespace, owner=f"{owner_name()} (init)", seconds=LEASE_SECONDS)
    with conn.cursor() as cur:
        cur.execute("BEGIN")
        try:
            generation = lease.acquire(cur)
            if generation is None:
                cur.execute(f"SELECT owner FROM {quote(settings.namespace)}.ingest")
                row: Any = cur.fetchone()
                raise Unavailable(
                    f"{row[0]} works on this ledger at this moment, and a slot cannot be made beside it",
                    hint="stop it, or wait until it has ended, and run `walstream init` again",
                )
            # The lease's row and the fencing row change together, or not at all (rule 7).
            cur.execute(f"UPDATE {quote(settings.namespace)}.generation SET generation = %s", (generation,))
            cur.execute(f"UPDATE {quote(settings.namespace)}.ingest SET state = 'init', error = NULL")
            cur.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # what was raised matters more
                cur.execute("ROLLBACK")
            raise
        renewed = time.monotonic()

        def renew() -> None:
            nonlocal renewed
            if time.monotonic() - renewed > _RENEW_EVERY:
                if not lease.renew(cur):
                    raise lease.fenced()
                renewed = time.monotonic()

        try:
            yield generation, renew
        finally:
            with contextlib.suppress(Exception):  # a lost connection ends the lease as well
                lease.release(cur)


class _Filling:
    """Orders what stands in the table, under one generation."""

    def __init__(
        self,
        settings: Settings,
        conn: Connection,
        generation: int,
        floor_seq: int | None,
        renew: Callable[[], None],
        progress: Progress,
    ) -> None:
        from walstream.order.writer import OrderWriter

        self._settings = settings
        self._conn = conn
        self._writer = OrderWriter(conn, settings.namespace, generation)
        self._floor_seq = floor_seq
        self._renew = renew
        self._progress = progress

    def before_the_slot(self) -> int:
        """Order rows until only a small rest is left for the slot's snapshot; return how many were ordered."""
        total = 0
        for number in range(MOST_PASSES):
            expected = self._estimate() if number == 0 else None
            ordered = self._order("ordering the rows of the table" if number == 0 else "ordering new rows", expected)
            total += ordered
            if ordered <= SMALL_REST:
                break
        return total

    def on_snapshot(self, snapshot: str) -> int:
        """Order what the exported snapshot shows and the order does not have; return how many rows."""
        with database(self._settings, "init-snapshot", PATIENT) as reader, reader.cursor() as cur:
            cur.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cur.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
            return self._order("ordering the rest", None, reader)

    def _order(self, what: str, expected: int | None, reader: Connection | None = None) -> int:
        from walstream.order.reconcile import fill, missing_seqs

        self._progress.begin(what, expected)
        source = self._conn if reader is None else reader
        ledger = self._settings.ledger
        missing = missing_seqs(source, ledger, self._known, wait=None, floor_seq=self._floor_seq)
        total = 0
        for segment in fill(self._writer, source, ledger, missing):
            total += len(segment.seqs)
            self._progress.advance(len(segment.seqs))
            self._renew()
        return total

    def _known(self, seqs: Sequence[int]) -> set[int]:
        self._renew()
        return self._writer.known(seqs)

    def _estimate(self) -> int | None:
        """About how many rows have no offset yet; ``None`` if the table was never analyzed."""
        with self._conn.cursor() as cur:
            cur.execute(
                f"""
                SELECT sum(c.reltuples)::bigint - (SELECT coalesce(sum(events), 0)
                                                     FROM {quote(self._settings.namespace)}.commit_order)
                  FROM pg_catalog.pg_class AS c
                 WHERE c.relkind = 'r' AND c.reltuples >= 0 AND (c.oid = pg_catalog.to_regclass(%s)
                    OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree(pg_catalog.to_regclass(%s))))""",
                (self._settings.ledger.qualified,) * 2,
            )
            row: Any = cur.fetchone()
        return None if row[0] is None or self._floor_seq is not None else max(0, int(row[0]))
