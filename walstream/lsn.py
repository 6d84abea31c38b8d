"""Log sequence numbers: positions in the write-ahead log.

Inside walstream an LSN is always a plain ``int`` (64 bits, bytes since the start of the WAL), because only numbers
compare correctly: as text, ``'F/FFFFFFFF' > '10/0'``. Text is for the edges: SQL and people.

Source: PostgreSQL documentation, "pg_lsn Type" (8.20) and "Streaming Replication Protocol" (55.4).
"""

from __future__ import annotations

import re

from .errors import ConfigError

INVALID = 0
"""``0/0``: never a position. Relation messages carry it, and transactions with a replication origin do."""

_MAX = (1 << 64) - 1
_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def parse_lsn(text: str) -> int:
    """Return the LSN that Postgres writes as ``text`` (two hexadecimal halves around a slash).

    Raises:
        ConfigError: ``text`` is not an LSN. Nothing is guessed: ``'2/3F42B70'`` is ``0x0000000203F42B70``.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not an LSN", hint="an LSN looks like 16/B374D848")
    return int(found[1], 16) << 32 | int(found[2], 16)


def format_lsn(lsn: int) -> str:
    """Return ``lsn`` as Postgres writes it.

    Raises:
        ValueError: ``lsn`` does not fit into 64 bits.
    """
    if not 0 <= lsn <= _MAX:
        raise ValueError(f"an LSN has 64 bits: {lsn}")
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
