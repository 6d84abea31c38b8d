"""What was received and is not ordered yet, in commit order; and what of it has an offset already."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from walstream.event import Commit, Row
from walstream.order.reconcile import MissingRow
from walstream.order.segment import MAX_EVENTS, size_codes
from walstream.order.snapshot import Snapshot

from .intake import Burst, Piece
from .violations import Violation


@dataclass(frozen=True, slots=True)
class Recovered:
    """Rows that the slot did not deliver, found by the reconciler, in the order that they are to get.

    Without rows it is a mark: ``done`` is set when everything submitted before is ordered.
    """

    rows: Sequence[MissingRow]
    done: threading.Event


@dataclass(frozen=True, slots=True)
class Noticed:
    """What the catalogue told of the ledger, to be written down in one statement.

    Attributes:
        seen: what it says now, by name, as far as that is new.
        gone: what it says no more.
        done: set once it is written.
    """

    violations: list[Violation]
    seen: Mapping[str, Mapping[str, Any]]
    gone: list[str]
    done: threading.Event = field(default_factory=threading.Event)


class Backlog:
    """What was taken from the queue and is not ordered yet."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.rows: list[Row] = []
        self.stripped: dict[int, int] = {}
        self.violations: list[Violation] = []
        self.recovered: deque[Recovered] = deque()
        self.noticed: deque[Noticed] = deque()
        self.bursts = 0
        self.nbytes = 0

    def absorb(self, burst: Burst) -> None:
        if burst.stripped:
            base = len(self.rows)
            self.stripped.update({base + index: size for index, size in burst.stripped.items()})
        pieces = burst.pieces if len(burst.rows) <= MAX_EVENTS else list(_divided(burst.pieces))
        if self.pieces:
            self.pieces += pieces
            self.rows += burst.rows
        else:
            self.pieces, self.rows = pieces, burst.rows
        self.violations += burst.violations
        self.bursts += 1
        self.nbytes += burst.nbytes

    def ready(self, snapshot: Snapshot) -> int:
        """How many pieces at the front belong to transactions that are finished, and fit into one segment."""
        pieces = self.pieces
        if len(self.rows) > MAX_EVENTS:
            ends = accumulate([piece[1] for piece in pieces])
            pieces = pieces[: sum(end <= MAX_EVENTS for end in ends)]
        return snapshot.finished_first([piece[0].xid for piece in pieces])

    def pop_violations(self, count: int) -> list[Violation]:
        """Remove what belongs to the transactions of the first ``count`` pieces. To be asked before :meth:`pop`."""
        if not self.violations or not count:
            return []
        last = self.pieces[count - 1][0].lsn
        ready = bisect_right(self.violations, last, key=lambda violation: violation.commit_lsn)
        popped = self.violations[:ready]
        del self.violations[:ready]
        return popped

    def pop(self, count: int) -> tuple[list[Piece], list[Row], bytes, bool, int]:
        """Remove the first ``count`` pieces; return them with their rows, the size class of each payload, whether any
        payload is missing here because it was too large, and about how many bytes that was."""
        pieces = self.pieces[:count]
        total = sum([piece[1] for piece in pieces])
        rows = self.rows[:total]
        nbytes = self.nbytes if count == len(self.pieces) else self.nbytes * total // max(1, len(self.rows))
        self.nbytes -= nbytes
        sizes = _row_sizes(rows, mixed=bool(self.stripped))
        stripped = False
        if self.stripped:
            for index, size in self.stripped.items():
                if index < total:
                    sizes[index] = size
                    stripped = True
            self.stripped = {index - total: size for index, size in self.stripped.items() if index >= total}
        del self.pieces[:count]
        del self.rows[:total]
        return pieces, rows, size_codes(sizes), stripped, nbytes


def _divided(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces of which none has more rows than a segment holds. ``chunk_bytes`` bounds bytes, and rows can be tiny."""
    for commit, count, end, inserts in pieces:
        done = inserts - count
        while count > MAX_EVENTS:
            done += MAX_EVENTS
            count -= MAX_EVENTS
            yield commit, MAX_EVENTS, 0, done
        yield commit, count, end, inserts


def _row_sizes(rows: Sequence[Row], *, mixed: bool) -> list[int]:
    """Bytes of each row, as far as a reader's memory is concerned: payload and extras.

    Args:
        mixed: some of the rows are stripped of their extras, so that one does not speak for all.
    """
    if not rows or (not mixed and rows[0][6] is None and rows[-1][6] is None):
        return [len(row[4]) for row in rows]
    return [len(row[4]) + sum(map(len, filter(None, row[6][1] if row[6] else ()))) for row in rows]


def without_known(
    pieces: Sequence[Piece], rows: Sequence[Row], sizes: bytes, known: set[int]
) -> tuple[list[Piece], list[Row], bytes, list[Violation]]:
    """Take out every insert whose seq has an offset already, or comes twice in this flush. Rule 6."""
    taken = set(known)
    kept_pieces: list[Piece] = []
    kept: list[Row] = []
    kept_sizes = bytearray()
    doubles: list[Violation] = []
    index = 0
    for commit, count, end, inserts in pieces:
        before = len(kept)
        for step in range(count):
            row = rows[index]
            if row[0] in taken:
                # Negative, so that it never meets the number of an UPDATE or DELETE of the same transaction.
                ordinal = -(inserts - count + step + 1)
                doubles.append(_double(commit, ordinal, row))
            else:
                taken.add(row[0])
                kept.append(row)
                kept_sizes.append(sizes[index])
            index += 1
        kept_pieces.append((commit, len(kept) - before, end, inserts))
    return kept_pieces, kept, bytes(kept_sizes), doubles


def _double(commit: Commit, ordinal: int, row: Row) -> Violation:
    return Violation(
        "duplicate-seq",
        commit.lsn,
        ordinal,
        row[0],
        commit.xid,
        "an insert whose seq has an offset already: a row moved between partitions, or a sequence started again",
        commit.time_us,
    )
