"""Audit trails for tests: events to put on record, and the files they end in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

from walstream.audit.record import Record, parse
from walstream.audit.segments import Segment, read_lines, segments_in
from walstream.audit.trail import AuditTrail
from walstream.audit.verifying import Report, verify
from walstream.config import Settings
from walstream.event import Commit, Event
from walstream.testing.events import KEY_PREFIX

SETTINGS = Settings()


def event(offset: int, seq: int | None = None, payload: str = '{"n": 1.50}', **columns: Any) -> Event:
    """An event; its seq is ten times its offset if nothing else is said."""
    row = (
        offset * 10 if seq is None else seq,
        str(columns.get("session", "s")).encode(),
        str(columns.get("agent", "a")).encode(),
        str(columns.get("event_type", "t")).encode(),
        payload.encode(),
        b"2026-01-02 03:04:05.678901+00",
        columns.get("extras"),
    )
    return Event(offset, row, Commit(offset * 64, 820_000_000_000_000 + offset, 7, KEY_PREFIX))


def events(first: int, last: int) -> list[Event]:
    return [event(offset) for offset in range(first, last + 1)]


def record(directory: Path, some: Sequence[Event], *, batch: int = 100, first: int | None = 1, **options: Any) -> None:
    """Put events on record by a trail that is made for it, as after a restart, and closed again."""
    trail = AuditTrail(directory, **options)
    try:
        for start in range(0, len(some), batch):
            trail.record(some[start : start + batch], SETTINGS, first=first)
    finally:
        trail.close()


def crash(directory: Path, some: Sequence[Event], **options: Any) -> None:
    """The same by a process that is gone without closing it: there is no head for its last records."""
    trail = AuditTrail(directory, head_seconds=3600, head_every=1_000_000, **options)
    trail._voucher._last = float("inf")
    trail.record(some, SETTINGS)
    trail._forget()
    trail._directory.close()


def settle(directory: Path, last: Event, *, tries: int = 500, **options: Any) -> None:
    """Deliver ``last`` again and again, until every closed segment is compressed, described and (if so) archived."""
    trail = AuditTrail(directory, **options)
    try:
        for _ in range(tries):
            trail.record([last], SETTINGS)
            if not trail._unsettled:
                return
            time.sleep(0.01)
        raise AssertionError("closed segments are never settled")
    finally:
        trail.close()


def newest(directory: Path) -> Path:
    """The file of the newest segment."""
    return segments_in(directory)[-1].path


def records(directory: Path) -> list[Record]:
    return [parse(line) for segment in segments_in(directory) for lines in read_lines(segment.path) for line in lines]


def offsets(directory: Path) -> list[int]:
    return [each.offset for each in records(directory) if each.offset is not None]


def verified(directory: Path, **options: Any) -> Report:
    """Verify it; there has to be no finding."""
    report = verify(directory, **options)
    assert report.findings == []
    return report


def edit(segment: Segment | Path, change: Any) -> None:
    """Change a segment's lines, plain or packed: ``change`` gets a list of lines and returns one."""
    path = segment.path if isinstance(segment, Segment) else segment
    lines = [line for some in read_lines(path) for line in some]
    data = b"".join(line + b"\n" for line in change(lines))
    os.chmod(path, 0o644)
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
