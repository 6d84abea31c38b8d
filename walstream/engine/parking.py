"""Parked sessions: events that a projector could not project, and those of the same session that wait behind them.

An entry is a reference (offset and seq), never a copy: the payload stays in the ledger. A session is parked as long as
it has entries. Its first one decides when it is tried again; the others wait in order, and so do events of that session
that are still to come. All other sessions flow.

Entries are written and removed in the same transaction as the cursor step, or the effect, that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from walstream.config import quote
from walstream.event import Event

from .cursors import StaleCursor

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

_OURS: Final = "EXISTS (SELECT 1 FROM {schema}.projectors AS p WHERE p.name = k.projector AND p.generation = %s)"


@dataclass(frozen=True, slots=True)
class Entry:
    """One parked event.

    Attributes:
        offset: of the event, and with ``seq`` all that is kept of it.
        attempts: failed tries so far.
    """

    offset: int
    seq: int
    session_id: str
    event_type: str
    state: str
    attempts: int


class Parking:
    """The parked entries of one projector.

    Args:
        namespace: walstream's schema.
        projector: its name.
        generation: under which this process runs it; 0 for an operator's command.
    """

    def __init__(self, namespace: str, projector: str, generation: int = 0) -> None:
        self._table = f"{quote(namespace)}.parked"
        self._ours = _OURS.format(schema=quote(namespace))
        self._projector = projector
        self._generation = generation

    # -- what the runner does --------------------------------------------------------------------------------------

    def count(self, cur: Cursor) -> tuple[int, int]:
        """How many sessions are parked, and how many events: those that failed, and what waits behind them."""
        cur.execute(
            f"SELECT count(DISTINCT session_id), count(*) FROM {self._table} WHERE projector = %s", (self._projector,)
        )
        row = cur.fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    def parked_among(self, cur: Cursor, sessions: Iterable[str]) -> set[str]:
        """Those of ``sessions`` that are parked."""
        cur.execute(
            f"SELECT DISTINCT session_id FROM {self._table} WHERE projector = %s AND session_id = ANY (%s)",
            (self._projector, sorted(set(sessions))),
        )
        return {str(row[0]) for row in cur.fetchall()}

    def park(self, cur: Cursor, event: Event, *, attempts: int, error: str, trace: str, pause: float) -> None:
        """Park the session of an event that failed; try it again in ``pause`` seconds."""
        cur.execute(
            f"INSERT INTO {self._table} (projector, event_offset, seq, session_id, event_type, state, attempts, error,"
            " traceback, next_try) VALUES (%s, %s, %s, %s, %s, 'failed', %s, %s, %s,"
            " clock_timestamp() + make_interval(secs => %s)) ON CONFLICT (projector, event_offset) DO NOTHING",
            (
                self._projector,
                event.offset,
                event.seq,
                event.session_id,
                event.event_type,
                attempts,
                error,
                trace,
                pause,
            ),
        )

    def wait(self, cur: Cursor, events: Sequence[Event]) -> None:
        """Line events up behind the entries of their sessions."""
        if not events:
            return
        cur.execute(
            f"INSERT INTO {self._table} (projector, event_offset, seq, session_id, event_type, state)"
            " SELECT %s, r.event_offset, r.seq, r.session_id, r.event_type, 'waiting'"
            " FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::text[])"
            " AS r (event_offset, seq, session_id, event_type) ON CONFLICT (projector, event_offset) DO NOTHING",
            (
                self._projector,
                [event.offset for event in events],
                [event.seq for event in events],
                [event.session_id for event in events],
                [event.event_type for event in events],
            ),
        )

    def due(self, cur: Cursor) -> list[str]:
        """The sessions whose first entry may be tried now, the longest due first."""
        cur.execute(
            f"""
            SELECT session_id FROM (
                SELECT DISTINCT ON (session_id) session_id, state, next_try, event_offset
                  FROM {self._table} WHERE projector = %s ORDER BY session_id, event_offset) AS first
             WHERE state = 'waiting' OR next_try IS NULL OR next_try <= clock_timestamp()
             ORDER BY next_try NULLS FIRST, event_offset""",
            (self._projector,),
        )
        return [str(row[0]) for row in cur.fetchall()]

    def first(self, cur: Cursor, session_id: str) -> Entry | None:
        """The entry that holds a session up, or ``None`` if it is not parked."""
        cur.execute(
            f"SELECT event_offset, seq, session_id, event_type, state, attempts FROM {self._table}"
            " WHERE projector = %s AND session_id = %s ORDER BY event_offset LIMIT 1",
            (self._projector, session_id),
        )
        row = cur.fetchone()
        return None if row is None else Entry(*row)

    def remove(self, cur: Cursor, entry: Entry) -> None:
        """Remove an entry that was projected, in the transaction of its effect.

        Raises:
            StaleCursor: the entry is gone, or another process runs the projector now: the effect must not stand.
        """
        cur.execute(
            f"DELETE FROM {self._table} AS k WHERE projector = %s AND event_offset = %s AND {self._ours}",
            (self._projector, entry.offset, self._generation),
        )
        self._require_one(cur, entry)

    def failed_again(self, cur: Cursor, entry: Entry, *, attempts: int, error: str, trace: str, pause: float) -> None:
        """Write down another failure (or, with the same ``attempts``, a postponement) of an entry.

        Raises:
            StaleCursor: the entry is gone, or another process runs the projector now.
        """
        cur.execute(
            f"UPDATE {self._table} AS k SET state = 'failed', attempts = %s, error = %s, traceback = %s,"
            " next_try = clock_timestamp() + make_interval(secs => %s)"
            f" WHERE projector = %s AND event_offset = %s AND {self._ours}",
            (attempts, error, trace, pause, self._projector, entry.offset, self._generation),
        )
        self._require_one(cur, entry)

    def _require_one(self, cur: Cursor, entry: Entry) -> None:
        if cur.rowcount != 1:
            raise StaleCursor(
                f"projector {self._projector!r}: the parked event at offset {entry.offset} was discarded or taken over",
                hint="nothing was written for it here",
            )

    # -- what an operator does -------------------------------------------------------------------------------------

    def retry_now(self, cur: Cursor, session_id: str | None = None) -> int:
        """Make the parked sessions (or one of them) due at once; return how many entries that concerned."""
        cur.execute(
            f"UPDATE {self._table} SET next_try = clock_timestamp() WHERE projector = %s AND state = 'failed'"
            " AND (%s::text IS NULL OR session_id = %s)",
            (self._projector, session_id, session_id),
        )
        return int(cur.rowcount)

    def discard(self, cur: Cursor, offset: int) -> bool:
        """Give one parked event up for this projector; what waits behind it is tried next. ``False`` if it is gone."""
        cur.execute(f"DELETE FROM {self._table} WHERE projector = %s AND event_offset = %s", (self._projector, offset))
        return bool(cur.rowcount == 1)
