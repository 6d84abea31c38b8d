"""The files of a trail: their names, their order, reading them line by line, plain or compressed.

A segment is called ``<first n>-<next offset>.jsonl``, both in sixteen digits: the number of its first record, and the
offset that the next event had when it was begun. With ``.zst`` behind it is closed, compressed and read-only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import zstandard

_NAME: Final = re.compile(r"([0-9]{16})-([0-9]{16})\.jsonl(\.zst)?")
_SCRATCH: Final = re.compile(r"\.(?:[0-9]{16}-[0-9]{16}\.jsonl(?:\.zst)?|manifest\.json)\.[0-9]+")
MiB: Final = 1024 * 1024
_BLOCK: Final = 2 * MiB
_LEVEL: Final = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a trail.

    Attributes:
        name: of the plain file.
        first_n: number of its first record.
        next_offset: of the first event at or behind its beginning.
        plain, packed: its files, where they are there. Both are while a closed one is being compressed.
    """

    name: str
    first_n: int
    next_offset: int
    plain: Path | None
    packed: Path | None

    @property
    def path(self) -> Path:
        """The file to read. The compressed one is complete as soon as it has its name."""
        path = self.packed or self.plain
        assert path is not None
        return path


def name_of(first_n: int, next_offset: int) -> str:
    """What a segment's plain file is called."""
    return f"{first_n:016d}-{next_offset:016d}.jsonl"


def segments_in(directory: Path) -> list[Segment]:
    """The segments of a trail, in their order.

    Raises:
        OSError: the directory cannot be read.
    """
    found: dict[str, list[Path | None]] = {}
    for entry in os.scandir(directory):
        name = _NAME.fullmatch(entry.name)
        if name is not None:
            files = found.setdefault(entry.name.removesuffix(".zst"), [None, None])
            files[1 if name[3] else 0] = Path(entry.path)
    made = []
    for plain_name, (plain, packed) in found.items():
        parts = _NAME.fullmatch(plain_name)
        assert parts is not None
        made.append(Segment(plain_name, int(parts[1]), int(parts[2]), plain, packed))
    return sorted(made, key=lambda segment: (segment.first_n, segment.next_offset))


def read_lines(path: Path, *, block: int = _BLOCK) -> Iterator[list[bytes]]:
    """The lines of a segment, a block at a time, without their line breaks. What stands behind the last line break, if
    anything does, comes as a last block of one line that ends with ``b"\\0"`` and so can be no record.

    A plain file that is gone was compressed since somebody looked: it is read as it is now.

    Raises:
        OSError: the file cannot be read.
        DamagedFile: it cannot be decompressed.
    """
    try:
        opened = as_it_is_now(path).open("rb")
    except FileNotFoundError:  # compressed between the look and the opening
        opened = as_it_is_now(path).open("rb")
    path = Path(opened.name)
    with opened as file:
        parts: list[bytes] = []  # of a line that is longer than a block
        for data in _blocks(file, path, block):
            end = data.rfind(b"\n")
            if end < 0:
                parts.append(data)
                continue
            parts.append(data[:end])
            lines = (b"".join(parts) if len(parts) > 1 else parts[0]).split(b"\n")
            parts = [data[end + 1 :]] if end + 1 < len(data) else []
            yield lines
        if parts:
            yield [b"".join(parts) + b"\0"]


def as_it_is_now(path: Path) -> Path:
    """The file of a segment that was ``path`` a moment ago: a plain one may have been compressed since."""
    if path.suffix != ".zst" and not path.exists():
        return path.with_name(f"{path.name}.zst")
    return path


def _blocks(file: BinaryIO, path: Path, block: int) -> Iterator[bytes]:
    if path.suffix != ".zst":
        while data := file.read(block):
            yield data
        return
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        while data := reader.read(block):
            yield data
    except zstandard.ZstdError as error:
        raise DamagedFile(f"{path.name} cannot be decompressed: {error}") from error


def remove_scratch(directory: Path) -> None:
    """Remove what a process left behind that was killed while it wrote a file that was to get its name later.

    Raises:
        OSError: the directory cannot be read or written to.
    """
    for entry in os.scandir(directory):
        if _SCRATCH.fullmatch(entry.name):
            os.unlink(entry.path)


class DamagedFile(Exception):
    """A compressed segment that is not what was compressed."""


def pack(segment: Segment) -> Path:
    """Compress a closed segment into a read-only file beside it, durably; return that file.

    Raises:
        OSError: the disk is full, or gone. Nothing is left behind then.
    """
    assert segment.plain is not None
    target = segment.plain.with_name(f"{segment.name}.zst")
    with segment.plain.open("rb") as source, _replacing(target, mode=0o444) as out:
        _compressor().copy_stream(source, out, size=segment.plain.stat().st_size)
    return target


def write_anew(path: Path, lines: Iterable[bytes]) -> None:
    """Replace a segment by one of these lines, plain or compressed as it was, durably: after a crash it is the old one
    or the new one.

    Raises:
        OSError: the disk is full, or gone. Nothing is left behind then.
    """
    with _replacing(path, mode=path.stat().st_mode & 0o777) as out:
        if path.suffix == ".zst":
            with _compressor().stream_writer(out, closefd=False) as sink:
                for line in lines:
                    sink.write(line + b"\n")
        else:
            for line in lines:
                out.write(line + b"\n")


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file as a whole: after a crash it is the old one or the new one."""
    with _replacing(path) as out:
        out.write(data)


@contextlib.contextmanager
def _replacing(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file beside ``path`` that takes its place, durably, when all of it is written; or is gone again."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as out:
            yield out
            out.flush()
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
