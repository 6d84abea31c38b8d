"""``walstream diff`` and ``walstream fold check`` over sessions that stand in a ledger."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extras import Json

from tests.cli_calls import call, ok, set_up
from tests.conftest import Database
from tests.recorded import RUNS, run_file, run_lines
from tests.unit.test_diff import DONE, LOADED, Step, session, turn, write

A, B = (str(uuid.UUID(int=n)) for n in (0xA, 0xB))

OWN_FOLD = """
import time
from walstream import Fold

fold = Fold()
impure = Fold()

@fold.on("note.added")
def note_added(context, event):
    context.setdefault("notes", []).append(event.payload["text"])

@impure.on("note.added")
def note_added_at(context, event):
    context["at"] = time.time()
"""


@pytest.fixture
def ledger(database: Database) -> Database:
    set_up(database)
    return database


def append(database: Database, session_id: str, *steps: Step) -> list[int]:
    """Append events; return their seqs."""
    return [
        database.execute("SELECT seq FROM walstream.append(%s, 'agent', %s, %s)", session_id, kind, Json(payload))[0][0]
        for kind, payload in steps
    ]


@pytest.fixture
def own_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with folds, in the working directory, as an application has it."""
    name = f"folds_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(OWN_FOLD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def test_two_sessions(ledger: Database, tmp_path: Path) -> None:
    append(ledger, A, *session())
    seqs = append(ledger, B, *session("other", result="nothing"))
    found = call("diff", A, B, "--json", dsn=ledger.dsn)
    assert found.exit_code == 1
    assert (found.json["first"]["step"], found.json["first"]["aspect"]) == (2, "result")
    assert found.json["first"]["seqs"]["b"] == seqs[5:9]
    assert ok("diff", A, A, dsn=ledger.dsn).stdout == "equal: 3 steps\n"
    # As they were after five events of the later one; the other has all of its events by then.
    assert call("diff", A, B, "--at", str(seqs[4]), "--json", dsn=ledger.dsn).json["first"]["step"] == 2
    assert call("diff", A, B, "--at", str(seqs[4]), "--json", dsn=ledger.dsn).json["b"]["steps"] == 1
    file = write(tmp_path / "run.jsonl", session("x"))
    assert ok("diff", A, file, dsn=ledger.dsn).stdout == "equal: 3 steps\n"


def test_a_session_and_its_fork_part_where_the_fork_begins(ledger: Database) -> None:
    seqs = append(ledger, A, *session())
    (fork,) = ledger.execute("SELECT session FROM walstream.fork(%s, %s, 'agent')", A, seqs[8])[0]
    append(ledger, fork, *turn(3, prefix="again", result="something else"), DONE)
    found = call("diff", A, fork, "--json", dsn=ledger.dsn)
    assert found.exit_code == 1
    assert (found.json["first"]["step"], found.json["first"]["aspect"]) == (3, "result")
    (twin,) = ledger.execute("SELECT session FROM walstream.fork(%s, %s, 'agent')", A, seqs[4])[0]
    append(ledger, twin, *turn(2, prefix="twin"), *turn(3, prefix="twin"), DONE)
    assert ok("diff", A, twin, dsn=ledger.dsn).stdout == "equal: 3 steps\n"


def test_a_window_that_is_stored_by_digest_is_the_same_window(ledger: Database) -> None:
    append(ledger, A, *session())
    ledger.execute(
        "SELECT walstream.append(%s, 'agent', %s, %s, store_messages => true)", B, LOADED[0], Json(LOADED[1])
    )
    append(ledger, B, *session("b")[1:])
    assert ok("diff", A, B, dsn=ledger.dsn).stdout == "equal: 3 steps\n"
    assert ok("fold", "check", "--sessions", B, "--json", dsn=ledger.dsn).json["pure"] is True


@pytest.mark.parametrize("word", ["00000000-0000-4000-8000-0000000000ff", "no-uuid-and-no-file"])
def test_a_session_that_is_not_there(ledger: Database, word: str) -> None:
    append(ledger, A, *session())
    called = call("diff", A, word, dsn=ledger.dsn)
    assert called.exit_code == 3
    assert word in called.stderr


def test_the_builtin_fold_over_the_ledger(ledger: Database) -> None:
    seqs = append(ledger, A, *session())
    append(ledger, B, *session("b"))
    ledger.execute("SELECT walstream.fork(%s, %s, 'agent', %s)", A, seqs[3], str(uuid.UUID(int=0xC)))
    found = ok("fold", "check", "--json", dsn=ledger.dsn).json
    assert (found["pure"], found["sessions"], found["events"]) == (True, 3, 29)
    assert ok("fold", "check", "--limit", "1", "--json", dsn=ledger.dsn).json["events"] == 1
    assert ok("fold", "check", "--sessions", B, "--json", dsn=ledger.dsn).json["events"] == 14


def test_a_fold_of_an_application(ledger: Database, own_folds: str, tmp_path: Path) -> None:
    (seq,) = append(ledger, A, ("note.added", {"text": "x"}))
    assert ok("fold", "check", "--fold", f"{own_folds}:fold", dsn=ledger.dsn).stdout.startswith(
        f"pure: {own_folds}:fold"
    )
    called = call("fold", "check", "--fold", f"{own_folds}:impure", dsn=ledger.dsn)
    assert called.exit_code == 1
    assert "forbidden call: time.time at " in called.stdout
    assert f"in note_added_at (note.added, session {A}, seq {seq})" in called.stdout
    # The one that the configuration names is checked if no other is given.
    config = tmp_path / "walstream.toml"
    config.write_text(f'fold = "{own_folds}:impure"\n', encoding="utf-8")
    found = call("fold", "check", "--json", "--config", str(config), dsn=ledger.dsn)
    assert found.exit_code == 1
    (finding,) = found.json["findings"]
    assert (finding["kind"], finding["seq"], finding["event_type"]) == ("forbidden call", seq, "note.added")


def test_a_file_is_checked_without_a_database(own_folds: str, tmp_path: Path) -> None:
    file = write(tmp_path / "run.jsonl", [*session(), ("note.added", {"text": "x"})])
    assert ok("fold", "check", file, dsn="").exit_code == 0
    called = call("fold", "check", file, "--fold", f"{own_folds}:impure", dsn="")
    assert called.exit_code == 1
    assert f"(note.added, {file}:15)" in called.stdout
    missing = call("fold", "check", str(tmp_path / "none.jsonl"), dsn="")
    assert missing.exit_code == 6
    assert "none.jsonl" in missing.stderr


def test_nothing_to_fold_is_said(ledger: Database) -> None:
    assert "proves nothing" in ok("fold", "check", dsn=ledger.dsn).stderr


@pytest.mark.recorded
def test_recorded_runs_that_were_imported(ledger: Database) -> None:
    files = [str(run_file(name)) for name in RUNS]
    ok("import", *files, dsn=ledger.dsn)
    sessions: dict[str, Any] = {name: next(run_lines(name))["session_id"] for name in RUNS}
    a, b = sessions["marshmallow-tools"], sessions["marshmallow-tools-edited"]
    called = call("diff", a, b, dsn=ledger.dsn)
    assert called.exit_code == 1
    assert called.stdout.startswith("they part at step 1, in context: [0].content\n")
    assert "first in tool: step 1\n" in called.stdout
    by_file = call("diff", files[2], files[3], "--json", dsn="").json
    by_ledger = call("diff", a, b, "--json", dsn=ledger.dsn).json
    assert [(k, v["step"], v["path"]) for k, v in by_file["first_by_aspect"].items()] == [
        (k, v["step"], v["path"]) for k, v in by_ledger["first_by_aspect"].items()
    ]
    assert ok("diff", a, files[2], dsn=ledger.dsn).stdout == "equal: 11 steps\n"
    found = ok("fold", "check", "--json", dsn=ledger.dsn).json
    assert (found["sessions"], found["events"], found["pure"]) == (8, 337, True)
