"""Batches against the plain list of what they are made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from walstream.engine.batch import Batch
from walstream.engine.intake import Burst
from walstream.event import Commit, Event, Row
from walstream.order.segment import size_codes
from walstream.order.snapshot import Snapshot

transactions = st.lists(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5_000)), max_size=4), max_size=6)


def burst(made: list[list[tuple[int, int]]], at: int) -> Burst:
    """Transactions as (seq, size) of their rows. Every row of more than 4,000 bytes is stripped."""
    found = Burst()
    for number, rows in enumerate(made, at):
        commit = Commit(number * 100, number * 7, number, "l:1")
        for seq, size in rows:
            if size > 4_000:
                found.stripped[len(found.rows)] = size
            found.rows.append((seq, b"s", b"a", b"e", b"" if size > 4_000 else b"x" * size, None, None))
        found.pieces.append((commit, len(rows), number * 100 + 30, len(rows)))
        found.nbytes += sum(size for _, size in rows)
    return found


def plain(batch: Batch) -> list[tuple[int, Row, int, int, bool]]:
    """What the columns say of each event; they all have to be of the same lengths."""
    assert len(batch.events) == len(batch.seqs) == len(batch.codes) == sum(batch.counts)
    assert len(batch.pieces) == len(batch.counts) == len(batch.xids) == len(batch.lsns) == len(batch.times)
    assert [(c.xid, c.lsn, c.time_us, size) for c, size, _, _ in batch.pieces] == list(
        zip(batch.xids, batch.lsns, batch.times, batch.counts, strict=True)
    )
    commits = [commit for commit, size, _, _ in batch.pieces for _ in range(size)]
    assert [event.commit for event in batch.events] == commits
    assert [event.seq for event in batch.events] == list(batch.seqs)
    return [
        (event.offset, event.row, code, event.commit.xid, index in batch.stripped)
        for index, (event, code) in enumerate(zip(batch.events, batch.codes, strict=True))
    ]


@given(st.lists(transactions, min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 12))
def test_parts_that_are_put_together_and_taken_apart(
    parts: list[list[list[tuple[int, int]]]], skew: int, cut: int
) -> None:
    flat = [rows for part in parts for rows in part]
    expected = plain(Batch.of(burst(flat, 1), 5))
    assert [code for _, _, code, _, _ in expected] == list(size_codes([size for rows in flat for _, size in rows]))
    whole = Batch()
    at = 1
    for part in parts:
        batch = Batch.of(burst(part, at), 5 + len(whole) + skew * (at - 1))  # as after a flush that took something out
        at += len(part)
        if whole.pieces:
            whole.extend(batch)
        else:
            whole = batch
    whole.renumber(5)
    assert plain(whole) == expected
    size = whole.nbytes
    ready = whole.ready(Snapshot(cut + 1, cut + 1, frozenset()))
    assert ready == min(cut, len(flat))
    head = whole.split(ready)
    assert plain(head) + plain(whole) == expected
    assert len(head.pieces) == ready
    assert head.nbytes + whole.nbytes == size


@given(transactions, st.sets(st.integers(1, 30), max_size=6))
def test_a_seq_is_kept_once_and_not_if_it_is_known(made: list[list[tuple[int, int]]], known: set[int]) -> None:
    batch = Batch.of(burst(made, 1), 1)
    kept, doubles = batch.without(known)
    taken: set[int] = set()
    expected: list[Event] = []
    dropped: list[tuple[int, int, Row]] = []
    index = 0
    for rows in made:
        for number in range(1, len(rows) + 1):
            event = batch.events[index]
            index += 1
            if event.seq in known | taken:
                dropped.append((event.commit.xid, number, event.row))
            else:
                taken.add(event.seq)
                expected.append(event)
    assert [(piece[0].xid, number, row) for piece, number, row in doubles] == dropped
    found = plain(kept)
    assert [row for _, row, _, _, _ in found] == [event.row for event in expected]
    assert [offset for offset, *_ in found] == list(range(1, len(found) + 1))
    assert [missing for *_, missing in found] == [batch.events.index(event) in batch.stripped for event in expected]
    assert [piece[2:] for piece in kept.pieces] == [piece[2:] for piece in batch.pieces]
    if found:
        segment = kept.segment(1, 3)
        segment.check()
        assert list(segment.seqs) == [event.seq for event in expected]
        assert list(segment.tx_sizes) == [size for _, size, _, _ in kept.pieces if size]
        assert list(segment.commit_lsns) == [commit.lsn for commit, size, _, _ in kept.pieces if size]
        assert list(segment.commit_times) == [commit.time_us for commit, size, _, _ in kept.pieces if size]
        assert segment.last_lsn == 100 * len(made) + 30
