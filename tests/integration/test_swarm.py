"""The swarm on a real server: what the agents claim is what the ledger holds, and handoffs are taken up once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from tests.conftest import Database
from walstream.config import LedgerTable
from walstream.demo.agents import recorded_sessions, replaying, simulated
from walstream.demo.swarm import Agent, Budget, Swarm
from walstream.errors import ConfigError
from walstream.ledger.importing import copied_session
from walstream.ledger.json_lines import BadLine
from walstream.ledger.schema import ledger_sql

INBOX = """
CREATE TABLE agent_inbox (key text PRIMARY KEY, event_offset bigint, session_id text, sender text, recipient text,
                          message jsonb, state text DEFAULT 'waiting', taken_by text, taken_at timestamptz)"""
ROUTE = """
WITH new AS (
    INSERT INTO agent_inbox (key, event_offset, session_id, sender, recipient, message)
    SELECT 'l:1:' || seq, seq, session_id, agent_id, payload ->> 'to', payload FROM agent_events
     WHERE event_type = 'handoff.emitted' ON CONFLICT DO NOTHING RETURNING recipient
) SELECT pg_notify('agent_inbox', recipient) FROM new"""


@pytest.fixture
def ledger(database: Database) -> Database:
    database.execute(ledger_sql(LedgerTable()))
    database.execute(INBOX)
    return database


def swarm_of(database: Database, agents: list[Agent], budget: Budget) -> Swarm:
    return Swarm(agents, budget, LedgerTable(), lambda _name: psycopg2.connect(database.dsn))


@contextmanager
def routing(database: Database) -> Iterator[None]:
    """In the consumer's place."""
    done = threading.Event()

    def route() -> None:
        while not done.wait(0.02):
            database.execute(ROUTE)

    thread = threading.Thread(target=route)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_for_the_end(swarm: Swarm) -> None:
    deadline = time.monotonic() + 30
    while swarm.busy:
        assert time.monotonic() < deadline, "the swarm does not end"
        time.sleep(0.02)
    assert swarm.error is None, swarm.error


def test_a_swarm_writes_exactly_what_it_may_and_says_so(ledger: Database) -> None:
    swarm = swarm_of(ledger, simulated(6, seed=3), Budget(400, None))
    with routing(ledger):
        swarm.start()
        wait_for_the_end(swarm)
    swarm.stop()
    tally = swarm.tally
    assert tally.committed == 400
    assert ledger.execute("SELECT count(*) FROM agent_events") == [(400,)]
    assert tally.rollbacks > 0
    assert tally.savepoints > 0
    # What was undone is gone, and only its numbers are missing.
    ((highest,),) = ledger.execute("SELECT max(seq) FROM agent_events")
    assert 400 < highest <= 400 + tally.undone
    taken = ledger.execute(
        "SELECT payload ->> 'handoff', count(*) FROM agent_events WHERE event_type = 'handoff.received' GROUP BY 1"
    )
    assert len(taken) == tally.handoffs_taken > 0
    assert {times for _, times in taken} == {1}
    assert ledger.execute("SELECT count(*) FROM agent_inbox WHERE state = 'taken'") == [(len(taken),)]


def test_agents_go_on_while_nobody_delivers_their_handoffs(ledger: Database) -> None:
    swarm = swarm_of(ledger, simulated(4, seed=1), Budget(300, None))
    swarm.start()
    wait_for_the_end(swarm)
    swarm.stop()
    assert swarm.tally.committed == 300
    assert swarm.tally.handoffs_taken == 0


def test_the_gate_holds_writers_and_lets_them_go(ledger: Database) -> None:
    budget = Budget(200, None)
    budget.close_gate_at(50)
    swarm = swarm_of(ledger, simulated(4, seed=1), budget)
    swarm.start()
    deadline = time.monotonic() + 20
    while swarm.tally.committed < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert 50 <= swarm.tally.committed < 100
    assert swarm.busy
    budget.close_gate_at(None)
    wait_for_the_end(swarm)
    assert swarm.tally.committed == 200


def test_a_stopped_swarm_ends_soon_and_an_agent_that_fails_is_not_hidden(ledger: Database) -> None:
    budget = Budget(None, 50.0)
    swarm = swarm_of(ledger, simulated(3, seed=1), budget)
    swarm.start()
    while not swarm.tally.committed:
        time.sleep(0.01)
    swarm.stop(10)
    assert not swarm.busy
    ledger.execute("DROP TABLE agent_events")
    failing = swarm_of(ledger, simulated(3, seed=1), Budget(100, None))
    failing.start()
    deadline = time.monotonic() + 20
    while failing.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(failing.error, psycopg2.Error)
    failing.stop()


def test_replay_appends_every_copy_of_every_session_in_its_order(ledger: Database, tmp_path: Path) -> None:
    session = "11111111-2222-4333-8444-555555555555"
    lines = [
        f'{{"session_id": "{session}", "agent_id": "a", "event_type": "t", "payload": {n}.50}}\n' for n in range(40)
    ]
    (tmp_path / "one.jsonl").write_text("".join(lines))
    swarm = swarm_of(ledger, replaying(3, 5, recorded_sessions(tmp_path, 4)), Budget(None, None))
    swarm.start()
    wait_for_the_end(swarm)
    assert swarm.tally.committed == 160
    for copy in range(1, 5):
        rows = ledger.execute(
            "SELECT payload::text FROM agent_events WHERE session_id = %s ORDER BY seq", copied_session(session, copy)
        )
        assert rows == [(f"{n}.50",) for n in range(40)]


def test_a_folder_without_runs_and_a_run_with_a_bad_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*\.jsonl"):
        recorded_sessions(tmp_path, 1)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(BadLine, match=r"bad\.jsonl:1"):
        recorded_sessions(tmp_path, 1)
