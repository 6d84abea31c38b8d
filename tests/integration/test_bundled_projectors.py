"""The bundled counter against a real table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database
from walstream import Context, Event
from walstream.event import Commit
from walstream.projectors.event_counter import EventCounter


def event(offset: int, event_type: str = "t", session: str = "s", payload: str = "{}") -> Event:
    row = (offset * 10, session.encode(), b"planner-1", event_type.encode(), payload.encode(), None, None)
    return Event(offset, row, Commit(7, 1_000_000, 3, "l:1"))


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
