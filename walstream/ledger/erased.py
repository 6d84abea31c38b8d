"""What was erased by declaration (docs/ledger.md, "Erasing"), as rebuilds ask about it when something is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import psycopg2
import psycopg2.errors
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings

from .schema import fill, parameter_names

_DECLARED: Final = """
SELECT EXISTS (SELECT FROM $namespace.erasures
                WHERE pg_catalog.int8range(first_seq, nullif(last_seq, 9223372036854775807), '[]') @> (%s)::bigint)"""
# The releases before have declarations without number and session.
_OF_SESSION: Final = """
SELECT pg_catalog.to_char(pg_catalog.timezone('UTC', e.erased_at), 'YYYY-MM-DD HH24:MI:SS'), e.reason
  FROM $namespace.erasures AS e WHERE pg_catalog.to_jsonb(e) ->> 'session_id' = %s ORDER BY e.erased_at DESC LIMIT 1"""
_NUMBERED: Final = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
                WHERE attrelid = pg_catalog.to_regclass($namespace_name || '.erasures') AND attname = 'id')"""
_ERASED_SESSIONS: Final = "SELECT DISTINCT session_id FROM $namespace.erasures WHERE session_id = ANY (%s) ORDER BY 1"
_NEWEST: Final = "SELECT coalesce(max(id), 0) FROM $namespace.erasures"


def is_erased(cur: Cursor, settings: Settings, seq: int) -> bool:
    """Whether the row with this seq, or its payload, is declared to be removed."""
    cur.execute(fill(_DECLARED, parameter_names(settings)), (seq,))
    row: Any = cur.fetchone()
    return bool(row[0])


def session_erased(cur: Cursor, settings: Settings, session_id: str) -> tuple[str, str] | None:
    """When a session was erased last, and why; ``None`` if it was not, or this login may not know."""
    with contextlib.suppress(psycopg2.Error):
        cur.execute(fill(_OF_SESSION, parameter_names(settings)), (session_id,))
        row: Any = cur.fetchone()
        return None if row is None else (str(row[0]), str(row[1]))
    return None


def erased_sessions(conn: Connection, settings: Settings, session_ids: Sequence[str]) -> list[str]:
    """Those of these sessions that were erased; none, where walstream is not installed or this login may not know.

    Args:
        conn: not in autocommit; nothing is open on it afterwards.
    """
    named = parameter_names(settings)
    try:
        with conn.cursor() as cur:
            cur.execute(fill(_NUMBERED, named), ())
            if cur.fetchone() != (True,):
                return []
            cur.execute(fill(_ERASED_SESSIONS, named), (list(session_ids),))
            return [session for (session,) in cur.fetchall()]
    except psycopg2.errors.InsufficientPrivilege:
        return []
    finally:
        conn.rollback()


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
