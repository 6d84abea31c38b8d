"""Seen seqs: the same answers as a set of everything, in bounded memory, and rarely by asking."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.order.seen import SeenSeqs

LEAST, MOST = -(1 << 63), (1 << 63) - 1
NEAR = st.integers(-50, 120)
ANY = st.one_of(NEAR, st.sampled_from([LEAST, LEAST + 1, MOST, MOST - 1]))


class Table:
    """The order's table: everything that was ever added."""

    def __init__(self, seqs: Sequence[int] = ()) -> None:
        self.seqs = set(seqs)
        self.asked: list[int] = []

    def __call__(self, seqs: Sequence[int]) -> set[int]:
        self.asked += seqs
        return self.seqs.intersection(seqs)


@given(
    before=st.sets(ANY),
    batches=st.lists(st.lists(ANY, max_size=12), max_size=25),
    bound=st.integers(1, 6),
)
@settings(max_examples=100)
def test_it_answers_like_a_set_of_everything(before: set[int], batches: list[list[int]], bound: int) -> None:
    table = Table(list(before))
    seen = SeenSeqs(max(before) if before else None, table, max_intervals=bound)
    for batch in batches:
        known = seen.known(batch)
        assert known == table.seqs.intersection(batch)
        fresh = [seq for seq in batch if seq not in known]
        table.seqs.update(fresh)
        seen.add(fresh)
        assert seen.known(batch) == set(batch)
        assert len(seen._starts) == len(seen._ends) <= bound
        assert seen.known(list(range(-50, 121))) == table.seqs.intersection(range(-50, 121))


def test_an_ordinary_sequence_is_never_asked_about() -> None:
    """Several writers that overtake each other, and rollbacks that leave gaps: all from memory."""
    table = Table(range(1, 1001))
    seen = SeenSeqs(1000, table)
    for start in range(1001, 50_000, 100):
        batch = [start + 3, start + 1, start, *range(start + 4, start + 99)]  # start + 2 rolled back
        assert seen.known(batch) == set()
        seen.add(batch)
        late = [start - 1]  # the last of the batch before commits late
        assert seen.known(late) == (set() if start > 1001 else {1000})
        seen.add(late)
        assert seen.known(late) == {start - 1}
    assert set(table.asked) == {1000}
    assert len(seen._starts) == 491, "one for each rollback"


def test_memory_is_bounded_and_the_table_answers_for_what_was_forgotten() -> None:
    table = Table()
    seen = SeenSeqs(None, table, max_intervals=100)
    for seq in range(0, 10_000, 2):
        seen.add([seq])
        table.seqs.add(seq)
    assert len(seen._starts) <= 100
    assert seen.known([0, 1, 9_998, 9_999]) == {0, 9_998}
    assert set(table.asked) == {0, 1}
