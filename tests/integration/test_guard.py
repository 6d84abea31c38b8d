"""``walstream guard`` on real servers: each cause is made, and named; nothing is dropped that was not named."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from tests.cli_calls import Called, call, ok
from tests.conftest import Database, Server
from tests.integration.streams import Installed, eventually
from walstream.config import DropRule, GuardSettings, Settings
from walstream.guard.dropping import drop_if_due
from walstream.guard.policy import NOTICEABLE, State, judge
from walstream.guard.reading import SlotReader
from walstream.guard.watch import Guard, Report, Watch, guard_connection
from walstream.postgres import PostgresServer

FILL = "SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000)) FROM generate_series(1, %s)"
MB = 1_000_000


def guard(dsn: str, slot: str, *words: str) -> Called:
    return call("guard", "--slot", slot, "--sample", "0.3", "--json", *words, dsn=dsn)


def causes(called: Called) -> dict[str, dict[str, Any]]:
    (slot,) = called.json["slots"]
    return {each["cause"]: each for each in slot["causes"]}


@pytest.fixture
def stream(database: Database) -> Installed:
    return Installed(database)


def advance(database: Database, slot: str) -> None:
    """What ingest does by confirming, without one."""
    database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", slot)


# -- once ---------------------------------------------------------------------------------


def test_all_is_well_while_somebody_reads(stream: Installed) -> None:
    slot = stream.settings.slot
    active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    with stream.host():
        eventually(lambda: stream.place.execute(active, slot) == [(True,)], "it is read")
        called = guard(stream.settings.dsn, slot)
        assert called.exit_code == 0, called
        (found,) = called.json["slots"]
        assert (found["name"], found["state"], found["active"], found["causes"]) == (slot, "ok", True, [])
        assert found["retained_bytes"] >= found["behind_bytes"] >= 0
        assert found["safe_bytes"] > 0
        assert "walstream:stream" in found["holder"]
        shown = ok("guard", "--slot", slot, "--sample", "0.3", dsn=stream.settings.dsn).stdout
        assert shown.startswith(f"WALSTREAM OK - slot {slot}: ")
        assert f"| '{slot} retained'=" in shown

        # Whoever saw it being read knows since when it is not, whatever the version says.
        reader = SlotReader(slot)
        connection = guard_connection(stream.settings)
        assert reader.look(connection).slots[0].inactive_seconds is None
    eventually(lambda: not reader.look(connection).slots[0].active, "the slot is let go")
    seconds = reader.look(connection).slots[0].inactive_seconds
    assert seconds is not None
    assert 0 <= seconds < 60
    connection.close()


def test_a_slot_that_is_not_there_is_critical(stream: Installed) -> None:
    called = guard(stream.settings.dsn, "no_such_slot")
    assert (called.exit_code, called.json["state"]) == (2, "lost")
    assert set(causes(called)) == {"slot_missing"}
    shown = call("guard", "--slot", "no_such_slot", "--sample", "0.3", dsn=stream.settings.dsn)
    assert shown.stdout.startswith("WALSTREAM CRITICAL - there is no slot no_such_slot")
    assert "to do: `walstream run` makes a new one (so does `walstream init`)" in shown.stdout


def test_what_cannot_be_known_is_unknown(database: Database) -> None:
    for dsn in (make_dsn(database.dsn, host="/nowhere"), make_dsn(database.dsn, dbname="no_such_database"), "x=y"):
        called = guard(dsn, "s")
        assert (called.exit_code, called.json["state"]) == (3, "unknown"), called
        assert called.json["error"]["message"]
    assert call("guard", "--slot", "Not A Name", dsn=database.dsn).exit_code == 3


def test_nobody_connected(stream: Installed, server: Server) -> None:
    slot = stream.settings.slot
    reader = SlotReader(slot)
    connection = guard_connection(stream.settings)
    (reading,) = reader.look(connection).slots
    assert not reading.active
    # The server says since when from 17 on; before that, nobody knows, and that is the worst.
    assert (reading.inactive_seconds is not None) == (server.major >= 17)
    assert reading.idle_timeout == 0
    called = guard(stream.settings.dsn, slot)
    if server.major >= 17:
        assert called.exit_code == 0, called  # seconds ago `init` held it
    else:
        assert (called.exit_code, set(causes(called))) == (1, {"nobody_connected"})
        assert "walstream run" in causes(called)["nobody_connected"]["remedy"]
    connection.close()


def test_all_logical_slots_and_no_physical_one(database: Database, stream: Installed, server: Server) -> None:
    other = f"other_{database.name[-8:]}"
    server.execute("SELECT pg_create_physical_replication_slot(%s, true)", f"p_{database.name[-8:]}")
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", other)
    try:
        called = call("guard", "--all", "--sample", "0.3", "--json", dsn=database.dsn)
        names = {each["name"] for each in called.json["slots"]}
        assert names >= {other, stream.settings.slot}
        # What is not ours is not for walstream to begin again.
        reader = SlotReader(stream.settings.slot, every=True)
        connection = guard_connection(stream.settings)
        looked = {reading.name: reading for reading in reader.look(connection).slots}
        for name, ours in ((other, False), (stream.settings.slot, True)):
            (finding,) = judge(replace(looked[name], inactive_seconds=None), stream.settings.guard).findings
            assert ("walstream run" in finding.remedy) == ours
        connection.close()
        assert f"p_{database.name[-8:]}" not in names
    finally:
        server.execute("SELECT pg_drop_replication_slot(%s)", f"p_{database.name[-8:]}")


@pytest.mark.parametrize("prepared", [False, True])
def test_a_transaction_that_holds_wal_is_named(database: Database, stream: Installed, prepared: bool) -> None:
    slot, gid = stream.settings.slot, database.name
    writer = database.connect(application_name="the forgotten one")
    with writer.cursor() as cursor:
        cursor.execute("CREATE TABLE t AS SELECT 1 AS n")
        if prepared:
            cursor.execute("PREPARE TRANSACTION %s", (gid,))
            writer.rollback()
    database.execute(FILL, 80)
    database.execute("CHECKPOINT")  # logs the running transactions
    advance(database, slot)
    connection = guard_connection(stream.settings)
    (reading,) = SlotReader(slot).look(connection).slots
    connection.close()
    found = reading.transaction
    assert reading.behind is not None
    assert reading.retained is not None
    assert found is not None
    assert found.seconds is not None
    assert reading.behind < 20 * MB < NOTICEABLE < 80 * MB < reading.retained
    assert 0 <= found.seconds < 60

    an_hour_later = replace(reading, active=True, transaction=replace(found, seconds=3600.0))
    (cause,) = judge(an_hour_later, stream.settings.guard).findings
    assert (cause.cause, cause.state) == ("long_transaction", State.WARN)
    assert (gid if prepared else "the forgotten one") in cause.found
    database.execute(cause.remedy.removeprefix("if it is forgotten: ").split(" (or")[0])  # the remedy is one
    database.execute("CHECKPOINT")
    assert database.execute("SELECT 1 FROM pg_prepared_xacts WHERE gid = %s", gid) == []
    assert (writer.closed or _ended(writer)) is not prepared


def _ended(writer: Connection) -> bool:
    try:
        writer.cursor().execute("SELECT 1")
    except psycopg2.OperationalError:
        return True
    return False


def test_a_slot_that_is_stuck_in_its_creation(database: Database) -> None:
    """C47: it waits for an open transaction, delivers nothing, and keeps WAL; its position is NULL."""
    name = f"half_{database.name[-8:]}"
    writer = database.connect(application_name="the forgotten one")
    writer.cursor().execute("CREATE TABLE t AS SELECT 1 AS n")
    maker = database.connect()
    maker.autocommit = True
    creating = threading.Thread(
        target=lambda: maker.cursor().execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
    )
    creating.start()
    try:
        eventually(lambda: exists(database, name), "the slot is there")
        called = guard(database.dsn, name)
        assert (called.exit_code, called.json["state"]) == (2, "critical"), called
        cause = causes(called)["half_made"]
        assert "the forgotten one" in cause["found"]
        assert "pg_terminate_backend" in cause["remedy"]
        (found,) = called.json["slots"]
        assert (found["behind_bytes"], found["retained_bytes"] is None) == (None, False)
    finally:
        writer.rollback()
        creating.join(60)
    assert "half_made" not in causes(guard(database.dsn, name))


# -- a server of one's own: bounds, loss, forecasts -------------------------------------------------------------


class Small:
    """A server whose slots are lost soon, with a stream in it."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.name = "ledger"
        server.execute("CREATE DATABASE ledger")
        self.dsn = server.dsn("ledger")
        self.stream = Installed(self)
        self.slot = self.stream.settings.slot

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        return self.server.execute(sql, *args, dbname="ledger")

    def fill(self, megabytes: int) -> None:
        self.execute(FILL, megabytes)


@pytest.fixture
def small(own_server: Callable[..., PostgresServer]) -> Small:
    return Small(own_server(max_slot_wal_keep_size="64MB", max_wal_size="32MB", min_wal_size="32MB"))


def test_a_slot_on_its_way_to_being_lost(small: Small) -> None:
    """C46, from the first sign to the end: warn, critical, lost."""
    called = guard(small.dsn, small.slot)
    assert called.json["slots"][0]["bound_bytes"] == 64 * 1024 * 1024
    small.fill(45)
    called = guard(small.dsn, small.slot)
    (found,) = called.json["slots"]
    assert (called.exit_code, found["state"]) == (1, "warn"), found
    assert set(causes(called)) == {"nobody_connected"}
    small.fill(16)
    called = guard(small.dsn, small.slot)
    assert (called.exit_code, called.json["state"]) == (2, "critical"), called
    small.fill(60)
    small.execute("SELECT pg_switch_wal()")
    small.execute("CHECKPOINT")
    called = guard(small.dsn, small.slot)
    (found,) = called.json["slots"]
    assert (called.exit_code, found["state"]) == (2, "lost"), found
    assert (found["retained_bytes"], found["safe_bytes"]) == (None, None)  # the worst, not zero
    assert set(causes(called)) == {"slot_lost"}
    shown = call("guard", "--slot", small.slot, "--sample", "0.3", dsn=small.dsn).stdout
    assert "is lost" in shown
    assert f"'{small.slot} retained'=U" in shown
    assert "to do: `walstream run` makes a new one" in shown


def test_the_forecast_is_within_reason(database: Database, stream: Installed) -> None:
    """One megabyte each twentieth of a second: what is left lasts as long as it says."""
    one = Guard(stream.settings)
    connection = guard_connection(stream.settings)
    one.sample(connection)
    began = time.monotonic()
    for _ in range(20):
        database.execute(FILL, 1)
        time.sleep(0.05)
    report = one.round(connection)
    connection.close()
    rate = 20 * MB / (time.monotonic() - began)
    reading = report.verdicts[0].reading
    assert report.wal_rate is not None
    assert 0.5 * rate < report.wal_rate < 2 * rate
    assert reading.safe is not None
    forecast = judge(replace(reading, inactive_seconds=3600.0), stream.settings.guard).forecast
    assert forecast is not None
    assert 0.5 * reading.safe / rate < forecast < 2 * reading.safe / rate


def test_what_the_server_is_set_to(small: Small, server: Server) -> None:
    def set_to(name: str, value: str) -> None:
        small.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        small.execute("SELECT pg_reload_conf()")
        eventually(lambda: small.execute(f"SHOW {name}") == [(value,)], "the setting is there")

    # Over a Unix socket the disk is this machine's, and can be seen; over TCP it may be anybody's.
    (found,) = guard(small.dsn, small.slot).json["slots"]
    disk = os.statvfs(small.server.data_dir / "pg_wal")
    assert found["free_disk_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.1)
    (found,) = guard(small.server.dsn("ledger", tcp=True), small.slot).json["slots"]
    assert found["free_disk_bytes"] is None
    set_to("max_slot_wal_keep_size", "-1")
    called = guard(small.dsn, small.slot)
    assert called.exit_code == 1
    assert "ALTER SYSTEM SET max_slot_wal_keep_size" in causes(called)["bound_missing"]["remedy"]
    assert called.json["slots"][0]["bound_bytes"] is None
    if server.major >= 18:
        set_to("idle_replication_slot_timeout", "1h")
        connection = guard_connection(small.stream.settings)
        (reading,) = SlotReader(small.slot).look(connection).slots
        assert reading.idle_timeout == 3600
        connection.close()


@pytest.fixture
def stranger(database: Database, server: Server) -> Iterator[str]:
    """A login that may see what everybody may."""
    name = f"watcher_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'irrelevant'")
    yield make_dsn(database.dsn, user=name, password="irrelevant")
    server.execute(f"DROP ROLE {name}")


def test_a_role_that_may_see_little_is_told_what_it_can(
    stream: Installed, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = guard(stranger, stream.settings.slot).json["slots"]
    assert found["free_disk_bytes"] is None
    assert found["retained_bytes"] >= 0
    settings = stream.settings.model_copy(update={"dsn": stranger})
    connection = guard_connection(settings)
    one = Guard(settings)
    caplog.clear()  # what the command has said
    with caplog.at_level("INFO", "walstream.guard"):
        for _ in range(3):
            assert one.round(connection).error is None
    assert sum("are not watched" in record.getMessage() for record in caplog.records) == 1
    connection.close()


def test_the_age_of_a_transaction_that_may_not_be_seen(database: Database, stream: Installed, stranger: str) -> None:
    def look(reader: SlotReader) -> float | None:
        (reading,) = reader.look(connection).slots
        assert reading.transaction is not None
        return reading.transaction.seconds

    now = 0.0
    connection = guard_connection(stream.settings.model_copy(update={"dsn": stranger}))
    once = SlotReader(stream.settings.slot)
    watcher = SlotReader(stream.settings.slot, watching=True, clock=lambda: now)
    writer = database.connect()
    for number in (1, 2):
        writer.cursor().execute(f"CREATE TABLE t{number} AS SELECT 1 AS n")
        assert look(once) is None
        assert look(watcher) == 0
        now += 40
        assert look(watcher) == 40
        writer.commit()
    connection.close()


# -- dropping ---------------------------------------------------------------------------------


def exists(place: Small | Database, slot: str) -> bool:
    return place.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", slot) != []


def configuration(folder: Path, rule: str) -> str:
    file = folder / "guard.toml"
    file.write_text(f"[guard]\n{rule}\n")
    return str(file)


def test_only_the_slot_that_is_named_is_dropped_and_only_above_its_bound(
    database: Database, stream: Installed, tmp_path: Path
) -> None:
    slot, other = stream.settings.slot, f"other_{database.name[-8:]}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", other)
    database.execute(FILL, 3)
    assert guard(database.dsn, slot, "--all").json["acted"] == []
    below = configuration(tmp_path, f'drop = {{ slot = "{other}", above = "1GB" }}')
    assert guard(database.dsn, slot, "--all", "--config", below).json["acted"] == []
    assert exists(database, other)
    above = configuration(tmp_path, f'drop = {{ slot = "{other}", above = "1MB" }}')
    called = guard(database.dsn, slot, "--config", above)  # the slot of the rule is looked at as well
    (said,) = called.json["acted"]
    assert said.startswith(f"slot {other} was dropped")
    assert called.exit_code == 2
    assert not exists(database, other)
    assert exists(database, slot)
    called = guard(database.dsn, slot, "--config", above)  # and what is gone by its own rule is no alarm afterwards
    assert [each["name"] for each in called.json["slots"]] == [slot]
    assert called.json["acted"] == []


def test_a_slot_in_use_is_dropped_only_if_that_is_meant(stream: Installed, database: Database) -> None:
    slot = stream.settings.slot
    with stream.host():
        stream.wait_ordered()
        connection = guard_connection(stream.settings)
        eventually(lambda: SlotReader(slot).look(connection).slots[0].active, "the stream has the slot")
        (reading,) = SlotReader(slot).look(connection).slots
        dropped, said = drop_if_due(connection, DropRule(slot=slot, above=1), reading)
        assert not dropped
        assert f"slot {slot} is not dropped" in said
        assert "walstream:stream" in said
        assert exists(database, slot)
        dropped, said = drop_if_due(connection, DropRule(slot=slot, above=1, active=True), reading)
        assert dropped
        assert "it was in use: pid" in said
        assert not exists(database, slot)
        connection.close()


def test_a_slot_of_another_database_is_not_dropped_but_said(
    database: Database, stream: Installed, server: Server
) -> None:
    elsewhere = guard_connection(Settings(dsn=server.dsn()))
    (reading,) = SlotReader(stream.settings.slot).look(elsewhere).slots
    dropped, said = drop_if_due(elsewhere, DropRule(slot=stream.settings.slot, above=1), reading)
    assert not dropped
    assert "could not be dropped" in said
    assert database.name in said
    assert exists(database, stream.settings.slot)
    elsewhere.close()


# -- watching ---------------------------------------------------------------------------------


def test_the_watcher_says_what_changes_and_outlives_the_server(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "walstream.guard")
    settings = Settings(dsn=small.dsn, slot=small.slot, guard=GuardSettings(interval_seconds=0.1))
    reports: list[Report] = []
    watch = Watch(settings, Guard(settings), reports.append)
    watch.start()
    try:
        eventually(lambda: reports, "it has looked")
        small.fill(61)
        eventually(lambda: (reports[-1].state or 0) >= 2, "it is critical")
        small.server.stop("immediate")
        eventually(lambda: reports[-1].state is None, "nothing is known")
        small.server.start()
        eventually(lambda: reports[-1].state is not None, "it looks again")
        small.execute("SELECT pg_drop_replication_slot(%s)", small.slot)
        eventually(lambda: reports[-1].state == 3, "the slot is missing")
    finally:
        watch.stop()
    assert not watch.alive
    said = [record.getMessage() for record in caplog.records if record.name == "walstream.guard"]
    for words in (
        f"slot {small.slot}: critical: nobody reads slot",
        "nothing is known of the slots",
        "the slots can be seen again",
        f"slot {small.slot}: lost: there is no slot",
    ):
        assert sum(words in line for line in said) == 1, (words, said)


def test_an_agent_in_a_loop_is_an_alarm(database: Database, stream: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    # A look each twentieth of a second, however long they take here: rates are what this is about.
    clock = SimpleNamespace(monotonic=lambda: next(looks) * 0.05)
    monkeypatch.setattr("walstream.guard.agent_rates.time", clock)
    one = Guard(stream.settings)
    connection = guard_connection(stream.settings)
    insert = (
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT gen_random_uuid(), %s, 'model.requested', '{}' FROM generate_series(1, %s)"
    )
    for _ in range(9):
        database.execute(insert, "calm", 2)
        database.execute(insert, "busy", 40)
        assert [storm for storm in one.round(connection).storms if storm.kind == "agent"] == []
    database.execute(insert, "calm", 2000)
    database.execute(insert, "busy", 40)
    report = one.round(connection)
    (storm,) = [storm for storm in report.storms if storm.kind == "agent"]
    assert storm.name == "calm"
    assert storm.times > 20
    assert report.state is not None
    assert report.state >= 1
    connection.close()


def test_a_rule_that_cannot_be_followed_is_said_once(
    stream: Installed, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    slot = stream.settings.slot
    rule = DropRule(slot=slot, above=1)
    settings = stream.settings.model_copy(update={"guard": GuardSettings(interval_seconds=0.1, drop=rule)})
    reports: list[Report] = []
    with stream.host():
        stream.wait_ordered()
        eventually(
            lambda: database.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", slot),
            "it is read",
        )
        watch = Watch(settings, Guard(settings, may_drop=True), reports.append)
        watch.start()
        eventually(lambda: len(reports) > 4, "it has looked often")
        watch.stop()
    said = [record.getMessage() for record in caplog.records if "is not dropped" in record.getMessage()]
    assert len(said) == 1
    assert exists(database, slot)


def test_a_look_that_hangs_leaves_nothing_known(stream: Installed) -> None:
    settings = stream.settings.model_copy(update={"guard": GuardSettings(interval_seconds=0.1)})
    watch = Watch(settings, Guard(settings))
    watch.start()
    eventually(lambda: watch.latest is not None and watch.latest.error is None, "it has looked")
    watch.stop()
    assert watch._latest is not None
    watch._latest = replace(watch._latest, at=time.time() - 61)
    assert watch.latest is not None
    assert watch.latest.state is None
    assert "ago" in str(watch.latest.error)


@pytest.fixture
def watching(stream: Installed) -> Iterator[subprocess.Popen[str]]:
    words = ["guard", "--watch", "--interval", "0.1", "--json", "--log-format", "json", "--slot", "missing"]
    process = subprocess.Popen(
        [sys.executable, "-m", "walstream", *words],
        env={**os.environ, "WALSTREAM_DSN": stream.settings.dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def test_the_command_watches_until_it_is_told_to_stop(watching: subprocess.Popen[str]) -> None:
    assert watching.stdout is not None
    for _ in range(3):
        assert json.loads(watching.stdout.readline())["state"] == "lost"
    watching.send_signal(signal.SIGTERM)
    _, errors = watching.communicate(timeout=60)
    assert watching.returncode == 0, errors
    (line,) = errors.splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"]) == ("error", "walstream.guard")
    assert "there is no slot missing" in record["message"]
    assert record["time"].endswith("+00:00")


def test_a_password_is_in_no_log_line(stream: Installed) -> None:
    with pytest.raises(psycopg2.OperationalError):
        psycopg2.connect(make_dsn(stream.settings.dsn, dbname="nowhere"))
    called = guard(make_dsn(stream.settings.dsn, dbname="nowhere", password="s3cret"), "s")
    assert "s3cret" not in called.stdout + called.stderr
