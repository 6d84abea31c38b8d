"""The append-only file: every event once, whatever was torn, repeated or swapped."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from walstream import Context, Event, RetryLater
from walstream.event import Commit
from walstream.ledger.json_lines import parse_event
from walstream.projectors.json_lines_file import JsonLinesFile, OffsetFile, event_line


def event(offset: int, seq: int | None = None, payload: str = '{"n": 1.50}') -> Event:
    row = ((seq or offset * 10), b"s", b"a", b"t", payload.encode(), b"2024-02-03 04:05:06+00", None)
    return Event(offset, row, Commit(7, 1_000_000, 3, "l:1"))


def deliver(path: Path, *events: Event) -> None:
    """As after a restart: a projector that has just been made."""
    projector = JsonLinesFile(path)
    try:
        projector.project(events, Context("json-lines-file"))
    finally:
        projector.close()


def offsets(path: Path) -> list[int]:
    return [json.loads(line)["offset"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_lines_hold_the_event_and_can_be_imported(path: Path) -> None:
    deliver(path, event(1, payload='{"n":\n1.50, "m": 12345678901234567890}'), event(2))
    first = path.read_bytes().splitlines(keepends=True)[0]
    assert json.loads(first) == {
        "offset": 1,
        "seq": 10,
        "key": "l:1:10",
        "session_id": "s",
        "agent_id": "a",
        "event_type": "t",
        "created_at": "2024-02-03 04:05:06+00",
        "committed_at": "2000-01-01T00:00:01+00:00",
        "recovered": False,
        "payload": {"n": 1.5, "m": 12345678901234567890},
    }
    assert parse_event(first).payload == '{"n": 1.50, "m": 12345678901234567890}'


def test_what_comes_again_is_not_appended_again(path: Path) -> None:
    deliver(path, *map(event, range(1, 6)))
    deliver(path, *map(event, range(3, 9)))
    deliver(path, event(8))
    deliver(path, event(20))  # offsets between were erased: passed over by the cursor
    assert offsets(path) == [1, 2, 3, 4, 5, 6, 7, 8, 20]


def test_a_torn_line_is_cut_wherever_the_crash_came(path: Path) -> None:
    deliver(path, *map(event, range(1, 4)))
    whole = path.read_bytes()
    third = whole.rindex(b"\n", 0, -1) + 1
    for length in range(third, len(whole)):
        path.write_bytes(whole[:length])
        deliver(path, event(3), event(4))
        assert offsets(path) == [1, 2, 3, 4]
    path.write_bytes(whole[:5])
    deliver(path, event(1))
    assert offsets(path) == [1]


def test_a_line_longer_than_a_block_is_found_and_cut(path: Path) -> None:
    large = '"' + "x" * 300_000 + '"'
    deliver(path, event(1, payload=large), event(2, payload=large), event(3))
    deliver(path, event(1, payload=large), event(2, payload=large), event(3), event(4))
    with path.open("ab") as file:
        file.write(event_line(event(5, payload=large))[:200_000])
    deliver(path, event(5))
    assert offsets(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("payload", ['{"n": 1e400}', "[" * 2000 + "]" * 2000, '{"offset":9,"seq":9,"n":NaN}'])
def test_a_payload_that_no_parser_takes_is_no_hindrance(path: Path, payload: str) -> None:
    deliver(path, event(1), event(2, payload=payload), event(3, payload=payload))
    deliver(path, event(2, payload=payload), event(3, payload=payload), event(4))
    assert path.read_bytes().count(b"\n") == 4
    with pytest.raises(ValueError, match="holds seq 20 under offset 2"):
        deliver(path, event(2, seq=7))


@pytest.mark.parametrize("offset", [1, 2, 50, 99, 100])
def test_another_event_under_a_known_offset_is_an_alarm(path: Path, offset: int) -> None:
    deliver(path, *map(event, range(1, 101)))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"holds seq {offset * 10} under offset {offset}.*seq 7"):
        deliver(path, event(offset, seq=7))
    assert path.read_bytes() == before


def test_an_event_from_before_the_file_began_is_an_alarm(path: Path) -> None:
    deliver(path, event(10), event(12))
    for missing in (9, 11):
        with pytest.raises(ValueError, match=f"does not hold offset {missing}"):
            deliver(path, event(missing))


def test_a_file_that_is_not_ours_is_not_touched(path: Path) -> None:
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="a line that is not ours"):
        deliver(path, event(1))
    assert path.read_text() == "hello\n"


def test_two_processes_do_not_share_the_file(path: Path) -> None:
    holder = OffsetFile(path)
    try:
        with pytest.raises(RetryLater):
            deliver(path, event(1))
    finally:
        holder.close()
    deliver(path, event(1))
    assert offsets(path) == [1]


def test_one_that_stands_by_does_not_keep_the_file(path: Path) -> None:
    """Its process lives on and may get its turn again; the one that works now must not wait for its end."""
    first, second = JsonLinesFile(path), JsonLinesFile(path)
    context = Context("json-lines-file")
    first.project([event(1)], context)
    second.project([event(1), event(2)], context)
    first.project([event(2), event(3)], context)
    first.close()
    second.close()
    assert offsets(path) == [1, 2, 3]


def test_what_stands_in_the_file_already_is_made_durable_before_it_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process before was killed between writing and flushing: the cursor must not pass what a power cut takes."""
    path.write_bytes(event_line(event(1)))
    flushed: list[int] = []
    flush = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    projector = JsonLinesFile(path)
    projector.project([event(1)], Context("json-lines-file"))
    assert flushed == [path.stat().st_ino, path.parent.stat().st_ino]
    projector.project([event(2)], Context("json-lines-file"))
    assert flushed[2:] == [path.stat().st_ino], "once a batch, as before"


def test_a_full_disk_leaves_no_half_line_and_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(path, event(1))
    write = os.pwrite

    def full(descriptor: int, data: bytes, position: int) -> int:
        write(descriptor, data[:7], position)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RetryLater, match="No space left"):
        deliver(path, event(2))
    monkeypatch.undo()
    assert offsets(path) == [1]
    deliver(path, event(2))
    assert offsets(path) == [1, 2]


def test_a_missing_folder_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(RetryLater):
        deliver(tmp_path / "none" / "events.jsonl", event(1))
