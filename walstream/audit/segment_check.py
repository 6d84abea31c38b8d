"""Checking one segment by itself, so that several can be checked at once; what it says of its beginning is judged by
whoever knows the segment before it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from hashlib import sha256

from .chain import Broken, Link
from .record import NoRecord, parse
from .segments import DamagedFile, Segment, read_lines


@dataclass(slots=True)
class Checked:
    """What a segment was found to be.

    Attributes:
        name: of its file.
        first_n, prev: number of its first record, and the hash that this claims to follow.
        link: behind its last sound record.
        records: how many are sound.
        sha256: of the file, if it is a compressed one.
        fault: what is wrong with the next line; ``None`` if nothing is.
        n, offset, seq: of the record that should stand there.
        unfinished: the fault is a last line without its end, as one has that is being written.
    """

    name: str
    first_n: int = 0
    prev: bytes = b""
    link: Link = field(default_factory=Link)
    records: int = 0
    sha256: str | None = None
    fault: str | None = None
    n: int | None = None
    offset: int | None = None
    seq: int | None = None
    unfinished: bool = False


def check_segment(
    segment: Segment, wanted: Collection[int] = (), progress: Callable[[int], None] | None = None
) -> Checked:
    """Read a segment from its start to its end, or to the first record that is not right.

    Args:
        wanted: numbers of records whose hash is to be kept.
        progress: told how many records more were checked.

    Raises:
        OSError: its file cannot be read.
    """
    path = segment.path
    made = Checked(path.name)
    link: Link | None = Link() if segment.first_n == 1 else None
    try:
        for lines in read_lines(path):
            if link is None:
                first = parse(lines[0])
                link = Link.before(first)
                link.begins = first.offset
            if not made.first_n:
                made.first_n, made.prev = link.n + 1, link.hash
            before = link.n
            try:
                link.follow(lines, wanted)
            finally:
                made.records += link.n - before
                if progress is not None:
                    progress(link.n - before)
    except Broken as broken:
        made.fault, made.n, made.offset, made.seq = str(broken), broken.n, broken.offset, broken.seq
        made.unfinished = lines[broken.index].endswith(b"\0")
    except (NoRecord, DamagedFile) as error:
        made.fault = str(error)
        made.unfinished = isinstance(error, NoRecord) and lines[-1].endswith(b"\0")
        made.n = segment.first_n if link is None else link.n + 1
        made.offset = segment.next_offset if link is None or link.offset is None else link.offset + 1
    made.link = link or Link(segment.first_n - 1)
    if path.suffix == ".zst":
        data = sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                data.update(block)
        made.sha256 = data.hexdigest()
    return made
