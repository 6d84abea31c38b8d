"""Which seqs have an offset already (rule 6), in bounded memory and nearly always without asking the server.

New seqs come from a sequence: mostly ascending, a few overtaking each other, some never seen because their transaction
rolled back. So what was ordered lately is a short list of intervals. Only a seq below all of them (a long transaction
that commits late, a row that an UPDATE moved to another partition, a sequence that began again) needs the order itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import sub
from typing import Final

_LEAST: Final = -(1 << 63)
_INTERVALS: Final = 20_000  # about 2 MB; rolled-back transactions leave one each


class SeenSeqs:
    """The seqs that are in the order.

    Not thread-safe: it belongs to the thread that orders. After the loss of a connection it is worthless like
    everything in memory (rule 4); make a new one from the order's new end.

    Args:
        max_seq: the highest seq in the order, ``None`` if it is empty: above it, nothing has been seen.
        ask: returns those of the given seqs that are in the order's table (``OrderWriter.known``).
        max_intervals: bound of the memory.
    """

    def __init__(
        self,
        max_seq: int | None,
        ask: Callable[[Sequence[int]], set[int]],
        *,
        max_intervals: int = _INTERVALS,
    ) -> None:
        self._ask = ask
        self._max_intervals = max_intervals
        self._highest = _LEAST - 1 if max_seq is None else max_seq
        self._exact_from = self._highest + 1  # from here on the intervals are the whole truth
        self._starts: list[int] = []
        self._ends: list[int] = []  # inclusive

    def known(self, seqs: Sequence[int]) -> set[int]:
        """Return those of ``seqs`` that have an offset.

        Raises:
            WalstreamError: whatever ``ask`` raises.
        """
        if not seqs or min(seqs) > self._highest:
            return set()
        starts, ends = self._starts, self._ends
        found = set()
        below = []
        for seq in seqs:
            if seq < self._exact_from:
                below.append(seq)
            elif seq <= self._highest:
                index = bisect_right(starts, seq) - 1
                if index >= 0 and seq <= ends[index]:
                    found.add(seq)
        if below:
            found |= self._ask(below)
        return found

    def add(self, seqs: Sequence[int]) -> None:
        """Note that ``seqs`` are in the order's table now (not before: what is forgotten is looked up there)."""
        if not seqs:
            return
        ordered = sorted(set(seqs))
        if ordered[-1] - ordered[0] == len(ordered) - 1 and ordered[0] > self._highest:
            self._append(ordered[0], ordered[-1])
            return
        first = 0
        for index, step in enumerate(map(sub, ordered[1:], ordered), 1):
            if step > 1:
                self._insert(ordered[first], ordered[index - 1])
                first = index
        self._insert(ordered[first], ordered[-1])

    def _append(self, first: int, last: int) -> None:
        if self._ends and self._ends[-1] == first - 1:
            self._ends[-1] = last
        else:
            self._starts.append(first)
            self._ends.append(last)
            self._forget()
        self._highest = last

    def _insert(self, first: int, last: int) -> None:
        if first > self._highest:
            self._append(first, last)
            return
        first = max(first, self._exact_from)
        if last < first:
            return  # below the intervals: the table answers
        left = bisect_left(self._ends, first - 1)  # the first interval that touches or follows
        right = bisect_right(self._starts, last + 1)  # the first that does neither
        if left < right:
            first = min(first, self._starts[left])
            last = max(last, self._ends[right - 1])
        self._starts[left:right] = [first]
        self._ends[left:right] = [last]
        self._highest = max(self._highest, last)
        self._forget()

    def _forget(self) -> None:
        """Drop the lower half of the intervals when there are too many."""
        if len(self._starts) > self._max_intervals:
            half = len(self._starts) // 2
            del self._starts[:half], self._ends[:half]
            self._exact_from = self._starts[0]
