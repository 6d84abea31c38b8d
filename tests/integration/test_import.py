"""``walstream import``: what is appended, and what of a bad file is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from tests.conftest import Database, Server
from tests.recorded import run_files
from walstream.cli import app
from walstream.config import LedgerTable
from walstream.errors import ExitCode
from walstream.ledger.importing import Pace, copied_session
from walstream.ledger.json_lines import parse_event
from walstream.ledger.schema import ledger_sql

SESSION = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def ledger(database: Database) -> Database:
    database.execute(ledger_sql(LedgerTable()))
    return database


def run(database: Database, *words: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["import", "--dsn", database.dsn, *words], input=stdin)


def line(payload: str = "{}", session: str = SESSION, event_type: str = "t") -> str:
    return f'{{"session_id": "{session}", "agent_id": "a", "event_type": "{event_type}", "payload": {payload}}}\n'


def rows(database: Database, columns: str = "payload::text") -> list[Any]:
    return [
        row[0] if len(row) == 1 else row for row in database.execute(f"SELECT {columns} FROM agent_events ORDER BY seq")
    ]


def test_events_are_appended_in_order_and_to_the_last_digit(ledger: Database, tmp_path: Path) -> None:
    payloads = [
        '{"n": 9007199254740993}',
        "0.1234567890123456789",
        "1.10",
        "null",
        '"\\u00e9\\ud83d\\ude00"',
        '{"a": 1e400}',
    ]
    (tmp_path / "a.jsonl").write_text("".join(map(line, payloads)))
    result = run(ledger, str(tmp_path / "a.jsonl"), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) | {"seconds": 0} == {
        "events": 6,
        "transactions": 1,
        "files": [str(tmp_path / "a.jsonl")],
        "copies": 0,
        "sessions_known": 0,
        "seconds": 0,
    }
    assert rows(ledger) == [
        '{"n": 9007199254740993}',
        "0.1234567890123456789",
        "1.10",
        "null",
        '"é😀"',
        '{"a": 1' + "0" * 400 + "}",
    ]
    assert rows(ledger, "session_id::text, agent_id, event_type")[0] == (SESSION, "a", "t")


def test_payload_text_reaches_a_json_column_unchanged(ledger: Database, tmp_path: Path) -> None:
    ledger.execute("ALTER TABLE agent_events ALTER payload TYPE json, ALTER session_id TYPE text")
    text = '{ "b":1.0,"a" : 1e2, "b": 2 }'
    (tmp_path / "a.jsonl").write_text(line(text, session="no uuid"))
    assert run(ledger, str(tmp_path / "a.jsonl")).exit_code == 0
    assert rows(ledger, "session_id, payload::text") == [("no uuid", text)]


def test_a_bad_line_costs_nothing_if_the_file_can_be_checked_first(ledger: Database, tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(line("1") * 3)
    (tmp_path / "bad.jsonl").write_text(line("1") * 4 + line("NaN") + line("2"))
    result = run(ledger, str(tmp_path / "good.jsonl"), str(tmp_path / "bad.jsonl"), "--batch", "1")
    assert result.exit_code == ExitCode.DATA
    assert "bad.jsonl:5: NaN" in result.stderr
    assert rows(ledger) == []
    assert ledger.execute("SELECT last_value, is_called FROM agent_events_seq_seq") == [
        (1, False)
    ]  # no transaction at all


def test_of_a_bad_line_on_the_standard_input_its_transaction_is_not_written(ledger: Database) -> None:
    lines = "".join(line(str(n)) for n in range(1, 6)) + '{"session_id": 1}\n' + line("7")
    result = run(ledger, "-", "--batch", "2", stdin=lines.encode())
    assert result.exit_code == ExitCode.DATA
    assert "-:6: without agent_id, event_type, payload" in result.stderr
    assert "4 events before it are committed" in result.stderr
    assert rows(ledger) == ["1", "2", "3", "4"]


def test_a_row_that_only_the_server_can_refuse_is_named_too(ledger: Database, tmp_path: Path) -> None:
    ledger.execute("ALTER TABLE agent_events ADD CHECK (event_type <> 'forbidden')")
    (tmp_path / "a.jsonl").write_text(line("1") * 6 + line("7", event_type="forbidden") + line("8") * 2)
    result = run(ledger, str(tmp_path / "a.jsonl"), "--batch", "4", "--json")
    assert result.exit_code == ExitCode.DATA
    error = json.loads(result.stderr)
    assert error["error"] == "BadLine"
    assert "a.jsonl:7: new row" in error["message"]
    assert "violates check constraint" in error["message"]
    assert rows(ledger) == ["1"] * 4


def test_a_session_id_that_is_no_uuid_is_named(ledger: Database, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line("1") + line("2", session="x"))
    result = run(ledger, str(tmp_path / "a.jsonl"))
    assert result.exit_code == ExitCode.DATA
    assert 'a.jsonl:2: invalid input syntax for type uuid: "x"' in result.stderr
    assert rows(ledger) == []


def test_rows_that_are_refused_only_together_are_named_together(ledger: Database, tmp_path: Path) -> None:
    ledger.execute("CREATE UNIQUE INDEX ON agent_events (event_type)")
    (tmp_path / "a.jsonl").write_text(line("1") + line("2", event_type="u") + line("3"))
    result = run(ledger, str(tmp_path / "a.jsonl"))
    assert result.exit_code == ExitCode.DATA
    assert "lines 1 to 3 of" in result.stderr
    assert rows(ledger) == []


@pytest.mark.parametrize(("batch", "transactions"), [("0", 2), ("2", 4), ("100", 2)])
def test_a_transaction_never_spans_two_files(ledger: Database, tmp_path: Path, batch: str, transactions: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(line() * 3)
    result = run(ledger, str(tmp_path / "a"), str(tmp_path / "b"), "--batch", batch, "--json")
    assert json.loads(result.stdout)["transactions"] == transactions
    assert len(set(rows(ledger, "xmin::text"))) == transactions


def test_copies_have_sessions_of_their_own_and_a_rerun_is_noticed(ledger: Database, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(line("1") + line("2"))
    words = (str(tmp_path / "a"), "--copies", "3")
    first = run(ledger, *words, "--json")
    assert json.loads(first.stdout)["events"] == 6
    expected = [copied_session(SESSION, n) for n in (1, 1, 2, 2, 3, 3)]
    assert rows(ledger, "session_id::text") == expected
    assert len({SESSION, *expected}) == 4
    again = run(ledger, *words)
    assert "1 of these sessions have events in the ledger already" in again.stderr
    assert run(ledger, "-", "--copies", "2", stdin=line("3").encode()).exit_code == 0
    assert rows(ledger)[-2:] == ["3", "3"]


def test_a_file_that_is_not_there_and_a_server_that_is_not_there(ledger: Database, tmp_path: Path) -> None:
    missing = run(ledger, str(tmp_path / "none.jsonl"))
    assert missing.exit_code == ExitCode.CONFIG
    assert "none.jsonl: No such file" in missing.stderr
    (tmp_path / "a").write_text(line())
    words = ["import", str(tmp_path / "a"), "--dsn", "host=127.0.0.1 port=1 password=secret"]
    away = CliRunner().invoke(app, words)
    assert away.exit_code == ExitCode.UNAVAILABLE
    assert "secret" not in away.output


def test_a_connection_that_is_lost_on_the_way_is_no_mystery(ledger: Database, tmp_path: Path) -> None:
    ledger.execute(
        "CREATE FUNCTION fall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.payload = '4' THEN"
        " PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN NEW; END $$;"
        " CREATE TRIGGER fall BEFORE INSERT ON agent_events FOR EACH ROW EXECUTE FUNCTION fall()"
    )
    (tmp_path / "a.jsonl").write_text("".join(line(str(n)) for n in range(1, 7)))
    result = run(ledger, str(tmp_path / "a.jsonl"), "--batch", "2")
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert "already closed" not in result.stderr  # a consequence, and no cause
    assert "2 events before it are committed" in result.stderr
    assert f"whether lines 3 to 4 of {tmp_path}/a.jsonl are in the ledger has to be looked up" in result.stderr
    assert rows(ledger) == ["1", "2"]


def test_mapped_names_are_quoted(database: Database, tmp_path: Path) -> None:
    database.execute('CREATE SCHEMA "My %s"')
    database.execute(
        'CREATE TABLE "My %s"."E""v" (n bigserial PRIMARY KEY, "Session%" text, agent text, kind text, body jsonb)'
    )
    config = tmp_path / "walstream.toml"
    config.write_text(
        """[ledger]
namespace = "My %s"
table = 'E"v'
columns = {seq = "n", session_id = "Session%", agent_id = "agent", event_type = "kind", payload = "body"}
"""
    )
    result = run(database, "-", "--config", str(config), stdin=line("[1]").encode())
    assert result.exit_code == 0, result.output
    assert database.execute('SELECT "Session%", body::text FROM "My %s"."E""v"') == [(SESSION, "[1]")]


def test_the_pace_neither_rushes_nor_makes_up_for_lost_time() -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    pace = Pace(10, clock=lambda: now, sleep=sleep)
    for _ in range(5):
        pace.wait(10)
    assert now == pytest.approx(4)
    now += 100
    before = now
    for _ in range(4):
        pace.wait(10)
    assert now - before == pytest.approx(2, abs=1.01)
    Pace(None, clock=lambda: now, sleep=sleep).wait(1000)
    assert slept[-1] <= 1


# Characters and pieces that make near misses likely: the validator must agree with the server about each of them.
PIECES = st.sampled_from(
    [
        *'{}[]:,"\\ \t0123456789.eE+-',
        "\\u0000",
        "\\ud83d",
        "\\ude00",
        "\\u00e9",
        "\\n",
        "true",
        "null",
        "NaN",
        '"a"',
        "é",
        "1e9",
        "-",
    ]
)


def test_what_a_line_may_hold_is_what_jsonb_accepts(server: Server) -> None:
    connection = psycopg2.connect(server.dsn())
    connection.autocommit = True

    def accepted_by_server(text: str) -> bool:
        try:
            with connection.cursor() as cur:
                cur.execute("SELECT %s::jsonb", (text,))
        except psycopg2.DataError:
            return False
        return True

    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(PIECES, min_size=1, max_size=8).map("".join)
        | st.lists(PIECES, max_size=6).map(lambda p: f'["{"".join(p)}"]')
    )
    def agrees(text: str) -> None:
        raw = f'{{"payload": {text}, "session_id": "s", "agent_id": "a", "event_type": "t"}}'.encode()
        try:
            mine = parse_event(raw).payload
        except ValueError:
            mine = None
        if mine is None:
            # A text such as `1, "x": 2` would end the payload and go on with another key: not the server's business.
            assert not accepted_by_server(text), text
        else:
            assert accepted_by_server(mine), text

    try:
        agrees()
    finally:
        connection.close()


@pytest.mark.recorded
def test_the_recorded_runs_arrive_as_they_are(ledger: Database) -> None:
    files = run_files()
    result = run(ledger, *map(str, files), "--copies", "2", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(text) for file in files for text in file.read_text().splitlines()]
    found = rows(ledger, "session_id::text, agent_id, event_type, payload")
    wanted = [
        (copied_session(each["session_id"], copy), each["agent_id"], each["event_type"], each["payload"])
        for copy in (1, 2)
        for each in lines
    ]
    assert found == wanted
