"""What stands on record already: looked up by offset, and compared with what is delivered again."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from walstream.event import Event

from .findings import Finding
from .loading import TrailBroken
from .record import EVENT, NoRecord, Record, differences, is_another, parse
from .segments import DamagedFile, read_lines, segments_in

log = logging.getLogger("walstream.audit")

_OF_ANOTHER_HISTORY: Final = (
    "keep it as it is, and begin another one in a new directory (docs/audit.md, Another history)"
)


class Known:
    """The records of a trail by offset, as its files are now. Reading on is cheap, going back is not.

    Args:
        directory: of the trail.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segments = segments_in(directory)
        self._starts = [segment.next_offset for segment in self._segments]
        self._stream: Iterator[Record] = iter(())
        self._next = 0

    @property
    def begins(self) -> int:
        """The first offset that the files here can hold."""
        return self._starts[0] if self._starts else 1

    def behind(self, offset: int) -> Iterator[Record]:
        """The records from an offset on.

        Raises:
            TrailBroken: the files are damaged.
            OSError: they cannot be read.
        """
        try:
            for record in self._from(offset):
                if record.offset is not None and record.offset >= offset:
                    yield record
        except (NoRecord, DamagedFile) as error:
            raise self._damaged(offset, error) from error

    def find(self, offset: int) -> Record:
        """The record of an offset.

        Raises:
            TrailBroken: there is none.
            OSError: the files cannot be read.
        """
        if not 0 < self._next <= offset:
            self._stream = self._from(offset)
        try:
            for record in self._stream:
                if record.offset is not None and record.offset >= offset:
                    self._next = record.offset + 1
                    if record.offset == offset:
                        return record
                    break
        except (NoRecord, DamagedFile) as error:
            raise self._damaged(offset, error) from error
        self._next = 0
        raise TrailBroken(
            f"{self._directory} does not hold offset {offset}: the chain began behind it, or a segment is not here",
            hint="put the segments back, or keep the chain as it is and begin another one in a new directory",
        )

    def compare(self, events: Sequence[Event]) -> list[Finding]:
        """Compare events that were delivered again with what is on record.

        Returns:
            One for each that has changed since.

        Raises:
            TrailBroken: another event stands under the offset.
            OSError: the files cannot be read.
        """
        found: list[Finding] = []
        for event in events:
            record = self.find(event.offset)
            if record.seq != event.seq:
                raise another_event(self._directory, event.offset, record.seq, event.seq)
            if record.kind != EVENT:
                continue  # it was gone when its turn came, and is there again
            fields = record.fields()
            changed = differences(fields, record.sha256, event)
            if changed and is_another(fields, event):
                raise TrailBroken(
                    f"{self._directory} holds another event under offset {event.offset} and seq {event.seq} than the"
                    f" ledger has there ({', '.join(changed)} differ, and it was committed elsewhere): the chain"
                    " belongs to another history",
                    hint=_OF_ANOTHER_HISTORY,
                )
            if changed:
                log.error(
                    "seq %d (offset %d) is no longer what is on record (%s): the ledger was changed",
                    event.seq,
                    event.offset,
                    ", ".join(changed),
                )
                found.append(Finding(event.offset, event.seq, changed))
        return found

    def _damaged(self, offset: int, error: Exception) -> TrailBroken:
        return TrailBroken(
            f"{self._directory} is damaged near offset {offset}: {error}", hint="run `walstream audit verify`"
        )

    def _from(self, offset: int) -> Iterator[Record]:
        begin = max(0, bisect_right(self._starts, offset) - 1)
        for segment in self._segments[begin:]:
            for lines in read_lines(segment.path):
                for line in lines:
                    record = parse(line)
                    if record.offset is not None:
                        yield record


def another_event(directory: Path, offset: int, recorded: int | None, ordered: int | None) -> TrailBroken:
    """The error for an offset under which the ledger's order has another event than the trail."""
    return TrailBroken(
        f"{directory} holds seq {recorded} under offset {offset}, and the ledger's order has seq {ordered} there: the"
        " chain belongs to another history",
        hint=_OF_ANOTHER_HISTORY,
    )
