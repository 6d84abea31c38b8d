"""Taking payloads out of the segments here, once a record of the chain declares it.

Hash and header of a record stay as they are, so the chain does. A segment is written anew beside itself, flushed, and
put in its place: a crash leaves the old one or the new one. It is done again whenever the trail is taken up and the
newest segment holds such a record, since nothing is written behind one before its payloads are gone.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .manifest import Manifest, describe
from .record import EVENT, NoRecord, Record, parse, without_payload
from .segments import Segment, read_lines, segments_in, write_anew

log = logging.getLogger("walstream.audit")

Ranges = Sequence[tuple[int, int]]
"""First and last of numbers that follow each other, ascending."""

_LONGEST: Final = 50_000_000  # records of a segment
MOST: Final = 10_000
"""Records that one record of an erasure declares; of a larger one there are several."""


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


def find(directory: Path, offsets: Collection[int]) -> list[Found]:
    """The records of events with these offsets that have a payload here.

    Raises:
        NoRecord, DamagedFile: a segment is not what it was.
        OSError: it cannot be read.
    """
    found: list[Found] = []
    wanted = sorted(offsets)
    segments = segments_in(directory)
    for place, segment in enumerate(segments):
        behind = segments[place + 1].next_offset if place + 1 < len(segments) else None
        begin = bisect_right(wanted, segment.next_offset - 1)
        end = len(wanted) if behind is None else bisect_right(wanted, behind - 1)
        if begin == end:
            continue
        here = set(wanted[begin:end])
        for _, record in _records(segment.path, segment.first_n):
            if record.offset in here and record.kind == EVENT and record.payload is not None:
                found.append(Found(record.n, record.sha256.decode()))
    return found


def blank(directory: Path, erasures: Mapping[int, Ranges], manifest: Manifest) -> bool:
    """Take the payloads that these records of erasures declare out of every segment here; say whether any was there.

    What the manifest says of closed segments is put right, and written.

    Args:
        erasures: by the number of the record: which records it declares.

    Raises:
        NoRecord, DamagedFile: a segment is not what it was.
        OSError: the disk is full, or gone. What is done so far is done, and the rest as it was.
    """
    declared = sorted((first, last, n) for n, ranges in erasures.items() for first, last in ranges)
    if not declared:
        return False
    segments = segments_in(directory)
    changed = stale = False
    for place, segment in enumerate(segments):
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


def _records(path: Path, first_n: int) -> Iterator[tuple[bytes, Record]]:
    n = first_n
    for lines in read_lines(path):
        for line in lines:
            if line.endswith(b"\0"):
                return  # a torn end: of no record yet
            record = parse(line)
            if record.n != n:
                raise NoRecord(f"{path.name} has record {record.n} where record {n} belongs")
            yield line, record
            n += 1


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
    records = _records(path, first_n)
    if not any(record.n in erased and record.payload is not None for _, record in records):
        return False
    write_anew(
        path,
        (
            without_payload(line, erased[record.n]) if record.n in erased and record.payload is not None else line
            for line, record in _records(path, first_n)
        ),
    )
    log.warning("%s: payloads were taken out that an erasure declares", path)
    return True
