"""The end of the newest segment after a crash: how far it is sound, and what is torn off.

A batch is written, then flushed, and only then counted (heads, the projector's cursor). So what a crash can leave half
written lies behind everything that was counted. It is put aside and comes again. Damage anywhere else is no crash's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .chain import Broken, Link
from .record import NoRecord, parse
from .segments import read_lines, sync_folder

SIDE_FOLDER: Final = "torn"


@dataclass(frozen=True, slots=True)
class Tail:
    """How far a segment is sound.

    Attributes:
        link: behind its last sound record.
        size: bytes up to there.
        fault: what is wrong with the next line; ``None`` if the segment ends there.
        sound: that line is a whole record, only not the one that belongs there.
    """

    link: Link
    size: int
    fault: str | None
    sound: bool = False


def examine(path: Path, before: Link | None, wanted: Collection[int] = ()) -> Tail:
    """Read a plain segment from its start.

    Args:
        before: where the chain stands before it; ``None`` takes what its first record says.
        wanted: numbers of records whose hash is to be kept.

    Raises:
        OSError: it cannot be read.
    """
    link = before
    size = 0
    for lines in read_lines(path):
        if link is None:
            try:
                link = Link.before(parse(lines[0]))
            except NoRecord as error:
                return Tail(Link(), 0, str(error))
        try:
            link.follow(lines, wanted)
        except Broken as broken:
            sound = lines[: broken.index]
            return Tail(link, size + sum(map(len, sound)) + len(sound), str(broken), broken.sound)
        size += sum(map(len, lines)) + len(lines)
    return Tail(link or Link(), size, None)


def set_aside(path: Path, size: int) -> Path:
    """Move what stands behind the first ``size`` bytes of a segment into a file of its own, durably; return that file.

    Raises:
        OSError: it cannot be read or written. The segment is as it was then.
    """
    folder = path.parent / SIDE_FOLDER
    folder.mkdir(exist_ok=True)
    target = folder / f"{path.name}.{size}.{time.time_ns()}"
    with path.open("r+b") as segment:
        segment.seek(size)
        try:
            with target.open("wb") as out:
                while block := segment.read(1 << 20):
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        sync_folder(folder)
        segment.truncate(size)
        os.fsync(segment.fileno())
    return target
