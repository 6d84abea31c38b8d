"""The bundled transactional projectors against real tables."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database
from walstream import Context, Event
from walstream.event import Commit
from walstream.projectors.event_counter import EventCounter
from walstream.projectors.handoff_inbox import CHANNEL, HandoffInbox


def event(offset: int, event_type: str = "t", session: str = "s", payload: str = "{}") -> Event:
    row = (offset * 10, session.encode(), b"planner-1", event_type.encode(), payload.encode(), None, None)
    return Event(offset, row, Commit(7, 1_000_000, 3, "l:1"))


def handoff(offset: int, to: str = "writer") -> Event:
    return event(offset, "handoff.emitted", payload=f'{{"to": "{to}", "task": "x"}}')


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    made = database.connect()
    yield made
    made.rollback()


def context(connection: Connection, **options: Any) -> Context:
    return Context("p", connection=connection, **options)


def test_the_counter_counts_by_session_and_type(database: Database, connection: Connection) -> None:
    counter = EventCounter()
    counter.setup(context(connection))
    counter.setup(context(connection))  # every start does it again
    counter.project([event(1, "a"), event(2, "b"), event(3, "a"), event(4, "a", session="%s' \\")], context(connection))
    connection.commit()
    counter.project([event(5, "a"), event(6, "a")], context(connection))
    connection.rollback()  # the batch failed: nothing of it counts
    counter.project([event(5, "a")], context(connection))
    connection.commit()
    assert database.execute("SELECT * FROM event_counts ORDER BY 1, 2") == [
        ("%s' \\", "a", 1, 4),
        ("s", "a", 3, 5),
        ("s", "b", 1, 2),
    ]


def test_a_handoff_is_put_into_the_inbox_once_and_knocks(database: Database, connection: Connection) -> None:
    listener = database.connect()
    listener.autocommit = True
    with listener.cursor() as cur:
        cur.execute(f"LISTEN {CHANNEL}")
    inbox = HandoffInbox()
    assert inbox.outward
    inbox.setup(context(connection))
    inbox.project([handoff(3), handoff(4, "reviewer"), handoff(5)], context(connection))
    inbox.project([handoff(3)], context(connection))
    connection.commit()
    rows = database.execute(
        "SELECT key, event_offset, session_id, sender, recipient, state FROM agent_inbox ORDER BY 2"
    )
    assert rows == [
        ("l:1:30", 3, "s", "planner-1", "writer", "waiting"),
        ("l:1:40", 4, "s", "planner-1", "reviewer", "waiting"),
        ("l:1:50", 5, "s", "planner-1", "writer", "waiting"),
    ]
    select.select([listener], [], [], 10)
    listener.poll()
    assert {notify.payload for notify in listener.notifies} == {"writer", "reviewer"}


def test_a_rebuild_starts_no_agent(database: Database, connection: Connection) -> None:
    inbox = HandoffInbox()
    inbox.setup(context(connection))
    inbox.project([handoff(3)], context(connection, rebuilding=True))
    connection.commit()
    assert database.execute("SELECT count(*) FROM agent_inbox") == [(0,)]


@pytest.mark.parametrize("payload", ["{}", "[]", '{"to": 7}', '{"to": ""}', "null"])
def test_a_handoff_without_a_recipient_is_an_error_that_names_it(connection: Connection, payload: str) -> None:
    inbox = HandoffInbox()
    inbox.setup(context(connection))
    with pytest.raises(ValueError, match="l:1:30 names no recipient"):
        inbox.project([event(3, "handoff.emitted", payload=payload)], context(connection))
