"""Slots are made without hanging and leave nothing behind (C47), and are dropped only if they are ours (C41)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database
from tests.integration.source_ledgers import Ledger, slot_name
from walstream.errors import ConfigError, SlotError, Unavailable
from walstream.postgres import PostgresServer
from walstream.source import slots
from walstream.source.connection import connect, replication_connect
from walstream.source.facts import Blocker, blockers, slot_facts


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database.dsn, database.execute, slot_name(database.name)).make(slot=False)


def gone(ledger: Ledger) -> bool:
    return not ledger.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", ledger.settings.slot)


def test_snapshot_and_stream_meet(ledger: Ledger) -> None:
    """C60: what committed before is in the snapshot, what committed after is in the stream, nothing is in both."""
    ledger.insert("before")
    with slots.create(ledger.settings.dsn, ledger.settings.slot) as new:
        ledger.insert("after")
        conn = psycopg2.connect(ledger.settings.dsn)
        with conn.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (new.snapshot,))
            cursor.execute("SELECT event_type FROM agent_events")
            assert cursor.fetchall() == [("before",)]
        conn.close()
        assert new.consistent_point == ledger.confirmed()
    with ledger.reading() as reading:
        reading.until_rows(1)
        reading.for_a_while(0.2)
    assert reading.event_types == ["after"]


def test_open_transactions_are_named_waited_for_and_nothing_is_left(database: Database, ledger: Ledger) -> None:
    """C47: in another database, and prepared, too."""
    other = psycopg2.connect(database.server.dsn("postgres"), application_name="a long import")
    other.cursor().execute("SELECT pg_current_xact_id()")
    prepared = database.connect()
    prepared.tpc_begin("a gid of 'ours'")
    prepared.cursor().execute("INSERT INTO agent_events (event_type) VALUES ('open')")
    prepared.tpc_prepare()
    reports: list[Sequence[Blocker]] = []
    making = slots.create(
        ledger.settings.dsn, ledger.settings.slot, timeout=3, attempt_timeout=0.3, on_wait=reports.append
    )
    try:
        with pytest.raises(Unavailable) as caught, making:
            pass
        assert "'a long import' in database postgres" in str(caught.value)
        assert "prepared transaction \"a gid of 'ours'\"" in str(caught.value)
        assert f"pg_terminate_backend({other.info.backend_pid})" in caught.value.hint
        assert 2 <= len(reports) <= 3 / 0.3 + 1
        assert gone(ledger)
        remedies = {blocker.gid: blocker.remedy for blocker in reports[-1]}
        assert "ROLLBACK PREPARED 'a gid of ''ours'''" in remedies["a gid of 'ours'"]
        prepared.tpc_rollback()
        rollback = threading.Timer(0.7, other.rollback)
        rollback.start()
        with slots.create(ledger.settings.dsn, ledger.settings.slot, timeout=20, attempt_timeout=0.3):
            assert not gone(ledger)
        rollback.join()
    finally:
        other.close()


def test_timeouts_of_the_database_do_not_end_a_long_filling(ledger: Ledger, database: Database) -> None:
    for name in ("idle_in_transaction_session_timeout", "idle_session_timeout", "transaction_timeout"):
        if name != "transaction_timeout" or database.server.major >= 17:
            database.execute(f"ALTER DATABASE {database.name} SET {name} = '200ms'")
    with slots.create(ledger.settings.dsn, ledger.settings.slot) as new:
        time.sleep(0.8)
        conn = psycopg2.connect(ledger.settings.dsn)
        with conn.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (new.snapshot,))
        conn.close()


def test_transactions_that_only_read_are_not_in_the_way(ledger: Ledger, database: Database) -> None:
    reader = database.connect()
    reader.cursor().execute("SELECT 1 FROM agent_events")
    with slots.create(ledger.settings.dsn, ledger.settings.slot, timeout=10):
        pass
    conn = connect(database.dsn, application_name="walstream:test")
    assert reader.info.backend_pid not in [blocker.pid for blocker in blockers(conn)]
    conn.close()


def test_a_slot_whose_filling_fails_is_dropped_again(ledger: Ledger) -> None:
    def fill() -> None:
        with slots.create(ledger.settings.dsn, ledger.settings.slot):
            assert not gone(ledger)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fill()
    assert gone(ledger)


def test_a_slot_that_exists_is_not_made_again(ledger: Ledger) -> None:
    ledger.make_slot()
    with pytest.raises(SlotError, match="already exists"), slots.create(ledger.settings.dsn, ledger.settings.slot):
        pass
    assert not gone(ledger)


def test_slots_are_never_two_phase(ledger: Ledger, database: Database) -> None:
    with slots.create(ledger.settings.dsn, ledger.settings.slot):
        pass
    conn = connect(database.dsn, application_name="walstream:test")
    found = slot_facts(conn, ledger.settings.slot)
    assert found is not None
    assert (found.plugin, found.slot_type, found.database) == ("pgoutput", "logical", database.name)
    assert not found.two_phase
    assert not found.temporary
    conn.close()


def test_failover_slots_need_17(ledger: Ledger, database: Database) -> None:
    make = slots.create(ledger.settings.dsn, ledger.settings.slot, failover=True)
    if database.server.major < 17:
        with pytest.raises(ConfigError, match="17"), make:
            pass
        assert gone(ledger)
        return
    with make:
        assert ledger.execute(
            "SELECT failover FROM pg_replication_slots WHERE slot_name = %s", ledger.settings.slot
        ) == [(True,)]


@pytest.mark.parametrize("another", [True, False], ids=["cancelled", "where no other connection can be had"])
def test_a_slot_that_is_read_meanwhile_is_waited_for_with_an_end(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """ALTER_REPLICATION_SLOT knows no timeout of the server's. It is ended from here without ``connection.cancel()``,
    which would keep all threads waiting for as long as a network stands still."""
    if database.server.major < 17:
        pytest.skip("slots for fail-over came with 17")
    ledger.make_slot()
    opened: list[Connection] = []

    def open_one(*args: Any, **rest: Any) -> Connection:
        if opened and not another:
            raise Unavailable("no way there")
        opened.append(replication_connect(*args, **rest))
        return opened[-1]

    monkeypatch.setattr(slots, "replication_connect", open_one)
    monkeypatch.setattr(slots, "slot_facts", lambda *_: None)  # it is taken right after that look
    monkeypatch.setattr(slots, "_ALTER_SECONDS", 0.5)
    with ledger.reading():
        with pytest.raises(Unavailable) as raised:
            slots.set_failover(ledger.settings.dsn, ledger.settings.slot, True)
        assert ("not free within" in str(raised.value)) == another
    assert all(each.closed for each in opened)


def test_only_our_own_slots_are_dropped(ledger: Ledger, database: Database) -> None:
    ledger.make_slot()
    elsewhere = connect(database.server.dsn("postgres"), application_name="walstream:test")
    with pytest.raises(SlotError, match=f"belongs to {database.name}"):
        slots.drop(elsewhere, ledger.settings.slot)
    elsewhere.close()
    conn = connect(database.dsn, application_name="walstream:test")
    with ledger.reading() as reading:
        held = f"pid {reading.stream.backend_pid}, walstream:stream"
        with pytest.raises(Unavailable, match=held):
            slots.drop(conn, ledger.settings.slot)
        found = slot_facts(conn, ledger.settings.slot)
        assert found is not None
        assert found.active
        assert found.holder is not None
        assert found.holder.pid == reading.stream.backend_pid
    end = time.monotonic() + 60
    while True:
        try:
            assert slots.drop(conn, ledger.settings.slot)
            break
        except Unavailable:
            assert time.monotonic() < end
    assert not slots.drop(conn, ledger.settings.slot)
    conn.close()


def test_servers_that_cannot_have_another_slot(own_server: Callable[..., PostgresServer]) -> None:
    """C41: errors that only a person can heal, with the parameter to change."""
    server = own_server(max_replication_slots=1)
    ledger = Ledger(server.dsn(), server.execute, "s").make()
    with pytest.raises(ConfigError) as caught, slots.create(server.dsn(), "another"):
        pass
    assert "max_replication_slots" in caught.value.hint
    server.execute("SELECT pg_drop_replication_slot('s')")
    server.settings["wal_level"] = "replica"
    server.restart()
    with pytest.raises(ConfigError, match="wal_level") as caught, slots.create(server.dsn(), ledger.settings.slot):
        pass
    assert "restart" in caught.value.hint
