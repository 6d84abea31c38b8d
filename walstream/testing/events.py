"""Events made by hand, and a projector called without a database: for tests of projectors."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from typing import Any, Final

from walstream.engine.context import Context
from walstream.engine.projector import Projector
from walstream.event import Commit, Event

KEY_PREFIX: Final = "11111111-2222-3333-4444-555555555555:1"
SESSION: Final = "00000000-0000-4000-8000-000000000001"


def make_event(
    offset: int,
    event_type: str = "test.happened",
    *,
    payload: Any = None,
    payload_text: str | None = None,
    session_id: str = SESSION,
    agent_id: str = "agent",
    seq: int | None = None,
    created_at: str = "2026-01-02 03:04:05.678901+00",
    commit: Commit | None = None,
) -> Event:
    """An event as a projector receives it.

    Args:
        offset: its place; also its seq, unless that is given.
        payload: turned into JSON, unless ``payload_text`` gives the text itself.
        commit: its transaction; events that are to belong to one share the object.

    >>> from walstream.testing import make_event
    >>> event = make_event(7, "tool.invoked", payload={"tool": "search"})
    >>> event.offset, event.event_type, event.payload["tool"], event.key.rpartition(":")[2]
    (7, 'tool.invoked', 'search', '7')
    """
    text = json.dumps({} if payload is None else payload) if payload_text is None else payload_text
    row = (
        offset if seq is None else seq,
        session_id.encode(),
        agent_id.encode(),
        event_type.encode(),
        text.encode(),
        created_at.encode(),
        None,
    )
    return Event(offset, row, commit or Commit(offset * 64, 820_000_000_000_000 + offset, 0, KEY_PREFIX))


def make_context(projector: str = "test", *, connection: Any = None, rebuilding: bool = False) -> Context:
    """A context to call a projector with.

    Args:
        connection: what a transactional projector writes through; the caller commits.
    """
    return Context(projector, connection=connection, rebuilding=rebuilding)


def deliver(projector: Projector, events: Sequence[Event], ctx: Context | None = None) -> None:
    """Call a projector, plain or async, once with ``events``, as the runner does; errors come through as they are."""
    outcome: object = projector.project(events, ctx or make_context(projector.name))
    if inspect.isawaitable(outcome):

        async def wait_for_it() -> None:
            await outcome

        asyncio.run(wait_for_it())
