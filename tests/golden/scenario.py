"""One scenario: SQL, and what the stream has to say about it, written by hand.

``says`` is the outline (see ``tests.golden.vectors.outline``) that follows from the SQL by the documentation, not from
our decoder; a test compares the two for every major. In ``letters`` it is a regular expression over the messages'
letters, where the number of changes in a block is up to the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

READ = "-- read"
"""A step: fetch what the slot has so far."""

AGENT_EVENTS = """
CREATE TABLE agent_events (
    seq bigserial PRIMARY KEY, session_id uuid NOT NULL, agent_id text NOT NULL, event_type text NOT NULL,
    payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())"""

LEDGER = (AGENT_EVENTS, "CREATE PUBLICATION p FOR TABLE agent_events")

SESSION = "11111111-2222-3333-4444-555555555555"


def event(seq: int, kind: str, payload: str = "{}", at: str = "2024-02-03 04:05:06.123456+00") -> str:
    """An INSERT whose every column is known."""
    return f"INSERT INTO agent_events VALUES ({seq}, '{SESSION}', 'planner', '{kind}', '{payload}', '{at}')"


def said(seq: int, kind: str, payload: str = "{}", at: str = "2024-02-03 04:05:06.123456+00") -> str:
    """The row of :func:`event` as the outline shows it."""
    return f"({seq}, {SESSION}, planner, {kind}, {payload}, {at})"


def tx(*changes: str) -> tuple[str, ...]:
    """A transaction's outline."""
    return ("B", *changes, "C")


SHAPE = "R public.agent_events d (seq*, session_id, agent_id, event_type, payload, created_at)"
LEAF = SHAPE.replace("agent_events", "leaf").replace("*", "")


@dataclass(frozen=True)
class Scenario:
    """One capture.

    Attributes:
        name: of the scenario, unique.
        setup: SQL before the slot is made; a publication ``p`` among it.
        steps: what happens then; a pair names a second session, and ``READ`` reads the slot in between.
        options: for pgoutput, beside ``publication_names``.
        says: the outline, or
        letters: a regular expression for all messages' letters.
        since: first major that can do it.
        two_phase: make the slot with it.
        create: options of CREATE DATABASE.
        session: settings of the session that reads.
    """

    name: str
    setup: tuple[str, ...]
    steps: tuple[str | tuple[int, str], ...]
    says: tuple[str, ...] = ()
    letters: str = ""
    options: dict[str, str] = field(default_factory=lambda: {"proto_version": "1"})
    since: int = 14
    two_phase: bool = False
    create: str = ""
    session: tuple[str, ...] = ()
