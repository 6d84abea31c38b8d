"""The cold path: events from the commit order and the ledger, by key.

The same events as the hot buffer gives, with the same bytes, for whoever is too far behind for it or lives in another
process. Memory is bounded before anything is fetched, by the size codes that the order keeps of every row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Final

from psycopg2.extensions import connection as Connection

from walstream.config import LedgerTable, quote
from walstream.errors import LedgerError, RowMissing
from walstream.event import ERASED_PAYLOAD, Commit, Event, Row
from walstream.order.erasures import erased_among
from walstream.order.large_rows import LARGE_CODE
from walstream.order.ledger_rows import FINGERPRINT, LedgerRows
from walstream.order.segment import SMALLEST_SIZE_CODE, Segment
from walstream.order.table import COLUMNS, order_table, own_table, query, segment_of, segments_with_seqs_between

_CHUNK: Final = 5_000  # rows a query


@dataclass(frozen=True, slots=True)
class ColdBatch:
    """What a cold read brought.

    Attributes:
        events: in order; offsets whose row, or its payload, is erased by declaration are left out.
        through: everything up to this offset is done with this batch. At least the last event's offset; equal to the
            offset that was asked from if there is nothing new.
    """

    events: list[Event]
    through: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment and where its pieces end (indices into its events)."""

    segment: Segment
    ends: list[int]


@dataclass(slots=True)
class _Stretch:
    """Consecutive events that a read might deliver, flattened over segments."""

    seqs: list[int]
    sizes: bytearray
    pieces: list[tuple[int, int, int, bool]]  # (index of the first event, commit LSN, commit time, recovered)
    goes_on: int | None  # commit LSN of the event after it; None if the order ends here

    def cut(self, count: int) -> int:
        """Where to end at the most ``count`` events without splitting a transaction, unless it is the first."""
        starts = [piece[0] for piece in self.pieces]
        if count < len(self.seqs):
            index = bisect_right(starts, count) - 1
            follower = self.pieces[index][1]
            if starts[index] == count:  # between two pieces, perhaps of one transaction
                index -= 1
                if not _same_transaction(self.pieces[index][1], follower):
                    return count
        elif self.goes_on is not None:
            index, follower = len(starts) - 1, self.goes_on
            if not _same_transaction(self.pieces[index][1], follower):
                return count
        else:
            return count
        while index > 0 and _same_transaction(self.pieces[index - 1][1], follower):
            index -= 1
        return starts[index] or count


class ColdReader:
    """Reads events by offset on a connection of its own.

    Args:
        connection: in autocommit, made by :func:`walstream.source.connection.connect`: its pinned settings make the
            bytes what they are, and ``row_security = off`` makes a policy an error instead of a gap.
        namespace: schema of walstream's tables.
        ledger: the table and its mapping.
        key_prefix: ``ledger:epoch``, as far as the identity in the database does not say otherwise.
    """

    def __init__(self, connection: Connection, namespace: str, ledger: LedgerTable, key_prefix: str) -> None:
        if not connection.autocommit:
            raise ValueError("a cold reader needs autocommit: inside a transaction it might never see what is new")
        self._connection = connection
        self._namespace = namespace
        self._ledger = ledger
        self._key_prefix = key_prefix
        self._rows = LedgerRows(connection, ledger)
        self._parts: list[_Part] = []  # the window that was read last, without gaps

    def head(self) -> int:
        """Return the last offset of the order; 0 if it is empty.

        Raises:
            WalstreamError: of the connection.
        """
        rows = query(
            self._connection,
            f"SELECT first_offset + events - 1 FROM {order_table(self._namespace)} ORDER BY first_offset DESC LIMIT 1",
            doing="reading the end of the order",
        )
        return int(rows[0][0]) if rows else 0

    def offset_of(self, seq: int) -> int | None:
        """Return the offset of the event ``seq``; ``None`` if it has none (yet).

        Raises:
            LedgerError: a segment is damaged.
            WalstreamError: of the connection.
        """
        for segment in segments_with_seqs_between(self._connection, self._namespace, seq, seq):
            if seq in segment.seqs:
                return segment.first_offset + segment.seqs.index(seq)
        return None

    def read(self, after: int, limit: int, max_bytes: int) -> ColdBatch:
        """Return the events after offset ``after``.

        A transaction is not split unless it is larger than ``limit`` or ``max_bytes``.

        Args:
            after: the last offset that the caller has; 0 begins at the beginning.
            limit: events, at the most.
            max_bytes: of rows, at the most, by their size codes (which are up to twice the size). A single row that
                is larger comes alone.

        Raises:
            RowMissing: the next event has an offset, but its row is gone and no erasure declares that. Events before
                it are returned first.
            LedgerError: the order or the ledger is damaged or lacks a column.
            WalstreamError: of the connection; make a new one, and a new reader.
        """
        if after < 0 or limit < 1:
            raise ValueError(f"cannot read {limit} events after offset {after}")
        stretch = self._stretch(after, limit)
        if not stretch.seqs:
            return ColdBatch([], after)
        count = stretch.cut(_fitting(stretch.sizes, max_bytes))
        seqs = stretch.seqs[:count]
        rows: dict[int, Row] = {}
        if count == 1 and stretch.sizes[0] >= LARGE_CODE:
            rows = self._rows.fetch_large(seqs[0])
        else:
            for start in range(0, count, _CHUNK):
                rows.update(self._rows.fetch(seqs[start : start + _CHUNK]))
        erased = [seq for seq, row in rows.items() if row[4] == ERASED_PAYLOAD]
        if erased:
            for seq in self._declared(erased):
                del rows[seq]
        whole = len(rows) == count
        if not whole:
            count = self._without_missing(seqs, rows, after)
        return ColdBatch(self._events(stretch, count, rows, after, whole=whole), after + count)

    def _events(self, stretch: _Stretch, count: int, rows: dict[int, Row], after: int, *, whole: bool) -> list[Event]:
        """The first ``count`` of the stretch, as far as they have rows; ``whole``: all have."""
        commits: list[Commit] = []
        ends = [piece[0] for piece in stretch.pieces[1:]]
        commit = Commit(0, 0, 0, self._key_prefix)
        for (start, lsn, time_us, recovered), end in zip(stretch.pieces, [*ends, count], strict=True):
            if start >= count:
                break
            if start == 0 or not _same_transaction(commit.lsn, lsn):
                commit = Commit(lsn, time_us, 0, self._key_prefix, recovered)
            commits += repeat(commit, min(end, count) - start)
        offsets, seqs = range(after + 1, after + 1 + count), stretch.seqs[:count]
        if whole:
            return list(map(Event, offsets, map(rows.__getitem__, seqs), commits))
        placed = zip(offsets, seqs, commits, strict=True)
        return [Event(offset, rows[seq], commit) for offset, seq, commit in placed if seq in rows]

    def _declared(self, seqs: Sequence[int]) -> list[int]:
        return erased_among(self._connection, self._namespace, seqs)

    def _without_missing(self, seqs: Sequence[int], rows: dict[int, Row], after: int) -> int:
        """How many of ``seqs`` can be passed: up to the first whose row is gone without a declared erasure."""
        missing = [seq for seq in seqs if seq not in rows]
        lost = set(missing).difference(self._declared(missing))
        if not lost:
            return len(seqs)
        count = next(index for index, seq in enumerate(seqs) if seq in lost)
        if count == 0:
            seq = seqs[0]
            raise RowMissing(
                f"the event at offset {after + 1} has no row any more: {self._ledger.qualified} holds no "
                f"{self._ledger.columns.seq} = {seq}, and no erasure declares that ({len(lost)} such within the next "
                f"{len(seqs)} events)",
                hint="restore the row. If it was removed on purpose, declare it: INSERT INTO "
                f"{quote(self._namespace)}.erasures (first_seq, last_seq, reason) VALUES ({seq}, {seq}, '…')",
            )
        return count

    def _stretch(self, after: int, limit: int) -> _Stretch:
        first, last = after + 1, after + limit
        if not self._parts or self._parts[0].segment.first_offset > first or self._end() <= last + 1:
            self._load(first, last + 1)
        stretch = _Stretch([], bytearray(), [], None)
        for part in self._parts:
            segment = part.segment
            if segment.next_offset <= first:
                continue
            start = max(0, first - segment.first_offset)
            stop = min(segment.events, last + 1 - segment.first_offset)
            piece = bisect_right(part.ends, start)
            if stop <= 0:
                stretch.goes_on = segment.commit_lsns[piece]
                break
            base = len(stretch.seqs) - start
            index = start
            while index < stop:
                stretch.pieces.append(
                    (base + index, segment.commit_lsns[piece], segment.commit_times[piece], segment.recovered)
                )
                index = part.ends[piece]
                piece += 1
            stretch.seqs += segment.seqs[start:stop]
            stretch.sizes += segment.sizes[start:stop]
            if stop < segment.events:
                stretch.goes_on = segment.commit_lsns[bisect_right(part.ends, stop)]
                break
        return stretch

    def _end(self) -> int:
        return self._parts[-1].segment.next_offset

    def _load(self, first: int, last: int) -> None:
        """Read the segments that hold the offsets ``first`` to ``last``, as far as they exist."""
        order, identity = order_table(self._namespace), own_table(self._namespace, "identity")
        known = next((part for part in reversed(self._parts) if part.segment.first_offset <= first), None)
        same = (known.segment.first_offset, known.segment.events) if known else (0, 0)
        fields = COLUMNS.replace("body", "CASE WHEN first_offset = %s AND events = %s THEN NULL ELSE body END")
        rows = query(
            self._connection,
            # The epoch with the order: what was ordered after an adoption must not get a key of before.
            f"SELECT (SELECT ledger_id::text || ':' || epoch FROM {identity}), {FINGERPRINT}, {fields} FROM {order}"
            " WHERE first_offset <= %s AND first_offset >= COALESCE("
            f"(SELECT first_offset FROM {order} WHERE first_offset <= %s ORDER BY first_offset DESC LIMIT 1), 0)"
            " ORDER BY first_offset",
            (self._ledger.namespace, self._ledger.table, *same, last, first),
            doing=f"reading the order at offset {first}",
        )
        parts: list[_Part] = []
        for key_prefix, fingerprint, *row in rows:
            self._key_prefix = key_prefix or self._key_prefix
            self._rows.expect(fingerprint)
            if row[-1] is None and known is not None:
                part = known  # the decoded segment is here already: what has an offset never changes
            else:
                segment = segment_of(tuple(row))
                part = _Part(segment, list(accumulate(segment.tx_sizes)))
            expected = parts[-1].segment.next_offset if parts else first
            if part.segment.first_offset > expected or (parts and part.segment.first_offset < expected):
                raise LedgerError(
                    f"the commit order has a gap or an overlap: after offset {expected - 1} it goes on at "
                    f"{part.segment.first_offset}",
                    hint="nothing in walstream removes order rows; look for who did, and restore walstream's schema "
                    "together with the ledger",
                )
            parts.append(part)
        self._parts = parts


def _same_transaction(one: int, other: int) -> bool:
    """Whether two neighbouring pieces belong to one commit, by its LSN. Recovered events carry none."""
    return one == other != 0


def _fitting(sizes: bytearray, max_bytes: int) -> int:
    """How many rows fit into ``max_bytes`` by their size codes: at least one."""
    if len(sizes) << SMALLEST_SIZE_CODE <= max_bytes and max(sizes) <= SMALLEST_SIZE_CODE:
        return len(sizes)
    return max(1, bisect_right(list(accumulate(1 << size for size in sizes)), max_bytes))
