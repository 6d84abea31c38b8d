"""The table of declared removals: what a declaration by hand says by itself, and the order of the ids."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.conftest import Database
from walstream.config import Settings
from walstream.ledger import schema

DECLARED = "INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (%s, %s, 'asked for')"


@pytest.fixture
def ledger(database: Database) -> Database:
    database.execute(schema.ledger_sql(Settings().ledger))
    return database


def test_what_was_declared_before_is_of_no_transaction(ledger: Database) -> None:
    schema.install(ledger.connect(), Settings(), upto=schema.ERASURES_VERSION - 1)
    ledger.execute(DECLARED, 1, 9)
    schema.install(ledger.connect(), Settings())
    rows = ledger.execute("SELECT first_seq, last_seq, session_id, xid, mode, erased_by FROM walstream.erasures")
    assert rows == [(1, 9, None, None, "removed", None)]


def test_a_declaration_by_hand_says_by_itself_who_and_in_which_transaction(ledger: Database) -> None:
    schema.install(ledger.connect(), Settings())
    conn = ledger.connect()
    with conn, conn.cursor() as cur:
        cur.execute("INSERT INTO walstream.erasures VALUES (1, 2, 'by place')")
        cur.execute(DECLARED, (1, 2))
        cur.execute("SELECT pg_current_xact_id()::text::bigint, session_user::text")
        own: Any = cur.fetchone()
    highest = 2**63 - 1
    ledger.execute(DECLARED, 5, highest)
    rows = ledger.execute("SELECT id, first_seq, last_seq, mode, xid, erased_by FROM walstream.erasures ORDER BY id")
    assert rows[:2] == [(1, 1, 2, "removed", *own), (2, 1, 2, "removed", *own)]
    assert rows[2][:4] == (3, 5, highest, "removed")


def test_ids_are_committed_in_their_order(ledger: Database) -> None:
    """Whoever reads on from an id would otherwise miss the one that was drawn before it and committed after it."""
    schema.install(ledger.connect(), Settings())
    first, second = ledger.connect(), ledger.connect()
    with first.cursor() as cur:
        cur.execute("SET session_replication_role = replica")  # triggers are skipped, but for this one
        cur.execute(DECLARED, (1, 1))
    done = threading.Event()

    def declare() -> None:
        with second, second.cursor() as cur:
            cur.execute(DECLARED, (2, 2))
        done.set()

    thread = threading.Thread(target=declare)
    thread.start()
    assert not done.wait(0.5)
    assert ledger.execute("SELECT id FROM walstream.erasures") == []
    first.commit()
    thread.join(60)
    assert ledger.execute("SELECT id, first_seq FROM walstream.erasures ORDER BY id") == [(1, 1), (2, 2)]
