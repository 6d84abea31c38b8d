"""What was received and is not ordered yet, in commit order; and what of it has an offset already."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from walstream.order.reconcile import MissingRow

from .batch import Batch
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
        self.batch = Batch()
        self.violations: list[Violation] = []
        self.recovered: deque[Recovered] = deque()
        self.noticed: deque[Noticed] = deque()
        self.bursts = 0

    @property
    def pieces(self) -> int:
        """How many pieces of transactions wait."""
        return len(self.batch.pieces)

    def absorb(self, batch: Batch, violations: Sequence[Violation]) -> None:
        if self.pieces:
            self.batch.extend(batch)
        else:
            self.batch = batch
        self.violations += violations
        self.bursts += 1

    def pop(self, count: int) -> tuple[Batch, list[Violation]]:
        """Remove the first ``count`` pieces and the violations of their transactions."""
        if count == self.pieces:  # nearly always
            popped, self.batch = self.batch, Batch()
        else:
            popped = self.batch.split(count)
        if not self.violations or not count:
            return popped, []
        ready = bisect_right(self.violations, popped.lsns[-1], key=lambda violation: violation.commit_lsn)
        violations = self.violations[:ready]
        del self.violations[:ready]
        return popped, violations


def without_doubles(batch: Batch, known: set[int]) -> tuple[Batch, list[Violation]]:
    """Take out every insert whose seq has an offset already, or comes twice in this flush. Rule 6."""
    kept, found = batch.without(known)
    return kept, [
        Violation(
            "duplicate-seq",
            commit.lsn,
            -ordinal,  # so that it never meets the number of an UPDATE or DELETE of the same transaction
            row[0],
            commit.xid,
            "an insert whose seq has an offset already: a row moved between partitions, or a sequence started again",
            commit.time_us,
        )
        for (commit, *_), ordinal, row in found
    ]
