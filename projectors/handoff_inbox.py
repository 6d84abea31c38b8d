"""Hands a task to the next agent: a row in its inbox, and a knock at its door, when a handoff has committed.

An agent waits with ``LISTEN agent_inbox`` and takes a row in the transaction that writes its ``handoff.received``, so
that a handoff is taken up once, whatever dies in between::

    UPDATE agent_inbox SET state = 'taken', taken_by = 'writer-1', taken_at = now()
     WHERE key = (SELECT key FROM agent_inbox WHERE recipient = 'writer' AND state = 'waiting'
                   ORDER BY event_offset LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING session_id, sender, message
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from psycopg2.extras import execute_values

from walstream import Context, Event, Projector

CHANNEL: Final = "agent_inbox"
"""What to LISTEN on; the notification's payload is the recipient."""

_LONGEST_NOTE: Final = 7999  # bytes of a NOTIFY payload (documentation, NOTIFY)


class HandoffInbox(Projector):
    """Fills ``agent_inbox`` from ``handoff.emitted``; the payload names the recipient under ``to``.

    The inbox is keyed by the event's key, so a handoff has one row however often it is delivered. Rebuilding it would
    start agents a second time: it is ``outward``, and silent during a rebuild.
    """

    name = "handoff-inbox"
    transactional = True
    outward = True
    events = ("handoff.emitted",)

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute(
            "CREATE TABLE IF NOT EXISTS agent_inbox ("
            " key text PRIMARY KEY,"
            " event_offset bigint NOT NULL,"
            " session_id text NOT NULL,"
            " sender text NOT NULL,"
            " recipient text NOT NULL,"
            " message jsonb NOT NULL,"
            " state text NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'taken')),"
            " arrived_at timestamptz NOT NULL DEFAULT clock_timestamp(),"
            " taken_by text,"
            " taken_at timestamptz)"
        )
        ctx.cursor.execute(
            "CREATE INDEX IF NOT EXISTS agent_inbox_waiting ON agent_inbox (recipient, event_offset)"
            " WHERE state = 'waiting'"
        )

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        if ctx.rebuilding:
            return
        rows = [
            (event.key, event.offset, event.session_id, event.agent_id, recipient_of(event), event.payload_text)
            for event in events
        ]
        execute_values(
            ctx.cursor,
            "INSERT INTO agent_inbox (key, event_offset, session_id, sender, recipient, message) VALUES %s"
            " ON CONFLICT (key) DO NOTHING",
            rows,
        )
        for recipient in sorted({row[4] for row in rows}):
            note = recipient if len(recipient.encode()) <= _LONGEST_NOTE else ""
            ctx.cursor.execute("SELECT pg_notify(%s, %s)", (CHANNEL, note))


def recipient_of(event: Event) -> str:
    """Return whom ``event`` hands its session to.

    Raises:
        ValueError: the payload does not say. The session is then parked: nobody may guess.
    """
    payload = event.payload
    to = payload.get("to") if isinstance(payload, dict) else None
    if not isinstance(to, str) or not to:
        shown = json.dumps(payload, default=str)[:200]
        raise ValueError(f"the handoff {event.key} names no recipient under 'to': {shown}")
    return to
