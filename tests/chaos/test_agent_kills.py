"""An agent with side effects in the ledger's database dies by SIGKILL at every step of its turns, and goes on.

The agent is the one of docs/examples/agent_loop.py, unchanged. What it has to show is asked in SQL: every invoice paid
once, every call answered once, every attempt an event; and beside the database, a file says which attempts began.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import set_up
from tests.conftest import Database

_ROOT = Path(__file__).resolve().parents[2]
INVOICES = 3
KILLED = -9


class Agents:
    """Agents to be run and killed, and the oracle over what they left."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self._folder = folder
        self.sessions: list[str] = []
        self._killed: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.agent_process"],
            cwd=_ROOT,
            env={**os.environ, "WALSTREAM_DSN": database.dsn},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def session(self) -> str:
        self.sessions.append(str(uuid.uuid4()))
        return self.sessions[-1]

    def log(self, session: str) -> Path:
        return self._folder / session

    def run(self, session: str, *kill_at: int | None) -> list[dict[str, Any]]:
        """One agent for each of ``kill_at``, all at once; how each of them ended."""
        runs = [{"session": session, "kill_at": step, "log": str(self.log(session))} for step in kill_at]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"runs": runs}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks agents is gone"
        ends: list[dict[str, Any]] = json.loads(line)
        for end in ends:
            assert end["code"] in (0, KILLED), end["said"]
            if end["code"] == KILLED:
                self._killed.add(str(end["pid"]))
        return ends

    def steps(self) -> int:
        """How many steps the whole life of an agent has that nobody kills."""
        (end,) = self.run(self.session(), None)
        return int(end["said"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def check(self) -> None:
        """Nothing missing, nothing doubled, no call lost, every attempt an event."""
        ask = self.database.execute
        sessions = len(self.sessions)
        assert ask("SELECT count(*), count(DISTINCT (session, invoice)) FROM payments") == [
            (INVOICES * sessions, INVOICES * sessions)
        ]
        assert ask("SELECT sum(balance)::bigint FROM accounts") == [(1_000_000,)]
        assert ask(
            "SELECT count(*) FROM accounts AS a WHERE name <> 'ours' AND balance IS DISTINCT FROM"
            " (SELECT sum(amount) FROM payments WHERE invoice = a.name)"
        ) == [(0,)]
        # Each call: invoked once, answered once, and its attempts are 2, 3, … without a gap or a double.
        assert (
            ask(
                "SELECT session_id, call_id, array_agg(event_type ORDER BY seq) FROM"
                " (SELECT *, payload ->> 'call_id' AS call_id FROM agent_events WHERE event_type LIKE 'tool.%') AS e"
                " GROUP BY 1, 2 HAVING count(*) FILTER (WHERE event_type = 'tool.invoked') <> 1"
                " OR count(*) FILTER (WHERE event_type = 'tool.observed') <> 1"
                " OR array_remove(array_agg(CASE WHEN event_type = 'tool.retried' THEN (payload ->> 'attempt')::int END"
                "    ORDER BY seq), NULL)"
                "  <> ARRAY(SELECT generate_series(2, 1 + count(*) FILTER (WHERE event_type = 'tool.retried')::int))"
            )
            == []
        )
        # The effect stands in the transaction that answered its call.
        assert ask(
            "SELECT count(*) FROM payments AS p JOIN agent_events AS e ON e.session_id::text = p.session"
            " AND e.event_type = 'tool.observed' AND e.xmin = p.xmin"
            " AND e.payload ->> 'result' = format('paid %s to %s', amount, invoice)"
        ) == [(INVOICES * sessions,)]
        # One key a call, whatever the attempt.
        assert ask(
            "SELECT max(keys) FROM (SELECT count(DISTINCT payload ->> 'idempotency_key') AS keys FROM agent_events"
            " WHERE event_type IN ('tool.invoked', 'tool.retried') GROUP BY session_id, payload ->> 'call_id') AS k"
        ) == [(1,)]
        # Some were killed where a call was in flight, or all of this says nothing.
        assert ask("SELECT count(*) > 0 FROM agent_events WHERE event_type = 'tool.retried'") == [(True,)]
        for session in self.sessions:
            self._check_attempts(session)

    def _check_attempts(self, session: str) -> None:
        """What began to execute, by the file: never more than the ledger says, and never two at once."""
        begun: Counter[str] = Counter()
        running: str | None = None
        for line in self.log(session).read_text().splitlines():
            word, pid, call_id = line.split()
            if word == "begin":
                # Whoever began before and did not end was killed: that is how the lock came to another.
                assert running is None or running in self._killed, "two agents executed at once"
                running = pid
                begun[call_id] += 1
            else:
                assert running == pid, "two agents executed at once"
                running = None
        recorded = dict(
            self.database.execute(
                "SELECT payload ->> 'call_id', count(*) FROM agent_events WHERE session_id = %s"
                " AND event_type IN ('tool.invoked', 'tool.retried') GROUP BY 1",
                session,
            )
        )
        assert {call for call, times in begun.items() if times > recorded[call]} == set()


@pytest.fixture
def agents(database: Database, tmp_path: Path) -> Iterator[Agents]:
    set_up(database)
    made = Agents(database, tmp_path)
    yield made
    made.close()


def kill_at(agents: Agents, step: int) -> int:
    """A life that ends at this step, and another that goes on; how many were killed."""
    session = agents.session()
    (end,) = agents.run(session, step)
    (again,) = agents.run(session, None)
    assert again["code"] == 0
    return int(end["code"] == KILLED)


def test_twelve_kills(agents: Agents) -> None:
    steps = agents.steps()
    assert sum(kill_at(agents, 1 + step * steps // 12) for step in range(12)) == 12
    agents.check()


@pytest.mark.slow
def test_killed_at_every_step_of_its_turns(agents: Agents) -> None:
    """Two hundred times at the least: at every step of a life, and at random steps of what recovers from it."""
    steps = agents.steps()
    kills = sum(kill_at(agents, step) for step in range(1, steps + 1))
    assert kills == steps
    chance = random.Random(31)
    while kills < 200 + steps:
        session = agents.session()
        while True:  # again and again, until one survives
            (end,) = agents.run(session, chance.randrange(1, 2 * steps))
            if end["code"] == 0:
                break
            kills += 1
    agents.check()


@pytest.mark.slow
def test_several_at_once_some_of_which_are_killed(agents: Agents) -> None:
    chance = random.Random(32)
    steps = agents.steps()
    for _ in range(20):
        session = agents.session()
        doomed = [chance.randrange(1, steps) for _ in range(5)]
        ends = agents.run(session, *doomed, None)
        assert ends[-1]["code"] == 0
    agents.check()
