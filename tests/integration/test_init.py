"""``walstream init``: what it makes, in which order, and that it can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_calls import call, hold, ok
from tests.conftest import Database, Server
from tests.integration.births import assert_every_row_once, insert_rows, ordered_seqs
from walstream.config import load
from walstream.errors import ExitCode
from walstream.ledger.identity import check_identity
from walstream.source.connection import connect
from walstream.source.preflight import preflight


@pytest.fixture
def slot(database: Database) -> str:
    """A name of its own: slots belong to the whole server."""
    return f"i_{database.name[-8:]}"


def run_would_start(database: Database, slot: str, **fields: object) -> None:
    """What `walstream run` checks before it streams."""
    settings = load(arguments={"dsn": database.dsn, "slot": slot, **fields})
    conn = connect(database.dsn, application_name="test")
    try:
        check_identity(conn, settings)
        facts = preflight(settings, conn)
        assert not facts.slot_moved
    finally:
        conn.close()


def test_an_empty_database(database: Database, slot: str) -> None:
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert [words.split()[0] for words in done["done"]] == ["table", "schema", "identity", "publication"]
    assert done["slot"] == {"name": slot, "made_because": "new", "filled": 0, "floor_seq": None}
    assert database.execute("SELECT slot_state FROM walstream.identity") == [("ready",)]
    assert database.execute(
        "SELECT puballtables, pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication"
    ) == [(False, True, False, False, True)]
    run_would_start(database, slot)


def test_repeated_it_changes_nothing(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 3)
    before = database.execute("SELECT i.*, g.generation FROM walstream.identity AS i, walstream.generation AS g")
    again = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert (again["done"], again["slot"]) == ([], None)
    assert (
        database.execute("SELECT i.*, g.generation FROM walstream.identity AS i, walstream.generation AS g") == before
    )
    assert assert_every_row_once(database, slot) == ([], [1, 2, 3])


def test_rows_that_stand_there_are_ordered_and_the_stream_goes_on_behind_them(database: Database, slot: str) -> None:
    database.execute(
        "CREATE TABLE agent_events (seq bigserial PRIMARY KEY, session_id text NOT NULL, agent_id text NOT NULL,"
        " event_type text NOT NULL, payload json NOT NULL, created_at timestamptz, extra int)"
    )
    insert_rows(database, 30_000)
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert done["slot"]["filled"] == 30_000
    insert_rows(database, 5)
    ordered, streamed = assert_every_row_once(database, slot)
    assert (ordered, streamed) == (list(range(1, 30_001)), list(range(30_001, 30_006)))
    run_would_start(database, slot)


def test_from_now_sets_a_floor(database: Database, slot: str) -> None:
    database.execute(
        "CREATE TABLE agent_events (seq bigserial PRIMARY KEY, session_id uuid NOT NULL, agent_id text NOT NULL,"
        " event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())"
    )
    insert_rows(database, 100)
    done = ok("init", "--slot", slot, "--from", "now", "--json", dsn=database.dsn).json
    assert (done["slot"]["filled"], done["slot"]["floor_seq"]) == (0, 100)
    assert ordered_seqs(database) == []
    run_would_start(database, slot)
    # A second call does not move the floor, and none can be set later.
    insert_rows(database, 1)
    ok("init", "--slot", slot, "--from", "now", dsn=database.dsn)
    assert database.execute("SELECT floor_seq FROM walstream.identity") == [(100,)]


def test_a_floor_cannot_be_set_later(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    called = call("init", "--slot", slot, "--from", "now", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "'latest'" in called.stderr


def test_a_floor_outlives_a_lost_slot(database: Database, slot: str) -> None:
    """Rows below it are not events after a new birth either; rows above it that the slot missed are."""
    ok("init", "--slot", slot, "--table", "agent_events", dsn=database.dsn)
    database.execute("UPDATE walstream.identity SET floor_seq = 2")
    insert_rows(database, 4)
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert done["slot"] == {"name": slot, "made_because": "it is missing", "filled": 2, "floor_seq": 2}
    assert ordered_seqs(database) == [3, 4]


def test_dry_run_changes_nothing_and_names_everything(database: Database, slot: str) -> None:
    shown = ok("init", "--slot", slot, "--dry-run", dsn=database.dsn).stdout
    for words in ("CREATE TABLE", "CREATE PUBLICATION", "would make: the slot (new)"):
        assert words in shown
    plan = ok("init", "--slot", slot, "--dry-run", "--json", dsn=database.dsn).json
    assert (len(plan["steps"]), plan["slot"]) == (4, "new")
    assert database.execute("SELECT count(*) FROM pg_class WHERE relname = 'agent_events'") == [(0,)]
    assert database.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", slot) == [(0,)]
    ok("init", "--slot", slot, dsn=database.dsn)
    assert "everything is there" in ok("init", "--slot", slot, "--dry-run", dsn=database.dsn).stdout


@pytest.mark.parametrize("name", ["walstream", 'Ström, "a" \\ $x'])
def test_a_publication_may_have_any_name(database: Database, slot: str, name: str) -> None:
    ok("init", "--slot", slot, "--publication", name, dsn=database.dsn)
    run_would_start(database, slot, publication=name)


def test_mapped_names(database: Database, slot: str, tmp_path: Path) -> None:
    config = tmp_path / "walstream.toml"
    config.write_text(
        f"slot = '{slot}'\nnamespace = 'my stream'\n"
        "[ledger]\nnamespace = 'My App'\ntable = 'agent\"steps %s'\n"
        "[ledger.columns]\nseq = 'step no'\nsession_id = 'thread'\nagent_id = 'who'\nevent_type = 'kind'\n"
        "payload = 'body %'\ncreated_at = 'at'\n"
    )
    ok("init", "--config", str(config), dsn=database.dsn)
    settings = load(flags={"dsn": database.dsn}, file=config)
    database.execute(
        f'INSERT INTO {settings.ledger.qualified} (thread, who, kind, "body %")'
        " VALUES (gen_random_uuid(), 'a', 't', '{}')"
    )
    conn = connect(database.dsn, application_name="test")
    try:
        check_identity(conn, settings)
        preflight(settings, conn)
    finally:
        conn.close()
    # A new birth reads the mapped table.
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    assert ok("init", "--config", str(config), "--json", dsn=database.dsn).json["slot"]["filled"] == 1


def test_two_streams_in_one_database(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    called = call("init", "--slot", f"{slot}_b", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "--namespace" in called.stderr
    ok("init", "--slot", f"{slot}_b", "--namespace", "second", "--publication", "second", dsn=database.dsn)
    run_would_start(database, f"{slot}_b", namespace="second", publication="second")
    run_would_start(database, slot)


def test_a_slot_of_somebody_else_is_not_touched(database: Database, slot: str) -> None:
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.SLOT
    assert f"pg_drop_replication_slot('{slot}')" in called.stderr
    # Nothing was made either: the plan is refused before its first step.
    assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'walstream'") == [(0,)]


@pytest.mark.parametrize("plugin", ["test_decoding", "other database"])
def test_our_slot_that_became_another_is_refused(database: Database, server: Server, slot: str, plugin: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    where = "postgres" if plugin == "other database" else database.name
    kind = "pgoutput" if plugin == "other database" else plugin
    server.execute("SELECT pg_create_logical_replication_slot(%s, %s)", slot, kind, dbname=where)
    try:
        called = call("init", "--slot", slot, dsn=database.dsn)
        assert called.exit_code == ExitCode.SLOT
        assert "not the one of this stream" in called.stderr
    finally:
        server.execute("SELECT pg_drop_replication_slot(%s)", slot, dbname=where)


def test_a_publication_that_was_dropped_makes_a_new_slot(database: Database, slot: str) -> None:
    """Decoding with the old slot would fail for ever at the first change made meanwhile (C34)."""
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute("DROP PUBLICATION walstream")
    insert_rows(database, 2)
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert done["slot"]["made_because"] == "the publication is younger than it would be"
    insert_rows(database, 1)
    assert assert_every_row_once(database, slot) == ([1, 2], [3])


def test_a_table_taken_out_of_the_publication_comes_back(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute("ALTER PUBLICATION walstream DROP TABLE agent_events")
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert done["done"] == ['"public"."agent_events" into publication "walstream"']
    insert_rows(database, 1)
    assert assert_every_row_once(database, slot) == ([], [1])


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("ALTER PUBLICATION walstream SET (publish = 'update')", "does not publish inserts"),
        ("ALTER PUBLICATION walstream SET TABLE agent_events WHERE (seq > 5)", "sends only rows"),
        ("ALTER PUBLICATION walstream SET TABLE agent_events (seq, session_id)", "leaves out columns"),
    ],
)
def test_a_publication_that_would_lose_rows_is_refused(
    database: Database, server: Server, slot: str, statement: str, words: str
) -> None:
    if server.major < 15 and "SET TABLE" in statement:
        pytest.skip("row filters and column lists came with 15")
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute(statement)
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert words in called.stderr


def test_for_all_tables_is_noted(database: Database, slot: str) -> None:
    database.execute("CREATE PUBLICATION walstream FOR ALL TABLES")
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert any("FOR ALL TABLES" in note for note in done["notes"])


@pytest.mark.parametrize(
    ("column", "words"),
    [("environment = 'production'", "environment"), ("timeline = timeline + 1", "timeline")],
)
def test_another_place_or_history_is_for_adopt(database: Database, slot: str, column: str, words: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute(f"UPDATE walstream.identity SET {column}")
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert words in called.stderr
    assert "walstream adopt" in called.stderr


def test_refused_while_a_consumer_works_on_a_ledger_whose_slot_is_lost(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    holder = hold(database, "ingest")
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.UNAVAILABLE
    assert "host:1" in called.stderr
    holder.close()
    ok("init", "--slot", slot, dsn=database.dsn)


def test_the_lease_is_given_back(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    assert database.execute("SELECT owner, lease_until FROM walstream.ingest") == [(None, None)]


def test_wrong_words(database: Database) -> None:
    assert call("init", "--from", "yesterday", dsn=database.dsn).exit_code == ExitCode.CONFIG
    called = call("init", "--slot-wal-keep", "10 GB'; DROP TABLE x", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "not a size" in called.stderr
