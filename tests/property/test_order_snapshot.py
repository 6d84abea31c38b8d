"""Snapshots: 32-bit ids of the stream against 64-bit ids of the server, over any number of wrap-arounds."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from walstream.errors import LedgerError
from walstream.order.snapshot import Snapshot, full_xid

MASK = (1 << 32) - 1
XIDS = st.integers(3, 1 << 40)


@given(xmin=XIDS, width=st.integers(0, 1 << 30), data=st.data())
@example(xmin=MASK, width=10, data=None)
def test_it_answers_as_the_full_ids_would(xmin: int, width: int, data: st.DataObject | None) -> None:
    xmax = xmin + width
    picks = [xmin, xmax, xmax - 1, xmin - 1, xmin + 1]
    if data is not None:
        picks += data.draw(st.lists(st.integers(max(3, xmax - (1 << 31) + 1), xmin + (1 << 31) - 1), max_size=20))
        running = frozenset(xid for xid in picks if xmin <= xid < xmax and data.draw(st.booleans()))
    else:
        running = frozenset({xmin, xmin + 1})
    snapshot = Snapshot.parse(f"{xmin}:{xmax}:{','.join(map(str, sorted(running)))}")
    assert (snapshot.xmin, snapshot.xmax, snapshot.running) == (xmin, xmax, running)
    for xid in picks:
        finished = xid < xmin or (xid < xmax and xid not in running)
        assert snapshot.shows_finished(xid & MASK) is finished, xid
        assert full_xid(xid & MASK, xmax) == xid
    asked = [xid & MASK for xid in picks]
    answers = [snapshot.shows_finished(xid) for xid in asked]
    assert snapshot.finished_first(asked) == (answers.index(False) if False in answers else len(asked))


@pytest.mark.parametrize("text", ["", "1:2", "1:2:3:4", "a:b:", "5:4:", "0:4:", "1:2:x", "1:5:2,,3"])
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    with pytest.raises(LedgerError, match="snapshot"):
        Snapshot.parse(text)


def test_it_shows_itself() -> None:
    assert repr(Snapshot.parse("10:20:12,15")) == "Snapshot(10:20:12,15)"
