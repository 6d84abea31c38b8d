"""`walstream fork`: a session that goes on from a point of another one, without a copy of its events."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from tests.cli_calls import call, ok, set_up
from tests.conftest import Database
from walstream import rebuild_context
from walstream.config import Settings
from walstream.ledger.ledger import Ledger


@pytest.fixture
def settings(database: Database) -> Settings:
    return set_up(database)


@pytest.fixture
def conn(database: Database) -> Connection:
    made = database.connect()
    made.autocommit = True
    return made


def hand_over(conn: Connection, settings: Settings, session: str, *numbers: int, agent: str = "planner") -> list[int]:
    """An event with a number for each; their seqs."""
    ledger = Ledger(settings)
    return [ledger.append(session, agent, "handoff.emitted", {"n": n}, on=conn).seq for n in numbers]


def numbers(conn: Connection, settings: Settings, session: str, **options: Any) -> list[int]:
    context = rebuild_context(conn, session, settings=settings, **options)
    assert context == rebuild_context(conn, session, settings=settings, snapshots=False, **options)
    return [each["n"] for each in context["handoffs"]]


def test_a_fork_goes_on_from_there(database: Database, settings: Settings, conn: Connection) -> None:
    parent = str(uuid.uuid4())
    seqs = hand_over(conn, settings, parent, 0, 1, 2, 3)
    made = ok("fork", parent, "--at", str(seqs[1]), "--json", dsn=database.dsn).json
    child = made["session_id"]
    assert (made["parent"], made["at_seq"]) == (parent, seqs[1])
    assert numbers(conn, settings, child) == [0, 1]
    hand_over(conn, settings, child, 10)
    hand_over(conn, settings, parent, 4)
    assert numbers(conn, settings, child) == [0, 1, 10]
    assert numbers(conn, settings, child, upto_seq=made["seq"]) == [0, 1]
    assert numbers(conn, settings, parent) == [0, 1, 2, 3, 4]
    assert database.execute("SELECT count(*) FROM agent_events WHERE session_id = %s", child) == [(2,)]
    found = ok("context", child, "--json", dsn=database.dsn).json
    assert found["forked_from"] == {"session": parent, "at_seq": seqs[1]}
    assert f"forked from session {parent} at seq {seqs[1]}" in ok("context", child, dsn=database.dsn).stdout


def test_it_prints_the_new_id_alone(database: Database, settings: Settings, conn: Connection) -> None:
    parent = str(uuid.uuid4())
    hand_over(conn, settings, parent, 0, agent="first")
    (newest,) = hand_over(conn, settings, parent, 1, agent="second")
    printed = ok("fork", parent, dsn=database.dsn)
    child = printed.stdout.strip()
    assert uuid.UUID(child)
    assert f"after seq {newest}" in printed.stderr
    # Without further words: from the newest event, in the name of whoever wrote it.
    assert database.execute("SELECT agent_id, payload FROM agent_events WHERE session_id = %s", child) == [
        ("second", {"parent_session": parent, "at_seq": newest})
    ]
    chosen = str(uuid.uuid4())
    assert ok("fork", parent, "--as", chosen, "--agent", "me", dsn=database.dsn).stdout.strip() == chosen
    assert database.execute("SELECT agent_id FROM agent_events WHERE session_id = %s", chosen) == [("me",)]


def test_what_cannot_be_forked(database: Database, settings: Settings, conn: Connection) -> None:
    parent, other = str(uuid.uuid4()), str(uuid.uuid4())
    (seq,) = hand_over(conn, settings, parent, 0)
    hand_over(conn, settings, other, 0)
    early = call("fork", parent, "--at", str(seq - 1), "--json", dsn=database.dsn)
    assert early.exit_code == 3
    assert f"no event up to seq {seq - 1}" in early.error["message"]
    taken = call("fork", parent, "--as", other, "--json", dsn=database.dsn)
    assert taken.exit_code == 6
    assert "has events already" in taken.error["message"]
    assert database.execute("SELECT count(*) FROM walstream.forks") == [(0,)]
    assert database.execute("SELECT count(*) FROM agent_events") == [(2,)]


def test_forks_of_forks(database: Database, settings: Settings, conn: Connection) -> None:
    """Each goes on from the one before, and each has its own past."""
    session = str(uuid.uuid4())
    hand_over(conn, settings, session, 0)
    ledger = Ledger(settings)
    line = [session]
    for generation in range(1, 30):
        seq = database.execute("SELECT max(seq) FROM agent_events")[0][0]
        line.append(ledger.fork(line[-1], seq, "a", on=conn).session)
        hand_over(conn, settings, line[-1], generation)
    for generation, session in enumerate(line):
        assert numbers(conn, settings, session) == list(range(generation + 1))
    stood = ok("sessions", "--limit", "1", "--json", dsn=database.dsn).json[0]
    assert stood["session_id"] == line[-1]
    assert stood["forked_from"]["session_id"] == line[-2]
    assert stood["events"] == 2


def test_a_lower_seq_of_the_parent_that_commits_later_is_in_the_fork(
    database: Database, settings: Settings, conn: Connection
) -> None:
    """Inserted without append, so nothing held it back (C21): the fork is the fold of what is there, as ever."""
    parent = str(uuid.uuid4())
    hand_over(conn, settings, parent, 0)
    late = database.connect()
    with late.cursor() as cur:
        cur.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " VALUES (%s, 'a', 'handoff.emitted', '{\"n\": 1}')",
            (parent,),
        )
    (seq,) = hand_over(conn, settings, parent, 2)
    child = Ledger(settings).fork(parent, seq, "a", on=conn).session
    assert numbers(conn, settings, child) == [0, 2]
    late.commit()
    assert numbers(conn, settings, child) == [0, 1, 2] == numbers(conn, settings, parent)


def test_forked_while_the_parent_goes_on(database: Database, settings: Settings, conn: Connection) -> None:
    """Every fork holds exactly the parent's events up to its point, whoever appends meanwhile."""
    parent = str(uuid.uuid4())
    hand_over(conn, settings, parent, 0)
    stop = threading.Event()

    def append() -> None:
        mine = database.connect()
        n = 1
        while not stop.is_set():
            hand_over(mine, settings, parent, n)
            mine.commit()
            n += 1

    writer = threading.Thread(target=append)
    writer.start()
    try:
        forks = [ok("fork", parent, "--json", dsn=database.dsn).json for _ in range(5)]
    finally:
        stop.set()
        writer.join()
    for fork in forks:
        truth = database.execute(
            "SELECT (payload ->> 'n')::int FROM agent_events WHERE session_id = %s AND seq <= %s ORDER BY seq",
            parent,
            fork["at_seq"],
        )
        assert numbers(conn, settings, fork["session_id"]) == [n for (n,) in truth]
