"""Whether each payload that is gone from a trail was declared to be erased, by the very record that its line names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from .chain import ranges_declared
from .manifest import Manifest
from .record import ERASURE, NoRecord, Record, parse
from .segment_check import Checked
from .segments import read_lines, segments_in

_LOOKS: Final = 3


class Undeclared(NamedTuple):
    """A payload that is gone, and that nothing declares."""

    name: str
    n: int
    erasure: int


def blanks(directory: Path, checked: Sequence[Checked]) -> tuple[int, list[Undeclared]]:
    """How many payloads are gone by declaration, and those that are not.

    Raises:
        OSError: a segment cannot be read.
    """
    declared: dict[int, list[tuple[int, int]]] = {}
    for each in checked:
        declared.update(each.link.erasures)
    elsewhere = {erasure for each in checked for _, erasure in each.link.blanked}.difference(declared)
    if elsewhere:
        declared.update(_erasures_of(directory, elsewhere))
    count = 0
    found: list[Undeclared] = []
    for each in checked:
        for n, erasure in each.link.blanked:
            if any(first <= n <= last for first, last in declared.get(erasure, ())):
                count += 1
            else:
                found.append(Undeclared(each.name, n, erasure))
    return count, found


def is_right_now(directory: Path, first_n: int) -> bool:
    """Whether a closed segment's file is the one that the manifest speaks of, both looked at together: payloads may
    have been erased since they were looked at one after the other."""
    for look in range(_LOOKS):
        if look:
            time.sleep(0.1)
        manifest = Manifest.read(directory) or Manifest()
        closed = next((each for each in manifest.segments if each.first_n == first_n), None)
        if closed is None:
            return False
        if sha256((directory / closed.file).read_bytes()).hexdigest() == closed.sha256:
            return True
    return False


def _erasures_of(directory: Path, numbers: set[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """What these records declare: they stand behind the segments that were asked for, or were written meanwhile."""
    segments = segments_in(directory)
    behind = [*(segment.first_n for segment in segments[1:]), None]
    for segment, end in zip(segments, behind, strict=True):
        if not any(n >= segment.first_n and (end is None or n < end) for n in numbers):
            continue
        for lines in read_lines(segment.path):
            for record in _whole(lines):
                if record.n in numbers and record.kind == ERASURE and record.fault() is None:
                    yield record.n, ranges_declared(record)


def _whole(lines: Sequence[bytes]) -> Iterator[Record]:
    for line in lines:
        with contextlib.suppress(NoRecord):  # where it was asked for, that is a finding of its own
            yield parse(line)
