"""What was erased by declaration (docs/ledger.md, "Erasing"), as rebuilds ask about it when something is not there."""

from __future__ import annotations

from typing import Any, Final

from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings

from .schema import fill, parameter_names

_DECLARED: Final = """
SELECT EXISTS (SELECT FROM $namespace.erasures
                WHERE pg_catalog.numrange(first_seq, last_seq, '[]') @> (%s)::numeric)"""
# Declarations of the releases before have no number.
_NUMBERED: Final = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
                WHERE attrelid = pg_catalog.to_regclass($namespace_name || '.erasures') AND attname = 'id')"""
_NEWEST: Final = "SELECT coalesce(max(id), 0) FROM $namespace.erasures"


def is_erased(cur: Cursor, settings: Settings, seq: int) -> bool:
    """Whether the row with this seq, or its payload, is declared to be removed."""
    cur.execute(fill(_DECLARED, parameter_names(settings)), (seq,))
    row: Any = cur.fetchone()
    return bool(row[0])


class Erasures:
    """Notices new declarations."""

    def __init__(self, settings: Settings) -> None:
        self._names = parameter_names(settings)
        self._numbered = False

    def newest(self, cur: Cursor) -> int:
        """The number of the newest one; 0 if there is none, or the schema is of a release that does not number them."""
        if not self._numbered:
            self._numbered = bool(self._ask(cur, _NUMBERED))
        return self._ask(cur, _NEWEST) if self._numbered else 0

    def _ask(self, cur: Cursor, sql: str) -> int:
        cur.execute(fill(sql, self._names), ())
        row: Any = cur.fetchone()
        return int(row[0])
