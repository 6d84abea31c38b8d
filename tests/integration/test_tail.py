"""``walstream tail``: from the order where a stream is installed, else through a temporary slot that leaves nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from tests.cli_calls import append_to_order, call, hold, ok, set_up
from tests.conftest import Database
from walstream.cli.tail import Line
from walstream.config import LedgerTable
from walstream.errors import ExitCode
from walstream.event import Commit, Event
from walstream.ledger.json_lines import parse_event
from walstream.ledger.schema import ledger_sql
from walstream.source import tail_publication

ONE = "11111111-2222-4333-8444-555555555555"
TWO = "99999999-2222-4333-8444-555555555555"


@pytest.fixture
def ledger(database: Database) -> Database:
    database.execute(ledger_sql(LedgerTable()))
    return database


def insert(database: Database, event_type: str = "t", payload: str = "{}", session: str = ONE, agent: str = "a") -> int:
    ((seq,),) = database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, %s, %s, %s) RETURNING seq",
        session,
        agent,
        event_type,
        payload,
    )
    return int(seq)


def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


def streaming(database: Database) -> list[tuple[Any, ...]]:
    return database.execute(
        "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = current_database() AND temporary"
        " AND active AND confirmed_flush_lsn IS NOT NULL AND EXISTS"
        " (SELECT FROM pg_stat_replication WHERE pid = active_pid AND state = 'streaming')"
    )


def left_behind(database: Database) -> list[tuple[Any, ...]]:
    return database.execute(
        "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()"
        " UNION ALL SELECT pubname::text FROM pg_publication"
    )


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do ``work`` in another thread while the block runs, and raise what it raises."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if failures:
            raise failures[0]


# -- through a temporary slot ------------------------------------------------------------------------------------------


def test_without_a_stream_events_come_through_a_temporary_slot(ledger: Database) -> None:
    insert(ledger, "before")

    def write() -> None:
        until(lambda: streaming(ledger), "the slot")
        writer = ledger.connect()
        with writer.cursor() as cur:  # commits second, although its seq is lower
            cur.execute(
                "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                " VALUES (%s, 'é\u200b', 'second', '{\"n\": 9007199254740993.10}')",
                (ONE,),
            )
            insert(ledger, "first", "[1.0]")
            cur.execute("SAVEPOINT s; DELETE FROM agent_events WHERE false; ROLLBACK TO s")
        writer.commit()
        insert(ledger, "beyond the limit")

    with meanwhile(write):
        called = call("tail", "--json", "--limit", "2", dsn=ledger.dsn)
    assert called.exit_code == 0, called
    lines = called.stdout.splitlines()
    first, second = map(json.loads, lines)
    assert (first["event_type"], second["event_type"]) == ("first", "second")
    assert first["seq"] > second["seq"]
    assert first["offset"] is None
    assert first["key"] is None
    assert second["agent_id"] == "é\u200b"
    assert second["committed_at"] > first["committed_at"]
    assert '"payload":{"n": 9007199254740993.10}}' in lines[1]
    assert parse_event(lines[1].encode()).payload == '{"n": 9007199254740993.10}'
    assert left_behind(ledger) == []


def test_a_partitioned_ledger_with_other_names(database: Database, tmp_path: Any) -> None:
    database.execute(
        'CREATE TABLE "Ev" (n bigserial, sid text, agent text, kind text, body jsonb, at timestamptz DEFAULT now(),'
        " more int, PRIMARY KEY (n, at)) PARTITION BY RANGE (at);"
        ' CREATE TABLE leaf PARTITION OF "Ev" DEFAULT'
    )
    config = tmp_path / "w.toml"
    config.write_text(
        '[ledger]\ntable = "Ev"\ncolumns = {seq = "n", session_id = "sid", agent_id = "agent", event_type = "kind",'
        ' payload = "body", created_at = "at"}\n'
    )

    def write() -> None:
        until(lambda: streaming(database), "the slot")
        database.execute("INSERT INTO \"Ev\" (sid, agent, kind, body, more) VALUES ('s', 'a', 'k', '1', 7)")

    with meanwhile(write):
        called = call("tail", "--json", "--limit", "1", "--config", str(config), dsn=database.dsn)
    assert json.loads(called.stdout)["extras"] == {"more": "7"}, called


def test_an_offset_needs_an_installed_stream(ledger: Database) -> None:
    called = call("tail", "--from", "1", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "walstream init" in called.stderr
    assert left_behind(ledger) == []


def test_a_table_that_is_not_there_is_named(database: Database) -> None:
    called = call("tail", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert '"public"."agent_events"' in called.stderr
    assert left_behind(database) == []


def test_an_open_transaction_in_the_way_is_named_and_nothing_is_left(ledger: Database, tmp_path: Path) -> None:
    (tmp_path / "walstream.toml").write_text("connect_timeout = 2\n")
    blocker = ledger.connect(application_name="the blocker")
    with blocker.cursor() as cur:
        cur.execute("CREATE TABLE t ()")
    called = call("tail", "--config", str(tmp_path / "walstream.toml"), dsn=ledger.dsn)
    assert called.exit_code == ExitCode.UNAVAILABLE, called
    assert "the blocker" in called.stderr
    assert left_behind(ledger) == []


def started(database: Database, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "walstream.cli", "tail", "--dsn", database.dsn, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(ledger: Database, number: signal.Signals) -> None:
    process = started(ledger)
    try:
        until(lambda: streaming(ledger), "the slot")
        insert(ledger, "seen")
        assert process.stdout is not None
        assert b"seen" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert b"Traceback" not in process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
    assert left_behind(ledger) == []


@pytest.mark.parametrize("quiet", [True, False])
def test_a_reader_that_goes_away_ends_it_quietly(ledger: Database, quiet: bool) -> None:
    process = started(ledger)
    try:
        until(lambda: streaming(ledger), "the slot")
        assert process.stdout is not None
        process.stdout.close()
        if not quiet:
            insert(ledger)
        assert process.wait(60) == 141
        assert process.stderr is not None
        with process.stderr:
            said = process.stderr.read().decode()
        assert "temporary slot" in said
        assert len(said.splitlines()) == 1
    finally:
        process.kill()
        process.wait()
    assert left_behind(ledger) == []


def test_what_a_killed_tail_leaves_is_found_and_removed_by_the_next(ledger: Database) -> None:
    process = started(ledger)
    until(lambda: streaming(ledger), "the slot")
    connection = ledger.connect()
    connection.autocommit = True
    assert tail_publication.leftovers(connection) == []  # it lives
    ((name,),) = ledger.execute("SELECT pubname FROM pg_publication")
    process.kill()
    process.communicate()
    until(lambda: tail_publication.leftovers(connection) == [name], "the leftover")
    until(lambda: left_behind(ledger) == [(name,)], "the end of the temporary slot")

    def write() -> None:
        until(lambda: streaming(ledger), "the slot")
        insert(ledger)

    with meanwhile(write):
        called = call("tail", "--limit", "1", dsn=ledger.dsn)
    assert f"dropped the publication {name}" in called.stderr
    assert left_behind(ledger) == []


def test_another_role_neither_drops_what_lives_nor_fails_on_what_is_not_its(ledger: Database) -> None:
    role = f"r_{ledger.name[-8:]}"
    owner = ledger.connect()
    owner.autocommit = True
    name = tail_publication.make(owner, LedgerTable())
    ledger.execute(f"CREATE ROLE {role} LOGIN")
    try:
        other = psycopg2.connect(ledger.dsn, user=role)
        other.autocommit = True
        assert tail_publication.leftovers(other) == []
        owner.close()
        until(lambda: tail_publication.leftovers(other) == [name], "the leftover")
        assert tail_publication.remove_leftovers(other) == []
        other.close()
        assert left_behind(ledger) == [(name,)]
    finally:
        ledger.execute(f"DROP ROLE {role}")


# -- from the order ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ordered(database: Database) -> Database:
    set_up(database)
    seqs = [
        insert(database, "context.loaded", agent="planner-1"),
        insert(database, "tool.invoked", agent="writer-1"),
        insert(database, "tool.observed", session=TWO, agent="writer-2"),
        insert(database, "task.completed", '{"n": 1.50}', session=TWO, agent="reviewer-1"),
    ]
    append_to_order(database, [seqs[1], seqs[0]], [seqs[2]])
    append_to_order(database, [seqs[3]])
    return database


def types_of(called: Any) -> list[tuple[int, str]]:
    return [(line["offset"], line["event_type"]) for line in map(json.loads, called.stdout.splitlines())]


def test_an_installed_stream_is_read_in_its_order_without_a_slot(ordered: Database) -> None:
    called = ok("tail", "--json", "--from", "1", "--limit", "4", dsn=ordered.dsn)
    assert types_of(called) == [(1, "tool.invoked"), (2, "context.loaded"), (3, "tool.observed"), (4, "task.completed")]
    last = json.loads(called.stdout.splitlines()[-1])
    ((ledger_id,),) = ordered.execute("SELECT ledger_id::text FROM walstream.identity")
    assert last["key"] == f"{ledger_id}:1:4"
    assert '"payload":{"n": 1.50}}' in called.stdout
    assert left_behind(ordered) == []
    assert "no ingest is running" in called.stderr or called.stderr == ""


@pytest.mark.parametrize(
    ("words", "offsets"),
    [
        (("--from", "3", "--limit", "2"), [3, 4]),
        (("--from", "-1", "--limit", "1"), [4]),
        (("--from", "-100", "--limit", "1"), [1]),
        (("--from", "1", "--type", "tool.*", "--limit", "2"), [1, 3]),
        (("--from", "1", "--type", "task.failed", "--type", "task.completed", "--limit", "1"), [4]),
        (("--from", "1", "--agent", "writer-?", "--limit", "2"), [1, 3]),
        (("--from", "1", "--session", "9999", "--limit", "2"), [3, 4]),
        (("--from", "1", "--session", TWO, "--agent", "reviewer-1", "--limit", "1"), [4]),
    ],
)
def test_offsets_and_filters_choose(ordered: Database, words: tuple[str, ...], offsets: list[int]) -> None:
    called = ok("tail", "--json", *words, dsn=ordered.dsn)
    assert [offset for offset, _ in types_of(called)] == offsets


def test_brackets_in_a_name_are_no_pattern(ordered: Database) -> None:
    append_to_order(ordered, [insert(ordered, "t[1]", agent="worker[3]"), insert(ordered, "t1", agent="worker3")])
    for words in (("--agent", "worker[3]"), ("--agent", "work*[3]"), ("--type", "t[1]")):
        assert ok("tail", "--json", "--from", "5", *words, "--limit", "1", dsn=ordered.dsn).stdout.count("worker[3]")


def test_what_is_ordered_later_follows_and_a_lost_connection_costs_nothing(ordered: Database) -> None:
    process = started(ordered, "--json", "--from", "4")
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["offset"] == 4
        append_to_order(ordered, [insert(ordered, "five")])
        assert json.loads(process.stdout.readline())["event_type"] == "five"
        ordered.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'walstream:tail'"
        )
        append_to_order(ordered, [insert(ordered, "six")])
        assert json.loads(process.stdout.readline())["event_type"] == "six"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()


def test_it_says_when_nobody_puts_events_in_order(ordered: Database) -> None:
    assert "no ingest is running" in ok("tail", "--from", "4", "--limit", "1", dsn=ordered.dsn).stderr
    holder = hold(ordered, "ingest")
    assert ok("tail", "--from", "4", "--limit", "1", dsn=ordered.dsn).stderr == ""
    holder.close()


def test_a_stream_that_is_not_ready_counts_as_none(ordered: Database) -> None:
    ordered.execute("UPDATE walstream.identity SET slot_state = 'filling'")
    assert call("tail", "--from", "1", dsn=ordered.dsn).exit_code == ExitCode.CONFIG


# -- how it looks ------------------------------------------------------------------------------------------------------


def event_of(payload: str, agent: str = "writer-1", offset: int = 12) -> Event:
    row = (7, ONE.encode(), agent.encode(), b"tool.invoked", payload.encode(), None, None)
    return Event(offset, row, Commit(0, 1_000_000, 1, "l:1"))


def test_a_line_fits_the_width_and_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.cells import cell_len

    monkeypatch.setenv("COLUMNS", "100")
    line = Line()
    plain = line.render(event_of('{"a": 1}')).decode()
    assert plain == '      12 00:00:01.000 11111111 writer-1     tool.invoked     {"a": 1}\n'
    for payload in ("x" * 1000, "漢" * 1000, "é" * 1000):
        shown = line.render(event_of(payload)).decode().rstrip("\n")
        assert shown.endswith("…")
        assert 97 <= cell_len(shown) <= 100
    evil = line.render(event_of('"\x9b31m\u202e"', agent="a\x1b[2J\n")).decode()
    assert not set("\x1b\x9b\u202e") & set(evil)
    assert evil.count("\n") == 1
    assert "\x1b" not in plain
