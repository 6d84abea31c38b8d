"""The pure rules of runners: whose fault, how long to wait, how to narrow down, which lane, how to cut."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from itertools import pairwise

import psycopg2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.engine.lanes import BatchSize, Selection, cut, lane_of
from walstream.engine.retry import Backoff, DeadlineExceeded, Fault, describe, judge, narrow
from walstream.errors import ConnectionLost, Fenced, PayloadError, RetryLater, Unavailable
from walstream.event import Commit, Event
from walstream.metrics import Metrics
from walstream.testing import make_event


def sql(state: str) -> psycopg2.Error:
    """A server's error with an SQLSTATE, which the driver alone can set otherwise."""
    error = psycopg2.Error(state)
    set_state: Callable[[dict[str, str]], None] = error.__setstate__
    set_state({"pgcode": state})
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("x"), Fault.EVENT),
        (PayloadError("x"), Fault.EVENT),
        (RecursionError(), Fault.EVENT),
        (MemoryError(), Fault.EVENT),
        (ConnectionRefusedError(), Fault.EVENT),  # an address out of a payload would hold everybody up
        (concurrent.futures.CancelledError(), Fault.EVENT),
        (DeadlineExceeded("x"), Fault.EVENT),
        (RetryLater(), Fault.LATER),
        (Unavailable("x"), Fault.LATER),
        (ConnectionLost("x"), Fault.CONNECTION),
        (Fenced("x"), Fault.FENCED),
        (psycopg2.OperationalError("could not connect to server"), Fault.LATER),
        (sql("23505"), Fault.EVENT),
        (sql("22012"), Fault.EVENT),
        (sql("57014"), Fault.EVENT),
        (sql("53200"), Fault.EVENT),
        (sql("53300"), Fault.LATER),
        (sql("57P03"), Fault.LATER),
        (sql("08006"), Fault.LATER),
        (sql("40001"), Fault.CONFLICT),
        (sql("40P01"), Fault.CONFLICT),
    ],
)
def test_whose_fault_it_is(error: BaseException, fault: Fault) -> None:
    assert judge(error, connection_lost=False) is fault


def test_nothing_is_the_events_fault_once_our_connection_is_gone() -> None:
    assert judge(ValueError("x"), connection_lost=True) is Fault.CONNECTION
    assert judge(DeadlineExceeded("x"), connection_lost=True) is Fault.EVENT
    assert judge(Fenced("x"), connection_lost=True) is Fault.FENCED


def test_pauses_double_up_to_a_cap_and_are_spread() -> None:
    backoff = Backoff(1.0, 8.0)
    for attempt, exact in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 8), (5000, 8)):
        pauses = [backoff.pause(attempt) for _ in range(50)]
        assert exact * 0.87 < min(pauses) < max(pauses) < exact * 1.13
    assert Backoff(0.0, 0.0).pause(3) == 0


def _events(count: int) -> list[Event]:
    return [make_event(offset) for offset in range(1, count + 1)]


@given(st.integers(2, 40), st.integers(0, 40), st.booleans())
def test_narrowing_keeps_every_event_that_is_not_done_in_order(count: int, done: int, repeatable: bool) -> None:
    events = _events(count)
    parts = narrow(events, done=min(done, count), repeatable=repeatable)
    flat = [event for part in parts for event in part]
    skipped = 0 if repeatable or not 0 < done < count else done
    assert flat == events[skipped:]
    assert all(0 < len(part) < count for part in parts)


def test_narrowing_isolates_the_suspect() -> None:
    events = _events(10)
    assert [len(part) for part in narrow(events, done=4, repeatable=True)] == [4, 1, 5]
    assert [len(part) for part in narrow(events, done=4, repeatable=False)] == [1, 5]
    assert [len(part) for part in narrow(events, done=9, repeatable=True)] == [9, 1]
    assert [len(part) for part in narrow(events, done=0, repeatable=True)] == [5, 5]
    assert [len(part) for part in narrow(events, done=0, repeatable=False)] == [1] * 10


def test_an_error_that_cannot_be_told_is_told_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    line, trace = describe(Unspeakable())
    assert "Unspeakable" in line
    assert "Unspeakable" in trace


def test_the_lane_of_a_session_never_changes() -> None:
    # Stored cursors depend on it: these numbers must not change with a release.
    ids = (b"00000000-0000-4000-8000-000000000001", b"agent-7", "größe".encode())
    assert [lane_of(session, 8) for session in ids] == [1, 4, 1]
    assert [lane_of(session, 3) for session in ids] == [1, 0, 2]


@given(st.lists(st.text(min_size=1, max_size=5), max_size=30), st.integers(1, 5))
def test_every_event_has_exactly_one_lane(sessions: list[str], lanes: int) -> None:
    events = [make_event(n, session_id=session) for n, session in enumerate(sessions, start=1)]
    kept = [Selection(frozenset(), lane, lanes).keep(events) for lane in range(lanes)]
    assert sorted(event.offset for lane in kept for event in lane) == list(range(1, len(events) + 1))


def test_a_selection_by_type() -> None:
    events = [make_event(1, "a"), make_event(2, "b"), make_event(3, "a")]
    assert [event.offset for event in Selection(frozenset({b"a"})).keep(events)] == [1, 3]
    assert Selection(frozenset()).keep(events) is events


@given(st.lists(st.integers(1, 9), max_size=15), st.integers(1, 12))
def test_cutting_splits_only_what_is_larger_than_the_limit(sizes: list[int], limit: int) -> None:
    events: list[Event] = []
    for size in sizes:
        commit = Commit(len(events) + 1, 0, 0, "l:1")
        events += [make_event(len(events) + 1 + n, commit=commit) for n in range(size)]
    batches = list(cut(events, limit))
    assert [event for batch in batches for event in batch] == events
    assert all(1 <= len(batch) <= limit for batch in batches)
    for left, right in pairwise(batches):
        if left[-1].commit is right[0].commit:  # split: then it is in the batch alone, and larger than the limit
            assert sum(event.commit is right[0].commit for event in events) > limit
            assert left[0].commit is left[-1].commit


def test_batches_grow_where_projecting_is_quick_and_shrink_where_it_is_slow() -> None:
    size = BatchSize(2000)
    assert size.limit == 500
    size.took(499, 0.001)  # not full: that it was quick says nothing about larger ones
    assert size.limit == 500
    for limit in (1000, 2000, 2000):
        size.took(size.limit, 0.1)
        assert size.limit == limit
    size.took(2000, 0.5)
    assert size.limit == 2000
    for limit in (1000, 500, 500):
        size.took(size.limit, 1.1)
        assert size.limit == limit


def test_a_small_batch_stays_what_the_projector_takes() -> None:
    size = BatchSize(10)
    for seconds in (0.001, 1.1, 0.001):
        size.took(10, seconds)
        assert size.limit == 10


def test_metrics_only_rise_unless_they_are_set() -> None:
    metrics = Metrics()
    metrics.add("a_total", 2, projector="p")
    metrics.add("a_total", projector="p")
    metrics.set("lag", 7, lane="0", projector="p")
    metrics.set("lag", 3, projector="p", lane="0")
    assert metrics.value("a_total", projector="p") == 3
    assert metrics.value("lag", lane="0", projector="p") == 3
    assert metrics.value("never") == 0
    with pytest.raises(ValueError, match="cannot fall"):
        metrics.add("a_total", -1)
    samples = metrics.snapshot()
    assert [(sample.name, sample.counter) for sample in samples] == [("a_total", True), ("lag", False)]
    assert samples[1].labels == (("lane", "0"), ("projector", "p"))
