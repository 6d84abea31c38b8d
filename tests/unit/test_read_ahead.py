"""Reading ahead: what is used, what is dropped, and what an end in the middle does."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from tests.integration.streams import eventually
from walstream.engine import read_ahead
from walstream.engine.read_ahead import WORTH, ReadAhead
from walstream.errors import ConnectionLost
from walstream.event import Event
from walstream.testing import make_event


@dataclass
class Batch:
    events: list[Event]
    through: int


class Reader:
    """Has ``end`` events; fails or waits at a place."""

    def __init__(self, end: int) -> None:
        self._end = end
        self.reads: list[tuple[int, int]] = []
        self.breaks_at = self.waits_at = -1
        self.abandoned = threading.Event()

    def read(self, after: int, limit: int, max_bytes: int) -> Batch:
        del max_bytes
        self.reads.append((after, limit))
        if after == self.waits_at:
            assert self.abandoned.wait(60)
            raise ConnectionLost("abandoned")
        if after == self.breaks_at:
            raise ConnectionLost("broken")
        through = min(self._end, after + limit)
        return Batch([make_event(offset) for offset in range(after + 1, through + 1)], through)


def made(end: int = 10 * WORTH) -> tuple[ReadAhead, Reader]:
    reader = Reader(end)
    return ReadAhead(reader, reader.abandoned.set), reader


def test_what_is_read_ahead_is_what_is_asked_for_next_and_is_read_once() -> None:
    ahead, reader = made(3 * WORTH + 7)
    offsets: list[int] = []
    while (batch := ahead.read(len(offsets), WORTH, 1)).events:
        offsets += [event.offset for event in batch.events]
    assert offsets == list(range(1, 3 * WORTH + 8))
    assert reader.reads == [(0, WORTH), (WORTH, WORTH), (2 * WORTH, WORTH), (3 * WORTH, WORTH), (len(offsets), WORTH)]


def test_another_place_gets_its_own() -> None:
    ahead, reader = made()
    ahead.read(0, WORTH, 1)
    assert ahead.read(20, 1, 1).events[0].offset == 21
    assert ahead.read(WORTH, 1, 1).events[0].offset == WORTH + 1  # another limit is another batch
    assert reader.reads == [(0, WORTH), (WORTH, WORTH), (20, 1), (WORTH, 1)]


def test_where_there_is_little_nothing_is_read_ahead() -> None:
    ahead, reader = made(WORTH - 1)
    ahead.read(0, WORTH, 1)
    ahead.close()
    assert reader.reads == [(0, WORTH)]


def test_what_has_waited_for_long_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, reader = made()
    ahead.read(0, WORTH, 1)
    eventually(lambda: len(reader.reads) == 2 and not _reading_ahead(), "it has read ahead")
    monkeypatch.setattr(read_ahead, "FRESH_SECONDS", 0.0)
    assert ahead.read(WORTH, WORTH, 1).through == 2 * WORTH
    assert reader.reads[:3] == [(0, WORTH), (WORTH, WORTH), (WORTH, WORTH)]


def test_an_error_comes_when_it_is_its_turn() -> None:
    ahead, reader = made()
    reader.breaks_at = WORTH
    assert ahead.read(0, WORTH, 1).through == WORTH
    with pytest.raises(ConnectionLost, match="broken"):
        ahead.read(WORTH, WORTH, 1)
    reader.breaks_at = -1
    assert ahead.read(WORTH, WORTH, 1).through == 2 * WORTH


def test_closing_in_the_middle_waits_for_nobody() -> None:
    ahead, reader = made()
    reader.waits_at = WORTH
    ahead.read(0, WORTH, 1)
    eventually(lambda: len(reader.reads) == 2, "it reads ahead")
    ahead.close()
    assert reader.abandoned.is_set()
    assert not _reading_ahead()


def test_what_is_not_needed_any_more_is_forgotten() -> None:
    ahead, reader = made()
    ahead.read(0, WORTH, 1)
    eventually(lambda: len(reader.reads) == 2 and not _reading_ahead(), "it has read ahead")
    ahead.forget()
    ahead.read(WORTH, WORTH, 1)
    assert reader.reads[:3] == [(0, WORTH), (WORTH, WORTH), (WORTH, WORTH)]


def _reading_ahead() -> bool:
    return any(thread.name == "walstream-read-ahead" for thread in threading.enumerate())
