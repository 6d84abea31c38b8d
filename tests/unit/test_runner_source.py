"""The event source over a hot buffer, without a database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from walstream.engine.source import Reset, StreamSource
from walstream.errors import LedgerError
from walstream.event import Commit, Event
from walstream.order.buffer import HotBuffer
from walstream.order.reader import ColdBatch
from walstream.testing import make_event


class Never:
    def wait(self, timeout: float) -> bool:
        del timeout
        return False


def no_database(*_: Any) -> Any:
    raise AssertionError("nothing is to be read cold here")


def source_of(hot: Any, max_bytes: int = 1 << 20) -> StreamSource:
    cold: Callable[[Any], Any] = no_database
    return StreamSource(hot, no_database, cold, Never(), poll_seconds=60.0, max_bytes=max_bytes)


def events(*sizes: int, payload: int) -> list[Event]:
    """Transactions of so many events, with payloads of so many bytes."""
    made: list[Event] = []
    for size in sizes:
        commit = Commit(len(made) + 1, 0, 0, "l:1")
        for _ in range(size):
            made.append(make_event(len(made) + 1, payload_text='"' + "x" * (payload - 2) + '"', commit=commit))
    return made


def read(source: StreamSource, after: int) -> list[int]:
    return [event.offset for event in source.read(after, limit=1000, timeout=0).events]


def test_what_is_taken_at_once_is_bounded_in_bytes() -> None:
    """Else every lane that works slowly would hold a copy of the whole buffer."""
    hot = HotBuffer(1 << 20)
    hot.reset(1)
    hot.publish(events(1, 2, 2, 7, 1, payload=1000), 13_000)
    source = source_of(hot, max_bytes=5_000)
    assert read(source, 0) == [1, 2, 3, 4, 5]
    assert read(source, 5) == [6, 7, 8, 9, 10]  # a transaction that is larger by itself is split
    assert read(source, 10) == [11, 12, 13]
    assert read(source_of(hot, max_bytes=10), 0) == [1]  # at least one


def test_offsets_that_do_not_follow_are_refused() -> None:
    class Broken:
        incarnation = 0

        def read(self, *_: Any, **__: Any) -> list[Event]:
            return [make_event(7)]

    with pytest.raises(LedgerError, match="gave offsets 7 to 7"):
        source_of(Broken()).read(1, limit=10, timeout=0)


def test_a_reset_between_making_and_reading_is_noticed() -> None:
    hot = HotBuffer(1 << 20)
    hot.reset(1)
    source = source_of(hot)
    hot.reset(1)
    with pytest.raises(Reset):
        source.read(0, limit=10, timeout=0)
    assert source.read(0, limit=10, timeout=0).through == 0


def test_what_was_read_ahead_does_not_outlive_a_reset() -> None:
    """Rule 4: who starts over from his cursor is told what is there then."""

    class Connection:
        def close(self) -> None: ...

    class Ledger:
        order = "first"

        def read(self, after: int, limit: int, max_bytes: int) -> ColdBatch:
            del limit, max_bytes
            return ColdBatch([make_event(after + 1, event_type=self.order)], after + 1000)

    ledger, hot = Ledger(), HotBuffer(1 << 20)
    hot.reset(10_000)
    source = StreamSource(hot, Connection, lambda _: ledger, Never(), poll_seconds=60.0, max_bytes=1 << 20)  # type: ignore[arg-type]
    assert source.read(0, limit=1000, timeout=0).events[0].event_type == "first"
    assert source._cold is not None
    assert source._cold._errand is not None
    source._cold._errand.join()  # the next batch is here already
    ledger.order = "second"
    hot.reset(10_000)
    with pytest.raises(Reset):
        source.read(1000, limit=1000, timeout=0)
    assert source.read(1000, limit=1000, timeout=0).events[0].event_type == "second"
    source.close()
