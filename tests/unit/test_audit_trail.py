"""The trail on disk: every event once, whatever was torn, repeated, full, taken over or moved away."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import (
    SETTINGS,
    crash,
    edit,
    event,
    events,
    newest,
    offsets,
    record,
    records,
    settle,
    verified,
)
from walstream import Context, RetryLater
from walstream.audit.directory import Directory
from walstream.audit.heads import read_heads
from walstream.audit.loading import TrailBroken
from walstream.audit.segment_check import check_segment
from walstream.audit.segments import pack, segments_in
from walstream.audit.tail import SIDE_FOLDER
from walstream.audit.trail import AuditTrail
from walstream.config import Settings
from walstream.errors import ConfigError
from walstream.plugins import configured_projectors
from walstream.projectors.audit_sink import AuditSink


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def test_what_comes_again_is_not_recorded_again(directory: Path) -> None:
    record(directory, events(1, 5))
    record(directory, events(3, 9))
    record(directory, [event(9)])
    assert offsets(directory) == list(range(1, 10))
    report = verified(directory)
    assert (report.records, report.events, report.first_offset, report.last_offset) == (10, 9, 1, 9)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_record_torn_at_any_byte_is_put_aside_and_comes_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    # Several thousand flushes, of files that nobody will need after a power cut.
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: None)
    record(directory, events(1, 2))
    torn = event(3, payload='{"a":\n1}')
    crash(directory, [torn])
    segment = newest(directory)
    whole = segment.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for length in sorted({*range(start, len(whole), step), len(whole) - 1}):
        segment.write_bytes(whole[:length])
        crash(directory, [torn, event(4)])
        assert offsets(directory) == [1, 2, 3, 4]
        assert check_segment(segments_in(directory)[0]).fault is None
        aside = list((directory / SIDE_FOLDER).glob("*"))
        assert b"".join(each.read_bytes() for each in aside) == whole[start:length]
        for each in aside:
            each.unlink()
    record(directory, [event(4)])
    verified(directory)


@pytest.mark.parametrize("junk", [b"\0" * 5000, b"half a line", b'{"hash":"\n{"hash":"', b"\n\n"])
def test_junk_behind_the_last_flush_is_put_aside(directory: Path, junk: bytes) -> None:
    """What a power cut makes of pages that were not flushed."""
    record(directory, events(1, 3))
    with newest(directory).open("ab") as file:
        file.write(junk)
    record(directory, events(3, 5))
    assert offsets(directory) == [1, 2, 3, 4, 5]
    (aside,) = (directory / SIDE_FOLDER).iterdir()
    assert aside.read_bytes() == junk
    verified(directory)


def test_a_torn_beginning_is_begun_again(directory: Path) -> None:
    record(directory, events(1, 1))
    first = newest(directory)
    data = first.read_bytes()
    (directory / "heads.jsonl").unlink()
    first.write_bytes(data[:100])
    record(directory, events(1, 2))
    assert offsets(directory) == [1, 2]
    verified(directory)


def test_what_a_head_vouches_for_is_never_put_aside(directory: Path) -> None:
    record(directory, events(1, 9))
    before = newest(directory).read_bytes()
    edit(newest(directory), lambda lines: [*lines[:4], lines[4].replace(b"1.50", b"9.50"), *lines[5:]])
    changed = newest(directory).read_bytes()
    assert changed != before
    with pytest.raises(TrailBroken, match=r"record 5: its payload is not .* not what a crash leaves"):
        record(directory, events(9, 10))
    assert newest(directory).read_bytes() == changed
    assert not (directory / SIDE_FOLDER).exists()


def test_a_whole_record_of_another_chain_is_no_crash(directory: Path, tmp_path: Path) -> None:
    record(directory, events(1, 3))
    record(tmp_path / "other", events(1, 9))
    foreign = newest(tmp_path / "other").read_bytes().splitlines(keepends=True)[4]
    with newest(directory).open("ab") as file:
        file.write(foreign)
    with pytest.raises(TrailBroken, match=r"record 5: it does not follow .* not what a crash leaves"):
        record(directory, [event(4)])
    assert newest(directory).read_bytes().endswith(foreign)


@pytest.mark.parametrize("size", [100, 3_000_000])
def test_lines_longer_than_a_block_are_read(directory: Path, size: int) -> None:
    large = '"' + "x" * size + '"'
    record(directory, [event(1, payload=large), event(2), event(3, payload=large)], roll_bytes=1)
    record(directory, [event(3, payload=large), event(4, payload=large)], roll_bytes=1)
    assert [len(each.payload or b"") for each in records(directory) if each.kind == "event"] == [
        *(size + 2, 11, size + 2, size + 2)
    ]
    assert offsets(directory) == [1, 2, 3, 4]
    verified(directory)


def test_the_configuration_finds_the_sink(directory: Path) -> None:
    settings = Settings.model_validate({"projectors": {"audit-sink": {"options": {"directory": str(directory)}}}})
    (sink,) = configured_projectors(settings)
    assert isinstance(sink, AuditSink)
    assert (sink.name, sink.on_poison, sink.lanes) == ("audit-sink", "halt", 1)


def test_one_that_never_had_its_turn_leaves_the_directory_alone(directory: Path) -> None:
    record(directory, events(1, 2))
    before = (directory / "lock").read_bytes()
    AuditTrail(directory).close()
    assert (directory / "lock").read_bytes() == before


def test_records_that_are_cut_off_behind_a_head_are_missed(directory: Path) -> None:
    record(directory, events(1, 9))
    edit(newest(directory), lambda lines: lines[:6])
    with pytest.raises(TrailBroken, match=r"ends with record 6, and a head vouches for record 10 \(offset 9\)"):
        record(directory, [event(6)])


def test_records_that_no_head_vouches_for_are_missed_at_the_next_event(directory: Path) -> None:
    record(directory, events(1, 3))
    crash(directory, events(4, 9))
    edit(newest(directory), lambda lines: lines[:6])
    with pytest.raises(TrailBroken, match=r"ends with offset 5 and the next event has offset 10: .* is not on record"):
        record(directory, [event(10)])
    record(directory, events(6, 10))  # the projector was set back
    verified(directory)


@pytest.mark.parametrize("offset", [1, 2, 50, 99, 100])
def test_another_event_under_a_recorded_offset_is_an_alarm(directory: Path, offset: int) -> None:
    record(directory, events(1, 100), roll_bytes=10_000)
    before = records(directory)
    with pytest.raises(TrailBroken, match=rf"seq {offset * 10} under offset {offset}, .* has seq 7 there"):
        record(directory, [event(offset, seq=7)])
    assert records(directory) == before


def test_a_row_that_was_changed_between_two_deliveries_is_a_violation_on_record(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(directory, events(1, 3))
    with caplog.at_level(logging.ERROR):
        record(directory, [event(2, payload='{"n": 9}'), event(3, agent="other"), event(4)])
    assert "seq 20 (offset 2) is no longer what is on record (payload)" in caplog.text
    found = [json.loads(each.payload or b"") for each in records(directory) if each.kind == "violation"]
    assert found == [
        {"what": "changed", "offset": 2, "seq": 20, "columns": ["payload"]},
        {"what": "changed", "offset": 3, "seq": 30, "columns": ["agent_id"]},
    ]
    assert offsets(directory) == [1, 2, 3, 4]
    verified(directory)


def test_a_hole_in_the_offsets_is_an_alarm(directory: Path) -> None:
    record(directory, events(1, 3))
    with pytest.raises(TrailBroken, match="ends with offset 3 and the next event has offset 5: offsets 4 to 4"):
        record(directory, [event(5)])
    assert offsets(directory) == [1, 2, 3]


def test_a_chain_that_begins_late_says_so(directory: Path) -> None:
    record(directory, events(500, 510), first=None)
    first = records(directory)[0]
    assert (first.kind, json.loads(first.payload or b"")["first_offset"]) == ("chain", 500)
    assert json.loads((directory / "manifest.json").read_bytes())["first_offset"] == 500
    assert verified(directory).first_offset == 500
    with pytest.raises(TrailBroken, match="does not hold offset 499"):
        record(directory, [event(499)])


@pytest.mark.parametrize("made", [True, False], ids=["empty", "missing"])
def test_a_directory_that_lost_its_disk_is_waited_for(directory: Path, tmp_path: Path, made: bool) -> None:
    record(directory, events(1, 5))
    away = tmp_path / "away"
    directory.rename(away)
    if made:
        directory.mkdir()
    with pytest.raises(RetryLater, match="is the disk mounted" if made else "No such file"):
        record(directory, [event(6)])
    assert directory.exists() is made
    shutil.rmtree(directory, ignore_errors=True)
    away.rename(directory)
    record(directory, [event(6)])
    assert offsets(directory) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("first", [1, None])
def test_a_directory_that_vanishes_under_a_running_sink(directory: Path, tmp_path: Path, first: int | None) -> None:
    trail = AuditTrail(directory)
    trail.record(events(1, 3), SETTINGS, first=first)
    directory.rename(tmp_path / "away")
    with pytest.raises(RetryLater, match="No such file"):
        trail.record([event(4)], SETTINGS, first=first)
    directory.mkdir()
    with pytest.raises(RetryLater, match="holds no chain"):
        trail.record([event(4)], SETTINGS, first=first)
    shutil.rmtree(directory)
    (tmp_path / "away").rename(directory)
    trail.record([event(4)], SETTINGS)
    trail.close()
    assert offsets(directory) == [1, 2, 3, 4]
    verified(directory)


class Full:
    """A disk with room for so many bytes more: the write that exceeds it is cut short, the next one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: Any, position: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, bytes(data[: self.room]), position)
        self.room -= written
        return written


@pytest.mark.parametrize("room", [1, 100, 700, 1500])
def test_a_disk_that_fills_up_leaves_no_half_record(
    directory: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    trail = AuditTrail(directory)
    trail.record(events(1, 2), SETTINGS)
    before = newest(directory).read_bytes()
    full = Full(monkeypatch, room)
    for _ in range(2):
        with pytest.raises(RetryLater, match="No space left on device"):
            trail.record(events(2, 9), SETTINGS)
        assert newest(directory).read_bytes() == before
        full.room = 0
    monkeypatch.undo()
    trail.record(events(2, 9), SETTINGS)
    trail.close()
    assert offsets(directory) == list(range(1, 10))
    verified(directory)


def test_a_disk_that_is_read_only_is_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(directory, events(1, 3))
    before = records(directory)
    opening = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opening(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(RetryLater, match="Read-only file system"):
        record(directory, events(4, 5))
    monkeypatch.undo()
    assert records(directory) == before
    record(directory, events(4, 5))
    assert offsets(directory) == [1, 2, 3, 4, 5]


def test_a_flush_that_fails_counts_for_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trail = AuditTrail(directory)
    trail.record(events(1, 2), SETTINGS)

    def failing(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(RetryLater, match="Input/output error"):
        trail.record(events(3, 4), SETTINGS)
    monkeypatch.undo()
    assert offsets(directory) == [1, 2]
    trail.record(events(3, 4), SETTINGS)
    trail.close()
    verified(directory)


def test_what_was_written_and_not_flushed_is_flushed_before_it_counts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process before was killed in between: the cursor must not pass what a power cut takes."""
    crash(directory, events(1, 3))
    flushed: list[int] = []
    flush = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    trail = AuditTrail(directory)
    trail.record(events(1, 3), SETTINGS)
    assert flushed[0] == newest(directory).stat().st_ino
    trail.close()


def test_one_flush_a_batch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trail = AuditTrail(directory)
    trail.record(events(1, 10), SETTINGS)
    flushes: list[int] = []
    flush = os.fdatasync

    def watched(descriptor: int) -> None:
        flushes.append(descriptor)
        flush(descriptor)

    monkeypatch.setattr(os, "fdatasync", watched)
    trail.record(events(11, 900), SETTINGS)
    assert len(flushes) == 1
    trail.close()


def test_two_processes_do_not_write_at_once(directory: Path) -> None:
    record(directory, events(1, 2))
    holder = Directory(directory)
    with holder.held(), pytest.raises(RetryLater, match=rf"pid {os.getpid()} is writing"):
        record(directory, [event(3)])
    holder.close()
    record(directory, [event(3)])
    assert offsets(directory) == [1, 2, 3]


def test_one_that_was_replaced_sees_what_the_other_wrote(directory: Path) -> None:
    first, second = AuditTrail(directory, roll_bytes=1500), AuditTrail(directory, roll_bytes=1500)
    first.record(events(1, 2), SETTINGS)
    second.record(events(1, 5), SETTINGS)
    second.record(events(6, 9), SETTINGS)
    first.record(events(3, 10), SETTINGS)
    second.record(events(10, 12), SETTINGS)
    first.close()
    second.close()
    assert offsets(directory) == list(range(1, 13))
    verified(directory)


def test_segments_are_closed_by_size_compressed_and_made_read_only(directory: Path) -> None:
    record(directory, events(1, 300), batch=10, roll_bytes=20_000)
    segments = segments_in(directory)
    assert len(segments) > 5
    settle(directory, event(300))
    for segment in segments_in(directory)[:-1]:
        assert segment.plain is None
        assert segment.packed is not None
        assert segment.packed.stat().st_mode & 0o777 == 0o444
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert [each["first_n"] for each in manifest["segments"]] == [s.first_n for s in segments_in(directory)[:-1]]
    assert verified(directory).events == 300
    closed = {head.n for head in read_heads(directory / "heads.jsonl")}
    assert {each["last_n"] for each in manifest["segments"]} <= closed


def test_segments_are_closed_by_age(directory: Path) -> None:
    record(directory, events(1, 5), roll_seconds=3600)
    record(directory, events(6, 7), roll_seconds=3600)
    assert len(segments_in(directory)) == 1
    time.sleep(0.02)
    record(directory, events(8, 9), roll_seconds=0.01)
    assert len(segments_in(directory)) == 2
    verified(directory)


def test_a_crash_while_a_segment_is_closed_is_made_good(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with the plain file still there, with the compressed one beside it, and half of it under another name."""
    monkeypatch.setattr("walstream.audit.packing.Packer.start", lambda *_: None)
    record(directory, events(1, 60), batch=10, roll_bytes=5_000)
    monkeypatch.undo()
    plain = [segment.name for segment in segments_in(directory)[:-1]]
    assert len(plain) > 2
    (directory / f".{plain[0]}.zst.1234").write_bytes(b"half")
    pack(segments_in(directory)[1])
    settle(directory, event(60))
    assert not list(directory.glob(".*"))
    assert [segment.plain for segment in segments_in(directory)[:-1]] == [None] * len(plain)
    verified(directory)


@pytest.mark.parametrize("content", [b"", b'{"format": 1, "chain', b'{"format": 9}', None])
def test_a_manifest_that_is_damaged_or_gone_is_made_anew(directory: Path, content: bytes | None) -> None:
    record(directory, events(1, 60), batch=10, roll_bytes=5_000)
    settle(directory, event(60))
    right = json.loads((directory / "manifest.json").read_bytes())
    if content is None:
        (directory / "manifest.json").unlink()
    else:
        (directory / "manifest.json").write_bytes(content)
    settle(directory, event(60))
    made = json.loads((directory / "manifest.json").read_bytes())
    assert made == right
    verified(directory)
    if content is not None:
        (aside,) = (directory / SIDE_FOLDER).iterdir()
        assert aside.read_bytes() == content


def test_events_that_are_long_on_record_are_compared_through_closed_segments(directory: Path) -> None:
    record(directory, events(1, 300), batch=10, roll_bytes=20_000)
    record(directory, events(1, 305), batch=7)
    assert offsets(directory) == list(range(1, 306))
    with pytest.raises(TrailBroken, match="under offset 17,"):
        record(directory, [*events(15, 16), event(17, seq=1)])


# -- the projector -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "reason"), [({"lanes": 2}, "a chain has one order"), ({"events": ("a",)}, "takes all events")]
)
def test_lanes_and_filters_are_refused(directory: Path, option: dict[str, Any], reason: str) -> None:
    sink = AuditSink(directory)
    for name, value in option.items():
        setattr(sink, name, value)
    with pytest.raises(ConfigError, match=reason):
        sink.setup(Context("audit-sink"))


def test_lanes_of_the_configuration_are_refused(directory: Path) -> None:
    settings = Settings.model_validate({"projectors": {"audit-sink": {"lanes": 3}}})
    with pytest.raises(ConfigError, match="has 3 lanes"):
        AuditSink(directory).setup(Context("audit-sink", settings=settings))


@pytest.mark.parametrize(("start", "first"), [("latest", 70), (70, 70)])
def test_a_late_start_is_the_configurations_to_say(directory: Path, start: Any, first: int) -> None:
    settings = Settings.model_validate({"projectors": {"audit-sink": {"start": start}}})
    sink = AuditSink(directory)
    sink.project(events(70, 75), Context("audit-sink", settings=settings))
    sink.close()
    assert verified(directory).first_offset == first


@pytest.mark.parametrize(
    "options",
    [{"head_every": 0}, {"heads_to": "s3://nowhere"}, {"heads_to": "table:a.b.c"}, {"key": "/nowhere/key.pem"}],
)
def test_options_that_make_no_sense_are_refused(directory: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AuditSink(directory, **options)
