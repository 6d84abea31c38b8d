"""An append-only file, one event a line, that knows by itself how far it got.

The file is outside the database, so its position cannot commit together with the cursor's. Its own last line is the
truth instead: what is delivered again after a crash stands there already and is not appended twice; a line that was
torn by the crash is cut off, and its event comes again. So the file holds every event exactly once, in offset order.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from walstream import Context, Event, Projector, RetryLater

_BLOCK: Final = 64 * 1024
# How each line of ours begins. The rest is not looked at: a payload of the type json may hold what no parser of ours
# takes (an exponent of 400, a thousand levels), and it is of any size.
_PLACE: Final = re.compile(rb'\{"offset":([0-9]{1,19}),"seq":(-?[0-9]{1,19}),')
_LONGEST_PLACE: Final = 64
_LINE_BREAKS: Final = bytes.maketrans(b"\n\r", b"  ")


class JsonLinesFile(Projector):
    """Appends every event to ``path``. One process at a time: the file is locked as long as a batch takes. In between
    it is free, so that a process that stands by (and may have worked before) does not keep the one that works from it.

    Whatever goes wrong with the disk is nobody's fault: it is tried again later. Whatever is wrong with the *file*
    (another event stands under an offset, a last line that is not ours) halts the projector: going on would hide it.

    Args:
        path: made if it is not there; its folder must be.
    """

    name = "json-lines-file"
    on_poison = "halt"  # parking would leave a hole in the file

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._left: tuple[int, int] | None = None

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        try:
            file = OffsetFile(self.path, durable=self._left)
            try:
                if self._left is None:
                    ctx.log.info("%s ends with offset %d", self.path, file.last)
                for event in events:
                    if event.offset <= file.last:
                        file.must_hold(event)
                file.append([event for event in events if event.offset > file.last])
                self._left = file.state
            finally:
                file.close()
        except OSError as error:
            raise RetryLater(f"{self.path}: {error.strerror or error}") from error


class OffsetFile:
    """The file itself: lines that begin with ascending offsets.

    Args:
        path: made if it is not there.
        durable: the :attr:`state` in which it was known to be on the disk. In any other it may hold what somebody wrote
            who was killed before it was flushed: that is done first.

    Attributes:
        last: offset of the last line; 0 while there is none.

    Raises:
        OSError: the file cannot be opened, or another process has it (``BlockingIOError``).
        ValueError: its last line is not one of ours.
    """

    def __init__(self, path: Path, *, durable: tuple[int, int] | None = None) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = self._cut_torn_line()
            if self.state != durable:
                os.fsync(self._fd)
                _sync_folder(path.parent)
            start = self._start_of_line(self._size - 1)
            self.last = self._place(start)[0] if self._size else 0
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def state(self) -> tuple[int, int]:
        """Which file it is, and how long."""
        return os.fstat(self._fd).st_ino, self._size

    def append(self, events: Sequence[Event]) -> None:
        """Append and make durable. If that fails the file is as before."""
        if not events:
            return
        data = b"".join(map(event_line, events))
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._size + written)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self.last = events[-1].offset

    def must_hold(self, event: Event) -> None:
        """Check that the file holds ``event`` under its offset.

        Raises:
            ValueError: it does not. The order that filled the file is not the one that is read now.
        """
        low, high = 0, self._size  # the line is searched by halves; `low` is always the start of a line
        while low < high:
            start = self._start_of_line((low + high) // 2)
            offset, seq = self._place(start)
            if offset == event.offset:
                if seq == event.seq:
                    return
                raise ValueError(
                    f"{self.path} holds seq {seq} under offset {event.offset}, and the ledger's order has "
                    f"seq {event.seq} there: the file belongs to another history; move it away and reset the projector"
                )
            if offset < event.offset:
                low = self._end_of_line(start)
            else:
                high = start
        raise ValueError(
            f"{self.path} ends with offset {self.last} and does not hold offset {event.offset} (seq {event.seq}): it "
            "was not filled from there on; move it away, and a new one is filled from the projector's position"
        )

    def close(self) -> None:
        os.close(self._fd)

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            size = self._start_of_line(size)
            os.ftruncate(self._fd, size)
        return size

    def _start_of_line(self, position: int) -> int:
        """Where the line starts that holds the byte at ``position``."""
        end = position
        while end > 0:
            start = max(0, end - _BLOCK)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _end_of_line(self, position: int) -> int:
        while block := os.pread(self._fd, _BLOCK, position):
            found = block.find(b"\n")
            if found >= 0:
                return position + found + 1
            position += len(block)
        return position

    def _place(self, start: int) -> tuple[int, int]:
        """Offset and seq of the line that starts at ``start``."""
        line = os.pread(self._fd, _LONGEST_PLACE, start)
        place = _PLACE.match(line)
        if place is None:
            raise ValueError(f"{self.path} holds a line that is not ours at byte {start}: {line!r}")
        return int(place[1]), int(place[2])


def event_line(event: Event) -> bytes:
    """Return ``event`` as a line of JSON: its place, its columns, and the payload digit by digit as the ledger has it.

    The same as ``walstream tail --json`` prints, and ``walstream import`` reads.
    """
    committed = event.committed_at
    head: dict[str, Any] = {
        "offset": event.offset or None,
        "seq": event.seq,
        "key": event.key if event.offset else None,
        "session_id": event.session_id,
        "agent_id": event.agent_id,
        "event_type": event.event_type,
        "created_at": event.created_at_text,
        "committed_at": committed.isoformat() if committed else None,
        "recovered": event.recovered,
    }
    if event.extras:
        head["extras"] = dict(event.extras)
    # White space in a `json` column may hold line breaks; inside a string JSON allows none.
    payload = event.payload_bytes.translate(_LINE_BREAKS)
    return b'%b,"payload":%b}\n' % (orjson.dumps(head)[:-1], payload)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
