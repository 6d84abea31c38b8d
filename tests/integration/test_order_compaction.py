"""Compaction on a real server: smaller, and otherwise the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import Database, Server
from tests.integration.order_bench import OrderBench, bench, module_database, until
from walstream.errors import Fenced, LedgerError
from walstream.order.compaction import Compactor, merge
from walstream.order.segment import Segment, encode_body
from walstream.order.table import COLUMNS, segment_of
from walstream.order.writer import OrderWriter


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Database]:
    with module_database(server, "compaction") as made:
        yield made


@pytest.fixture
def order(shared: Database) -> Iterator[OrderBench]:
    with bench(shared.dsn) as made:
        made.create_ledger()
        yield made


def stored(order: OrderBench) -> list[Segment]:
    return [
        segment_of(row) for row in order.execute(f"SELECT {COLUMNS} FROM walstream.commit_order ORDER BY first_offset")
    ]


def shape(order: OrderBench) -> list[tuple[int, int]]:
    return [(segment.first_offset, segment.events) for segment in stored(order)]


def compactor(order: OrderBench, writer: OrderWriter, *, target: int = 10_000, min_run: int = 2) -> Compactor:
    return Compactor(order.connect(), "walstream", writer.generation, small=100, target=target, min_run=min_run)


def flat(segments: list[Segment]) -> list[tuple[int, int, int, int, int, bool]]:
    """Every event with its offset, commit, time, size and flag."""
    found = []
    for segment in segments:
        index = 0
        for size, lsn, time_us in zip(segment.tx_sizes, segment.commit_lsns, segment.commit_times, strict=True):
            for _ in range(size):
                place = (segment.first_offset + index, segment.seqs[index], lsn, time_us)
                found.append((*place, segment.sizes[index], segment.recovered))
                index += 1
    return found


def test_the_order_stays_what_it_was(order: OrderBench) -> None:
    """Random segments: recovered ones among them, commits that go on, large ones that are left alone."""
    source = random.Random(4)
    writer = order.writer()
    tails, seq = [], 1
    for _ in range(120):
        count = source.choice((1, 1, 1, 2, 5, 150))
        seqs = list(range(seq, seq + count))
        source.shuffle(seqs)
        seq += count
        recovered = source.random() < 0.2
        partial = count if not recovered and source.random() < 0.2 else None
        order.order(writer, seqs, [count] if partial else None, partial_inserts=partial, recovered=recovered)
        tails.append(writer.tail())
    before = stored(order)
    worker = compactor(order, writer, target=400)
    while worker.run(max_merges=3):
        assert flat(stored(order)) == flat(before)
    after = stored(order)
    assert flat(after) == flat(before)
    assert len(after) < 0.6 * len(before)
    assert after[-1] == before[-1], "the tail is never touched"
    assert writer.tail() == tails[-1]
    ends = {segment.next_offset: (segment.last_lsn, segment.partial_inserts) for segment in before}
    for segment in after:
        assert ends[segment.next_offset] == (segment.last_lsn, segment.partial_inserts)
    for low, high, least, most in order.execute(
        "SELECT first_offset, first_offset + events, min_seq, max_seq FROM walstream.commit_order"
    ):
        seqs = [entry[1] for entry in flat(before) if low <= entry[0] < high]
        assert (least, most) == (min(seqs), max(seqs))
    assert compactor(order, writer, target=400).run() == 0, "nothing is left to do"


def test_a_commit_in_two_segments_becomes_one_piece() -> None:
    one = Segment(1, [1, 2], [2], [100], [5], b"\n\n", 100, 2, False, 1)
    two = Segment(3, [3, 4], [1, 1], [100, 300], [5, 6], b"\n\n", 348, None, False, 2)
    assert merge([one, two]) == Segment(1, [1, 2, 3, 4], [3, 1], [100, 300], [5, 6], b"\n" * 4, 348, None, False, 2)
    apart = Segment(1, [1], [1], [0], [0], b"\n", 100, 2, True, 1)
    assert merge([apart, Segment(2, [2], [1], [0], [0], b"\n", 100, 2, True, 1)]).tx_sizes == [1, 1]
    for other in (
        Segment(4, [3], [1], [100], [5], b"\n", 100, 2, False, 1),
        Segment(3, [3], [1], [0], [0], b"\n", 100, 2, True, 1),
    ):
        with pytest.raises(ValueError, match="cannot be merged"):
            merge([one, other])


def test_short_runs_wait_and_full_ones_are_left(order: OrderBench) -> None:
    writer = order.writer()
    worker = compactor(order, writer, target=100, min_run=10)
    for seq in range(1, 11):
        order.order(writer, [seq])
    assert worker.run() == 0, "nine and the tail"
    order.order(writer, [11])
    assert worker.run() == 1
    assert shape(order) == [(1, 10), (11, 1)]
    for seq in range(12, 16):
        order.order(writer, [seq])
    assert worker.run() == 0
    for seq in range(16, 200):
        order.order(writer, [seq])
    while worker.run():
        pass
    assert shape(order)[0] == (1, 100)
    assert len(shape(order)) <= 12


def test_a_replaced_ingest_compacts_nothing(order: OrderBench) -> None:
    writer = order.writer()
    for seq in range(1, 20):
        order.order(writer, [seq])
    worker = compactor(order, writer)
    heir = order.writer()
    with pytest.raises(Fenced, match="not compacted"):
        worker.run()
    assert len(shape(order)) == 19
    assert compactor(order, heir).run() == 1


def test_two_at_once_are_one_after_the_other(order: OrderBench) -> None:
    """The second finds its rows gone: its whole statement is undone, and the order is as the first left it."""
    writer = order.writer()
    for seq in range(1, 40):
        order.order(writer, [seq])
    first = order.connect()
    first.autocommit = False
    with first.cursor() as cursor:
        cursor.execute("SELECT 1 FROM walstream.commit_order WHERE first_offset = 20 FOR UPDATE")
    before = stored(order)
    second = order.connect()
    worker = Compactor(second, "walstream", writer.generation, min_run=2)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(worker.run)
        until(
            lambda: order.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", second.info.backend_pid
            ),
            "the second waits for a row of the first",
        )
        with first.cursor() as cursor:  # what a compaction of 20 to 29 does
            merged = merge(before[19:29])
            cursor.execute("DELETE FROM walstream.commit_order WHERE first_offset BETWEEN 20 AND 29")
            cursor.execute(
                "INSERT INTO walstream.commit_order"
                " (first_offset, events, last_lsn, min_seq, max_seq, generation, body)"
                " VALUES (20, 10, '0/1', 20, 29, 1, %s)",
                (encode_body(merged),),
            )
        first.commit()
        blocked.result(60)
    assert shape(order) == [*((n, 1) for n in range(1, 20)), (20, 10), *((n, 1) for n in range(30, 40))]
    assert worker.run() == 1
    assert shape(order) == [(1, 38), (39, 1)]


def test_a_hole_is_reported_and_not_closed(order: OrderBench) -> None:
    writer = order.writer()
    for seq in range(1, 10):
        order.order(writer, [seq])
    order.execute("DELETE FROM walstream.commit_order WHERE first_offset = 4")
    with pytest.raises(LedgerError, match="gap"):
        compactor(order, writer).run()


def test_readers_see_one_form_or_the_other(order: OrderBench) -> None:
    """Everything is read again and again while it is merged step by step."""
    total = 300
    seqs = order.insert(total)
    writer = order.writer()
    for seq in seqs:
        order.order(writer, [seq])
    done = False

    def read_all() -> int:
        rounds = 0
        while not done or rounds < 2:
            reader = order.reader()
            after = 0
            while after < total:
                batch = reader.read(after, 37, 1 << 20)
                assert [event.seq for event in batch.events] == seqs[after : batch.through]
                after = batch.through
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all)
        for target in (8, 20, 50, 400):
            worker = Compactor(order.connect(), "walstream", writer.generation, small=target, target=target, min_run=2)
            while worker.run(max_merges=1):
                pass
        done = True
        assert reading.result(60) >= 2
    assert len(shape(order)) == 2


def test_it_shrinks_what_a_quiet_ledger_leaves(order: OrderBench) -> None:
    """One event a segment: a hundred and more bytes each before, a few after."""
    writer = order.writer()
    count = 400
    for seq in range(1, count + 1):
        order.order(writer, [seq])
    size = "SELECT sum(pg_column_size(o.*)) FROM walstream.commit_order o"
    ((before,),) = order.execute(size)
    compactor(order, writer).run()
    ((after,),) = order.execute(size)
    assert before > 90 * count
    assert after < 5 * count
