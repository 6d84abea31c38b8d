"""The orderer against a scripted store: what is shown, when, and what may be confirmed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from walstream.engine.backlog import Noticed, Recovered
from walstream.engine.gathering import Gathering
from walstream.engine.intake import Burst
from walstream.engine.orderer import Orderer
from walstream.engine.violations import Violation
from walstream.errors import Fenced
from walstream.event import Commit, Row
from walstream.order.buffer import HotBuffer
from walstream.order.reconcile import MissingRow
from walstream.order.seen import SeenSeqs
from walstream.order.segment import MAX_EVENTS, Segment
from walstream.order.writer import Snapshot


class Store:
    """Keeps segments in memory; transactions become visible when the test says so."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.durable: list[bool] = []
        self.asked: list[list[int]] = []
        self.noted: list[tuple[int, int]] = []
        self.violations: list[Violation] = []
        self.visible_below = 1 << 31
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.wal = 1_000_000

    def snapshot(self) -> Snapshot:
        return Snapshot.parse(f"{self.visible_below}:{self.visible_below}:")

    def append(self, segment: Segment, durable: bool = False) -> None:
        self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        segment.check()  # as the writer does
        self.segments.append(segment)
        self.durable.append(durable)

    def append_if_finished(self, segment: Segment, xids: Sequence[int]) -> bool:
        self.asked.append(list(xids))
        if not all(map(self.snapshot().shows_finished, xids)):
            return False
        self.append(segment)
        return True

    def wal_position(self) -> int:
        self.wal += 10
        return self.wal

    def note_position(self, lsn: int) -> None:
        self.noted.append((self.wal, lsn))

    def record_violations(self, violations: Sequence[Violation]) -> int:
        self.violations += violations
        return sum(violation.changes for violation in violations)

    def record_noticed(self, noticed: Noticed) -> int:
        return self.record_violations(noticed.violations)


class Bench:
    """An orderer with all its neighbours."""

    def __init__(
        self,
        *,
        next_offset: int = 1,
        max_seq: int | None = None,
        known: Callable[[Sequence[int]], set[int]] = lambda _: set(),
    ) -> None:
        self.store = Store()
        self.buffer = HotBuffer(1 << 20)
        self.buffer.reset(next_offset)
        self.heartbeats = self.announced = self.woken = 0
        self.orderer = Orderer(
            self.store,
            SeenSeqs(max_seq, known),
            self.buffer,
            next_offset=next_offset,
            last_lsn=0,
            partial_inserts=None,
            generation=3,
            key_prefix="l:1",
            pending_limit=1 << 20,
            announce=self._announce,
            wake=self._wake,
            heartbeat=self._beat,
            heartbeat_seconds=0.05,
        )
        self.orderer.start()

    def _beat(self) -> None:
        self.heartbeats += 1

    def _announce(self) -> None:
        self.announced += 1

    def _wake(self) -> None:
        self.woken += 1

    def offsets(self, after: int = 0) -> list[tuple[int, int]]:
        events = self.buffer.read(after, 1000, 0)
        assert events is not None
        return [(event.offset, event.seq) for event in events]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.gate.set()
    assert made.orderer.stop(5)


def row(seq: int) -> Row:
    return (seq, b"s", b"a", b"e", b"{}", None, None)


def burst(*transactions: tuple[int, int, Sequence[int]]) -> Burst:
    """Transactions as (xid, commit LSN, seqs); each ends 30 bytes behind its commit LSN."""
    made = Burst()
    for xid, lsn, seqs in transactions:
        made.rows += [row(seq) for seq in seqs]
        made.pieces.append((Commit(lsn, 1, xid, "l:1"), len(seqs), lsn + 30, len(seqs)))
        made.nbytes += 100 * len(seqs)
    return made


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_offsets_are_dense_and_in_commit_order(bench: Bench) -> None:
    bench.orderer.submit(burst((1, 100, [7, 8]), (2, 200, [3])))
    bench.orderer.submit(burst((3, 300, [9])))
    assert bench.orderer.drain(60)
    assert bench.offsets() == [(1, 7), (2, 8), (3, 3), (4, 9)]
    assert bench.store.segments[0].first_offset == 1
    assert bench.store.segments[-1].last_lsn == 330


def test_nothing_is_shown_before_its_order_is_written(bench: Bench) -> None:
    """Rule 1."""
    bench.store.gate.clear()
    bench.orderer.submit(burst((1, 100, [7])))
    time.sleep(0.05)
    assert bench.offsets() == []
    assert not bench.orderer.confirmable
    bench.store.gate.set()
    assert bench.orderer.drain(60)
    assert bench.offsets() == [(1, 7)]


def test_a_transaction_that_is_not_visible_holds_back_itself_and_what_is_behind_it(bench: Bench) -> None:
    """Rule 2."""
    bench.store.visible_below = 5
    bench.orderer.submit(burst((4, 100, [1]), (5, 200, [2]), (3, 300, [3])))
    eventually(lambda: bench.offsets() == [(1, 1)])
    time.sleep(0.05)
    assert bench.offsets() == [(1, 1)]
    assert [end for _, end in bench.orderer.confirmable] == [130]
    eventually(lambda: bench.heartbeats > 0)  # the lease is renewed while it waits
    bench.store.visible_below = 6
    assert bench.orderer.drain(60)
    assert bench.offsets() == [(1, 1), (2, 2), (3, 3)]
    assert bench.store.asked == [[4, 5, 3], [5, 3]], "a row is sent along with the first look only"


def test_few_transactions_are_ordered_in_one_round_trip(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are visible is asked by the statement that writes the row."""

    def snapshot() -> Snapshot:
        raise AssertionError("a round trip more")

    finished = bench.store.append_if_finished
    monkeypatch.setattr(bench.store, "append_if_finished", lambda segment, xids: finished(segment, xids) or snapshot())
    monkeypatch.setattr(bench.store, "snapshot", lambda: Snapshot.parse("9:9:"))
    bench.orderer.submit(burst(*((xid, 100 * xid, [xid]) for xid in range(1, 9))))
    assert bench.orderer.drain(60)
    assert bench.orderer.error is None
    assert bench.store.asked == [list(range(1, 9))]
    assert [end for _, end in bench.orderer.confirmable] == [830]


def test_many_are_asked_for_with_one_snapshot(bench: Bench) -> None:
    bench.orderer.submit(burst(*((xid, 100 * xid, [xid]) for xid in range(1, 18))))
    assert bench.orderer.drain(60)
    assert len(bench.offsets()) == 17
    assert bench.store.asked == []


def test_what_is_special_is_not_ordered_in_one_round_trip(bench: Bench) -> None:
    """Doubles and other violations have to be on record first."""
    bench.orderer.submit(burst((1, 100, [1, 1])))
    assert bench.orderer.drain(60)
    some = burst((2, 200, [2]))
    some.violations = [Violation("update", 200, 1, 1, 2, "")]
    bench.orderer.submit(some)
    assert bench.orderer.drain(60)
    assert bench.store.asked == []
    assert [violation.kind for violation in bench.store.violations] == ["duplicate-seq", "update"]
    assert bench.offsets() == [(1, 1), (2, 2)]


def test_offsets_go_on_behind_what_was_taken_out_or_came_in_between(bench: Bench) -> None:
    """They are written into events before the flush that may take out some of those."""
    bench.store.visible_below = 1
    bench.orderer.submit(burst((1, 100, [1, 2, 2, 3])))
    bench.orderer.submit(burst((2, 200, [4])))
    bench.orderer.submit(Recovered([MissingRow(90, 1, 1, 0), MissingRow(91, 1, 1, 0)], threading.Event()))
    bench.orderer.submit(burst((3, 300, [5, 6])))
    bench.store.visible_below = 9
    assert bench.orderer.drain(60)
    bench.orderer.submit(burst((4, 400, [7])))
    assert bench.orderer.drain(60)
    assert bench.orderer.error is None
    seqs = [seq for segment in bench.store.segments for seq in segment.seqs]
    assert seqs == [1, 2, 3, 4, 90, 91, 5, 6, 7]
    assert bench.offsets(6) == [(7, 5), (8, 6), (9, 7)]


def test_the_position_to_pass_is_taken_behind_the_order_row(bench: Bench) -> None:
    """Rule 3."""
    bench.orderer.submit(burst((1, 100, [7])))
    assert bench.orderer.drain(60)
    assert list(bench.orderer.confirmable) == [(1_000_010, 130)]
    assert not bench.orderer.idle


def test_a_seq_that_has_an_offset_is_a_violation() -> None:
    """Rule 6, against the order table, against this session, and inside one flush."""
    bench = Bench(next_offset=5, max_seq=9, known=lambda seqs: set(seqs) & {2})
    try:
        bench.orderer.submit(burst((1, 100, [10, 2])))
        assert bench.orderer.drain(60)
        bench.orderer.submit(burst((2, 200, [10, 11, 11])))
        assert bench.orderer.drain(60)
        assert bench.offsets(4) == [(5, 10), (6, 11)]
        assert [(v.kind, v.seq, v.commit_lsn, v.ordinal) for v in bench.store.violations] == [
            ("duplicate-seq", 2, 100, -2),
            ("duplicate-seq", 10, 200, -1),
            ("duplicate-seq", 11, 200, -3),
        ]
        eventually(lambda: [end for _, end in bench.orderer.confirmable] == [130, 230])
    finally:
        assert bench.orderer.stop(5)


def test_a_violation_waits_until_its_transaction_is_visible(bench: Bench) -> None:
    """Rule 2 holds for it as well; and what is behind it in commit order is not confirmed before it is on record."""
    bench.store.visible_below = 5
    some = burst((4, 100, [1]), (7, 200, []), (3, 300, [3]))
    some.violations = [Violation("update", 100, 1, 1, 4, ""), Violation("delete", 200, 1, 1, 7, "")]
    bench.orderer.submit(some)
    eventually(lambda: bench.offsets() == [(1, 1)])
    time.sleep(0.05)
    assert [each.kind for each in bench.store.violations] == ["update"]
    assert [end for _, end in bench.orderer.confirmable] == [130]
    assert not bench.orderer.idle
    bench.store.visible_below = 8
    assert bench.orderer.drain(60)
    assert [each.kind for each in bench.store.violations] == ["update", "delete"]
    assert bench.offsets() == [(1, 1), (2, 3)]
    eventually(lambda: bench.orderer.confirmable[-1][1] == 330)
    assert bench.orderer.violations == 2


def test_what_the_catalogue_told_is_on_record_beside_what_waits(bench: Bench) -> None:
    bench.store.visible_below = 1
    bench.orderer.submit(burst((4, 100, [1])))
    noticed = Noticed([Violation("dropped", 900, 1, None, 0, "", origin="catalogue")], {}, [])
    bench.orderer.submit(noticed)
    assert noticed.done.wait(60)
    assert [each.kind for each in bench.store.violations] == ["dropped"]
    assert bench.offsets() == []
    bench.store.visible_below = 5
    assert bench.orderer.drain(60)


def test_a_piece_of_changes_alone_that_goes_on_moves_no_position(bench: Bench) -> None:
    some = burst((1, 100, [1]))
    some.pieces.append((Commit(200, 1, 2, "l:1"), 0, 0, 0))
    some.violations = [Violation("update", 200, 1, 1, 2, "")]
    bench.orderer.submit(some)
    assert bench.orderer.drain(60)
    (segment,) = bench.store.segments
    assert (segment.last_lsn, segment.partial_inserts) == (130, None)
    assert [end for _, end in bench.orderer.confirmable] == [130]


def test_a_transaction_of_violations_alone_writes_no_order_and_is_confirmed(bench: Bench) -> None:
    bench.orderer.submit(burst((1, 100, [1])))
    assert bench.orderer.drain(60)
    bench.orderer.submit(burst((2, 200, [1])))
    assert bench.orderer.drain(60)
    assert len(bench.store.segments) == 1
    eventually(lambda: bench.orderer.confirmable[-1][1] == 230)
    assert list(bench.orderer.confirmable) == [(1_000_010, 130), (1_000_020, 230)]
    assert bench.store.noted == [(1_000_010, 230)], "no order row ends there: written down before the second position"


def test_a_piece_says_how_far_it_got_and_is_not_confirmed(bench: Bench) -> None:
    """Rule 5."""
    piece = burst((1, 50, [1]), (2, 100, [2, 3]))
    commit = piece.pieces[-1][0]
    piece.pieces[-1] = (commit, 2, 0, 2)
    bench.orderer.submit(piece)
    assert bench.orderer.drain(60)
    (segment,) = bench.store.segments
    assert (segment.last_lsn, segment.partial_inserts) == (100, 2)
    assert [end for _, end in bench.orderer.confirmable] == [80]
    end = Burst(pieces=[(commit, 0, 130, 2)])
    bench.orderer.submit(end)
    assert bench.orderer.drain(60)
    eventually(lambda: [end for _, end in bench.orderer.confirmable] == [80, 130])
    assert [lsn for _, lsn in bench.store.noted] == [130], "the order says 100"


def test_positions_are_asked_for_now_and_then_and_nothing_is_idle_before(bench: Bench) -> None:
    """Rule 3: one that is taken later is behind more of the order, never behind less."""
    began = time.monotonic()
    for number in range(1, 201):
        bench.orderer.submit(burst((number, 100 * number, [number])))
        assert bench.orderer.drain(60)
        assert not bench.orderer.idle
    eventually(lambda: bench.orderer.confirmable[-1][1] == 200 * 100 + 30)
    assert len(bench.orderer.confirmable) <= (time.monotonic() - began) / 0.05 + 1
    ends = [end for _, end in bench.orderer.confirmable]
    assert ends == sorted(ends)
    assert bench.announced == 200
    assert bench.woken == len(ends), "the reader is woken for what it may confirm, and for nothing else"
    assert bench.store.noted == [], "an order row ends there"
    bench.orderer.confirmable.clear()
    assert bench.orderer.idle


class Load(Gathering):
    """Always load, with a pause of the test's choice."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause

    def flushed(self, events: int) -> None:
        pass


def test_under_load_a_flush_takes_what_gathered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.orderer, "_gathering", Load(0.05))
    began = time.monotonic()
    for seq in range(1, 401):
        bench.orderer.submit(burst((seq, seq * 100, [seq])))
        time.sleep(0.0002)
    assert bench.orderer.drain(60)
    assert bench.offsets() == [(seq, seq) for seq in range(1, 401)]
    assert len(bench.store.segments) <= (time.monotonic() - began) / 0.05 + 2


def test_nothing_gathers_once_the_reader_has_to_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.orderer, "_gathering", Load(3600.0))
    time.sleep(0.2)  # several heartbeats long, so that it stands in the pause by now
    small, large = burst((1, 100, [1])), burst((2, 200, [2]))
    large.nbytes = 1 << 20
    bench.orderer.submit(small)
    bench.orderer.submit(large)
    bench.orderer.wait_for_room(60)
    assert bench.orderer.has_room
    assert bench.offsets() == [(1, 1), (2, 2)]


def test_a_stop_does_not_wait_for_more_to_gather(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.orderer, "_gathering", Load(3600.0))
    time.sleep(0.2)  # several heartbeats long, so that it stands in the pause by now
    assert bench.orderer.stop(60)


def test_recovered_rows_are_durable_first_and_only_those_without_an_offset(bench: Bench) -> None:
    """Rule 11."""
    bench.orderer.submit(burst((1, 100, [1, 2])))
    found = Recovered([MissingRow(seq, 10, 1, 0) for seq in (2, 3, 4)], threading.Event())
    bench.orderer.submit(found)
    assert found.done.wait(60)
    segment = bench.store.segments[-1]
    assert (segment.seqs, segment.recovered, bench.store.durable[-1]) == ([3, 4], True, True)
    assert segment.last_lsn == 130, "the stream's position is not the reconciler's to move"
    assert bench.buffer.read(2, 10, 0) is None, "read from the ledger, not from memory"


def test_what_the_store_says_ends_it(bench: Bench) -> None:
    bench.store.failure = Fenced("replaced")
    bench.orderer.submit(burst((1, 100, [1])))
    eventually(lambda: bench.orderer.error is not None)
    assert isinstance(bench.orderer.error, Fenced)
    eventually(lambda: bench.woken == 1)  # the reader, who ends the session
    assert bench.offsets() == []


def test_a_size_counts_extras_between_rows_that_were_stripped_of_them(bench: Bench) -> None:
    """A reader bounds its memory by it."""
    extras = (("note",), (b"x" * 100_000,))
    made = Burst(rows=[row(1), (2, b"s", b"a", b"e", b"{}", None, extras), row(3)], stripped={0: 5 << 20, 2: 6 << 20})
    made.pieces.append((Commit(100, 1, 1, "l:1"), 3, 130, 3))
    bench.orderer.submit(made)
    assert bench.orderer.drain(60)
    assert list(bench.store.segments[0].sizes) == [23, 17, 23]


@pytest.mark.parametrize("one_transaction", [False, True])
def test_a_backlog_larger_than_a_segment_is_ordered_in_several(bench: Bench, one_transaction: bool) -> None:
    """While transactions wait for a standby, or the order for a lock, small rows pile up by the hundred thousand."""
    bench.store.visible_below = 1
    count = 2 * MAX_EVENTS + 50
    seqs = range(1, count + 1)
    if one_transaction:  # `chunk_bytes` may be set so high that a piece alone is larger
        bench.orderer.submit(burst((1, 100, seqs)))
    else:
        bench.orderer.submit(burst(*((n, 100 * n, seqs[50 * (n - 1) : 50 * n]) for n in range(1, count // 50 + 2))))
    bench.store.visible_below = 1 << 31
    assert bench.orderer.drain(60)
    assert bench.orderer.error is None
    segments = bench.store.segments
    assert [seq for segment in segments for seq in segment.seqs] == list(seqs)
    assert [segment.first_offset for segment in segments[1:]] == [segment.next_offset for segment in segments[:-1]]
    ends = [(segment.last_lsn, segment.partial_inserts) for segment in segments]
    if one_transaction:
        assert ends == [(100, MAX_EVENTS), (100, 2 * MAX_EVENTS), (130, None)]
        assert [end for _, end in bench.orderer.confirmable] == [130]
    else:
        assert all(partial is None for _, partial in ends)
