"""A slot that cannot be read any further is made anew by `run`, and nothing is lost (C26, C34, C41, C46, C47)."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest

from tests.cli_calls import call
from tests.conftest import Database
from tests.integration.births import INSERT, insert_rows
from tests.integration.streams import Installed, Recorder, eventually
from walstream.engine import birth, rebirth
from walstream.errors import ConfigError, ExitCode, PublicationGone, SlotError
from walstream.metrics import METRICS
from walstream.postgres import PostgresServer


@pytest.fixture
def stream(database: Database) -> Installed:
    return Installed(database)


def drop(stream: Installed) -> None:
    """As a person would who believes that nobody needs the slot, and who is faster than its reader comes back."""
    eventually(lambda: _dropped(stream), "the slot can be dropped")


def _dropped(stream: Installed) -> bool:
    slot = stream.settings.slot
    stream.place.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active", slot
    )
    try:
        stream.place.execute("SELECT pg_drop_replication_slot(%s)", slot)
    except psycopg2.errors.ObjectInUse:
        return False
    return True


def all_once(stream: Installed, recorder: Recorder) -> None:
    """Every row of the ledger has one offset, and the projector has got it once, in order."""
    assert stream.wait_ordered()
    eventually(lambda: len(recorder.got) >= len(stream.ledger()), "everything was delivered")
    assert [event.offset for event in recorder.got] == list(range(1, len(stream.ledger()) + 1))
    assert sorted(event.seq for event in recorder.got) == stream.ledger()


def counted(stream: Installed) -> int:
    return int(stream.place.execute("SELECT recovered FROM walstream.ingest")[0][0])


def test_missing_at_the_start(stream: Installed, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("before")
        eventually(lambda: recorder.got, "one event")
    stream.insert("hole", "hole")
    stream.place.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    stream.insert("hole")
    risen = METRICS.value("ingest_recovered_total")
    with caplog.at_level(logging.WARNING), stream.host(recorder):
        eventually(lambda: len(recorder.got) == 4, "what the slot missed")
        stream.insert("after")
        all_once(stream, recorder)
    assert [event.event_type for event in recorder.got if event.recovered] == ["hole"] * 3
    assert counted(stream) == 3
    assert METRICS.value("ingest_recovered_total") == risen + 3
    said = next(record.getMessage() for record in caplog.records if "taken from the ledger" in record.getMessage())
    assert "3 events (seq 2 to 4, offsets 2 to 4)" in said
    assert "there is no slot" in said
    assert stream.place.execute(
        "SELECT events, min_seq, max_seq, first_offset, last_offset FROM walstream.recoveries WHERE kind = 'rebirth'"
    ) == [(3, 2, 4, 2, 4)]
    shown = call("status", "--json", dsn=stream.place.dsn).json["recoveries"][0]
    assert (shown["kind"], shown["events"]) == ("rebirth", 3)
    assert "there is no slot" in shown["cause"]
    assert stream.place.execute("SELECT slot_state FROM walstream.identity") == [("ready",)]


def test_dropped_while_it_streams(stream: Installed) -> None:
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.got, "one event")
        drop(stream)
        stream.insert("two", "three")
        all_once(stream, recorder)
        stream.insert("four")
        all_once(stream, recorder)


def test_readers_in_other_processes_are_woken(stream: Installed) -> None:
    """By the fill itself, long before they would have looked."""
    recorder = Recorder()
    with stream.host(recorder, ingest=False, poll_seconds=600):
        with stream.host():
            stream.insert("one")
            eventually(lambda: recorder.got, "one event")
        stream.place.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
        stream.insert("two")
        with stream.host():
            eventually(lambda: len(recorder.got) == 2, "what was filled")


@pytest.mark.parametrize("state", ["creating", "filling"])
def test_a_birth_that_was_cut_short_is_gone_on_with(stream: Installed, state: str) -> None:
    """With the slot as such a birth leaves it: in `filling` it is there, and sends nothing of what came before it."""
    recorder = Recorder()
    stream.insert("one")
    stream.place.execute("UPDATE walstream.identity SET slot_state = %s", state)
    if state == "creating":
        stream.place.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    else:
        stream.place.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", stream.settings.slot)
    stream.insert("two")
    with stream.host(recorder):
        stream.insert("three")
        all_once(stream, recorder)


def test_a_set_up_that_was_never_begun_is_not_gone_on_with(database: Database) -> None:
    """Only a person knows from which row on there are to be events."""
    stream = Installed(database)
    stream.place.execute("UPDATE walstream.identity SET slot_state = 'creating'")
    stream.place.execute("UPDATE walstream.ingest SET generation = 0")
    with pytest.raises(ConfigError, match="half set up"), stream.host():
        pass


def test_the_floor_of_a_birth_that_was_cut_short_holds(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Installed(database)
    database.execute("DROP SCHEMA walstream CASCADE")
    database.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    insert_rows(database, 5)

    def dies(_self: birth.Birth) -> birth.Born:
        raise SystemExit(9)

    with monkeypatch.context() as patched:
        patched.setattr(birth.Birth, "run", dies)
        with pytest.raises(AssertionError):
            Installed(database, "--from", "now")
    insert_rows(database, 1)
    with stream.host():
        assert eventually_ordered(stream) == [6]


def eventually_ordered(stream: Installed) -> list[int]:
    eventually(stream.ordered, "something is ordered")
    return stream.ordered()


def test_a_publication_that_was_dropped_and_made_again(stream: Installed) -> None:
    """C34: what was written in between cannot be decoded through it, for ever."""
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.got, "one event")
    stream.place.execute("DROP PUBLICATION walstream")
    stream.insert("two")
    stream.place.execute("CREATE PUBLICATION walstream FOR TABLE agent_events WITH (publish = 'insert, truncate')")
    stream.insert("three")
    with stream.host(recorder):
        stream.insert("four")
        all_once(stream, recorder)


@pytest.mark.parametrize(
    "breaking", ["DROP PUBLICATION walstream", "ALTER PUBLICATION walstream DROP TABLE agent_events"]
)
@pytest.mark.parametrize("running", [True, False])
def test_a_publication_that_is_gone_is_put_right_by_who_may(stream: Installed, breaking: str, running: bool) -> None:
    """C34, C37: and what was written meanwhile is found in the ledger."""
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.got, "one event")
        if running:
            stream.place.execute(breaking)
            stream.insert("two")
            all_once(stream, recorder)
    if not running:
        stream.place.execute(breaking)
        stream.insert("two")
    with stream.host(recorder):
        stream.insert("three")
        all_once(stream, recorder)
    assert stream.place.execute("SELECT tablename FROM pg_publication_tables WHERE pubname = 'walstream'") == [
        ("agent_events",)
    ]


def test_a_publication_that_is_gone_ends_a_login_that_may_not(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    with stream.host(dsn=database.server.dsn(database.name, login)) as host:
        stream.insert("one")
        stream.wait_ordered()
        database.execute("ALTER PUBLICATION walstream DROP TABLE agent_events")
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, PublicationGone)
        assert host.exit_code == ExitCode.CONFIG
        assert 'ALTER PUBLICATION "walstream" ADD TABLE "public"."agent_events"' in host.error.hint


def test_not_where_the_configuration_says_so(stream: Installed) -> None:
    stream.place.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    with stream.host(recover_slot="never") as host:
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, SlotError)
        assert host.exit_code == ExitCode.SLOT
        assert "walstream init" in host.error.hint


@pytest.mark.parametrize("plugin", ["test_decoding", "two_phase"])
def test_a_slot_of_somebody_else_is_not_dropped(stream: Installed, plugin: str) -> None:
    slot = stream.settings.slot
    stream.place.execute("SELECT pg_drop_replication_slot(%s)", slot)
    made = ("pgoutput", True) if plugin == "two_phase" else (plugin, False)
    stream.place.execute("SELECT pg_create_logical_replication_slot(%s, %s, false, %s)", slot, *made)
    stream.place.execute("UPDATE walstream.identity SET slot_state = 'filling'")  # whatever state it died in
    with stream.host() as host:
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, SlotError)
        assert f"pg_drop_replication_slot('{slot}')" in host.error.hint
    assert stream.place.execute("SELECT plugin FROM pg_replication_slots WHERE slot_name = %s", slot) == [(made[0],)]


def test_what_is_in_the_way_is_named_and_has_an_end(
    stream: Installed, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C47. What stands in the ledger is delivered all the same."""
    monkeypatch.setattr(rebirth, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(rebirth, "MOST_ATTEMPTS", 2)
    words = ("status", "--slot", stream.settings.slot, "--json")
    recorder = Recorder()
    writer = database.connect(application_name="the forgotten one")
    writer.cursor().execute(INSERT)
    stream.insert("seen")
    database.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    with stream.host(recorder) as host:
        eventually(
            lambda: any("is being made anew" in each for each in call(*words, dsn=database.dsn).json["problems"]),
            "status says it",
        )
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, SlotError)
        assert "in 2 attempts" in str(host.error)
        assert "the forgotten one" in str(host.error)
        assert "pg_terminate_backend" in host.error.hint
    assert recorder.types == ["seen"]
    writer.commit()
    with stream.host(recorder):
        all_once(stream, recorder)


def test_not_again_and_again(stream: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebirth, "MOST_BIRTHS", 2)
    with stream.host() as host:
        for number in range(1, 3):
            stream.insert("one")
            stream.wait_ordered()
            drop(stream)
            eventually(lambda wanted=number: _births(stream) == wanted, "it was made anew")  # type: ignore[misc]
        stream.wait_ordered()
        drop(stream)
        eventually(lambda: host.wait(0), "it ends")
        assert "2 times within 10 minutes" in str(host.error)
        assert host.exit_code == ExitCode.SLOT


def _births(stream: Installed) -> int:
    return int(stream.place.execute("SELECT count(*) FROM walstream.recoveries WHERE kind = 'rebirth'")[0][0])


@pytest.fixture
def login(database: Database) -> Iterator[str]:
    """A role with what `init --grants` gives it, and no more."""
    role = f"plain_{database.name[-8:]}"
    database.server.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    yield role
    database.drop()
    database.server.execute(f"DROP ROLE {role}")


def test_with_the_grants_of_init(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    stream.insert("one")
    database.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    recorder = Recorder()
    recorder.name = "cold"
    with stream.host(recorder, dsn=database.server.dsn(database.name, login)):
        stream.insert("two")
        all_once(stream, recorder)


def test_without_the_right_to_write_the_state_nothing_is_dropped(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    database.execute(f"REVOKE UPDATE (slot_state) ON walstream.identity FROM {login}")
    database.execute("UPDATE walstream.identity SET slot_state = 'filling'")
    with stream.host(dsn=database.server.dsn(database.name, login)) as host:
        eventually(lambda: host.wait(0), "it ends")
        assert host.exit_code == ExitCode.CONFIG
        assert host.error is not None
        assert f'GRANT UPDATE (slot_state) ON "walstream".identity TO "{login}"' in host.error.hint
    assert stream.confirmed()


def lose(server: PostgresServer) -> None:
    """Write WAL until the server throws away what slots still need."""
    for _ in range(20):
        server.execute("SELECT pg_logical_emit_message(false, 'fill', repeat('x', 1000000))")
        server.execute("SELECT pg_switch_wal()")
    server.execute("CHECKPOINT")


def unread(own_server: Callable[..., PostgresServer], events: int) -> None:
    """The slot is invalidated while so many events are unread."""
    server = own_server(max_slot_wal_keep_size="1MB", max_wal_size="32MB")
    server.execute("CREATE DATABASE ledger")
    database = Database(server, "ledger", made=True)
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("first")
        eventually(lambda: recorder.got, "one event")
    sessions = max(1, events // 1000)
    for start in range(0, events, 500):
        database.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " SELECT md5((n %% %s)::text)::uuid, 'a', 't', jsonb_build_object('n', n)"
            " FROM generate_series(%s::int, %s::int) AS n",
            sessions,
            start + 1,
            start + 500,
        )
    lose(server)
    slot: list[Any] = database.execute("SELECT wal_status FROM pg_replication_slots")
    assert slot == [("lost",)]
    with stream.host(recorder):
        eventually(lambda: len(recorder.got) > events, "every unread event", timeout=120)
        stream.insert("last")
        eventually(lambda: len(recorder.got) == events + 2, "and the next one")
    assert [event.offset for event in recorder.got] == list(range(1, events + 3))
    latest: dict[str, int] = {}
    for event in recorder.got:
        assert latest.get(str(event.session_id), 0) < event.seq, "in the order of each session"
        latest[str(event.session_id)] = event.seq
    assert counted(stream) == events


def test_invalidated_while_events_are_unread(own_server: Callable[..., PostgresServer]) -> None:
    unread(own_server, 3_000)


@pytest.mark.slow
def test_invalidated_while_a_hundred_thousand_events_are_unread(own_server: Callable[..., PostgresServer]) -> None:
    unread(own_server, 100_000)


def test_invalidated_beneath_an_open_stream(own_server: Callable[..., PostgresServer]) -> None:
    """C46: it looks like an ordinary disconnect."""
    server = own_server(max_slot_wal_keep_size="1MB", max_wal_size="32MB")
    server.execute("CREATE DATABASE ledger")
    stream = Installed(Database(server, "ledger", made=True))
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.got, "one event")
        # The walsender stands still, so that nothing is confirmed and the slot falls behind.
        ((pid,),) = server.execute("SELECT active_pid FROM pg_replication_slots")
        os.kill(pid, signal.SIGSTOP)
        try:
            stream.insert("two", "three")
            for _ in range(6):
                server.execute("SELECT pg_logical_emit_message(false, 'fill', repeat('x', 1000000))")
                server.execute("SELECT pg_switch_wal()")
            server.execute("SELECT pg_terminate_backend(%s)", pid)
        finally:
            os.kill(pid, signal.SIGCONT)
        lose(server)
        stream.insert("four")
        all_once(stream, recorder)
