"""Where a runner gets its events: from memory while it keeps up, from the order and the ledger while it does not.

Both yield the same events, and a position is all that a reader holds, so changing over leaves neither gap nor double:
whatever comes next is what stands after that position. Fresh events are in the hot buffer of the process that ingests;
a reader that asks for older ones (or runs in another process) is sent to the cold reader, and comes back by itself once
it has caught up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from walstream.errors import ConnectionLost, LedgerError
from walstream.event import Event
from walstream.source.connection import abandon

from .read_ahead import Cold, ReadAhead

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

Path = Literal["hot", "cold"]
_HOT_LOOK = 0.1  # seconds between two looks at a hot buffer that does not have our place
_COLD_CONNECTION_KEPT = 30.0  # seconds on the hot path before the cold reader's connection is given back


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one read yields.

    Attributes:
        events: in order; may be empty.
        through: everything up to this offset is accounted for: it is among ``events``, was before, or was removed from
            the ledger and declared in ``erasures``. The next read goes on from here.
    """

    events: Sequence[Event]
    through: int


class Reset(ConnectionLost):
    """The ingest session that fed the hot buffer is over, and offsets that were seen may have been lost with the
    server: read the cursor again (rule 4)."""


class EventSource(Protocol):
    """What a runner reads from. All implementations pass one suite (tests/conformance/test_runner_sources.py)."""

    def read(self, after: int, *, limit: int, timeout: float) -> EventBatch:
        """The events after offset ``after``: at once if there are any, else as soon as there are, within ``timeout``
        seconds. At most ``limit``, and no transaction is split unless it is larger than that.

        Raises:
            Reset: see there.
            RowMissing: an event has an offset, but its row is gone and nobody declared that.
            WalstreamError: the database cannot be read; transient if it is away.
        """

    def event_at(self, offset: int) -> Event | None:
        """One event by its offset; ``None`` if its row was removed and that is declared.

        Raises:
            RowMissing: it is gone and nobody declared that.
        """

    @property
    def path(self) -> Path:
        """Where the last read came from."""

    def close(self) -> None:
        """Give connections back."""


class Hot(Protocol):
    """The hot buffer (walstream.order.buffer)."""

    @property
    def incarnation(self) -> int: ...
    def read(
        self, after: int, limit: int, timeout: float, *, incarnation: int | None = None
    ) -> Sequence[Event] | None: ...


class Waiter(Protocol):
    """Waits until there may be new order (walstream.order.wake)."""

    def wait(self, timeout: float) -> object: ...


class StreamSource:
    """Hot while it can, cold while it must.

    Args:
        hot: the hot buffer of this process, or ``None`` in a process that does not ingest.
        connect: makes the cold reader's connection; called when it is first needed.
        cold: makes a cold reader on it.
        waiter: wakes a cold reader at the end of the order.
        poll_seconds: how often a cold reader looks for more although nobody woke it.
        max_bytes: about so many bytes of rows are fetched at once (one event, at least).
    """

    def __init__(
        self,
        hot: Hot | None,
        connect: Callable[[], Connection],
        cold: Callable[[Connection], Cold],
        waiter: Waiter,
        *,
        poll_seconds: float,
        max_bytes: int,
    ) -> None:
        self._hot = hot
        self._incarnation = 0 if hot is None else hot.incarnation
        self._connect = connect
        self._make_cold = cold
        self._waiter = waiter
        self._poll_seconds = poll_seconds
        self._max_bytes = max_bytes
        self._dry_at = -1
        self._dry_until = 0.0
        self._connection: Connection | None = None
        self._cold: ReadAhead | None = None
        self._cold_used = 0.0
        self._path: Path = "cold" if hot is None else "hot"

    @property
    def path(self) -> Path:
        """Where the last read came from."""
        return self._path

    def read(self, after: int, *, limit: int, timeout: float) -> EventBatch:
        """See :class:`EventSource`."""
        until = time.monotonic() + timeout
        rang = self._dry_at == after and self._waiter.wait(0.0)
        while True:
            batch = self._read_hot(after, limit, max(0.0, until - time.monotonic()))
            if batch is not None:
                return batch
            now = time.monotonic()
            if rang or self._dry_at != after or now >= self._dry_until:
                batch = self._read_cold(after, limit)
                if batch.through > after:
                    return batch
                # Nothing more: no need to ask again before somebody rings, or for a while.
                self._dry_at, self._dry_until = after, now + self._poll_seconds
            left = until - now
            if left <= 0:
                return EventBatch((), after)
            pause = min(left, max(0.0, self._dry_until - now))
            # A hot buffer that is idle (ingest begins, or another process ingests) may come to life; nobody rings then.
            rang = bool(self._waiter.wait(pause if self._hot is None else min(pause, _HOT_LOOK)))

    def event_at(self, offset: int) -> Event | None:
        """See :class:`EventSource`."""
        batch = self._reader().read(offset - 1, 1, self._max_bytes)
        return batch.events[0] if batch.events and batch.events[0].offset == offset else None

    def close(self) -> None:
        """Give the cold reader's connection back; the next cold read makes a new one."""
        if self._cold is not None:
            self._cold.close()
            self._cold = None
        self._dry_at = -1
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None

    def _read_hot(self, after: int, limit: int, timeout: float) -> EventBatch | None:
        hot = self._hot
        if hot is None:
            return None
        events = hot.read(after, limit, timeout, incarnation=self._incarnation)
        self._check_incarnation(hot)
        if events is None:
            return None
        self._path = "hot"
        if self._cold is not None:
            self._cold.forget()
        if self._connection is not None and time.monotonic() - self._cold_used > _COLD_CONNECTION_KEPT:
            self.close()
        if not events:
            return EventBatch((), after)
        events = _within(events, self._max_bytes)
        last = events[-1].offset
        if events[0].offset != after + 1 or last - after != len(events):
            raise LedgerError(
                f"the hot buffer gave offsets {events[0].offset} to {last} ({len(events)} events) after {after}",
                hint="a defect of walstream: please report it. The process starts over from the stored cursors",
            )
        return EventBatch(events, last)

    def _check_incarnation(self, hot: Hot) -> None:
        incarnation = hot.incarnation
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self.close()  # what was read ahead is of before
            raise Reset("ingest began anew in this process: the projector goes on from its stored cursor")

    def _read_cold(self, after: int, limit: int) -> EventBatch:
        reader = self._reader()
        self._path = "cold"
        batch = reader.read(after, limit, self._max_bytes)
        return EventBatch(batch.events, max(batch.through, after))

    def _reader(self) -> ReadAhead:
        if self._cold is None:
            connection = self._connection = self._connect()
            self._cold = ReadAhead(self._make_cold(connection), lambda: abandon(connection))
        self._cold_used = time.monotonic()
        return self._cold


def _within(events: Sequence[Event], max_bytes: int) -> Sequence[Event]:
    """Cut events where their payloads exceed ``max_bytes`` together, between two transactions if that can be.

    The buffer drops what is old; a lane that works slowly must not hold all of it in its hands.
    """
    total = 0
    for index, event in enumerate(events):
        total += len(event.row[4])
        if total > max_bytes and index:
            end = index
            while end and events[end - 1].commit is event.commit:
                end -= 1
            return events[: end or index]
    return events
