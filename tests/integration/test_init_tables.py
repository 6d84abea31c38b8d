"""Ledgers as people have them: what ``walstream init`` accepts, and what it refuses with the reason."""

from __future__ import annotations

import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.births import assert_every_row_once, insert_rows
from walstream.errors import ExitCode

COLUMNS = {
    "seq": "bigserial PRIMARY KEY",
    "session_id": "uuid NOT NULL",
    "agent_id": "text NOT NULL",
    "event_type": "text NOT NULL",
    "payload": "jsonb NOT NULL",
    "created_at": "timestamptz NOT NULL DEFAULT now()",
}


@pytest.fixture
def slot(database: Database) -> str:
    return f"t_{database.name[-8:]}"


def make_table(database: Database, kind: str = "TABLE", tail: str = "", **columns: str) -> None:
    """The table ``agent_events`` with these columns instead of the usual ones; an empty one is left out."""
    merged = {**COLUMNS, **columns}
    inside = ", ".join(f"{name} {words}" for name, words in merged.items() if words)
    database.execute(f"CREATE {kind} agent_events ({inside}) {tail}")


def test_accepted(database: Database, slot: str) -> None:
    """One after the other in one database: making a database takes longer than the rest."""
    cases: list[dict[str, str]] = [
        {"session_id": "text NOT NULL"},
        {"seq": "serial PRIMARY KEY"},
        {"seq": "bigint NOT NULL GENERATED ALWAYS AS IDENTITY", "UNIQUE": "(seq)"},
        {"payload": "json NOT NULL"},
        {"created_at": "timestamptz"},
        {"trace_id": "text DEFAULT 'd'", "n": "int"},
        {"event_type": "varchar(40) NOT NULL"},
    ]
    for columns in cases:
        make_table(database, **columns)
        insert_rows(database, 3)
        ok("init", "--slot", slot, dsn=database.dsn)
        insert_rows(database, 2)
        assert assert_every_row_once(database, slot) == ([1, 2, 3], [4, 5]), columns
        database.execute("SELECT pg_drop_replication_slot(%s)", slot)
        database.execute("DROP PUBLICATION walstream; DROP SCHEMA walstream, public CASCADE; CREATE SCHEMA public")


REFUSED: list[tuple[dict[str, str], str, str]] = [
    ({"seq": "bigserial"}, "TABLE", "no unique key"),
    ({"seq": "bigserial", "UNIQUE": "(agent_id, seq)"}, "TABLE", "no unique key"),
    ({"seq": "bigserial", "UNIQUE": "(seq) DEFERRABLE"}, "TABLE", "no unique key"),
    ({"seq": "uuid PRIMARY KEY"}, "TABLE", "is uuid"),
    ({"seq": "numeric PRIMARY KEY"}, "TABLE", "is numeric"),
    ({"seq": "bigint UNIQUE"}, "TABLE", "may be NULL"),
    ({"session_id": "uuid"}, "TABLE", "may be NULL"),
    ({"payload": "jsonb"}, "TABLE", "may be NULL"),
    ({"payload": "text NOT NULL"}, "TABLE", "json or jsonb"),
    ({"event_type": ""}, "TABLE", "has no column 'event_type'"),
    ({"created_at": ""}, "TABLE", "has no column 'created_at'"),
    ({"event_type": "text NOT NULL GENERATED ALWAYS AS (agent_id) STORED"}, "TABLE", "generated column"),
    ({}, "UNLOGGED TABLE", "SET LOGGED"),
]


def test_refused_with_the_reason(database: Database, slot: str) -> None:
    for columns, kind, words in REFUSED:
        make_table(database, kind, **columns)
        called = call("init", "--slot", slot, dsn=database.dsn)
        assert called.exit_code == ExitCode.CONFIG, (columns, called)
        assert words in called.stderr, (columns, called)
        assert "hint:" in called.stderr, (columns, called)
        database.execute("DROP TABLE agent_events")
    # Nothing was made: neither schema nor publication nor slot.
    assert database.execute(
        "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'walstream') + (SELECT count(*) FROM pg_publication)"
        " + (SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s)",
        slot,
    ) == [(0,)]


def test_a_partial_or_invalid_unique_index_is_no_key(database: Database, slot: str) -> None:
    make_table(database, seq="bigserial")
    database.execute("CREATE UNIQUE INDEX ON agent_events (seq) WHERE seq > 5")
    assert "no unique key" in call("init", "--slot", slot, dsn=database.dsn).stderr
    database.execute("CREATE UNIQUE INDEX ON agent_events (seq)")
    ok("init", "--slot", slot, dsn=database.dsn)


def test_a_view_is_refused(database: Database, slot: str) -> None:
    make_table(database)
    database.execute("ALTER TABLE agent_events RENAME TO real; CREATE VIEW agent_events AS SELECT * FROM real")
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "is a view" in called.stderr


def test_partitioned(database: Database, slot: str) -> None:
    """Published through its root, so that partitions that come later are streamed as well (C15)."""
    make_table(database, tail="PARTITION BY RANGE (created_at)", seq="bigserial", PRIMARY="KEY (seq, created_at)")
    database.execute("CREATE TABLE p1 PARTITION OF agent_events FOR VALUES FROM ('2000-01-01') TO ('2020-01-01')")
    database.execute("CREATE TABLE p2 PARTITION OF agent_events DEFAULT")
    insert_rows(database, 3)
    ok("init", "--slot", slot, dsn=database.dsn)
    assert database.execute("SELECT pubviaroot FROM pg_publication") == [(True,)]
    insert_rows(database, 1)
    database.execute("CREATE TABLE p3 PARTITION OF agent_events FOR VALUES FROM ('1990-01-01') TO ('2000-01-01')")
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload, created_at)"
        " VALUES (gen_random_uuid(), 'a', 't', '{}', '1995-01-01')"
    )
    assert assert_every_row_once(database, slot) == ([1, 2, 3], [4, 5])


def test_partitions_that_cannot_work_are_refused(database: Database, slot: str) -> None:
    by_time = "PARTITION BY RANGE (created_at)"
    make_table(database, tail=by_time, seq="bigserial", PRIMARY="KEY (created_at, seq)")
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "no unique key" in called.stderr
    assert "ADD UNIQUE" in called.stderr
    database.execute("DROP TABLE agent_events")

    make_table(database, tail=by_time, seq="bigserial", PRIMARY="KEY (seq, created_at)")
    database.execute('CREATE UNLOGGED TABLE "One Leaf" PARTITION OF agent_events DEFAULT')
    called = call("init", "--slot", slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "unlogged" in called.stderr
    assert 'ALTER TABLE public."One Leaf" SET LOGGED' in called.stderr
    database.execute('ALTER TABLE "One Leaf" RENAME TO leaf')
    # A leaf is not the ledger.
    called = call("init", "--slot", slot, "--table", "leaf", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG


def test_row_security_does_not_hide_rows_from_the_fill(database: Database, slot: str) -> None:
    make_table(database)
    database.execute("ALTER TABLE agent_events ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    insert_rows(database, 2)
    ok("init", "--slot", slot, dsn=database.dsn)
    assert assert_every_row_once(database, slot) == ([1, 2], [])


def test_an_encoding_that_is_none_is_refused(database: Database, slot: str) -> None:
    name = f"{database.name[:40]}_ascii"
    database.execute(f"CREATE DATABASE \"{name}\" ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        called = call("init", "--slot", slot, dsn=make_dsn(database.dsn, dbname=name))
        assert called.exit_code == ExitCode.CONFIG
        assert "SQL_ASCII" in called.stderr
    finally:
        database.execute(f'DROP DATABASE "{name}"')


def test_latin1_works(database: Database, slot: str) -> None:
    name = f"{database.name[:40]}_latin"
    database.execute(f"CREATE DATABASE \"{name}\" ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    latin = Database(database.server, name, made=True)
    try:
        ok("init", "--slot", slot, "--table", "événements", dsn=make_dsn(database.dsn, dbname=name))
    finally:
        latin.drop()
