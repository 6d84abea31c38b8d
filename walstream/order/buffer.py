"""The hot buffer: the newest events, in memory, for every projector of the ingest process.

Bounded in bytes. Whoever reads too slowly finds that what it needs is gone and reads from the order and the ledger
instead (:mod:`walstream.order.reader`), until it has caught up. Both ways lead through the same offsets, so there is
neither gap nor duplicate at the crossing.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from walstream.event import Event

_MERGE_EVENTS: Final = 512
_MERGE_SHARE: Final = 16


class HotBuffer:
    """A window of consecutive events that ends at the newest one.

    Thread-safe: one thread publishes, any number read. Batches are evicted oldest first as soon as they hold more than
    ``max_bytes`` together, but the newest stays whatever its size, so that a reader that keeps up never has to leave:
    memory is bounded by ``max_bytes`` or the newest batch, whichever is larger.

    Args:
        max_bytes: see above, as counted by the publisher.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._firsts: list[int] = []  # the first offset of each batch
        self._batches: list[list[Event]] = []
        self._bytes: list[int] = []
        self._total = 0
        self._next = 1
        self._incarnation = 0
        self._suspended = False
        self._closed = False
        self._error: BaseException | None = None

    @property
    def head(self) -> int:
        """The last offset that was published (or skipped); 0 before there is one."""
        return self._next - 1

    @property
    def incarnation(self) -> int:
        """Rises with every :meth:`reset`: whatever a reader remembers from before is worthless then (rule 4)."""
        return self._incarnation

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def nbytes(self) -> int:
        """Bytes held at present, as counted by the publisher."""
        return self._total

    def publish(self, events: list[Event], nbytes: int) -> None:
        """Add ordered events and wake whoever waits for them. The list belongs to the buffer from here on.

        Args:
            events: with consecutive offsets, the first of which follows the head.
            nbytes: what they hold in memory, about.

        Raises:
            ValueError: they do not follow the head.
        """
        if not events:
            return
        first = events[0].offset
        with self._changed:
            if first != self._next or events[-1].offset != first + len(events) - 1:
                raise ValueError(f"events {first} to {events[-1].offset} do not continue the buffer after {self.head}")
            self._next += len(events)
            # Many small batches would cost every reader, every eviction and the garbage collector a step each.
            if (
                self._batches
                and len(self._batches[-1]) + len(events) <= _MERGE_EVENTS
                and (self._bytes[-1] + nbytes) * _MERGE_SHARE <= self._max_bytes
            ):
                self._batches[-1].extend(events)
                self._bytes[-1] += nbytes
            else:
                self._firsts.append(first)
                self._batches.append(events)
                self._bytes.append(nbytes)
            self._total += nbytes
            self._evict()
            self._changed.notify_all()

    def skip(self, next_offset: int) -> None:
        """Note that everything before ``next_offset`` has been ordered, although it was not kept in memory (rule 5:
        very large transactions, and recovered events). Readers get it cold.

        Raises:
            ValueError: that would go back; see :meth:`reset`.
        """
        with self._changed:
            if next_offset < self._next:
                raise ValueError(f"the buffer is at {self.head} already; {next_offset} would go back")
            self._clear(next_offset)
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget what is here: it is not, or may not be, what the ledger says by now. Readers get it cold."""
        with self._changed:
            self._clear(self._next)
            self._changed.notify_all()

    def reset(self, next_offset: int) -> None:
        """Forget everything and begin again: ingest has a new connection, and the order ends before ``next_offset``."""
        with self._changed:
            self._clear(next_offset)
            self._incarnation += 1
            self._suspended = False
            self._changed.notify_all()

    def suspend(self) -> None:
        """Nobody feeds it until the next :meth:`reset`: ingest has not begun yet, lost a connection, or another process
        ingests now. Readers go cold, where they see what that other process orders."""
        with self._changed:
            self._clear(self._next)
            self._suspended = True
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """No more will come. What is here can still be read.

        Args:
            error: what ended it; raised by every :meth:`read` that finds nothing left.
        """
        with self._changed:
            self._closed = True
            self._error = error
            self._changed.notify_all()

    def read(self, after: int, limit: int, timeout: float, *, incarnation: int | None = None) -> Sequence[Event] | None:
        """Return the next events after offset ``after``, and wait for them if there are none yet.

        A transaction is not split, unless it is larger than ``limit`` or lies in several batches.

        Args:
            after: the last offset that the reader has.
            limit: events, at the most.
            timeout: seconds to wait; 0 looks once.
            incarnation: the one the reader's position belongs to; ``None`` if it does not matter.

        Returns:
            Events with the offsets ``after + 1`` and following; an empty sequence if nothing came in time (or the
            buffer was reset meanwhile); ``None`` if the reader must go cold, because ``after + 1`` is no longer here,
            or not yet, or belongs to another incarnation, or the buffer is suspended, or closed with nothing left.

        Raises:
            BaseException: the one that :meth:`close` was given, when nothing is left.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            entered = self._incarnation
            if incarnation is not None and incarnation != entered:
                return None
            while True:
                if after + 1 < self._next:
                    return self._slice(after + 1, limit)
                if after + 1 > self._next:
                    return None
                if self._suspended and not self._closed:
                    return None
                if self._closed:
                    if self._error is not None:
                        raise self._error
                    return None
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left) or self._incarnation != entered:
                    if self._incarnation == entered and after + 1 != self._next:
                        continue  # something came in the very moment that the wait ended
                    return ()

    def _slice(self, first: int, limit: int) -> Sequence[Event] | None:
        index = bisect_right(self._firsts, first) - 1
        if index < 0:
            return None
        batch = self._batches[index]
        start = first - self._firsts[index]
        found = batch[start : start + limit]
        while len(found) < limit and index + 1 < len(self._batches):
            index += 1
            batch = self._batches[index]
            start = 0
            found += batch[: limit - len(found)]
        following = first + len(found)
        if following < self._next:
            ended = following - self._firsts[index]
            later = batch[ended] if ended < len(batch) else self._batches[index + 1][0]
            _to_transaction_end(found, later)
        return found

    def _evict(self) -> None:
        gone = 0
        while self._total > self._max_bytes and gone < len(self._batches) - 1:
            self._total -= self._bytes[gone]
            gone += 1
        if gone:
            del self._firsts[:gone], self._batches[:gone], self._bytes[:gone]

    def _clear(self, next_offset: int) -> None:
        self._firsts.clear()
        self._batches.clear()
        self._bytes.clear()
        self._total = 0
        self._next = next_offset


def _to_transaction_end(found: list[Event], later: Event) -> None:
    """Cut ``found`` back to the end of a transaction, if ``later``, which follows it, belongs to its last one."""
    commit = later.commit
    keep = len(found)
    while keep and found[keep - 1].commit is commit:
        keep -= 1
    if keep:  # else the transaction alone is larger than the limit
        del found[keep:]
