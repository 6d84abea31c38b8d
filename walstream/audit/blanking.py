"""Taking payloads out of the segments here, once a record of the chain declares it.

Hash and header of a record stay as they are, so the chain does. A segment is written anew beside itself, flushed, and
put in its place: a crash leaves the old one or the new one. It is done again whenever the trail is taken up and the
newest segment holds such a record, since nothing is written behind one before its payloads are gone.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import orjson

from .manifest import Manifest, describe
from .record import EVENT, NoRecord, Record, parse, without_payload
from .segments import Segment, read_lines, segments_in, write_anew

log = logging.getLogger("walstream.audit")

Ranges = Sequence[tuple[int, int]]
"""First and last of numbers that follow each other, ascending."""

_LONGEST: Final = 50_000_000  # records of a segment
MOST: Final = 10_000
"""Records that one record of an erasure declares; of a larger one there are several."""


class Unfinished(Exception):
    """Some segments still hold payloads: it goes on when it is called again."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record that is to lose its payload.

    Attributes:
        n: its number.
        sha256: the digest of its payload, in hexadecimal.
    """

    n: int
    sha256: str


def ranges_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges."""
    made: list[tuple[int, int]] = []
    for number in numbers:
        if made and made[-1][1] == number - 1:
            made[-1] = (made[-1][0], number)
        else:
            made.append((number, number))
    return made


def find(directory: Path, offsets: Collection[int], session_id: str) -> list[Found]:
    """The records of events of a session, with these offsets, that have a payload here.

    Raises:
        NoRecord, DamagedFile: a segment is not what it was.
        OSError: it cannot be read.
    """
    found: list[Found] = []
    wanted = sorted(offsets)
    mark = b'"session_id":%b,' % orjson.dumps(session_id)
    segments = segments_in(directory)
    for place, segment in enumerate(segments):
        behind = segments[place + 1].next_offset if place + 1 < len(segments) else None
        begin = bisect_right(wanted, segment.next_offset - 1)
        end = len(wanted) if behind is None else bisect_right(wanted, behind - 1)
        if begin == end:
            continue
        here = set(wanted[begin:end])
        for n, line in _lines(segment.path, segment.first_n):
            if mark in line:
                record = _record(line, n, segment.name)
                if record.offset in here and record.kind == EVENT and record.payload is not None:
                    found.append(Found(n, record.sha256.decode()))
    return found


def blank(
    directory: Path,
    erasures: Mapping[int, Ranges],
    manifest: Manifest,
    *,
    done: set[tuple[int, str, int]] | None = None,
    seconds: float = float("inf"),
) -> bool:
    """Take the payloads that these records of erasures declare out of every segment here; say whether any was there.

    What the manifest says of closed segments is put right, and written.

    Args:
        erasures: by the number of the record: which records it declares.
        done: segments in which nothing is left to do: the newest erasure, name and inode; added to.
        seconds: after which it stops at the next segment.

    Raises:
        Unfinished: it stopped.
        NoRecord, DamagedFile: a segment is not what it was.
        OSError: the disk is full, or gone. What is done so far is done, and the rest as it was.
    """
    declared = sorted((first, last, n) for n, ranges in erasures.items() for first, last in ranges)
    if not declared:
        return False
    segments = segments_in(directory)
    newest = max(erasures)
    until = time.monotonic() + seconds
    changed = stale = False
    for place, segment in enumerate(segments):
        if done is not None and (newest, segment.path.name, segment.path.stat().st_ino) in done:
            continue
        if time.monotonic() >= until:
            if stale:
                manifest.write(directory)
            raise Unfinished(f"{place} of {len(segments)} segments are done")
        behind = segments[place + 1].first_n if place + 1 < len(segments) else None
        here = [each for each in declared if each[1] >= segment.first_n and (behind is None or each[0] < behind)]
        if not here:
            continue
        upto = segment.first_n + _LONGEST if behind is None else behind - 1
        erased = {
            record: n for first, last, n in here for record in range(max(first, segment.first_n), min(last, upto) + 1)
        }
        rewritten = [_rewrite(path, segment.first_n, erased) for path in (segment.plain, segment.packed) if path]
        changed = changed or any(rewritten)
        if segment.packed is not None:
            stale = _describe_again(segment, manifest) or stale
        if done is not None and behind is not None:
            done.add((newest, segment.path.name, segment.path.stat().st_ino))
    if stale:
        manifest.write(directory)
    return changed


def archived(manifest: Manifest, records: Ranges) -> list[str]:
    """Where copies stand, in object storage, of segments that hold some of these records."""
    return [
        each.archived
        for each in manifest.segments
        if each.archived and any(first <= each.last_n and last >= each.first_n for first, last in records)
    ]


def put_aside(folder: Path, session_id: str) -> list[str]:
    """Names of files in a folder of what was put aside that mention the session."""
    if not folder.is_dir():
        return []
    wanted = session_id.encode()
    return sorted(path.name for path in folder.iterdir() if path.is_file() and wanted in path.read_bytes())


def _lines(path: Path, first_n: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a segment with the numbers that they should have."""
    n = first_n
    for lines in read_lines(path):
        for line in lines:
            if line.endswith(b"\0"):
                return  # a torn end: of no record yet
            yield n, line
            n += 1


def _record(line: bytes, n: int, name: str) -> Record:
    record = parse(line)
    if record.n != n:
        raise NoRecord(f"{name} has record {record.n} where record {n} belongs")
    return record


def _describe_again(segment: Segment, manifest: Manifest) -> bool:
    """Put right what the manifest says of a closed segment; say whether it was wrong."""
    known = next((each for each in manifest.segments if each.first_n == segment.first_n), None)
    if known is None or known.file != segment.path.name:
        return False  # it is described once it is compressed
    now = replace(describe(segment), archived=known.archived)
    if now == known:
        return False
    manifest.add(now)
    return True


def _rewrite(path: Path, first_n: int, erased: Mapping[int, int]) -> bool:
    """Write a segment anew without the payloads of these records, if it has one; say whether it had."""

    def has_payload(line: bytes, n: int) -> bool:
        return n in erased and _record(line, n, path.name).payload is not None

    if not any(has_payload(line, n) for n, line in _lines(path, first_n)):
        return False
    lines = _lines(path, first_n)
    write_anew(path, (without_payload(line, erased[n]) if has_payload(line, n) else line for n, line in lines))
    log.warning("%s: payloads were taken out that an erasure declares", path)
    return True
