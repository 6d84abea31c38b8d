"""The hot buffer: no gap, no duplicate, bounded, and a reader that waits is woken."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from walstream.errors import ConnectionLost
from walstream.event import Commit, Event
from walstream.order.buffer import HotBuffer


def events(first: int, count: int, commit: Commit | None = None) -> list[Event]:
    """Consecutive events, each in a transaction of its own unless ``commit`` is given."""
    return [
        Event(offset, (offset, b"s", b"a", b"t", b"{}", None, None), commit or Commit(offset, 0, 0, "l:1"))
        for offset in range(first, first + count)
    ]


def offsets(found: Sequence[Event] | None) -> list[int]:
    assert found is not None
    return [event.offset for event in found]


def test_a_reader_gets_what_follows_its_position() -> None:
    buffer = HotBuffer(1 << 20)
    assert buffer.head == 0
    assert buffer.read(0, 10, 0) == ()
    buffer.publish(events(1, 3), 30)
    buffer.publish([], 0)
    buffer.publish(events(4, 2), 20)
    assert buffer.head == 5
    assert offsets(buffer.read(0, 10, 0)) == [1, 2, 3, 4, 5]
    assert offsets(buffer.read(1, 3, 0)) == [2, 3, 4]
    assert offsets(buffer.read(4, 3, 0)) == [5]
    assert buffer.read(5, 3, 0) == ()
    assert buffer.read(6, 3, 0) is None, "ahead of the buffer"


def test_what_is_forgotten_is_read_cold_and_what_comes_is_hot() -> None:
    buffer = HotBuffer(1 << 20)
    buffer.publish(events(1, 3), 30)
    incarnation = buffer.incarnation
    buffer.forget()
    assert (buffer.head, buffer.nbytes, buffer.incarnation) == (3, 0, incarnation)
    assert buffer.read(1, 10, 0, incarnation=incarnation) is None
    assert buffer.read(3, 10, 0, incarnation=incarnation) == ()
    buffer.publish(events(4, 2), 20)
    assert buffer.read(2, 10, 0) is None
    assert offsets(buffer.read(3, 10, 0)) == [4, 5]


def test_what_does_not_continue_is_refused() -> None:
    buffer = HotBuffer(1 << 20)
    buffer.publish(events(1, 3), 30)
    for broken in (events(3, 1), events(5, 1), [*events(4, 1), *events(6, 1)]):
        with pytest.raises(ValueError, match="do not continue"):
            buffer.publish(broken, 1)
    with pytest.raises(ValueError, match="go back"):
        buffer.skip(3)
    assert offsets(buffer.read(0, 10, 0)) == [1, 2, 3]


def test_the_oldest_are_evicted_and_the_newest_stays() -> None:
    buffer = HotBuffer(1600)
    for first in range(1, 5):
        buffer.publish(events(first, 1), 500)
    assert buffer.nbytes == 1500
    assert buffer.read(0, 10, 0) is None
    assert offsets(buffer.read(1, 10, 0)) == [2, 3, 4]
    buffer.publish(events(5, 1), 5000)  # larger than all: alone, but there
    assert buffer.nbytes == 5000
    assert buffer.read(3, 10, 0) is None
    assert offsets(buffer.read(4, 10, 0)) == [5]
    buffer.publish(events(6, 1), 10)
    assert buffer.nbytes == 10
    assert offsets(buffer.read(5, 10, 0)) == [6]


def test_many_small_batches_stay_bounded() -> None:
    buffer = HotBuffer(64_000)
    for first in range(1, 5_001):
        buffer.publish(events(first, 1), 64)
        assert buffer.nbytes <= 64_000
    start = 5_000 - buffer.nbytes // 64
    assert start <= 4_100
    assert offsets(buffer.read(start, 10_000, 0)) == list(range(start + 1, 5_001))
    assert buffer.read(start - 1, 10, 0) is None
    assert len(buffer._batches) < 100


def test_a_transaction_is_not_split_unless_it_is_larger_than_the_limit() -> None:
    buffer = HotBuffer(1 << 20)
    buffer.publish([*events(1, 2), *events(3, 4, Commit(3, 0, 0, "l:1")), *events(7, 1)], 10)
    assert offsets(buffer.read(0, 4, 0)) == [1, 2]
    assert offsets(buffer.read(0, 6, 0)) == [1, 2, 3, 4, 5, 6]
    assert offsets(buffer.read(2, 3, 0)) == [3, 4, 5]
    assert offsets(buffer.read(5, 3, 0)) == [6, 7]
    across = Commit(8, 0, 0, "l:1")
    buffer.publish(events(8, 600, across), 10)  # not merged into the batch before
    buffer.publish(events(608, 5, across), 10)
    assert offsets(buffer.read(6, 604, 0)) == [7]
    assert offsets(buffer.read(7, 604, 0)) == list(range(8, 612))


def test_skipped_offsets_are_read_cold() -> None:
    buffer = HotBuffer(1 << 20)
    buffer.publish(events(1, 3), 30)
    buffer.skip(10)
    assert buffer.head == 9
    assert buffer.incarnation == 0
    assert buffer.read(1, 10, 0) is None
    assert buffer.read(9, 10, 0) == ()
    buffer.publish(events(10, 1), 10)
    assert offsets(buffer.read(9, 10, 0)) == [10]
    assert buffer.read(8, 10, 0) is None


def test_a_reset_is_another_incarnation() -> None:
    buffer = HotBuffer(1 << 20)
    buffer.publish(events(1, 9), 90)
    buffer.reset(5)
    assert (buffer.head, buffer.incarnation) == (4, 1)
    assert buffer.read(2, 10, 0) is None
    assert buffer.read(9, 10, 0) is None
    buffer.publish(events(5, 1), 10)
    assert offsets(buffer.read(4, 10, 0, incarnation=1)) == [5]
    assert buffer.read(4, 10, 0, incarnation=0) is None, "the position is of another history"


def test_a_closed_buffer_is_read_to_its_end() -> None:
    buffer = HotBuffer(1 << 20)
    buffer.publish(events(1, 1), 10)
    buffer.close(None)
    assert buffer.closed
    assert offsets(buffer.read(0, 10, 5)) == [1]
    assert buffer.read(1, 10, 5) is None
    buffer.close(ConnectionLost("gone"))
    with pytest.raises(ConnectionLost, match="gone"):
        buffer.read(1, 10, 5)


@pytest.mark.parametrize("what", ["publish", "reset", "skip", "close"])
def test_a_waiting_reader_is_woken(what: str) -> None:
    buffer = HotBuffer(1 << 20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.read, 0, 10, 60)
        while not buffer._changed._waiters:  # type: ignore[attr-defined]  # until it waits
            time.sleep(0.001)
        if what == "publish":
            buffer.publish(events(1, 1), 10)
            assert offsets(waiting.result(60)) == [1]
        elif what == "reset":
            buffer.reset(1)
            assert waiting.result(60) == ()
        elif what == "skip":
            buffer.skip(3)
            assert waiting.result(60) is None
        else:
            buffer.close()
            assert waiting.result(60) is None


def test_readers_and_a_writer_at_once() -> None:
    """Hot when it can, cold when it must: every reader gets every offset once, in order."""
    total = 6_000
    buffer = HotBuffer(3_000)  # so small that slow readers fall out
    cold_reads = 0

    def read(seed: int) -> list[int]:
        nonlocal cold_reads
        source = random.Random(seed)
        found: list[int] = []
        while len(found) < total:
            batch = buffer.read(len(found), source.randint(1, 50), 0.05)
            if batch is None:
                cold_reads += 1
                found += range(len(found) + 1, min(buffer.head, len(found) + 40) + 1)
            else:
                found += offsets(batch)
            if source.random() < 0.02:
                time.sleep(0.002)
        return found

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, seed) for seed in range(4)]
        source = random.Random(9)
        first = 1
        while first <= total:
            count = min(source.randint(1, 30), total + 1 - first)
            buffer.publish(events(first, count), 10 * count)
            first += count
            if source.random() < 0.1:
                time.sleep(0.001)
        for reader in readers:
            assert reader.result(60) == list(range(1, total + 1))
    assert cold_reads


class BufferModel(RuleBasedStateMachine):
    """Against a model that forgets nothing: whatever is returned is what follows, and None only when it must be."""

    @initialize(limit=st.integers(100, 2000))
    def start(self, limit: int) -> None:
        self.limit = limit
        self.buffer = HotBuffer(limit)
        self.next = 1
        self.newest = 0

    @rule(count=st.integers(1, 20), size=st.integers(1, 40))
    def publish(self, count: int, size: int) -> None:
        self.buffer.publish(events(self.next, count), count * size)
        self.newest = count * size
        self.next += count

    @rule(gap=st.integers(0, 5))
    def skip(self, gap: int) -> None:
        self.next += gap
        self.buffer.skip(self.next)
        self.newest = 0

    @rule(back=st.integers(-3, 10))
    def reset(self, back: int) -> None:
        self.next = max(1, self.next - back)
        self.buffer.reset(self.next)
        self.newest = 0

    @rule(behind=st.integers(-2, 60), count=st.integers(1, 50))
    def read(self, behind: int, count: int) -> None:
        after = max(0, self.next - 1 - behind)
        found = self.buffer.read(after, count, 0)
        if after >= self.next:
            assert found is None
        elif after == self.next - 1:
            assert found == ()
        elif found is not None:
            assert offsets(found) == list(range(after + 1, min(after + count, self.next - 1) + 1))

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "buffer"):
            assert self.buffer.nbytes <= max(self.limit, self.newest)
            assert self.buffer.head == self.next - 1
            if self.newest:
                assert self.buffer.read(self.next - 2, 1, 0), "the newest is always there"


TestBufferModel = BufferModel.TestCase
TestBufferModel.settings = settings(max_examples=40, deadline=None)
