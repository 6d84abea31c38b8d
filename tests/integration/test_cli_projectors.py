"""``walstream projectors`` and ``walstream parked``."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli_calls import add_projector, append_to_order, call, hold, ok, set_up
from tests.conftest import Database
from walstream.cli import app
from walstream.errors import ExitCode


@pytest.fixture
def ledger(database: Database) -> Database:
    set_up(database)
    append_to_order(database, [1], [2, 3], [4, 5, 6, 7, 8, 9, 10])
    add_projector(database, "meter", 4, lanes=2)
    add_projector(database, "router", 10)
    return database


def _park(database: Database, offset: int, session: str, state: str = "failed", **columns: Any) -> None:
    fields = {
        "projector": "meter",
        "event_offset": offset,
        "seq": offset,
        "session_id": session,
        "event_type": "t",
        "state": state,
        **columns,
    }
    database.execute(
        f"INSERT INTO walstream.parked ({', '.join(fields)}) VALUES ({', '.join(['%s'] * len(fields))})",
        *fields.values(),
    )


def _positions(database: Database, name: str) -> list[int]:
    return [
        row[0]
        for row in database.execute("SELECT position FROM walstream.cursors WHERE projector = %s ORDER BY lane", name)
    ]


def test_list(ledger: Database) -> None:
    found = {each["name"]: each for each in ok("projectors", "list", "--json", dsn=ledger.dsn).json}
    assert (found["meter"]["offset"], found["meter"]["lag_events"], found["meter"]["lanes"]) == (4, 6, 2)
    assert (found["router"]["offset"], found["router"]["lag_events"]) == (10, 0)
    assert "meter" in ok("projectors", "list", dsn=ledger.dsn).stdout


def test_pause_and_resume(ledger: Database) -> None:
    ok("projectors", "pause", "meter", "router", dsn=ledger.dsn)
    assert ledger.execute("SELECT desired FROM walstream.projectors") == [("paused",), ("paused",)]
    ok("projectors", "resume", "meter", dsn=ledger.dsn)
    assert ledger.execute("SELECT desired FROM walstream.projectors ORDER BY name") == [("running",), ("paused",)]


def test_resume_lets_a_halted_one_try_again(ledger: Database) -> None:
    ledger.execute("UPDATE walstream.projectors SET state = 'halted', error = 'boom' WHERE name = 'meter'")
    ok("projectors", "resume", "meter", dsn=ledger.dsn)
    assert ledger.execute("SELECT state FROM walstream.projectors WHERE name = 'meter'") == [("new",)]


def test_an_unknown_name_lists_the_known_ones_and_changes_nothing(ledger: Database) -> None:
    for command in (
        ["pause", "meter", "metre"],
        ["resume", "meter", "metre"],
        ["reset", "metre", "--to", "1", "--yes"],
        ["remove", "metre", "--yes"],
    ):
        called = call("projectors", *command, dsn=ledger.dsn)
        assert called.exit_code == ExitCode.CONFIG
        assert "meter, router" in called.stderr
    assert ledger.execute("SELECT DISTINCT desired FROM walstream.projectors") == [("running",)]


def test_reset_sets_every_lane(ledger: Database) -> None:
    before = 4
    for to, position in (("earliest", 0), ("latest", 10), ("3", 2), ("11", 10)):
        done = ok("projectors", "reset", "meter", "--to", to, "--yes", "--json", dsn=ledger.dsn).json
        assert (done["before"], done["offset"]) == (before, position)
        assert _positions(ledger, "meter") == [position, position]
        before = position
    assert _positions(ledger, "router") == [10]


def test_reset_to_no_place_is_refused(ledger: Database) -> None:
    for to in ("0", "12", "-1", "last", "٣"):
        called = call("projectors", "reset", "meter", f"--to={to}", "--yes", dsn=ledger.dsn)
        assert called.exit_code == ExitCode.CONFIG
    assert _positions(ledger, "meter") == [4, 4]


def test_reset_takes_back_the_parked_events_that_come_again(ledger: Database) -> None:
    for offset in (1, 2, 3, 4):
        _park(ledger, offset, "s")
    assert ok("projectors", "reset", "meter", "--to", "3", "--yes", "--json", dsn=ledger.dsn).json["unparked"] == 2
    assert ledger.execute("SELECT event_offset FROM walstream.parked ORDER BY 1") == [(1,), (2,)]


def test_reset_is_refused_while_it_runs_unless_it_is_paused(ledger: Database) -> None:
    holder = hold(ledger, "meter")
    generation = ledger.execute("SELECT generation FROM walstream.projectors WHERE name = 'meter'")[0][0]
    called = call("projectors", "reset", "meter", "--to", "earliest", "--yes", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "host:1" in called.stderr
    assert "projectors pause meter" in called.stderr
    assert _positions(ledger, "meter") == [4, 4]
    ok("projectors", "pause", "meter", dsn=ledger.dsn)
    ok("projectors", "reset", "meter", "--to", "earliest", "--yes", dsn=ledger.dsn)
    assert _positions(ledger, "meter") == [0, 0]
    # Whoever still holds it is fenced off: its next step is refused, and it reads the cursor again.
    assert ledger.execute("SELECT generation FROM walstream.projectors WHERE name = 'meter'")[0][0] > generation
    holder.close()


def test_reset_asks(ledger: Database) -> None:
    called = call("projectors", "reset", "meter", "--to", "earliest", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "--yes" in called.stderr
    assert _positions(ledger, "meter") == [4, 4]


def test_remove_forgets_what_no_process_runs(ledger: Database) -> None:
    _park(ledger, 1, "s")
    holder = hold(ledger, "meter")
    assert call("projectors", "remove", "meter", "--yes", dsn=ledger.dsn).exit_code == ExitCode.CONFIG
    holder.close()
    ok("projectors", "remove", "meter", "--yes", dsn=ledger.dsn)
    assert ledger.execute("SELECT name FROM walstream.projectors") == [("router",)]
    assert ledger.execute("SELECT count(*) FROM walstream.parked") == [(0,)]


def test_parked_list(ledger: Database) -> None:
    _park(ledger, 1, "s", attempts=3, error="[boom]", traceback="Traceback …")
    _park(ledger, 3, "s", "waiting")
    _park(ledger, 2, "t", attempts=1, error="bang")
    found = ok("parked", "list", "--json", dsn=ledger.dsn).json
    assert (found["events"], found["sessions"]) == (3, 2)
    assert [(each["event_offset"], each["state"], each["attempts"]) for each in found["entries"]] == [
        (1, "failed", 3),
        (2, "failed", 1),
        (3, "waiting", 0),
    ]
    assert found["entries"][0]["traceback"] == "Traceback …"
    assert ok("parked", "list", "meter", "--session", "s", "--json", dsn=ledger.dsn).json["events"] == 2
    assert ok("parked", "list", "--limit", "1", "--json", dsn=ledger.dsn).json["events"] == 3
    shown = ok("parked", "list", dsn=ledger.dsn).stdout
    assert "[boom]" in shown
    assert "3 events of 2 sessions" in shown
    assert ok("parked", "list", "router", dsn=ledger.dsn).stdout == "nothing is parked\n"
    assert call("parked", "list", "metre", dsn=ledger.dsn).exit_code == ExitCode.CONFIG


def test_on_a_narrow_terminal_nothing_is_cut_off(ledger: Database) -> None:
    """What stands in a table is what the next command is given."""
    session = "0f3c9a52-0a59-5e0f-8f57-0d8f3e3f2a11"
    _park(ledger, 1, session, attempts=3, error="boom")
    for words in (("projectors", "list"), ("status",), ("parked", "list")):
        shown = CliRunner().invoke(app, [*words, "--dsn", ledger.dsn], env={"COLUMNS": "60"}).stdout
        assert "…" not in shown, words
        cells = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
        assert "meter" in "".join(cell[1].strip() for cell in cells), words
    assert "".join(cell[4].strip() for cell in cells) == session


def test_parked_retry_makes_failed_ones_due(ledger: Database) -> None:
    _park(ledger, 1, "s", next_try="2100-01-01")
    _park(ledger, 2, "t", next_try="2100-01-01")
    assert ok("parked", "retry", "meter", "--session", "s", "--json", dsn=ledger.dsn).json["sessions"] == 1
    assert ledger.execute("SELECT session_id FROM walstream.parked WHERE next_try <= now()") == [("s",)]
    ok("parked", "retry", "meter", dsn=ledger.dsn)
    assert ledger.execute("SELECT count(*) FROM walstream.parked WHERE next_try <= now()") == [(2,)]


def test_parked_discard(ledger: Database) -> None:
    _park(ledger, 1, "s")
    _park(ledger, 2, "s", "waiting")
    assert call("parked", "discard", "meter", "1", dsn=ledger.dsn).exit_code == ExitCode.CONFIG
    called = call("parked", "discard", "meter", "1", "7", "--yes", "--json", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.FAILED
    assert called.json == {"projector": "meter", "discarded": [1], "not_parked": [7]}
    assert ledger.execute("SELECT event_offset FROM walstream.parked") == [(2,)]
    ok("parked", "discard", "meter", "2", "--yes", dsn=ledger.dsn)
