"""An order in memory that behaves like the real one: for tests of what reads events, without a database."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from walstream.engine.source import EventBatch, Path, Reset
from walstream.errors import RowMissing
from walstream.event import Event


class MemoryOrder:
    """Events with dense offsets, to which one thread appends and any number read.

    >>> from walstream.testing import MemoryOrder, make_event
    >>> order = MemoryOrder()
    >>> order.append([make_event(1), make_event(2)])
    >>> [event.offset for event in order.source().read(1, limit=10, timeout=0).events]
    [2]
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._missing: dict[int, bool] = {}
        self._incarnation = 0

    @property
    def head(self) -> int:
        """The last offset; 0 while there is none."""
        return len(self._events)

    def append(self, events: Iterable[Event]) -> None:
        """Add events; their offsets go on from :attr:`head`.

        Raises:
            ValueError: they do not.
        """
        with self._changed:
            for event in events:
                if event.offset != len(self._events) + 1:
                    raise ValueError(f"offset {event.offset} does not follow {len(self._events)}")
                self._events.append(event)
            self._changed.notify_all()

    def remove(self, offset: int, *, declared: bool) -> None:
        """Let a row vanish: declared as an erasure, or not."""
        with self._changed:
            self._missing[offset] = declared
            self._changed.notify_all()

    def lose_after(self, offset: int) -> None:
        """A server crash takes the end of the order, and ingest begins anew (rule 4)."""
        with self._changed:
            del self._events[offset:]
            self._incarnation += 1
            self._changed.notify_all()

    def source(self) -> MemorySource:
        """A reader, for one thread."""
        return MemorySource(self)

    def take(self, after: int, limit: int, timeout: float, incarnation: int) -> EventBatch:
        """What :meth:`MemorySource.read` returns."""
        until = time.monotonic() + timeout
        with self._changed:
            while self._incarnation == incarnation and len(self._events) <= after:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            if self._incarnation != incarnation:
                raise Reset("the order in memory began anew")
            found = self._events[after : after + limit]
            if after + limit < len(self._events):
                found = _to_transaction_end(found, self._events[after + limit])
            return self._without_missing(found, after)

    def incarnation(self) -> int:
        """How often :meth:`lose_after` was called."""
        return self._incarnation

    def _without_missing(self, found: Sequence[Event], after: int) -> EventBatch:
        kept: list[Event] = []
        through = after
        for event in found:
            if event.offset in self._missing:
                if not self._missing[event.offset]:
                    if through > after:
                        break
                    raise RowMissing(f"the event at offset {event.offset} (seq {event.seq}) is no longer in the ledger")
            else:
                kept.append(event)
            through = event.offset
        return EventBatch(kept, through)


class MemorySource:
    """An :class:`~walstream.engine.source.EventSource` over a :class:`MemoryOrder`."""

    def __init__(self, order: MemoryOrder) -> None:
        self._order = order
        self._incarnation = order.incarnation()

    @property
    def path(self) -> Path:
        return "hot"

    def read(self, after: int, *, limit: int, timeout: float) -> EventBatch:
        try:
            return self._order.take(after, limit, timeout, self._incarnation)
        except Reset:
            self._incarnation = self._order.incarnation()
            raise

    def event_at(self, offset: int) -> Event | None:
        batch = self._order.take(offset - 1, 1, 0, self._order.incarnation())
        return batch.events[0] if batch.events else None

    def close(self) -> None:
        """Nothing to give back."""


def _to_transaction_end(found: list[Event], following: Event) -> list[Event]:
    keep = len(found)
    while keep and found[keep - 1].commit is following.commit:
        keep -= 1
    return found[:keep] if keep else found
