"""A batch: transactions in commit order, laid out as the order needs them.

The thread that reads lays out what it has just decoded (:meth:`Batch.of`), a little at a time. The orderer then works
on few, dense columns and has the interpreter for a shorter time, in which nothing can be read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, repeat

from walstream.event import Event, Row
from walstream.order.segment import MAX_EVENTS, Segment, size_codes
from walstream.order.snapshot import Snapshot

from .intake import Burst, Piece


@dataclass(slots=True)
class Batch:
    """Consecutive pieces of transactions with their events.

    Attributes:
        events: with the offsets that they get if nothing comes in between; see :meth:`renumber`.
        pieces: of the transactions that they belong to; some may have no rows.
        seqs: of each event.
        codes: size code of each event's row.
        counts, xids, lsns, times: of each piece: its events; its transaction's id, commit LSN and commit time.
        stripped: indexes of the events whose payload was too large to be kept.
        nbytes: about how many bytes of messages that was.
    """

    events: list[Event] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    seqs: array[int] = field(default_factory=lambda: array("q"))
    codes: bytearray = field(default_factory=bytearray)
    counts: array[int] = field(default_factory=lambda: array("l"))
    xids: array[int] = field(default_factory=lambda: array("I"))
    lsns: array[int] = field(default_factory=lambda: array("Q"))
    times: array[int] = field(default_factory=lambda: array("q"))
    stripped: list[int] = field(default_factory=list)
    nbytes: int = 0

    @classmethod
    def of(cls, burst: Burst, first_offset: int) -> Batch:
        """Lay out what was received.

        Args:
            first_offset: the offset that its first event gets if nothing comes in between.
        """
        rows = burst.rows
        pieces = burst.pieces if len(rows) <= MAX_EVENTS else list(_divided(burst.pieces))
        sizes = _row_sizes(rows, burst.stripped)
        return cls._laid_out(rows, pieces, size_codes(sizes), first_offset, list(burst.stripped), burst.nbytes)

    @classmethod
    def _laid_out(
        cls,
        rows: Sequence[Row],
        pieces: list[Piece],
        codes: bytes,
        first_offset: int,
        stripped: list[int],
        nbytes: int,
    ) -> Batch:
        commits = [piece[0] for piece in pieces]
        counts = array("l", [piece[1] for piece in pieces])
        each = (
            commits
            if len(commits) == len(rows) == counts.count(1)
            else chain.from_iterable(map(repeat, commits, counts))
        )
        return cls(
            events=list(map(Event, count(first_offset), rows, each)),
            pieces=pieces,
            seqs=array("q", [row[0] for row in rows]),
            codes=bytearray(codes),
            counts=counts,
            xids=array("I", [commit.xid for commit in commits]),
            lsns=array("Q", [commit.lsn for commit in commits]),
            times=array("q", [commit.time_us for commit in commits]),
            stripped=stripped,
            nbytes=nbytes,
        )

    def __len__(self) -> int:
        return len(self.events)

    @property
    def next_offset(self) -> int:
        return self.events[-1].offset + 1

    def extend(self, other: Batch) -> None:
        """Add what follows."""
        if self.events and other.events:
            other.renumber(self.next_offset)
        base = len(self.events)
        if other.stripped:
            self.stripped += [base + index for index in other.stripped]
        self.events += other.events
        self.pieces += other.pieces
        self.seqs += other.seqs
        self.codes += other.codes
        self.counts += other.counts
        self.xids += other.xids
        self.lsns += other.lsns
        self.times += other.times
        self.nbytes += other.nbytes

    def renumber(self, first_offset: int) -> None:
        """Give the events their offsets from ``first_offset`` on, if they do not have them already."""
        events = self.events
        if events and events[0].offset != first_offset:
            self.events = [Event(offset, event.row, event.commit) for offset, event in enumerate(events, first_offset)]

    def ready(self, snapshot: Snapshot) -> int:
        """How many pieces at the front belong to transactions that are finished, and fit into one segment."""
        xids: Sequence[int] = self.xids
        if not xids or not snapshot.shows_finished(xids[0]):
            return 0  # said at once: this is asked again and again while a standby is away
        if len(self.events) > MAX_EVENTS:
            xids = xids[: sum(end <= MAX_EVENTS for end in accumulate(self.counts))]
        return snapshot.finished_first(xids)

    def segment(self, first_offset: int, generation: int) -> Segment:
        """The row of the order for all of it, which must have events."""
        # Not one that is of changes alone and goes on: nothing of that commit is ordered.
        last_commit, _, last_end, last_inserts = next(piece for piece in reversed(self.pieces) if any(piece[1:]))
        filled = None if min(self.counts) else [index for index, size in enumerate(self.counts) if size]

        def kept(column: array[int]) -> array[int]:
            return column if filled is None else array(column.typecode, [column[index] for index in filled])

        return Segment(
            first_offset=first_offset,
            seqs=self.seqs,
            tx_sizes=kept(self.counts),
            commit_lsns=kept(self.lsns),
            commit_times=kept(self.times),
            sizes=bytes(self.codes),
            last_lsn=last_end or last_commit.lsn,
            partial_inserts=None if last_end else last_inserts,
            recovered=False,
            generation=generation,
        )

    def split(self, pieces: int) -> Batch:
        """Remove the first ``pieces`` pieces and return them."""
        total = sum(self.counts[:pieces])
        head = Batch(
            self.events[:total],
            self.pieces[:pieces],
            self.seqs[:total],
            self.codes[:total],
            self.counts[:pieces],
            self.xids[:pieces],
            self.lsns[:pieces],
            self.times[:pieces],
            [index for index in self.stripped if index < total],
            self.nbytes * total // max(1, len(self.events)),
        )
        del self.events[:total], self.seqs[:total], self.codes[:total]
        del self.pieces[:pieces], self.counts[:pieces], self.xids[:pieces], self.lsns[:pieces], self.times[:pieces]
        self.stripped = [index - total for index in self.stripped if index >= total]
        self.nbytes -= head.nbytes
        return head

    def without(self, known: set[int]) -> tuple[Batch, list[tuple[Piece, int, Row]]]:
        """This without every insert whose seq is ``known`` or comes here for the second time (rule 6); and those, each
        with its piece and its number among the transaction's ledger inserts."""
        taken = set(known)
        pieces: list[Piece] = []
        rows: list[Row] = []
        codes = bytearray()
        doubles: list[tuple[Piece, int, Row]] = []
        stripped: list[int] = []
        missing = set(self.stripped)
        index = 0
        for piece in self.pieces:
            commit, size, end, inserts = piece
            before = len(rows)
            for step in range(size):
                row = self.events[index].row
                if row[0] in taken:
                    doubles.append((piece, inserts - size + step + 1, row))
                else:
                    taken.add(row[0])
                    if index in missing:
                        stripped.append(len(rows))
                    rows.append(row)
                    codes.append(self.codes[index])
                index += 1
            pieces.append((commit, len(rows) - before, end, inserts))
        first = self.events[0].offset if self.events else 0
        return self._laid_out(rows, pieces, bytes(codes), first, stripped, self.nbytes), doubles


def _divided(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of which none has more rows than a segment holds. ``chunk_bytes`` bounds bytes, and rows can be tiny."""
    for commit, size, end, inserts in pieces:
        done = inserts - size
        while size > MAX_EVENTS:
            done += MAX_EVENTS
            size -= MAX_EVENTS
            yield commit, MAX_EVENTS, 0, done
        yield commit, size, end, inserts


def _row_sizes(rows: Sequence[Row], stripped: dict[int, int]) -> list[int]:
    """Bytes of each row, as far as a reader's memory is concerned: payload and extras."""
    if not rows or (not stripped and rows[0][6] is None and rows[-1][6] is None):
        return [len(row[4]) for row in rows]
    sizes = [len(row[4]) + sum(map(len, filter(None, row[6][1] if row[6] else ()))) for row in rows]
    for index, size in stripped.items():
        sizes[index] = size
    return sizes
