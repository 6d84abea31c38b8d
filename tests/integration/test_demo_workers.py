"""The demo's workers without the demo: what they write is what the scenario says, and their accidents happen."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.cli_calls import set_up
from tests.conftest import Database
from walstream.demo.journal import Begun, Undone, read
from walstream.demo.scenario import Step, new_task, turn, turn_after
from walstream.demo.workers import EFFECTS, worker_of
from walstream.ledger.append import NewEvent

SESSIONS = 24


def opened(database: Database) -> dict[int, tuple[str, list[Step]]]:
    """Sessions whose planner has handed them on, and a job for each; by the handoff's seq, the turn that is wanted."""
    wanted = {}
    rng = random.Random(5)
    for _ in range(SESSIONS):
        task = new_task(rng)
        handoff: NewEvent = list(turn("planner", "planner-1", task, rng))[-1].events[-1]
        ((seq,),) = database.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, %s, %s, %s)"
            " RETURNING seq",
            *handoff,
        )
        database.execute("SELECT walstream.submit_job(%s, 'researcher', %s)", task.session_id, seq)
        wanted[seq] = (task.session_id, turn_after(json.loads(handoff.payload), task.session_id))
    return wanted


def test_a_turn_is_written_once_and_whole_whatever_happens_to_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WALSTREAM_DEMO_HANDS", "4")
    settings = set_up(database)
    database.execute(EFFECTS)
    wanted = opened(database)
    worker = worker_of("researcher")
    worker.start(settings.model_copy(update={"poll_seconds": 0.1}))
    try:
        deadline = time.monotonic() + 60
        while database.execute("SELECT count(*) FROM agent_jobs WHERE status = 'COMPLETED'") != [(SESSIONS,)]:
            assert time.monotonic() < deadline, database.execute("SELECT status, error FROM agent_jobs")
            time.sleep(0.1)
    finally:
        worker.stop()
    assert database.execute("SELECT event_seq, count(*) FROM demo_effects GROUP BY 1 ORDER BY 1") == [
        (seq, 1) for seq in wanted
    ]
    for session_id, steps in wanted.values():
        rows = database.execute(
            "SELECT event_type, payload FROM agent_events WHERE session_id = %s AND agent_id = 'researcher'", session_id
        )
        events = [(event.event_type, json.loads(event.payload)) for step in steps for event in step.events]
        assert sorted(kind for kind, _ in rows) == sorted(["handoff.received", *(kind for kind, _ in events)])
        assert all(event in rows for event in events)

    journal = list(read(tmp_path / "turns.jsonl"))
    begun = [entry for entry in journal if isinstance(entry, Begun)]
    undone = [entry for entry in journal if isinstance(entry, Undone)]
    failing = {
        seq for seq, (_, steps) in wanted.items() if steps[0].undo == "transaction" or steps[-1].undo == "transaction"
    }
    assert {entry.seq for entry in begun} == set(wanted)
    assert {entry.seq for entry in begun if entry.token > 1} == failing
    assert len(begun) == SESSIONS + len(failing)
    assert {entry.savepoint for entry in undone} == {True, False}
    assert all(entry.events > 0 for entry in undone)
