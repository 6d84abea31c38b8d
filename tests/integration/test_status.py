"""``walstream status``: what it reads, and what it says needs a person."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import add_projector, append_to_order, call, hold, ok, set_up
from tests.conftest import Database
from walstream.errors import ExitCode


@pytest.fixture
def ledger(database: Database) -> Database:
    slot = f"s_{database.name[-8:]}"
    set_up(database, slot=slot)
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    return database


def _status(database: Database) -> tuple[int, Any]:
    called = call("status", "--json", dsn=database.dsn)
    return called.exit_code, called.json


def test_all_is_well(ledger: Database) -> None:
    append_to_order(ledger, [1], [2])
    add_projector(ledger, "meter", 2)
    holders = [hold(ledger, "ingest"), hold(ledger, "meter")]
    code, found = _status(ledger)
    assert (code, found["problems"]) == (0, [])
    assert found["slot"]["wal_status"] == "reserved"
    assert found["slot"]["retained_bytes"] >= found["slot"]["distance_bytes"] >= 0
    assert found["order"]["head"] == 2
    assert (found["ingest"]["state"], found["ingest"]["owner"]) == ("running", "host:1")
    (projector,) = found["projectors"]
    assert (projector["state"], projector["lag_events"], projector["lag_seconds"]) == ("running", 0, 0.0)
    shown = ok("status", dsn=ledger.dsn).stdout
    for word in ("reserved", "head at offset 2", "meter", "host:1"):
        assert word in shown
    del holders


def test_lag_is_counted_in_events_and_from_the_commit_of_the_next_one(ledger: Database) -> None:
    append_to_order(ledger, [1], [2, 3], [4], ages=[1000.0, 500.0, 100.0])
    append_to_order(ledger, [5], ages=[50.0])
    for position in range(6):
        add_projector(ledger, f"p{position}", position)
    found = {each["name"]: each for each in _status(ledger)[1]["projectors"]}
    for position, age in enumerate((1000, 500, 500, 100, 50)):
        projector = found[f"p{position}"]
        assert projector["lag_events"] == 5 - position
        assert age <= projector["lag_seconds"] < age + 45
    assert (found["p5"]["lag_events"], found["p5"]["lag_seconds"]) == (0, 0.0)


def test_lag_of_recovered_events_comes_from_their_rows(ledger: Database) -> None:
    ledger.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload, created_at) VALUES"
        " (1, gen_random_uuid(), 'a', 't', '{}', now() - interval '1000 seconds'),"
        " (2, gen_random_uuid(), 'a', 't', '{}', '-infinity')"
    )
    append_to_order(ledger, [1], [2], ages=[None, None], recovered=True)
    add_projector(ledger, "first", 0)
    add_projector(ledger, "second", 1)
    first, second = _status(ledger)[1]["projectors"]
    assert 1000 <= first["lag_seconds"] < 1045
    assert second["lag_seconds"] is None  # unknown is said, and is not 0
    assert "?" in call("status", dsn=ledger.dsn).stdout


def test_lanes_stand_where_the_slowest_does(ledger: Database) -> None:
    append_to_order(ledger, [1], [2], [3])
    add_projector(ledger, "laned", 3, lanes=2)
    ledger.execute("UPDATE walstream.cursors SET position = 1 WHERE lane = 1")
    (projector,) = _status(ledger)[1]["projectors"]
    assert (projector["offset"], projector["lag_events"]) == (1, 2)


def test_what_needs_a_person_is_named_and_exits_1(ledger: Database) -> None:
    add_projector(ledger, "halted", 0, state="halted", error="boom", error_offset=1)
    add_projector(ledger, "orphan", 0)
    add_projector(ledger, "resting", 0, desired="paused")
    ledger.execute("SELECT pg_drop_replication_slot(slot) FROM walstream.identity")
    code, found = _status(ledger)
    assert code == ExitCode.FAILED
    words = "\n".join(found["problems"])
    assert "there is no slot" in words
    assert "`walstream run` makes a new one" in words
    assert "no ingest is running" in words
    assert "projector halted halted at offset 1: boom" in words
    assert "projector orphan: no process runs it" in words
    assert "resting" not in words
    assert found["slot"]["exists"] is False
    assert found["slot"]["retained_bytes"] is None
    shown = call("status", dsn=ledger.dsn).stdout
    assert "boom" in shown
    assert "does not exist" in shown


def test_a_runner_in_trouble(ledger: Database) -> None:
    for name, state in (("first", "hung"), ("second", "retrying")):
        add_projector(ledger, name, 0, error=f"{name} [trouble]")
        hold(ledger, name)
        ledger.execute("UPDATE walstream.projectors SET state = %s WHERE name = %s", state, name)
    hold(ledger, "ingest")
    assert _status(ledger)[1]["problems"] == ["projector first is hung: first [trouble]"]
    assert "second [trouble]" in call("status", dsn=ledger.dsn).stdout


def test_what_is_parked_needs_a_person(ledger: Database) -> None:
    append_to_order(ledger, [1], [2])
    add_projector(ledger, "meter", 2)
    holders = [hold(ledger, "ingest"), hold(ledger, "meter")]
    ledger.execute(
        "INSERT INTO walstream.parked (projector, event_offset, seq, session_id, event_type, state)"
        " SELECT 'meter', n, n, 's', 't', 'waiting' FROM generate_series(1, 2) AS n"
    )
    code, found = _status(ledger)
    assert (code, found["projectors"][0]["parked"]) == (1, 2)
    assert found["problems"] == ["projector meter: events parked behind a failure: 2 (see `walstream parked list`)"]
    del holders


def test_an_ingest_whose_connection_is_gone_is_gone(ledger: Database) -> None:
    hold(ledger, "ingest").close()
    state = _status(ledger)[1]["ingest"]
    assert state["state"] == "gone"
    ledger.execute("UPDATE walstream.ingest SET state = 'failed', error = 'disk [full]'")
    assert "ingest failed: disk [full]" in _status(ledger)[1]["problems"]


def test_half_set_up(ledger: Database) -> None:
    ledger.execute("UPDATE walstream.identity SET slot_state = 'filling'")
    assert "walstream init" in _status(ledger)[1]["problems"][0]


def test_not_installed(database: Database) -> None:
    called = call("status", "--json", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "walstream init" in called.error["hint"]


def test_watch_prints_a_line_a_look(ledger: Database) -> None:
    command = [sys.executable, "-m", "walstream.cli", "status", "--watch", "--interval", "0.1", "--json"]
    with subprocess.Popen(
        [*command, "--dsn", ledger.dsn], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.terminate()
    assert all(line.startswith('{"ledger"') for line in lines)


def test_watch_for_a_person_follows_changes_until_ctrl_c(ledger: Database) -> None:
    command = [sys.executable, "-m", "walstream.cli", "status", "--watch", "--interval", "0.1"]
    with subprocess.Popen(
        [*command, "--dsn", ledger.dsn], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        append_to_order(ledger, [1])
        for line in process.stdout:
            if "head at offset 1" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


def test_a_value_that_does_not_fit_is_a_configuration_error(tmp_path: Path) -> None:
    environ = {**os.environ, "WALSTREAM_LEASE_SECONDS": "long"}
    result = subprocess.run(
        [sys.executable, "-m", "walstream.cli", "status"], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (ExitCode.CONFIG, "")
    assert "WALSTREAM_LEASE_SECONDS: " in result.stderr
    assert "Traceback" not in result.stderr
