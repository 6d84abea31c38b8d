"""The reconciler: rows of the ledger that have no offset, found and given one.

The slot can miss rows (it was lost, recreated, advanced by hand; the publication was changed), and it never sees those
that stood in the table before it. What is committed and not in the order is found by comparing, chunk by chunk:

1. read a chunk of seqs, which are committed because they are visible, and keep those that are not in the order;
2. take the WAL position *after* that: every one of these commits lies before it;
3. wait until ingest has ordered everything up to there;
4. look into the order again: what is still not in it, the slot did not deliver and never will.

No transaction stays open meanwhile, and memory is bounded by a chunk and the candidates found so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Connection

from walstream.config import LedgerTable, quote
from walstream.errors import LedgerError, WalstreamError
from walstream.lsn import parse_lsn
from walstream.order.segment import Segment, size_codes
from walstream.order.table import query, spelled
from walstream.order.writer import OrderWriter, Tail

CHUNK: Final = 20_000  # seqs compared at once
CANDIDATES: Final = 100_000  # held before waiting for ingest
WINDOW: Final = 500_000  # rows sorted by commit time at once
_SEGMENT: Final = 10_000
_DETAILS: Final = 2_000  # rows whose size is asked for in one query

_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1
_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970 (see ``walstream.event.POSTGRES_EPOCH``)."""

Known = Callable[[Sequence[int]], set[int]]
"""Returns those of the seqs that have an offset: ``OrderWriter.known``, or ``ordered_seqs`` with a connection bound."""


@dataclass(frozen=True, slots=True)
class MissingRow:
    """A row of the ledger that is to be given an offset.

    Attributes:
        seq: its number.
        size: bytes of text over all its columns.
        xid: 32-bit id of the transaction that wrote it.
        time_us: when that committed, in microseconds since 2000-01-01 UTC; 0 if the server does not know.
    """

    seq: int
    size: int
    xid: int
    time_us: int


def missing_seqs(
    connection: Connection,
    ledger: LedgerTable,
    known: Known,
    *,
    wait: Callable[[int], None] | None,
    floor_seq: int | None = None,
    after_seq: int | None = None,
    through_seq: int | None = None,
    chunk: int = CHUNK,
) -> Iterator[list[int]]:
    """Yield the seqs of committed rows that ingest did not order and will not, ascending.

    Args:
        connection: reads the ledger. In autocommit; or, at the birth of a slot, in a transaction on the snapshot that
            the slot exported.
        ledger: the table.
        known: answers from the order as it is *now*, so on a connection in autocommit.
        wait: given a WAL position, returns once ingest has ordered everything up to it, or raises. ``None`` if no
            slot delivers what is visible here: before it exists, or on the snapshot it exported.
        floor_seq: rows up to here are never events (``init --from now``).
        after_seq, through_seq: compare only the seqs between (the first excluded, the second included).
        chunk: seqs compared at once.

    Raises:
        WalstreamError: of a connection, or whatever ``wait`` raises.
    """
    held: list[int] = []
    for seqs in _chunks(connection, ledger, _start(floor_seq, after_seq), through_seq, chunk):
        ordered = known(seqs)
        if len(ordered) < len(seqs):
            held += [seq for seq in seqs if seq not in ordered]
        if len(held) >= CANDIDATES:
            yield from _settled(connection, known, wait, held)
            held = []
    if held:
        yield from _settled(connection, known, wait, held)


def in_commit_order(connection: Connection, ledger: LedgerTable, seqs: Sequence[int]) -> list[MissingRow]:
    """Return the rows of ``seqs`` in the order in which they are to get their offsets.

    By commit time where the server tracks it (rows whose time it does not know come first: they are older), else by
    seq. Rows that are gone by now are left out.

    Raises:
        LedgerError: the server itself cannot read one of them; the message names it.
        WalstreamError: of the connection.
    """
    tracked = query(
        connection, "SELECT current_setting('track_commit_timestamp')", doing="asking whether commit times are tracked"
    ) == [("on",)]
    time = (
        f"COALESCE((extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000000)::bigint - {_EPOCH_US}, 0)"
        if tracked
        else "0::bigint"
    )
    seq = spelled(quote(ledger.columns.seq))
    statement = (
        f"SELECT {seq}, {_row_size(connection, ledger)}, xmin::text::bigint, {time}"
        f" FROM {spelled(ledger.qualified)} WHERE {seq} = ANY(%s::bigint[])"
    )
    found: list[MissingRow] = []
    for start in range(0, len(seqs), _DETAILS):
        part = list(seqs[start : start + _DETAILS])
        found += [MissingRow(*row) for row in _read(connection, statement, part, ledger.qualified)]
    # Without times (all 0) this is the order of seqs; with them a transaction stays together.
    found.sort(key=lambda row: (row.time_us, row.xid if row.time_us else 0, row.seq))
    return found


def _read(connection: Connection, statement: str, seqs: list[int], table: str) -> list[tuple[Any, ...]]:
    """The rows of ``seqs``. One that the server cannot turn into text (above 1 GB) is looked for, and named."""
    try:
        return query(connection, statement, (seqs,), doing=f"reading rows of {table} without offset")
    except WalstreamError as error:
        # In a transaction nothing more can be asked after an error.
        if error.transient or connection.info.transaction_status != TRANSACTION_STATUS_IDLE:
            raise
        if len(seqs) == 1:
            raise LedgerError(
                f"the row with seq {seqs[0]} cannot be read by anybody: {error}",
                hint=f"`walstream slot skip --seq {seqs[0]}` gives it up: it gets no offset, and that is on record",
            ) from error
        middle = len(seqs) // 2
        halves = seqs[:middle], seqs[middle:]
        return [row for half in halves for row in _read(connection, statement, half, table)]


def fill(
    writer: OrderWriter,
    connection: Connection,
    ledger: LedgerTable,
    missing: Iterable[list[int]],
    *,
    window: int = WINDOW,
) -> Iterator[Segment]:
    """Order missing rows, and yield each segment once it is durable (rule 11: no slot can derive it again).

    Meant for when nobody else writes under the writer's generation: the birth of a slot. A running ingest orders what
    :func:`in_commit_order` returns by itself, between two of its own segments.

    Safe to repeat after a crash at any point: what is ordered is not missing any more.

    Args:
        writer: of the present generation.
        connection: reads the ledger, as for :func:`missing_seqs`.
        ledger: the table.
        missing: what :func:`missing_seqs` yields.
        window: so many rows are sorted by commit time at once, which bounds the memory; beyond it, seqs decide.

    Raises:
        Fenced: another process took over.
        WalstreamError: of a connection.
    """
    tail = writer.tail()
    next_offset = tail.next_offset
    for seqs in _windows(missing, window):
        rows = in_commit_order(connection, ledger, seqs)
        for segment in recovered_segments(rows, tail, next_offset, writer.generation):
            writer.append(segment, durable=True)
            next_offset = segment.next_offset
            yield segment


def recovered_segments(rows: Sequence[MissingRow], tail: Tail, next_offset: int, generation: int) -> Iterator[Segment]:
    """Cut rows, in their order, into segments from ``next_offset`` on. Pure.

    Where the stream stands (``tail``) stays as it is. Neighbours that one transaction wrote are one piece.
    """
    held: list[list[MissingRow]] = []
    count = 0
    for _, group in groupby(rows, key=attrgetter("xid", "time_us")):
        piece = list(group)
        for start in range(0, len(piece), _SEGMENT):
            part = piece[start : start + _SEGMENT]
            if count + len(part) > _SEGMENT:
                yield _recovered(held, tail, next_offset, generation)
                next_offset += count
                held, count = [], 0
            held.append(part)
            count += len(part)
    if held:
        yield _recovered(held, tail, next_offset, generation)


def _recovered(pieces: list[list[MissingRow]], tail: Tail, first_offset: int, generation: int) -> Segment:
    return Segment(
        first_offset=first_offset,
        seqs=[row.seq for piece in pieces for row in piece],
        tx_sizes=[len(piece) for piece in pieces],
        commit_lsns=[0] * len(pieces),
        commit_times=[piece[0].time_us for piece in pieces],
        sizes=size_codes([row.size for piece in pieces for row in piece]),
        last_lsn=tail.last_lsn,
        partial_inserts=tail.partial_inserts or None,
        recovered=True,
        generation=generation,
    )


def _settled(
    connection: Connection, known: Known, wait: Callable[[int], None] | None, candidates: list[int]
) -> Iterator[list[int]]:
    """Those candidates that are still not in the order once ingest has passed them all."""
    if wait is not None:
        position = query(connection, "SELECT pg_current_wal_insert_lsn()::text", doing="reading the WAL's position")
        wait(parse_lsn(position[0][0]))
        ordered = known(candidates)
        candidates = [seq for seq in candidates if seq not in ordered]
    if candidates:
        yield candidates


def _chunks(
    connection: Connection, ledger: LedgerTable, start: int, through: int | None, size: int
) -> Iterator[list[int]]:
    """The ledger's seqs from ``start`` on, ascending, ``size`` at once."""
    seq = spelled(quote(ledger.columns.seq))
    # CAST, because the driver writes the least bigint as a numeric, for which no index on a bigint serves.
    statement = (
        f"SELECT {seq} FROM {spelled(ledger.qualified)} WHERE {seq} BETWEEN CAST(%s AS bigint) AND CAST(%s AS bigint)"
        f" ORDER BY {seq} LIMIT %s"
    )
    last = _MOST if through is None else through
    while start <= last:
        rows = query(
            connection, statement, (start, last, size), doing=f"reading the seqs of {ledger.qualified} from {start} on"
        )
        seqs = [seq for (seq,) in rows]
        if seqs:
            yield seqs
        if len(seqs) < size:
            return
        start = seqs[-1] + 1


def _start(floor_seq: int | None, after_seq: int | None) -> int:
    bounds = [bound + 1 for bound in (floor_seq, after_seq) if bound is not None]
    return max(bounds, default=_LEAST)


def _windows(batches: Iterable[list[int]], size: int) -> Iterator[Sequence[int]]:
    held = array("q")
    for batch in batches:
        held.extend(batch)
        if len(held) >= size:
            yield held
            held = array("q")
    if held:
        yield held


def _row_size(connection: Connection, ledger: LedgerTable) -> str:
    """SQL for the bytes of a row's text over all columns."""
    names = query(
        connection,
        """SELECT a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
             JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''""",
        (ledger.namespace, ledger.table),
        doing=f"reading the columns of {ledger.qualified}",
    )
    sizes = [f"COALESCE(octet_length({spelled(quote(name))}::text), 0)" for (name,) in names]
    return f"({' + '.join(sizes)})" if sizes else "0"
