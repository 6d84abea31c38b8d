"""Messages of pgoutput as bytes, for tests that need a stream without a server (protocol 1, text tuples)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

LEDGER_COLUMNS = (
    ("seq", 20),
    ("session_id", 2950),
    ("agent_id", 25),
    ("event_type", 25),
    ("payload", 3802),
    ("created_at", 1184),
)
"""Columns of the source design's table with their type OIDs (``pg_type.dat``)."""


def begin(final_lsn: int, *, time_us: int = 1, xid: int = 1) -> bytes:
    return b"B" + struct.pack(">QqI", final_lsn, time_us, xid)


def commit(commit_lsn: int, end_lsn: int, *, time_us: int = 1) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, time_us)


def relation(
    oid: int = 1,
    namespace: str = "public",
    name: str = "agent_events",
    columns: Sequence[tuple[str, int]] = LEDGER_COLUMNS,
) -> bytes:
    """A Relation message; the first column is its key."""
    parts = [
        b"R",
        struct.pack(">I", oid),
        namespace.encode(),
        b"\0",
        name.encode(),
        b"\0d",
        struct.pack(">H", len(columns)),
    ]
    for index, (column, type_oid) in enumerate(columns):
        parts += [struct.pack(">B", index == 0), column.encode(), b"\0", struct.pack(">Ii", type_oid, -1)]
    return b"".join(parts)


def insert(*values: str | bytes | None, oid: int = 1) -> bytes:
    """An Insert with these column texts; ``None`` is NULL."""
    parts = [b"I", struct.pack(">I", oid), b"N", struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        else:
            raw = value.encode() if isinstance(value, str) else value
            parts += [b"t", struct.pack(">I", len(raw)), raw]
    return b"".join(parts)


def event(
    seq: int,
    *,
    session: str = "00000000-0000-0000-0000-000000000001",
    agent: str = "a",
    event_type: str = "e",
    payload: str = "{}",
    created_at: str = "2026-01-01 00:00:00+00",
    oid: int = 1,
) -> bytes:
    """An Insert into the source design's table."""
    return insert(str(seq), session, agent, event_type, payload, created_at, oid=oid)
