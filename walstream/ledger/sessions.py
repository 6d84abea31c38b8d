"""Which sessions there are, and how they stand: read from the ledger, at a cost that does not grow with it.

The newest sessions are found by walking the ledger's seqs back from the end, in steps. If many events belong to few
sessions, so that the walk gets long, the index on (session, seq) is asked for one session after the other instead. Only
the sessions that are shown are then looked at, each through that index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings

from .inflight import calls_of, lineage
from .stored_rows import statement

_STEP: Final = 10_000  # events a step of the walk
_WALK: Final = 20  # steps after which the sessions are counted off in their index instead

_NEWEST: Final = """
SELECT w.session_id::text, max(w.seq) FILTER (WHERE w.recent), min(w.seq), count(*) FROM (
    SELECT e.$session_id AS session_id, e.$seq AS seq, coalesce(e.$created_at >= %s, true) AS recent
      FROM $table AS e WHERE $where ORDER BY e.$seq DESC LIMIT %s
) AS w GROUP BY w.session_id"""

_ALL_BY_INDEX: Final = """
WITH RECURSIVE s AS (
    (SELECT e.$session_id AS id FROM $table AS e ORDER BY e.$session_id LIMIT 1)
    UNION ALL
    SELECT (SELECT e.$session_id FROM $table AS e WHERE e.$session_id > s.id ORDER BY e.$session_id LIMIT 1)
      FROM s WHERE s.id IS NOT NULL
)
SELECT s.id::text, (SELECT max(e.$seq) FROM $table AS e WHERE e.$session_id = s.id) AS last
  FROM s WHERE s.id IS NOT NULL ORDER BY last DESC LIMIT %s"""

_ALL_BY_SCAN: Final = """
SELECT e.$session_id::text, max(e.$seq) AS last FROM $table AS e WHERE $where
 GROUP BY e.$session_id ORDER BY last DESC LIMIT %s"""

_INDEXED: Final = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_index AS i
      JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
     WHERE i.indrelid = %s::regclass AND i.indisvalid AND i.indpred IS NULL AND a.attname = %s)"""

# What says that the agent goes on after a task ended. Handoffs that it emits and notes of other types do not.
_SUMMARY: Final = """
SELECT e.$agent_id::text, count(*), min(e.$seq), max(e.$seq),
       count(*) FILTER (WHERE e.$event_type = 'tool.invoked'),
       max(e.$seq) FILTER (WHERE e.$event_type = 'task.completed'),
       max(e.$seq) FILTER (WHERE e.$event_type = 'task.failed'),
       max(e.$seq) FILTER (WHERE e.$event_type IN ('context.loaded', 'model.requested', 'model.responded',
                                                  'tool.invoked', 'tool.retried', 'handoff.received'))
  FROM $table AS e WHERE e.$session_id = %s GROUP BY e.$agent_id ORDER BY min(e.$seq)"""

_TIMES: Final = """
SELECT e.$seq, e.$created_at::text FROM $table AS e WHERE e.$session_id = %s AND e.$seq IN (%s, %s)"""


@dataclass(frozen=True)
class SessionSummary:
    """How a session stands.

    Attributes:
        agents: who wrote its events, in order of appearance.
        first_at, last_at: ``created_at`` of the first and last event, as Postgres prints it.
        state: ``running``, ``in flight`` (a tool call has no answer), ``completed`` or ``failed``.
        in_flight: tool calls without an answer; a session can be completed and still have one.
        forked_from: the session that it goes on from, and the last seq of it that counts.
    """

    session_id: str
    agents: list[str]
    events: int
    first_seq: int
    first_at: str | None
    last_seq: int
    last_at: str | None
    state: str
    in_flight: int
    forked_from: dict[str, Any] | None = field(default=None)


def newest_sessions(
    cur: Cursor, settings: Settings, limit: int, *, agent_id: str | None = None, since: datetime | None = None
) -> list[str]:
    """The ids of the sessions with the newest events, newest first.

    Args:
        agent_id: by the events of this agent alone.
        since: only those with an event created since then. The walk ends after 10,000 events in a row that are older:
            ``created_at`` follows seq closely, but has no index.
    """
    found: dict[str, int] = {}
    for step, page in enumerate(_walk(cur, settings, agent_id, since)):
        for session, last in page:
            found.setdefault(session, last)
        if len(found) >= limit:
            break
        if since is None and step + 1 >= _WALK:
            return _all_sessions(cur, settings, limit, agent_id)
    return sorted(found, key=lambda session: -found[session])[:limit]


def _walk(
    cur: Cursor, settings: Settings, agent_id: str | None, since: datetime | None
) -> Iterator[list[tuple[str, int]]]:
    """Step by step back from the end: each session of the step that counts, with its highest seq in it."""
    before: int | None = None
    while True:
        where = ["true"]
        values: list[object] = []
        if agent_id is not None:
            where.append("e.$agent_id = %s")
            values.append(agent_id)
        if before is not None:
            where.append("e.$seq < %s")
            values.append(before)
        cur.execute(statement(settings, _NEWEST.replace("$where", " AND ".join(where))), (since, *values, _STEP))
        rows = cur.fetchall()
        recent = [(session, last) for session, last, _, _ in rows if last is not None]
        yield recent
        if sum(row[3] for row in rows) < _STEP or not recent:
            return
        before = min(row[2] for row in rows)


def _all_sessions(cur: Cursor, settings: Settings, limit: int, agent_id: str | None) -> list[str]:
    ledger = settings.ledger
    cur.execute(_INDEXED, (ledger.qualified, ledger.columns.session_id))
    ((indexed,),) = cur.fetchall()
    if agent_id is None and indexed:
        cur.execute(statement(settings, _ALL_BY_INDEX), (limit,))
    else:
        where = "true" if agent_id is None else "e.$agent_id = %s"
        values = () if agent_id is None else (agent_id,)
        cur.execute(statement(settings, _ALL_BY_SCAN.replace("$where", where)), (*values, limit))
    return [session for session, _ in cur.fetchall()]


def summary(cur: Cursor, settings: Settings, session_id: str) -> SessionSummary:
    """How one session stands.

    Raises:
        UnknownSession: no event has this session id.
    """
    line = lineage(cur, settings, session_id)
    cur.execute(statement(settings, _SUMMARY), (session_id,))
    rows = cur.fetchall()
    first, last = min(row[2] for row in rows), max(row[3] for row in rows)
    cur.execute(statement(settings, _TIMES), (session_id, first, last))
    times = dict(cur.fetchall())
    forked = line[1] if len(line) > 1 else None
    calls = calls_of(cur, settings, session_id) if forked or any(row[4] for row in rows) else []
    return SessionSummary(
        session_id=line[0].session_id,
        agents=[row[0] for row in rows],
        events=sum(row[1] for row in rows),
        first_seq=first,
        first_at=times.get(first),
        last_seq=last,
        last_at=times.get(last),
        state=_state(rows, bool(calls)),
        in_flight=len(calls),
        forked_from=None if forked is None else {"session_id": forked.session_id, "at_seq": forked.upto},
    )


def _state(rows: list[tuple[Any, ...]], in_flight: bool) -> str:
    completed, failed, active = (max((row[place] or 0 for row in rows), default=0) for place in (5, 6, 7))
    if max(completed, failed) > active:
        return "completed" if completed > failed else "failed"
    return "in flight" if in_flight else "running"
