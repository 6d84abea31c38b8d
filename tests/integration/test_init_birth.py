"""The birth of a slot (C60): killed in any state, under writers, order and stream hold every row exactly once."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psycopg2
import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.births import INSERT, assert_every_row_once, insert_rows
from walstream.config import Settings
from walstream.errors import ExitCode
from walstream.ledger import schema
from walstream.postgres import PostgresServer


@pytest.fixture
def slot(database: Database) -> str:
    return f"b_{database.name[-8:]}"


@contextlib.contextmanager
def init_process(database: Database, slot: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """``walstream init`` as a process of its own, which is killed at the end if it still lives."""
    command = [sys.executable, "-m", "walstream.cli", "init", "--slot", slot, "--dsn", database.dsn, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def state(database: Database) -> str | None:
    with contextlib.suppress(psycopg2.Error):
        rows = database.execute("SELECT slot_state FROM walstream.identity")
        return str(rows[0][0]) if rows else None
    return None


def slots_named(database: Database, slot: str) -> int:
    return int(database.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", slot)[0][0])


def init_waits_for_a_lock(database: Database) -> bool:
    return bool(
        database.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND application_name = 'walstream:init'"
            " AND wait_event_type = 'Lock'",
            database.name,
        )
    )


def walsender_waits(database: Database) -> bool:
    return bool(
        database.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND application_name = 'walstream:create-slot'"
            " AND wait_event_type = 'Lock'",
            database.name,
        )
    )


def make_ledger(database: Database, rows: int) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    insert_rows(database, rows)


def test_killed_while_creating(database: Database, slot: str) -> None:
    """In the fill before the slot: it stands still at its first segment, because the order's table is locked."""
    make_ledger(database, 10)
    schema.install(database.connect(), Settings())
    holder = database.connect()
    holder.cursor().execute("LOCK TABLE walstream.commit_order IN SHARE MODE")
    with init_process(database, slot) as process:
        wait_until(lambda: init_waits_for_a_lock(database), "init stands at its first segment")
        process.kill()
    assert state(database) == "creating"
    assert slots_named(database, slot) == 0
    holder.rollback()
    insert_rows(database, 5)
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 2)
    ordered, streamed = assert_every_row_once(database, slot)
    assert (ordered, streamed) == (list(range(1, 16)), [16, 17])


def test_killed_while_the_slot_is_being_made(database: Database, slot: str) -> None:
    make_ledger(database, 10)
    writer = database.connect()
    writer.cursor().execute(INSERT)
    with init_process(database, slot) as process:
        wait_until(lambda: walsender_waits(database), "the creation of the slot waits for the open transaction")
        assert state(database) == "creating"
        process.kill()
    insert_rows(database, 3)
    writer.commit()
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 2)
    ordered, streamed = assert_every_row_once(database, slot)
    assert (sorted(ordered), streamed) == (list(range(1, 15)), [15, 16])


def test_killed_while_filling(database: Database, slot: str) -> None:
    """With the slot made, at the first segment from its snapshot."""
    make_ledger(database, 10)
    writer = database.connect()
    writer.cursor().execute(INSERT)
    with init_process(database, slot) as process:
        wait_until(lambda: walsender_waits(database), "the creation of the slot waits for the open transaction")
        insert_rows(database, 3)  # after the fill, before the slot: only its snapshot shows them
        holder = database.connect()
        holder.cursor().execute("LOCK TABLE walstream.commit_order IN SHARE MODE")  # takes no transaction id
        writer.commit()
        wait_until(lambda: init_waits_for_a_lock(database), "init stands at its first segment from the snapshot")
        assert state(database) == "filling"
        insert_rows(database, 4)  # these come through the slot, which is lost with this attempt
        process.kill()
    assert slots_named(database, slot) == 1
    holder.rollback()
    insert_rows(database, 2)
    # Nothing runs on a slot that is half filled.
    called = call("status", "--json", dsn=database.dsn)
    assert "not complete (state filling)" in called.json["problems"][0]
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert done["slot"]["made_because"] == "its birth was interrupted (state filling)"
    insert_rows(database, 2)
    ordered, streamed = assert_every_row_once(database, slot)
    assert (sorted(ordered), streamed) == (list(range(1, 21)), [21, 22])


def test_killed_at_random_under_writers(database: Database, slot: str) -> None:
    """Writers with rollbacks and transactions that overlap the whole birth; the last attempt is let be."""
    make_ledger(database, 3000)
    stop = threading.Event()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")

    def write(number: int) -> None:
        chance = random.Random(seed + number)
        with contextlib.closing(psycopg2.connect(database.dsn)) as conn, conn.cursor() as cur:
            while not stop.is_set():
                for _ in range(chance.randrange(1, 5)):
                    cur.execute(INSERT)
                time.sleep(chance.random() * 0.02)
                if chance.random() < 0.2:
                    conn.rollback()
                else:
                    conn.commit()

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    try:
        chance = random.Random(seed)
        for _ in range(4):
            with init_process(database, slot) as process, contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.4 + chance.random() * 1.2)
        wait_until(
            lambda: call("init", "--slot", slot, dsn=database.dsn).exit_code == 0, "init comes through at last", 60.0
        )
        time.sleep(0.3)  # some more rows for the stream
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    ordered, streamed = assert_every_row_once(database, slot)
    assert len(ordered) >= 3000
    assert streamed


def test_an_open_transaction_is_named_and_nothing_is_left_behind(database: Database, slot: str) -> None:
    writer = database.connect(application_name="the forgotten one")
    make_ledger(database, 1)
    writer.cursor().execute(INSERT)
    called = call("init", "--slot", slot, "--wait", "2.5", "--json", dsn=database.dsn)
    assert called.exit_code == ExitCode.UNAVAILABLE
    assert "the forgotten one" in called.error["message"]
    assert "pg_terminate_backend" in called.error["hint"]
    assert called.error["transient"]
    assert slots_named(database, slot) == 0
    writer.commit()
    ok("init", "--slot", slot, dsn=database.dsn)
    assert_every_row_once(database, slot)


def test_a_prepared_transaction_is_named(database: Database, slot: str) -> None:
    make_ledger(database, 1)
    database.execute(f"BEGIN; {INSERT}; PREPARE TRANSACTION 'half done'")
    called = call("init", "--slot", slot, "--wait", "2.5", dsn=database.dsn)
    assert called.exit_code == ExitCode.UNAVAILABLE
    assert "'half done'" in called.stderr
    database.execute("COMMIT PREPARED 'half done'")
    ok("init", "--slot", slot, dsn=database.dsn)
    assert assert_every_row_once(database, slot) == ([1, 2], [])


def test_a_lock_on_the_table_is_named(database: Database, slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walstream.cli.session.LOCK_TIMEOUT", "300ms")
    make_ledger(database, 1)
    holder = database.connect(application_name="vacuum full")
    holder.cursor().execute("LOCK TABLE agent_events IN ACCESS EXCLUSIVE MODE")
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.UNAVAILABLE
    assert "vacuum full" in called.stderr
    holder.rollback()
    ok("init", "--slot", slot, dsn=database.dsn)


def test_ctrl_c_leaves_no_slot_behind(database: Database, slot: str) -> None:
    make_ledger(database, 1)
    writer = database.connect()
    writer.cursor().execute(INSERT)
    with init_process(database, slot) as process:
        wait_until(lambda: walsender_waits(database), "the creation of the slot waits for the open transaction")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    wait_until(lambda: slots_named(database, slot) == 0, "the half-made slot is gone")


def test_two_at_once_make_one_slot(database: Database, slot: str) -> None:
    make_ledger(database, 2000)
    with init_process(database, slot) as first, init_process(database, slot) as second:
        codes = {first.wait(60), second.wait(60)}
    assert 0 in codes
    assert codes <= {0, ExitCode.UNAVAILABLE}
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 1)
    assert assert_every_row_once(database, slot) == (list(range(1, 2001)), [2001])


def test_a_slot_that_was_dropped_is_made_anew_and_what_it_missed_is_ordered(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 5)
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    insert_rows(database, 1)
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 1)
    assert assert_every_row_once(database, slot) == ([1, 2, 3, 4, 5, 6], [7])


def test_a_lost_slot_and_commit_order(own_server: Callable[..., PostgresServer]) -> None:
    """On a server of its own: WAL is thrown away under the slot, and commit times are tracked."""
    server = own_server(max_slot_wal_keep_size="1MB", track_commit_timestamp="on", max_wal_size="32MB")
    server.execute("CREATE DATABASE ledger")
    database = Database(server, "ledger", made=True)
    ok("init", "--slot", "lost", dsn=database.dsn)
    late = database.connect()
    late.cursor().execute(INSERT)
    insert_rows(database, 2)
    late.commit()
    for _ in range(20):
        server.execute("SELECT pg_logical_emit_message(false, 'fill', repeat('x', 1000000))")
        server.execute("SELECT pg_switch_wal()")
    server.execute("CHECKPOINT")
    assert call("status", "--json", dsn=database.dsn).json["slot"]["wal_status"] == "lost"
    assert any("is lost" in words for words in call("status", "--json", dsn=database.dsn).json["problems"])
    done = ok("init", "--slot", "lost", "--json", dsn=database.dsn).json
    assert done["slot"]["made_because"].startswith("it is lost")
    insert_rows(database, 1)
    # 1 was inserted first and committed last.
    assert assert_every_row_once(database, "lost") == ([2, 3, 1], [4])
