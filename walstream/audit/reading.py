"""Reading a trail: its records one by one, filtered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .record import NoRecord, Record, parse
from .segments import Segment, read_lines


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records to read; what is ``None`` (or empty) asks for nothing.

    Attributes:
        first, last: offsets.
        session, agent: of the event.
        types: event types.
        kinds: kinds of records.
        since, until: bounds of the commit's time, or of the recording where that is unknown; the second is exclusive.
    """

    first: int | None = None
    last: int | None = None
    session: str | None = None
    agent: str | None = None
    types: Sequence[str] = ()
    kinds: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None

    def takes(self, record: Record, fields: dict[str, Any]) -> bool:
        """Whether a record is wanted."""
        if self.kinds and record.kind not in self.kinds:
            return False
        if self.session is not None and fields.get("session_id") != self.session:
            return False
        if self.agent is not None and fields.get("agent_id") != self.agent:
            return False
        if self.types and fields.get("event_type") not in self.types:
            return False
        if self.since is None and self.until is None:
            return True
        at = datetime.fromisoformat(fields.get("committed_at") or fields["recorded_at"])
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)

    def within(self, record: Record) -> bool:
        """Whether a record's offset is; one without an offset is where no offsets were asked for."""
        if record.offset is None:
            return self.first is None and self.last is None
        return (self.first is None or record.offset >= self.first) and (self.last is None or record.offset <= self.last)


def read(segments: Sequence[Segment], wanted: Wanted) -> Iterator[tuple[bytes, Record, dict[str, Any]]]:
    """The wanted records: each as its line, taken apart, and with its header parsed.

    Raises:
        NoRecord: a line is none (a last one that is not complete is passed over).
        DamagedFile: a segment cannot be decompressed.
        OSError: a segment cannot be read.
    """
    # Most lines are not wanted where somebody asks for one session: they are not taken apart.
    needle = wanted.session.encode() if wanted.session and wanted.session.isascii() else b""
    for segment in segments:
        for lines in read_lines(segment.path):
            for line in lines:
                if (needle and needle not in line) or line.endswith(b"\0"):
                    continue
                record = parse(line)
                if not wanted.within(record):
                    continue
                fields = record.fields()
                if wanted.takes(record, fields):
                    yield line, record, fields


__all__ = ["NoRecord", "Wanted", "read"]
