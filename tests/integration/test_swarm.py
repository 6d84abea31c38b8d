"""The swarm on a real server: what the agents claim is what the ledger holds, once others did what was handed on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database
from walstream.config import LedgerTable
from walstream.demo.agents import OpenSessions, planners, recorded_sessions, replaying
from walstream.demo.scenario import turn_after
from walstream.demo.swarm import Agent, Budget, Swarm
from walstream.errors import ConfigError
from walstream.ledger.append import NewEvent, insert_events
from walstream.ledger.importing import copied_session
from walstream.ledger.json_lines import BadLine
from walstream.ledger.schema import ledger_sql


@pytest.fixture
def ledger(database: Database) -> Database:
    database.execute(ledger_sql(LedgerTable()))
    return database


def swarm_of(database: Database, agents: list[Agent], budget: Budget) -> Swarm:
    return Swarm(agents, budget, LedgerTable(), lambda _name: psycopg2.connect(database.dsn))


@contextmanager
def others_at_work(database: Database, sessions: OpenSessions) -> Iterator[None]:
    """In the workers' place: write what follows each handoff."""
    done = threading.Event()
    answered: set[int] = set()

    def work(connection: Connection) -> bool:
        """Answer what is there; whether that was anything."""
        with connection, connection.cursor() as cur:
            cur.execute("SELECT seq, session_id::text, payload FROM agent_events WHERE event_type = 'handoff.emitted'")
            handoffs = [row for row in cur.fetchall() if row[0] not in answered]
            for seq, session_id, payload in handoffs:
                answered.add(seq)
                received = NewEvent(session_id, payload["to"], "handoff.received", json.dumps({"handoff": seq}))
                written = [event for step in turn_after(payload, session_id) for event in step.events]
                insert_events(cur, LedgerTable(), [received, *written])
                sessions.ended += written[-1].event_type != "handoff.emitted"
        return bool(handoffs)

    def run() -> None:
        connection = psycopg2.connect(database.dsn)
        while work(connection) or not done.wait(0.02):
            pass
        connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_for_the_end(swarm: Swarm) -> None:
    deadline = time.monotonic() + 60
    while swarm.busy:
        assert time.monotonic() < deadline, "the swarm does not end"
        time.sleep(0.02)
    assert swarm.error is None, swarm.error


def test_a_swarm_has_exactly_so_much_written_as_it_may(ledger: Database) -> None:
    sessions = OpenSessions(5)
    swarm = swarm_of(ledger, planners(3, 3, sessions), Budget(600, None))
    with others_at_work(ledger, sessions):
        swarm.start()
        wait_for_the_end(swarm)
    swarm.stop()
    tally = swarm.tally
    assert tally.claimed == 600
    assert 100 < tally.handed_on < 600
    assert ledger.execute("SELECT count(*) FROM agent_events") == [(600,)]
    assert tally.rollbacks > 0
    assert tally.savepoints > 0
    # What was undone is gone, and only its numbers are missing.
    ((highest,),) = ledger.execute("SELECT max(seq) FROM agent_events")
    assert 600 < highest <= 600 + tally.undone
    assert ledger.execute("SELECT count(*) FROM agent_events WHERE event_type = 'handoff.emitted'") == ledger.execute(
        "SELECT count(*) FROM agent_events WHERE event_type = 'handoff.received'"
    )


def test_planners_go_on_alone_while_nobody_takes_their_handoffs(ledger: Database) -> None:
    swarm = swarm_of(ledger, planners(2, 1, OpenSessions(2)), Budget(300, None))
    swarm.start()
    wait_for_the_end(swarm)
    swarm.stop()
    assert swarm.tally.claimed == 300
    assert 0 < swarm.tally.handed_on < 200
    assert ledger.execute("SELECT count(*) FROM agent_events") == [(swarm.tally.committed,)]


def test_the_gate_holds_writers_and_lets_them_go(ledger: Database) -> None:
    budget = Budget(200, None)
    budget.close_gate_at(50)
    swarm = swarm_of(ledger, planners(4, 1, OpenSessions(0)), budget)
    swarm.start()
    deadline = time.monotonic() + 60
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
    swarm = swarm_of(ledger, planners(3, 1, OpenSessions(0)), budget)
    swarm.start()
    while not swarm.tally.committed:
        time.sleep(0.01)
    swarm.stop(10)
    assert not swarm.busy
    ledger.execute("DROP TABLE agent_events")
    failing = swarm_of(ledger, planners(3, 1, OpenSessions(0)), Budget(100, None))
    failing.start()
    deadline = time.monotonic() + 60
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
