"""Payloads are taken out of segments that an erasure declares, and the chain is what it was."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import event, record, records
from tests.unit.test_audit_verify import EXAMPLE, Trail, with_erasure
from walstream.audit import verifying
from walstream.audit.blanking import Unfinished, archived, blank, find, put_aside, ranges_of
from walstream.audit.manifest import Manifest
from walstream.audit.segments import remove_scratch, segments_in
from walstream.audit.verifying import verify


@pytest.fixture
def trail(tmp_path: Path) -> Trail:
    return Trail(tmp_path)


def manifest_of(trail: Trail) -> Manifest:
    manifest = Manifest.read(trail.directory)
    assert manifest is not None
    return manifest


def test_what_is_declared_goes_and_everything_verifies(trail: Trail) -> None:
    before = records(trail.directory)
    modes = {each.path.name: stat.S_IMODE(each.path.stat().st_mode) for each in segments_in(trail.directory)}
    erasure = with_erasure(trail, 5, 90)
    assert blank(trail.directory, {erasure: [(5, 90)]}, manifest_of(trail))
    now = records(trail.directory)
    assert [each.n for each in now if each.payload is None] == list(range(5, 91))
    assert {each.erased_by for each in now} == {None, erasure}
    assert [(each.hash, each.header) for each in now][:-1] == [(each.hash, each.header) for each in before]
    assert {each.path.name: stat.S_IMODE(each.path.stat().st_mode) for each in segments_in(trail.directory)} == modes
    report = trail.verify()
    assert (report.findings, report.blanked) == ([], 86)
    called = subprocess.run([sys.executable, "-I", str(EXAMPLE), str(trail.directory)], capture_output=True, text=True)
    assert called.returncode == 0, called.stderr
    assert not blank(trail.directory, {erasure: [(5, 90)]}, manifest_of(trail)), "and once is enough"


def test_only_segments_that_hold_some_are_written_anew(trail: Trail) -> None:
    before = {each.path: each.path.stat() for each in segments_in(trail.directory)}
    second = segments_in(trail.directory)[1]
    erasure = with_erasure(trail, second.first_n, second.first_n)
    blank(trail.directory, {erasure: [(second.first_n, second.first_n)]}, manifest_of(trail))
    changed = [path for path, was in before.items() if path.stat().st_ino != was.st_ino]
    assert changed == [second.path]


@pytest.mark.parametrize("at", range(8))
def test_stopped_anywhere_it_is_made_good_by_doing_it_again(
    trail: Trail, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before and after each rename, and before the manifest is written."""
    erasure = with_erasure(trail, 5, 90)
    calls = [0]
    rename = Path.rename

    def stopping(self: Path, target: Path) -> Path:
        calls[0] += 1
        if calls[0] == at // 2 + 1 and at % 2 == 0:
            raise KeyboardInterrupt
        made = rename(self, target)
        if calls[0] == at // 2 + 1:
            raise KeyboardInterrupt
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopping)
        patch.setattr(Path, "unlink", lambda *_args, **_options: None)  # a process that is killed tidies nothing
        with pytest.raises(KeyboardInterrupt):
            blank(trail.directory, {erasure: [(5, 90)]}, manifest_of(trail))
    remove_scratch(trail.directory)
    assert not any(entry.name.startswith(".") for entry in os.scandir(trail.directory))
    blank(trail.directory, {erasure: [(5, 90)]}, manifest_of(trail))
    report = trail.verify()
    assert (report.findings, report.blanked) == ([], 86)


def test_a_full_disk_leaves_the_segment_as_it_was(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    erasure = with_erasure(trail, 5, 90)
    before = {each.path: each.path.read_bytes() for each in segments_in(trail.directory)}
    with monkeypatch.context() as patch:

        def full(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("walstream.audit.segments.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            blank(trail.directory, {erasure: [(5, 90)]}, manifest_of(trail))
    assert {each.path: each.path.read_bytes() for each in segments_in(trail.directory)} == before
    assert not any(entry.name.startswith(".") for entry in os.scandir(trail.directory))


def test_records_are_found_by_offset(trail: Trail) -> None:
    found = find(trail.directory, [3, 77, 78, 400], "s")
    assert find(trail.directory, [3, 77, 78, 400], "another") == []
    by_n = {each.n: each for each in records(trail.directory)}
    assert [by_n[each.n].offset for each in found] == [3, 77, 78]
    assert [each.sha256 for each in found] == [by_n[each.n].sha256.decode() for each in found]
    erasure = with_erasure(trail, found[1].n, found[1].n)
    blank(trail.directory, {erasure: [(found[1].n, found[1].n)]}, manifest_of(trail))
    assert [each.n for each in find(trail.directory, [3, 77, 78], "s")] == [found[0].n, found[2].n]


def test_payloads_with_line_breaks(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    record(directory, [event(1, payload='{"a":\n1}'), event(2)])
    erasure = 4
    assert blank(directory, {erasure: [(2, 2)]}, Manifest())
    assert [each.payload is None for each in records(directory)] == [False, True, False]


def test_copies_and_what_was_put_aside_are_named(trail: Trail) -> None:
    manifest = manifest_of(trail)
    holder = manifest.segments[1]
    manifest.add(type(holder)(**{**{name: getattr(holder, name) for name in holder.__slots__}, "archived": "s3://x"}))
    assert archived(manifest, [(holder.first_n, holder.first_n)]) == ["s3://x"]
    assert archived(manifest, [(1, 1)]) == []
    folder = trail.directory / "torn"
    folder.mkdir()
    (folder / "one").write_bytes(b'half a record of session-7 "')
    (folder / "two").write_bytes(b"of another")
    assert put_aside(folder, "session-7") == ["one"]
    assert put_aside(trail.folder / "none", "session-7") == []


def test_ranges() -> None:
    assert ranges_of([]) == []
    assert ranges_of([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 7), (9, 10)]


def test_a_stretch_verifies_though_the_erasure_stands_behind_it(trail: Trail) -> None:
    erasure = with_erasure(trail, 5, 9)
    blank(trail.directory, {erasure: [(5, 9)]}, manifest_of(trail))
    report = verify(trail.directory, last=10)
    assert (report.findings, report.blanked) == ([], 5)
    assert report.last_n < erasure
    other = with_erasure(trail, 50, 50)
    blank(trail.directory, {other: [(6, 12)]}, manifest_of(trail))  # more than it declares
    assert {each.n for each in verify(trail.directory, last=10).findings} == {10, 11, 12}


def test_it_can_be_verified_while_payloads_are_erased(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the manifest and the look at a segment."""
    erasure = with_erasure(trail, 5, 9)
    check_all = verifying._check_all

    def meanwhile(*arguments: Any) -> Any:
        blank(trail.directory, {erasure: [(5, 9)]}, manifest_of(trail))
        return check_all(*arguments)

    monkeypatch.setattr(verifying, "_check_all", meanwhile)
    assert trail.verify().findings == []


def test_it_is_done_in_goes_that_get_on(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    erasure = with_erasure(trail, 5, 115)
    ticks = iter(range(1000))
    monkeypatch.setattr("walstream.audit.blanking.time.monotonic", lambda: next(ticks))
    done: set[tuple[int, str, int]] = set()
    for _ in range(10):
        with contextlib.suppress(Unfinished):
            blank(trail.directory, {erasure: [(5, 115)]}, manifest_of(trail), done=done, seconds=2)
            break
    assert next(ticks) > 6
    report = trail.verify()
    assert (report.findings, report.blanked) == ([], 111)
    assert len(done) == len(segments_in(trail.directory)) - 1
    another = with_erasure(trail, 2, 3)  # what is done is done for the others
    assert blank(trail.directory, {erasure: [(5, 115)], another: [(2, 3)]}, manifest_of(trail), done=done)
    assert trail.verify().blanked == 113
