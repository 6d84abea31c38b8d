"""Verifying a trail: its chain, the signatures of its heads, offsets without a hole, the manifest against the files.

The records alone are believed, and only as far as their hashes go; the manifest is compared with them, and heads say
whether they are still the ones that were vouched for, up to the last.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from walstream.errors import ConfigError

from .blank_check import blanks, is_right_now
from .heads import NAME as HEADS
from .heads import Head, read_heads
from .keys import Verifier
from .manifest import BadManifest, Closed, Manifest
from .record import NO_HASH
from .segment_check import Checked, check_segment
from .segments import MiB, Segment, as_it_is_now, segments_in

SECOND: Final = "the second place"
_DIGEST: Final = "digest of the file"
_WORTH_A_PROCESS: Final = 48 * MiB
"""Segments of less than this together are checked sooner than another process starts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it must be.

    Attributes:
        kind: ``chain``, ``head``, ``manifest``, ``erasure``, or (against the ledger) ``missing``, ``altered``,
            ``extra``, ``order``.
        what: in words.
        segment: the file.
        n, offset, seq: of the record.
    """

    kind: str
    what: str
    segment: str | None = None
    n: int | None = None
    offset: int | None = None
    seq: int | None = None


@dataclass(slots=True)
class Report:
    """What verification found.

    Attributes:
        records, events: how many are sound.
        first_n, last_n, first_offset, last_offset: from where to where.
        heads, signed: heads of this chain, and how many of them carry a good signature (0 if no key was given).
        vouched_n: the last record that a sound head vouches for.
        blanked: records whose payload was removed by a declared erasure.
        violations, changes: records of violations, and how many changes of the ledger they stand for.
        erasures: declared erasures that are on record.
        findings: the first difference in the chain comes first.
        notes: what one should know and nobody need mend.
    """

    records: int = 0
    events: int = 0
    first_n: int = 0
    last_n: int = 0
    first_offset: int | None = None
    last_offset: int | None = None
    heads: int = 0
    signed: int = 0
    vouched_n: int = 0
    blanked: int = 0
    violations: int = 0
    changes: int = 0
    erasures: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def chosen_segments(directory: Path, first: int | None = None, last: int | None = None) -> list[Segment]:
    """The segments that hold the offsets ``first`` to ``last``.

    Raises:
        ConfigError: the directory is not there, or holds no trail.
    """
    try:
        found = segments_in(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from None
    if not found:
        raise ConfigError(
            f"{directory} holds no audit trail", hint="name the directory that the audit sink writes into"
        )
    ends = [segment.next_offset - 1 for segment in found[1:]] + [None]
    return [
        segment
        for segment, end in zip(found, ends, strict=True)
        if (first is None or end is None or end >= first) and (last is None or segment.next_offset <= last)
    ]


def about_how_many(segments: Sequence[Segment]) -> int:
    """About how many records there are, by the names of the segments and the size of the last."""
    return segments[-1].first_n - segments[0].first_n + _plain_size(segments[-1]) // 800 if segments else 0


def verify(
    directory: Path,
    *,
    verifier: Verifier | None = None,
    other_heads: Sequence[Head] = (),
    first: int | None = None,
    last: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Verify a trail.

    Args:
        verifier: the public key; without it signatures are not looked at.
        other_heads: from the second place.
        first, last: only the segments that hold these offsets.
        progress: told how many records more were checked.

    Raises:
        ConfigError: there is no trail.
        OSError: a file cannot be read.
    """
    report = Report()
    # In this order, because it may be written to meanwhile: what heads and manifest speak of is in the segments then.
    own_heads = _own_heads(directory)
    manifest = _read_manifest(directory, report)
    segments = chosen_segments(directory, first, last)
    every = [*((head, HEADS) for head in own_heads), *((head, SECOND) for head in other_heads)]
    wanted = {1, *(head.n for head, _ in every)}
    checked = list(_check_all(segments, wanted, progress))
    _follow(checked, segments, first is not None, report)
    if manifest is not None:
        _compare(directory, manifest, checked, first is None and last is None, report)
    chain = _chain(checked, manifest)
    whole_to_the_end = last is None and not any(finding.kind == "chain" for finding in report.findings)
    _judge_heads(_of_this_chain(every, chain, report), chain, checked, verifier, whole_to_the_end, report)
    if whole_to_the_end and (every or verifier is not None):
        _judge_closed(directory, checked, verifier, report)
    _judge_blanks(directory, checked, report)
    return report


# -- the chain ---------------------------------------------------------------------------------------------------------


def _check_all(segments: list[Segment], wanted: set[int], progress: Callable[[int], None] | None) -> Iterator[Checked]:
    workers = min(os.cpu_count() or 1, len(segments), 8)
    if workers < 2 or sum(_plain_size(segment) for segment in segments) < _WORTH_A_PROCESS:
        for segment in segments:
            yield check_segment(segment, wanted, progress)
        return
    # `spawn`: this process has threads (a progress bar), and a fork with threads may hang.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for checked in pool.map(partial(check_segment, wanted=wanted), segments):
            if progress is not None:
                progress(checked.records)
            yield checked


def _plain_size(segment: Segment) -> int:
    size = as_it_is_now(segment.path).stat().st_size
    return size if segment.packed is None else size * 8


def _follow(checked: list[Checked], segments: list[Segment], begins_later: bool, report: Report) -> None:
    """Put the segments behind one another, and note the first place where they do not fit."""
    n, hash_, offset = 0, NO_HASH, None
    broken = False
    for index, each in enumerate(checked):
        newest = index == len(checked) - 1
        if each.records or each.fault:
            if index == 0:
                report.first_n, report.first_offset = each.first_n, each.link.begins
            if not broken and (index or not begins_later):
                seam = _seam(each, segments[index], n, hash_, offset)
                if seam is not None:
                    report.findings.append(seam)
                    broken = True
        if each.fault is not None:
            if newest and each.unfinished and each.n is not None:
                report.notes.append(f"behind record {each.n - 1} a line is not complete: it is being written, or torn")
            elif not broken:
                report.findings.append(Finding("chain", each.fault, each.name, each.n, each.offset, each.seq))
                broken = True
        report.records += each.records
        report.events += each.link.events
        report.violations += each.link.violations
        report.changes += each.link.changes
        report.erasures += each.link.declared
        if each.records:
            n, hash_ = each.link.n, each.link.hash
            offset = each.link.offset if each.link.offset is not None else offset
            report.last_n, report.last_offset = n, offset


def _seam(each: Checked, segment: Segment, n: int, hash_: bytes, offset: int | None) -> Finding | None:
    if not each.records:
        return None  # its own fault says more
    begins = each.link.begins
    if each.first_n != n + 1:
        missing = f"records {n + 1} to {each.first_n - 1} are not here" if each.first_n > n + 1 else "it comes twice"
        return Finding("chain", missing, each.name, n + 1, None if offset is None else offset + 1)
    if each.prev != hash_:
        return Finding(
            "chain", "its first record does not follow from the segment before", each.name, each.first_n, begins
        )
    if offset is not None and begins is not None and begins != offset + 1:
        return Finding(
            "chain", f"offset {offset + 1} is to come, and this is offset {begins}", each.name, each.first_n, begins
        )
    if each.first_n != segment.first_n:
        return Finding("chain", "its name says another first record than it has", each.name, each.first_n, begins)
    return None


def _chain(checked: list[Checked], manifest: Manifest | None) -> str | None:
    """The chain's name: the hash of its first record."""
    first = next((each for each in checked if each.first_n == 1), None)
    if first is not None and 1 in first.link.hashes:
        return first.link.hashes[1].decode()
    return manifest.chain if manifest else None


# -- the manifest ------------------------------------------------------------------------------------------------------


def _read_manifest(directory: Path, report: Report) -> Manifest | None:
    try:
        manifest = Manifest.read(directory)
    except BadManifest as error:
        report.findings.append(Finding("manifest", str(error)))
        return None
    if manifest is None and directory.is_dir():
        report.findings.append(Finding("manifest", "there is no manifest.json"))
    return manifest


def _compare(directory: Path, manifest: Manifest, checked: list[Checked], whole: bool, report: Report) -> None:
    """Compare what the manifest says with what the segments are."""
    by_name = {each.name: each for each in checked}
    for closed in manifest.segments:
        each = by_name.get(closed.file) or by_name.get(closed.file.removesuffix(".zst"))
        if each is not None:
            wrong = _unlike(closed, each)
            if wrong == _DIGEST and is_right_now(directory, closed.first_n):
                continue  # payloads in it were erased while this went on
            if wrong is not None:
                report.findings.append(
                    Finding("manifest", f"the manifest says another {wrong}", closed.file, closed.first_n)
                )
        elif whole and closed.archived:
            report.notes.append(f"{closed.file} is not here; a copy stands at {closed.archived}")
        elif whole:
            report.findings.append(
                Finding("manifest", "it is in the manifest, and not here", closed.file, closed.first_n)
            )


def _unlike(closed: Closed, each: Checked) -> str | None:
    if each.fault is not None:
        return None  # the chain's finding says more
    pairs = {
        "first record": (closed.first_n, each.first_n),
        "last record": (closed.last_n, each.link.n),
        "hash of the first record's predecessor": (closed.prev, each.prev.decode()),
        "hash of the last record": (closed.hash, each.link.hash.decode()),
        _DIGEST: (closed.sha256, each.sha256 or closed.sha256),
    }
    return next((what for what, (said, found) in pairs.items() if said != found), None)


# -- heads and erasures ------------------------------------------------------------------------------------------------


def _judge_heads(
    heads: Sequence[tuple[Head, str]],
    chain: str | None,
    checked: list[Checked],
    verifier: Verifier | None,
    whole_to_the_end: bool,
    report: Report,
) -> None:
    hashes: dict[int, bytes] = {}
    for each in checked:
        hashes.update(each.link.hashes)
    faults: dict[tuple[str, str], Finding] = {}  # one of a kind is enough: the first
    for head, place in sorted(heads, key=lambda pair: pair[0].n):
        report.heads += 1
        what, kind = head.fault(verifier), "signature"
        if what is None:
            report.signed += verifier is not None
            what, kind = _against(head, hashes, chain, whole_to_the_end, report)
        if what is None:
            report.vouched_n = max(report.vouched_n, head.n if head.n in hashes else 0)
        else:
            finding = Finding("head", f"{what} (head of {head.at} in {place})", None, head.n, head.offset)
            faults.setdefault((place, kind), finding)
    report.findings += faults.values()
    if verifier is not None and not report.signed:
        report.findings.append(Finding("head", "no head is signed with this key: anybody could have made this chain"))
    elif not heads:
        report.notes.append("there are no heads: a chain that was made anew, or cut off, would not be noticed")
    if verifier is None and heads:
        report.notes.append("signatures were not looked at: give the public key with --key")
    if report.last_n > report.vouched_n and heads:
        report.notes.append(f"the last {report.last_n - report.vouched_n:,} records are under no head yet")


def _judge_closed(directory: Path, checked: list[Checked], verifier: Verifier | None, report: Report) -> None:
    """The last record of every closed segment has a head. One that was closed a moment ago has it by now."""
    if len(checked) < 2 or report.vouched_n >= checked[-2].link.n or (verifier is not None and not report.signed):
        return
    end = checked[-2].link
    for head in _own_heads(directory):
        if (head.n, head.hash.encode()) == (end.n, end.hash) and head.fault(verifier) is None:
            report.vouched_n = head.n
            return
    what = f"no head vouches for the records behind {report.vouched_n}, and every closed segment must have one"
    report.findings.append(Finding("head", what, checked[-2].name, report.vouched_n + 1))


def _own_heads(directory: Path) -> list[Head]:
    return read_heads(directory / HEADS) if (directory / HEADS).exists() else []


def _of_this_chain(heads: list[tuple[Head, str]], chain: str | None, report: Report) -> list[tuple[Head, str]]:
    """Without what a second place holds for other chains, if it holds heads of this one as well."""
    own = [pair for pair in heads if pair[0].chain == chain or pair[1] != SECOND]
    others = [head for head, place in heads if place == SECOND and head.chain != chain]
    if not others or not any(place == SECOND for _, place in own):
        return heads
    newest = max(others, key=lambda head: head.at)
    report.notes.append(
        f"{SECOND} holds heads of other chains as well; the newest is of {newest.chain[:16]}…, {newest.at}"
    )
    return own


def _against(
    head: Head, hashes: dict[int, bytes], chain: str | None, whole_to_the_end: bool, report: Report
) -> tuple[str | None, str]:
    if chain is not None and head.chain != chain:
        return f"it is of another chain, {head.chain[:16]}…, and this one is {chain[:16]}…", "chain"
    found = hashes.get(head.n)
    if found is not None and found.decode() != head.hash:
        return "the record has another hash than its head vouches for: the chain was made anew", "hash"
    if head.n > report.last_n and whole_to_the_end:
        return f"the chain ends with record {report.last_n}, and a head vouches for more: it was cut off", "end"
    return None, ""


def _judge_blanks(directory: Path, checked: list[Checked], report: Report) -> None:
    report.blanked, undeclared = blanks(directory, checked)
    for name, n, erasure in undeclared:
        what = f"its payload was removed, and record {erasure} does not declare that"
        report.findings.append(Finding("erasure", what, name, n))
