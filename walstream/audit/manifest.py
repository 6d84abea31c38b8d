"""``manifest.json``: what the closed segments of a trail hold. It can be made anew from them at any time, so nothing
relies on it; it is compared with them by ``walstream audit verify``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import orjson

from .chain import TAKEN_OVER, note_id
from .record import FORMAT, NoRecord, Record, parse
from .segments import Segment, read_lines, write_durably

NAME: Final = "manifest.json"

# What nearly every line is, and where that stands: behind the two digests and the number.
_AN_EVENT: Final = b'"kind":"event"'
_WHERE: Final = (230, 290)


class BadManifest(Exception):
    """The file is there and is no manifest: cut off, edited, or of another format."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed segment.

    Attributes:
        file: the name of its file in the directory.
        first_n, last_n: the numbers of its records.
        first_offset, last_offset: of its events; ``None`` if it has none.
        prev, hash: what its first record follows from, and its last record's own hash.
        size: of the file, in bytes.
        sha256: of the file.
        archived: where a copy of it stands; ``None`` until that copy is complete.
        ids: the highest id in the database of what was taken over from there, by kind.
    """

    file: str
    first_n: int
    last_n: int
    first_offset: int | None
    last_offset: int | None
    prev: str
    hash: str
    size: int
    sha256: str
    archived: str | None = None
    ids: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Manifest:
    """The whole of it.

    Attributes:
        chain: hash of the first record, which names the chain.
        first_offset: that the first event of the chain has.
    """

    chain: str = ""
    first_offset: int = 1
    segments: list[Closed] = field(default_factory=list)

    def add(self, closed: Closed) -> None:
        """Put a segment in its place, instead of what was said of it before."""
        self.segments = sorted(
            [*(each for each in self.segments if each.first_n != closed.first_n), closed],
            key=lambda each: each.first_n,
        )

    def write(self, directory: Path) -> None:
        """Write it, as a whole and durably.

        Raises:
            OSError: the directory cannot be written to.
        """
        document = {"format": FORMAT, **asdict(self)}
        write_durably(directory / NAME, orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Read it; ``None`` if there is none.

        Raises:
            BadManifest: it is none of ours.
            OSError: it cannot be read.
        """
        try:
            raw = (directory / NAME).read_bytes()
        except FileNotFoundError:
            return None
        try:
            document: Any = orjson.loads(raw)
            if document["format"] != FORMAT:
                raise BadManifest(f"{NAME} has the format {document['format']!r}, and {FORMAT} is known")
            return cls(
                str(document["chain"]),
                int(document["first_offset"]),
                [Closed(**each) for each in document["segments"]],
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BadManifest(f"{NAME} is no manifest: {type(error).__name__}: {error}") from error


def describe(segment: Segment) -> Closed:
    """What a closed segment holds, by its file.

    Raises:
        NoRecord: its first or last line is no record.
        DamagedFile: it cannot be decompressed.
        OSError: it cannot be read.
    """
    first = last = b""
    first_offset = last_offset = None
    ids: dict[str, int] = {}
    for lines in read_lines(segment.path):
        first = first or lines[0]
        last = lines[-1]
        if first_offset is None:
            first_offset = next((o for o in map(_offset, lines) if o is not None), None)
        last_offset = next((o for o in map(_offset, reversed(lines)) if o is not None), last_offset)
        for line in lines:
            if line.find(_AN_EVENT, *_WHERE) < 0:
                _note_id(ids, line)
    if not first:
        raise NoRecord("it is empty")
    begin, end = parse(first), parse(last)
    data = sha256()
    with segment.path.open("rb") as file:
        while block := file.read(1 << 20):
            data.update(block)
    return Closed(
        segment.path.name,
        begin.n,
        end.n,
        first_offset,
        last_offset,
        begin.prev.decode(),
        end.hash.decode(),
        segment.path.stat().st_size,
        data.hexdigest(),
        ids=ids,
    )


def _note_id(ids: dict[str, int], line: bytes) -> None:
    with suppress(NoRecord):
        record = parse(line)
        if record.kind in TAKEN_OVER:
            note_id(ids, record)


def _offset(line: bytes) -> int | None:
    try:
        record: Record = parse(line)
    except NoRecord:
        return None
    return record.offset
