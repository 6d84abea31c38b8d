"""The stream on a real server: what arrives, what is acknowledged, and what ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from tests.conftest import Database
from tests.integration.source_ledgers import TABLE, Ledger, slot_name
from walstream.config import LedgerTable
from walstream.errors import ConfigError, ConnectionLost, DecodeError, SlotError, SlotGone, Unavailable
from walstream.postgres import PostgresServer
from walstream.source.connection import replication_connect
from walstream.source.failures import classify
from walstream.source.slots import start_command
from walstream.source.stream import ReplicationStream


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database.dsn, database.execute, slot_name(database.name)).make()


@pytest.mark.parametrize("publication", ["p", "Mixed Case", "we\"ird, 'qu\\oted", "発行; DROP TABLE x", "x" * 63])
def test_publication_names_are_quoted_twice(database: Database, publication: str) -> None:
    table = LedgerTable(namespace="Some Schema", table="Agent-Events «é»")
    database.execute('CREATE SCHEMA "Some Schema"')
    ledger = Ledger(database.dsn, database.execute, slot_name(database.name), publication, ledger=table).make()
    ledger.insert("x")
    with ledger.reading() as reading:
        reading.until_rows(1)
    assert reading.event_types == ["x"]


def test_a_transaction_comes_whole_and_its_end_is_the_streams_position(ledger: Ledger) -> None:
    ledger.insert("a", "b")
    with ledger.reading() as reading:
        assert reading.stream.backend_pid in [row[0] for row in ledger.execute("SELECT pid FROM pg_stat_activity")]
        assert ledger.execute(
            "SELECT backend_start = %s::timestamptz, application_name FROM pg_stat_activity WHERE pid = %s",
            reading.stream.backend_start,
            reading.stream.backend_pid,
        ) == [(True, "walstream:stream:1")]
        system = ledger.execute("SELECT system_identifier::text FROM pg_control_system()")[0][0]
        assert (reading.stream.system_identifier, reading.stream.timeline) == (system, 1)
        reading.until_rows(2)
        assert [tag for tag, _, _ in reading.messages] == ["B", "R", "I", "I", "C"]
        assert reading.stream.passed >= reading.commits[0]


def test_drain_stops_at_its_limit_and_when_it_is_told_to(ledger: Ledger) -> None:
    ledger.insert(*["x"] * 20)
    with ledger.reading() as reading:
        most = 0
        end = time.monotonic() + 60
        while len(reading.messages) < 6 and time.monotonic() < end:
            found = reading.stream.drain(reading.handle, 3)
            most = max(most, found)
            assert reading.stream.drained is (found < 3)
        assert most == 3
        seen: list[bytes] = []

        def once(payload: bytes, _: int) -> bool:
            seen.append(payload)
            return len(seen) < 2

        end = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < end:
            reading.stream.drain(once, 100)
        assert len(seen) == 2
        assert not reading.stream.drained, "the commit lies in the driver's buffer"
        reading.until(lambda: bool(reading.commits))


def test_the_server_settings_of_role_and_database_do_not_reach_the_stream(ledger: Ledger, database: Database) -> None:
    """C02: the walsender renders values with the session's settings."""
    expected = ["2024-02-03 04:05:06.123456+00", "1900-02-03 04:05:06+00"]
    count = 0
    for datestyle, timezone in (
        ("SQL, DMY", "Asia/Kathmandu"),
        ("German", "Europe/Amsterdam"),
        ("Postgres, MDY", "UTC"),
    ):
        database.execute(f"ALTER DATABASE {database.name} SET datestyle = '{datestyle}'")
        database.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {database.name} SET timezone = '{timezone}'")
        for instant in expected:
            database.execute("INSERT INTO agent_events (event_type, created_at) VALUES ('t', %s)", instant)
        count += 2
        with ledger.reading() as reading:
            reading.until_rows(count)
            assert [row["created_at"] for row in reading.rows[-2:]] == expected


def test_a_latin1_database_is_streamed_as_utf8(database: Database) -> None:
    """C03: names of columns included."""
    database.drop()
    database.create("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'", template="template0")
    ledger = Ledger(database.dsn, database.execute, slot_name(database.name), "publié").make()
    database.execute("ALTER TABLE agent_events ADD COLUMN né text")
    database.execute(
        "INSERT INTO agent_events (event_type, agent_id, payload, né) VALUES ('x', 'café', '{\"k\":\"é\"}', 'ü')"
    )
    with ledger.reading() as reading:
        reading.until_rows(1)
    assert reading.rows[0]["agent_id"] == "café"
    assert reading.rows[0]["payload"] == '{"k": "é"}'
    assert reading.rows[0]["né"] == "ü"


def test_logical_messages_arrive_in_and_outside_transactions(ledger: Ledger) -> None:
    """C12: the canary depends on the bare one."""
    ledger.execute("SELECT pg_logical_emit_message(false, 'walstream', 'canary')")
    ledger.execute("SELECT pg_logical_emit_message(true, 'walstream', 'inside')")
    with ledger.reading() as reading:
        reading.until(lambda: [tag for tag, _, _ in reading.messages] == ["M", "B", "M", "C"])
    assert b"canary" in reading.messages[0][2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("proto_version '1', streaming 'on'", ConfigError),
        ("proto_version '1', nope '1'", ConfigError),
        ("proto_version '99'", ConfigError),
        ("proto_version 'one'", ConfigError),
    ],
)
def test_option_errors_are_for_a_person(ledger: Ledger, options: str, error: type[Exception]) -> None:
    """C17: such an error can never heal."""
    conn = replication_connect(ledger.settings.dsn, application_name="walstream:test")
    command = f"START_REPLICATION SLOT {ledger.settings.slot} LOGICAL 0/0 ({options}, publication_names 'p')"
    cursor: Any = conn.cursor()
    with pytest.raises(psycopg2.Error) as caught:
        cursor.start_replication_expert(command)
    conn.close()
    found = classify(caught.value, doing="d")
    assert type(found) is error
    assert not found.transient


def test_the_end_of_a_commit_is_what_is_acknowledged(ledger: Ledger) -> None:
    """C22: neither once more nor never again."""
    ledger.insert("one")
    ledger.insert("two")
    with ledger.reading() as reading:
        reading.until_rows(2)
        reading.stream.confirm(reading.commits[0])
        reading.stream.feedback(force=True)
        reading.until(lambda: ledger.confirmed() == reading.commits[0])
        assert reading.stream.confirmed == reading.commits[0]
    with ledger.reading() as reading:
        reading.until_rows(1)
        reading.for_a_while(0.2)
    assert reading.event_types == ["two"]


def test_nothing_is_acknowledged_that_was_not_received(ledger: Ledger) -> None:
    """C24 b: the server would believe a position beyond its WAL, and skip everything up to it."""
    ledger.insert("one")
    with ledger.reading() as reading:
        reading.until_rows(1)
        reading.stream.confirm(reading.commits[0] + 2**32)
        reading.stream.feedback(force=True)
        assert reading.stream.confirmed <= reading.stream.passed
        ledger.insert("two")
        reading.until_rows(2)
        assert ledger.confirmed() <= ledger.wal_end()


def test_nothing_is_acknowledged_before_it_is_confirmed(ledger: Ledger) -> None:
    """C23, C44: whatever keepalives bring, the slot stays where our own confirmation put it."""
    ledger.insert("one")
    with ledger.reading() as reading:
        reading.until_rows(1)
        before = ledger.confirmed()
        ledger.execute("CREATE TABLE other AS SELECT generate_series(1, 50000) AS n")
        reading.until(lambda: reading.stream.passed > reading.commits[0] + 1_000_000)
        reading.for_a_while(1.5)  # feedback leaves within a second, with nothing new in it
        assert ledger.confirmed() == before
        reading.stream.confirm(reading.commits[0])
        reading.until(lambda: ledger.confirmed() == reading.commits[0])
        reading.for_a_while(1.5)  # nor does psycopg2 go past it by itself, as it would with one cursor
        assert ledger.confirmed() == reading.commits[0]


def test_an_idle_ledger_in_a_busy_database_lets_the_slot_move_on(ledger: Ledger) -> None:
    """C44: by the position of keepalives, when we say so."""
    ledger.insert("one")
    with ledger.reading() as reading:
        reading.until_rows(1)
        for _ in range(3):
            ledger.execute("CREATE TABLE other AS SELECT generate_series(1, 20000) AS n")
            ledger.execute("DROP TABLE other")
            written = ledger.wal_end()
            reading.until(lambda: reading.stream.passed >= written)  # noqa: B023
            reading.stream.confirm(reading.stream.passed)
            reading.until(lambda: ledger.confirmed() >= written)  # noqa: B023
    ledger.insert("two")
    with ledger.reading() as reading:
        reading.until_rows(1)
    assert reading.event_types == ["two"]


def test_a_position_of_another_history_is_refused(ledger: Ledger) -> None:
    """C24 a: the server would accept it in silence and send nothing."""
    with pytest.raises(SlotError, match="another history"):
        ReplicationStream.open(ledger.settings, start_lsn=ledger.wal_end() + 2**32, generation=1)
    ledger.insert("x")
    with ledger.reading(ledger.confirmed()) as reading:
        reading.until_rows(1)


def test_what_was_acknowledged_may_come_again_after_a_crash(own_server: Callable[..., PostgresServer]) -> None:
    """C27: the slot falls back to its last checkpoint; a start position keeps the repetition away."""
    server = own_server()
    ledger = Ledger(server.dsn(), server.execute, "s").make()
    server.execute("CHECKPOINT")
    ledger.insert("one")
    ledger.insert("two")
    ledger.insert("three")
    with ledger.reading() as reading:
        reading.until_rows(3)
        for end in (
            reading.commits[0],
            reading.commits[2],
        ):  # the first may be written to disk at once, the next is not
            reading.stream.confirm(end)
            reading.stream.feedback(force=True)
            reading.until(lambda end=end: ledger.confirmed() == end)  # type: ignore[misc]
        server.restart("immediate")
        with pytest.raises(ConnectionLost):
            reading.for_a_while(10)
    assert ledger.confirmed() < reading.commits[2]
    with ledger.reading() as again:
        again.until(lambda: "three" in again.event_types)
    assert again.event_types[-2:] == ["two", "three"]
    ledger.insert("four")
    with ledger.reading(reading.commits[2]) as resumed:
        resumed.until_rows(1)
    assert resumed.event_types == ["four"]


@pytest.fixture
def broken(database: Database) -> Ledger:
    """A ledger with its publication, whose slot each test makes wrong in its own way."""
    return Ledger(database.dsn, database.execute, slot_name(database.name)).make(slot=False)


def opening(ledger: Ledger) -> ReplicationStream:
    return ReplicationStream.open(ledger.settings, start_lsn=0, generation=1)


def test_a_missing_slot_ends_it(broken: Ledger) -> None:
    with pytest.raises(SlotError, match="does not exist") as caught:
        opening(broken)
    assert "walstream init" in caught.value.hint


def test_a_slot_of_another_plugin_ends_it(broken: Ledger) -> None:
    broken.make_slot("test_decoding")
    with pytest.raises(SlotError) as caught:
        opening(broken)
    assert "pgoutput" in caught.value.hint


def test_a_slot_of_another_database_ends_it(ledger: Ledger, database: Database) -> None:
    elsewhere = ledger.settings.model_copy(update={"dsn": database.server.dsn("postgres")})
    with pytest.raises(SlotError, match="was not created in this database"):
        ReplicationStream.open(elsewhere, start_lsn=0, generation=1)


def test_a_missing_publication_ends_it(database: Database) -> None:
    """C34: 18 only warns, and would go on without the change."""
    ledger = Ledger(database.dsn, database.execute, slot_name(database.name))
    database.execute(TABLE.format(name="agent_events"))
    ledger.make_slot()
    ledger.insert("x")
    with ledger.reading() as reading, pytest.raises(SlotGone, match="does not exist") as caught:
        reading.for_a_while(10)  # SlotGone: a warning says no more, and the next look at the publication does
    assert not caught.value.transient
    assert "walstream init" in caught.value.hint


@pytest.mark.parametrize("more", [False, True])
def test_a_publication_younger_than_the_slot_is_explained(database: Database, more: bool) -> None:
    """C34: psql shows it, and yet the server says that it does not exist."""
    ledger = Ledger(database.dsn, database.execute, slot_name(database.name))
    database.execute(TABLE.format(name="agent_events"))
    ledger.make_slot()
    ledger.insert("x")
    database.execute("CREATE PUBLICATION p FOR TABLE agent_events")
    if more:
        ledger.insert("y")
    with ledger.reading() as reading, pytest.raises(SlotGone, match="younger than the slot's position") as caught:
        reading.for_a_while(10)
    assert not caught.value.transient
    assert "pg_drop_replication_slot" in caught.value.hint
    assert "x" not in reading.event_types


def test_a_publication_made_anew_stops_at_the_first_change_it_does_not_cover(ledger: Ledger) -> None:
    ledger.insert("before")
    ledger.execute("DROP PUBLICATION p")
    ledger.insert("between")
    ledger.execute("CREATE PUBLICATION p FOR TABLE agent_events")
    with ledger.reading() as reading, pytest.raises(SlotGone, match="younger than the slot's position"):
        reading.for_a_while(10)
    assert reading.event_types == ["before"]


def test_a_slot_in_use_names_its_reader_and_is_waited_for(ledger: Ledger) -> None:
    """C52."""
    with ledger.reading(generation=41) as reading:
        with pytest.raises(Unavailable) as caught:
            opening(ledger)
        assert f"pid {reading.stream.backend_pid}, walstream:stream:41" in str(caught.value)
        assert caught.value.transient
    end = time.monotonic() + 60
    while True:
        try:
            opening(ledger).close()
            break
        except Unavailable:
            assert time.monotonic() < end


def test_a_terminated_walsender_is_a_lost_connection(ledger: Ledger) -> None:
    """C50: psycopg2 calls this connection open."""
    with ledger.reading() as reading:
        reading.turn()
        ledger.execute("SELECT pg_terminate_backend(%s)", reading.stream.backend_pid)
        with pytest.raises(ConnectionLost):
            reading.for_a_while(10)
        with pytest.raises(ConnectionLost, match="closed"):
            reading.turn()


@pytest.mark.parametrize("mode", ["fast", pytest.param("immediate", marks=pytest.mark.slow)])
def test_a_restart_is_a_lost_connection(own_server: Callable[..., PostgresServer], mode: str) -> None:
    """C50: a bare DatabaseError without SQLSTATE."""
    server = own_server()
    ledger = Ledger(server.dsn(), server.execute, "s").make()
    ledger.insert("one")
    with ledger.reading() as reading:
        reading.until_rows(1)
        restart = threading.Thread(target=server.restart, args=(mode,))
        restart.start()
        with pytest.raises(ConnectionLost):
            reading.for_a_while(20)
        restart.join()
    with ledger.reading() as reading:
        reading.until_rows(1)


def test_a_walsender_that_gave_us_up_is_a_lost_connection(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """C50, C51: what would happen if nobody looked at the clock."""
    monkeypatch.setattr("walstream.source.stream.MIN_TIMEOUT", 0.0)
    dsn = make_dsn(ledger.settings.dsn, options="-c wal_sender_timeout=800ms")
    ledger.settings = ledger.settings.model_copy(update={"dsn": dsn})
    with ledger.reading() as reading:
        reading.turn()
        end = time.monotonic() + 60
        pid = reading.stream.backend_pid
        while ledger.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid) and time.monotonic() < end:
            time.sleep(0.1)
        reading.stream._stall_after = float("inf")
        with pytest.raises(ConnectionLost):
            reading.for_a_while(10)


def test_prepared_transactions_come_when_they_commit(ledger: Ledger, database: Database) -> None:
    """C29: as ordinary ones, in the place of their COMMIT PREPARED."""
    conn = database.connect()
    for gid, event_type in (("g1", "kept"), ("g2", "dropped")):
        conn.tpc_begin(gid)
        conn.cursor().execute("INSERT INTO agent_events (event_type) VALUES (%s)", (event_type,))
        conn.tpc_prepare()
        conn.reset()
    ledger.insert("later")
    with ledger.reading() as reading:
        reading.until_rows(1)
        assert reading.event_types == ["later"]
        database.execute("COMMIT PREPARED 'g1'")
        database.execute("ROLLBACK PREPARED 'g2'")
        ledger.insert("last")
        reading.until_rows(3)
    assert reading.event_types == ["later", "kept", "last"]
    assert {tag for tag, _, _ in reading.messages} == {"B", "R", "I", "C"}


def test_a_change_that_the_server_cannot_send_names_where_it_stands(database: Database) -> None:
    """C18 in small: the server's own error inside its output plugin is neither retried nor skipped."""
    database.drop()
    database.create("ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'", template="template0")
    ledger = Ledger(database.dsn, database.execute, slot_name(database.name)).make()
    ledger.insert("good")
    database.execute("INSERT INTO agent_events (event_type) VALUES (E'\\xff')")
    ledger.insert("after")
    with ledger.reading() as reading, pytest.raises(DecodeError, match="invalid byte sequence") as caught:
        reading.for_a_while(10)
    assert reading.event_types == ["good"]
    assert caught.value.lsn >= reading.commits[0]
    assert not caught.value.transient
    assert "walstream slot skip" in caught.value.hint


def test_wakeup_ends_a_wait_from_another_thread_and_is_remembered(ledger: Ledger) -> None:
    with ledger.reading() as reading:
        reading.for_a_while(0.2)
        reading.stream._feedback_every = 600.0  # which would end a wait as well
        timer = threading.Timer(0.1, reading.stream.wakeup)
        timer.start()
        began = time.monotonic()
        reading.stream.wait(600)
        assert time.monotonic() - began < 300
        timer.join()
        for _ in range(100_000):
            reading.stream.wakeup()  # a full pipe would block
        began = time.monotonic()
        reading.stream.wait(600)
        assert time.monotonic() - began < 300
    reading.stream.wakeup()  # after close: harmless
    reading.stream.close()


def test_waiting_never_outlasts_the_next_feedback(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walstream.source.stream.DEFAULT_TIMEOUT", 1.2)
    with ledger.reading() as reading:
        began = time.monotonic()
        reading.stream.wait(600)
        assert time.monotonic() - began < 300


def test_a_temporary_slot_ends_with_its_stream(broken: Ledger) -> None:
    broken.insert("before")
    with ReplicationStream.open_temporary(broken.settings) as stream:
        assert broken.execute("SELECT temporary FROM pg_replication_slots WHERE slot_name = %s", broken.settings.slot)
        broken.insert("after")
        seen: list[bytes] = []
        end = time.monotonic() + 60
        while not any(payload[:1] == b"C" for payload in seen) and time.monotonic() < end:
            stream.drain(lambda payload, _: not seen.append(payload), 100)  # type: ignore[func-returns-value]
            stream.wait(0.1)
    rows = [payload for payload in seen if payload[:1] == b"I"]
    assert len(rows) == 1
    assert b"after" in rows[0]
    end = time.monotonic() + 60
    while broken.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", broken.settings.slot):
        assert time.monotonic() < end


def test_the_command_asks_for_text_whole_transactions_and_messages() -> None:
    assert start_command("s", 0x16B374D848, 'a"b', "it's") == (
        "START_REPLICATION SLOT \"s\" LOGICAL 16/B374D848 (proto_version '1', "
        "publication_names '\"a\"\"b\",\"it''s\"', messages 'true')"
    )
