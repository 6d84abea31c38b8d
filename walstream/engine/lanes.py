"""Lanes: which events of the stream a lane of a projector keeps, and how they are cut into batches.

A lane is a thread with a cursor of its own. Each lane reads the whole stream and keeps the sessions whose hash is its
own, so the order within a session never depends on the number of lanes. The hash must be the same in every process
and for ever, because cursors are stored by lane: CRC-32 of the session id's text in UTF-8 (Python's own ``hash`` is
seeded anew in each process).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NoReturn, Protocol
from zlib import crc32

from walstream.event import Event

if TYPE_CHECKING:
    from .delivery import Delivery


class Lane(Protocol):
    """What does the work of one lane, for those who do a part of it."""

    name: str

    @property
    def broken(self) -> bool: ...
    def delivery(self) -> Delivery: ...
    def start_over(self, error: Exception) -> NoReturn: ...
    def halt(self, events: Sequence[Event], error: Exception) -> NoReturn: ...
    def wait(self, error: Exception, events: Sequence[Event], pause: float) -> None: ...


def lane_of(session_id: bytes, lanes: int) -> int:
    """The lane, from 0, that a session belongs to when there are ``lanes`` of them."""
    return crc32(session_id) % lanes


class Selection:
    """The events that one lane of one projector keeps.

    Args:
        types: event types in UTF-8; empty means all.
        lane: from 0.
        lanes: how many there are.
    """

    def __init__(self, types: frozenset[bytes], lane: int = 0, lanes: int = 1) -> None:
        self._types = types
        self._lane = lane
        self._lanes = lanes

    def keep(self, events: Sequence[Event]) -> Sequence[Event]:
        """Those of ``events`` that are this lane's, in the same order."""
        types, lane, lanes = self._types, self._lane, self._lanes
        if types:
            events = [event for event in events if event.row[3] in types]
        if lanes > 1:
            events = [event for event in events if crc32(event.row[1]) % lanes == lane]
        return events


_FIRST_BATCH: Final = 500
_QUICK: Final = 0.2
_SLOW: Final = 1.0


class BatchSize:
    """How many events one lane hands over at once, at the most.

    A batch costs a round trip or three to the server whatever its size, so where projecting is quick larger ones are
    cheaper. Where it is slow they would only be long transactions, and much to be done again after a failure. So the
    size doubles after a full batch that took less than 0.2 s (one that waits for a slow disk once, whatever its size,
    still does), and is halved after one that took more than a second; it begins at 500, and never falls below.

    Args:
        most: what the projector takes (``batch``).

    Attributes:
        limit: the size now.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(most, _FIRST_BATCH)

    def took(self, events: int, seconds: float) -> None:
        """Learn from a batch that was delivered."""
        if seconds > _SLOW:
            self.limit = max(min(self._most, _FIRST_BATCH), self.limit // 2)
        elif seconds < _QUICK and events >= self.limit:
            self.limit = min(self._most, self.limit * 2)


def cut(events: Sequence[Event], limit: int) -> Iterator[Sequence[Event]]:
    """Cut events into batches of at most ``limit`` that split no transaction, unless it alone is larger.

    A transaction is recognised by its shared commit object; recovered events have none in common that means anything
    (what the slot missed is ordered one by one), but keeping them together does no harm.
    """
    start = 0
    while len(events) - start > limit:
        end = start + limit
        if events[end - 1].commit is events[end].commit:
            boundary = end
            while boundary > start and events[boundary - 1].commit is events[end].commit:
                boundary -= 1
            if boundary > start:
                end = boundary
        yield events[start:end]
        start = end
    if start < len(events):
        yield events[start:]
