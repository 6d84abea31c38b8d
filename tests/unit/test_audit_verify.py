"""Verification finds whatever was done to a trail, and names the first difference."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.audit_files import SETTINGS, crash, edit, event, events, newest, record, records, settle, verified
from walstream import Event, RetryLater
from walstream.audit import verifying
from walstream.audit.heads import heads_in, make_head, read_heads
from walstream.audit.keys import ENVIRONMENT, Verifier, generate, load_signer, load_verifier
from walstream.audit.record import ERASURE, Pen, parse, without_payload
from walstream.audit.segments import name_of, read_lines, segments_in
from walstream.audit.trail import AuditTrail
from walstream.audit.verifying import Finding, Report, verify
from walstream.errors import ConfigError

LAST = 120


class Trail:
    """A trail of several segments with signed heads, here and in a second place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "audit"
        self.key = folder / "key"
        self.public, self.key_id = generate(self.key)
        self.second = folder / "second"
        self.second.mkdir()
        self.record(events(1, LAST))
        settle(self.directory, event(LAST), key=self.key)

    def record(self, some: Sequence[Event]) -> None:
        record(self.directory, some, batch=10, roll_bytes=15_000, key=self.key, heads_to=str(self.second))

    @property
    def verifier(self) -> Verifier:
        return load_verifier(self.public)

    def verify(self, *, second: bool = True) -> Report:
        others = read_heads(self.second) if second else []
        return verify(self.directory, verifier=self.verifier, other_heads=others)

    def first(self) -> Finding:
        report = self.verify()
        assert report.findings, "nothing was found"
        return report.findings[0]

    def remade(self, directory: Path, last: int, *, key: Path | None = None) -> None:
        """Another chain, with one event that is not what it was, in the place of this one."""
        shutil.rmtree(directory)
        some = [event(n) if n != 50 else event(n, payload='{"n": 0}') for n in range(1, last + 1)]
        record(directory, some, batch=10, roll_bytes=15_000, key=key)
        settle(directory, some[-1], key=key)


@pytest.fixture
def trail(tmp_path: Path) -> Trail:
    return Trail(tmp_path)


def test_a_trail_that_nobody_touched(trail: Trail) -> None:
    report = trail.verify()
    assert report.findings == []
    assert report.notes == []
    assert len(segments_in(trail.directory)) > 3
    assert (report.events, report.first_offset, report.last_offset) == (LAST, 1, LAST)
    assert report.vouched_n == report.last_n == LAST + 1
    assert report.signed == report.heads > 6


def test_the_segments_in_several_processes_say_the_same(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trail.verify()
    monkeypatch.setattr(verifying, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert trail.verify() == alone


@pytest.mark.parametrize("where", [0, 1, -1])
def test_an_edited_segment(trail: Trail, where: int) -> None:
    """Closed ones, compressed anew, as well as the one that is written to."""
    segment = segments_in(trail.directory)[where]
    n = segment.first_n + 5
    edit(segment, lambda lines: [line.replace(b"1.50", b"1.51") if parse(line).n == n else line for line in lines])
    assert trail.first() == Finding(
        "chain", "its payload is not what its digest was made over", segment.path.name, n, n - 1, (n - 1) * 10
    )


def test_a_record_whose_digests_were_made_anew(trail: Trail) -> None:
    """The edited record is sound by itself; the next one does not follow from it."""
    segment = segments_in(trail.directory)[1]

    def change(lines: list[bytes]) -> list[bytes]:
        old = parse(lines[4])
        pen = Pen(old.n - 1, old.prev)
        assert old.offset
        forged = pen.event(event(old.offset, payload='{"n": 0}'), b'"2026-01-01T00:00:00.000+00:00"').rstrip(b"\n")
        return [*lines[:4], forged, *lines[5:]]

    edit(segment, change)
    found = trail.first()
    assert (found.kind, found.n) == ("chain", segment.first_n + 5)
    assert "does not follow from the record before" in found.what


def test_two_records_that_were_swapped(trail: Trail) -> None:
    segment = segments_in(trail.directory)[1]
    edit(segment, lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]])
    found = trail.first()
    assert (found.kind, found.segment, found.n) == ("chain", segment.path.name, segment.first_n + 3)
    assert found.what == f"number {segment.first_n + 3} is to come, and this is number {segment.first_n + 4}"


@pytest.mark.parametrize("where", [0, 1])
def test_a_segment_that_is_gone(trail: Trail, where: int) -> None:
    segments = segments_in(trail.directory)
    segments[where].path.unlink()
    report = trail.verify()
    first, after = segments[where].first_n, segments[where + 1].first_n
    assert (report.findings[0].kind, report.findings[0].n) == ("chain", first)
    assert report.findings[0].what == f"records {first} to {after - 1} are not here"
    assert (
        Finding("manifest", "it is in the manifest, and not here", segments[where].path.name, first) in report.findings
    )


def test_the_last_segment_is_gone_and_its_heads_with_it(trail: Trail) -> None:
    """Nothing in the directory says that there was more; the second place does."""
    last = segments_in(trail.directory)[-1]
    last.path.unlink()
    kept = [head for head in read_heads(trail.directory / "heads.jsonl") if head.n < last.first_n]
    (trail.directory / "heads.jsonl").write_bytes(b"".join(head.line for head in kept))
    assert trail.verify(second=False).findings == []
    found = trail.first()
    assert found.kind == "head"
    assert f"the chain ends with record {last.first_n - 1}, and a head vouches for more: it was cut off" in found.what


def test_the_last_segment_is_gone(trail: Trail) -> None:
    segments_in(trail.directory)[-1].path.unlink()
    report = trail.verify(second=False)
    assert [(each.kind, "it was cut off" in each.what) for each in report.findings] == [("head", True)]


def test_a_chain_that_was_made_anew_without_the_key(trail: Trail) -> None:
    trail.remade(trail.directory, LAST)
    report = verify(trail.directory, verifier=trail.verifier)
    assert [each.kind for each in report.findings] == ["head", "head"]
    assert "it is not signed" in report.findings[0].what
    assert "no head is signed with this key" in report.findings[1].what
    assert "it is of another chain" in trail.verify().findings[1].what


def test_a_chain_that_was_made_anew_with_another_key(trail: Trail) -> None:
    other = trail.folder / "other"
    generate(other)
    trail.remade(trail.directory, LAST, key=other)
    assert f"its signature is not of the key {trail.key_id}" in trail.first().what


def test_a_chain_that_was_made_anew_behind_its_old_heads(trail: Trail) -> None:
    heads = (trail.directory / "heads.jsonl").read_bytes()
    trail.remade(trail.directory, LAST)
    (trail.directory / "heads.jsonl").write_bytes(heads)
    found = trail.first()
    assert found.kind == "head"
    assert "it is of another chain" in found.what


def test_a_tail_that_was_made_anew_behind_the_last_head_that_was_left(trail: Trail) -> None:
    """Whoever cuts heads off so that his own records follow: closed segments without a head are noticed."""
    kept = read_heads(trail.directory / "heads.jsonl")[0]
    (trail.directory / "heads.jsonl").write_bytes(kept.line)
    report = verify(trail.directory, verifier=trail.verifier)
    (found,) = report.findings
    assert found.kind == "head"
    assert f"no head vouches for the records behind {kept.n}" in found.what


def test_a_head_that_was_edited(trail: Trail) -> None:
    path = trail.directory / "heads.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"offset":', b'"offset":9')
    path.write_bytes(b"".join(lines))
    found = trail.first()
    assert found.kind == "head"
    assert f"its signature is not of the key {trail.key_id}" in found.what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text[: len(text) // 2], "manifest.json is no manifest"),
        (lambda _text: b"", "manifest.json is no manifest"),
        (lambda text: text.replace(b'"last_n": ', b'"last_n": 1', 1), "the manifest says another last record"),
        (lambda text: text.replace(b'"sha256": "', b'"sha256": "0', 1), "the manifest says another digest of the file"),
        (None, "there is no manifest.json"),
    ],
    ids=["cut", "emptied", "number", "digest", "gone"],
)
def test_a_manifest_that_was_changed(trail: Trail, change: Callable[[bytes], bytes] | None, what: str) -> None:
    path = trail.directory / "manifest.json"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    report = trail.verify()
    assert report.events == LAST, "the records are believed and not the manifest"
    (found,) = report.findings
    assert found.kind == "manifest"
    assert what in found.what


def test_a_compressed_segment_that_is_damaged(trail: Trail) -> None:
    path = segments_in(trail.directory)[1].path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)
    found = trail.first()
    assert (found.kind, found.segment) == ("chain", path.name)
    assert found.n is not None


def test_a_compressed_segment_that_is_cut_off(trail: Trail) -> None:
    path = segments_in(trail.directory)[1].path
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)
    assert trail.first().kind == "chain"


def test_a_line_that_is_being_written_is_no_difference(trail: Trail) -> None:
    with newest(trail.directory).open("ab") as file:
        file.write(b'{"hash":"')
    report = trail.verify()
    assert report.findings == []
    assert report.notes == [f"behind record {LAST + 1} a line is not complete: it is being written, or torn"]


def test_a_segment_that_was_just_begun_may_hold_half_a_line(trail: Trail) -> None:
    last = records(trail.directory)[-1]
    (trail.directory / name_of(last.n + 1, LAST + 1)).write_bytes(b'{"hash":"12')
    report = trail.verify()
    assert report.findings == []
    assert report.notes[0] == f"behind record {LAST + 1} a line is not complete: it is being written, or torn"


def test_it_is_verified_while_it_is_written(trail: Trail) -> None:
    """Segments are begun, closed and compressed between any two looks."""
    done = threading.Event()

    def write() -> None:
        sink = AuditTrail(trail.directory, key=trail.key, roll_bytes=6_000, head_every=3)
        try:
            for offset in range(LAST + 1, LAST + 120):
                sink.record([event(offset)], SETTINGS)
        finally:
            sink.close()
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reports = []
    while not done.is_set():
        reports.append(verify(trail.directory, verifier=trail.verifier))
    writer.join()
    assert [report.findings for report in reports] == [[]] * len(reports)
    assert len({report.last_n for report in reports}) > 3


def test_records_behind_the_last_head_are_told(trail: Trail) -> None:
    crash(trail.directory, events(LAST + 1, LAST + 5), key=trail.key)
    report = trail.verify()
    assert report.findings == []
    assert report.notes == ["the last 5 records are under no head yet"]


def test_without_a_key_signatures_are_not_looked_at(tmp_path: Path) -> None:
    record(tmp_path / "audit", events(1, 5))
    report = verified(tmp_path / "audit")
    assert report.notes == ["signatures were not looked at: give the public key with --key"]


def test_a_stretch_of_offsets(trail: Trail) -> None:
    segments = segments_in(trail.directory)
    report = verify(
        trail.directory, verifier=trail.verifier, first=segments[1].next_offset + 2, last=segments[2].next_offset
    )
    assert report.findings == []
    assert (report.first_n, report.last_n) == (segments[1].first_n, segments[3].first_n - 1)
    edit(segments[1], lambda lines: [*lines[:3], lines[3].replace(b"1.50", b"1.60"), *lines[4:]])
    assert verify(trail.directory, first=segments[2].next_offset).findings == []
    assert verify(trail.directory, last=segments[1].next_offset).findings[0].n == segments[1].first_n + 3


def with_erasure(trail: Trail, first: int, last: int) -> int:
    """Append the record of an erasure of records ``first`` to ``last``; return its number."""
    path = newest(trail.directory)
    end = records(trail.directory)[-1]
    pen = Pen(end.n, end.hash)
    line = pen.other(ERASURE, {"records": [[first, last]], "reason": "asked for"}, b'"2026-01-02T00:00:00+00:00"')
    with path.open("ab") as file:
        file.write(line)
    return pen.n


def blanked(trail: Trail, n: int, erasure: int) -> None:
    segment = next(each for each in reversed(segments_in(trail.directory)) if each.first_n <= n)
    edit(segment, lambda lines: [without_payload(line, erasure) if parse(line).n == n else line for line in lines])


def test_a_payload_that_was_erased_by_declaration_still_verifies(trail: Trail) -> None:
    erasure = with_erasure(trail, 30, 40)
    blanked(trail, 33, erasure)
    report = trail.verify()
    assert [each.kind for each in report.findings] == ["manifest"], "the file is another one, and the chain is not"
    assert (report.blanked, report.events) == (1, LAST)


@pytest.mark.parametrize("n", [29, 41])
def test_a_payload_that_was_removed_without_a_declaration(trail: Trail, n: int) -> None:
    erasure = with_erasure(trail, 30, 40)
    blanked(trail, n, erasure)
    report = trail.verify()
    (found,) = [each for each in report.findings if each.kind == "erasure"]
    assert (found.n, found.what) == (n, f"its payload was removed, and record {erasure} does not declare that")


EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "verify_audit.py"


def without_walstream(directory: Path, *key: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(EXAMPLE), str(directory), *map(str, key)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_anyone_verifies_it_by_the_format_alone(trail: Trail) -> None:
    assert "walstream" not in "".join(re.findall(r"^(?:from|import) (\w+)", EXAMPLE.read_text(), re.MULTILINE))
    awkward = ['{"a":\n1.10}', '{"e": 1e400}', '{"x": {}, "payload": {}, "erased": 5}', '"\\u0000"']
    trail.record([event(LAST + n, payload=payload) for n, payload in enumerate(awkward, 1)])
    erasure = with_erasure(trail, 30, 40)
    blanked(trail, 33, erasure)
    found = without_walstream(trail.directory, trail.public)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"{erasure} records up to offset {LAST + 4} follow")
    edit(segments_in(trail.directory)[1], lambda lines: [lines[0].replace(b"1.50", b"1.51"), *lines[1:]])
    found = without_walstream(trail.directory, trail.public)
    assert found.returncode
    assert "payload of record" in found.stderr


def test_anyone_notices_another_key(trail: Trail) -> None:
    public, _ = generate(trail.folder / "other")
    assert without_walstream(trail.directory).returncode == 0
    assert "InvalidSignature" in without_walstream(trail.directory, public).stderr


def test_a_directory_without_a_trail_is_refused(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            verify(where)


def test_a_second_place_may_hold_heads_of_other_chains(trail: Trail, tmp_path: Path) -> None:
    other = tmp_path / "other"
    record(other, events(1, 5), key=trail.key, heads_to=str(trail.second))
    report = trail.verify()
    assert report.findings == []
    assert [note.split(";")[0] for note in report.notes] == ["the second place holds heads of other chains as well"]
    found = verify(other, verifier=trail.verifier, other_heads=[h for h in read_heads(trail.second) if h.n > 6])
    assert "it is of another chain" in found.findings[0].what


# -- heads and keys ----------------------------------------------------------------------------------------------------


def test_heads_are_found_in_whatever_they_were_printed_into() -> None:
    head = make_head("c" * 64, 5, "h" * 64, 4, None)
    log = b"2026-01-02 INFO x\n12:00 " + head.line + b'{"head":{"n":"x"},"signature":null}\n' + head.line
    assert list(heads_in(log)) == [head, head]


def test_a_key_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    generate(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(ConfigError, match="cannot be made"):
        generate(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == before


def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(tmp_path / "key")
    assert load_signer(None) is None
    monkeypatch.setenv(ENVIRONMENT, (tmp_path / "key").read_text())
    signer = load_signer(None)
    assert signer is not None
    head = make_head("c" * 64, 5, "h" * 64, 4, signer)
    assert head.fault(load_verifier(tmp_path / "key.pub")) is None
    assert head.key == load_verifier(tmp_path / "key").id


RSA = "-----BEGIN PUBLIC KEY-----\nMFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAL5\n-----END PUBLIC KEY-----\n"


@pytest.mark.parametrize("content", ["", "nothing", RSA])
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError):
        load_verifier(tmp_path / "key")


def test_a_public_key_does_not_sign(tmp_path: Path) -> None:
    public, _ = generate(tmp_path / "key")
    with pytest.raises(ConfigError, match="holds a public key"):
        load_signer(public)


def test_a_second_place_that_is_away_is_waited_for(tmp_path: Path) -> None:
    directory, second = tmp_path / "audit", tmp_path / "second"
    with pytest.raises(RetryLater, match="heads cannot be written to"):
        record(directory, events(1, 3), heads_to=str(second))
    second.mkdir()
    record(directory, events(1, 4), heads_to=str(second))
    assert [head.n for head in read_heads(second)] == [head.n for head in read_heads(directory / "heads.jsonl")] == [5]
    assert [len(lines) for lines in read_lines(newest(directory))] == [5]
