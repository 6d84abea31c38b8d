"""walstream's own tables: installed once, by whoever comes first, identical to what is printed for a DBA."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from psycopg2.extensions import connection

from tests.conftest import Database
from walstream.config import Settings, quote
from walstream.errors import ConfigError
from walstream.ledger import schema

ODD = 'my "odd" $namespace'
CATALOG = """
    SELECT c.relkind::text, c.relname::text, c.relpersistence::text, pg_get_indexdef(c.oid),
           (SELECT array_agg(format('%%s %%s %%s %%s %%s', a.attname, format_type(a.atttypid, a.atttypmod),
                                    a.attnotnull, a.attstorage, pg_get_expr(d.adbin, d.adrelid)) ORDER BY a.attnum)
              FROM pg_attribute a LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
             WHERE a.attrelid = c.oid AND a.attnum > 0),
           (SELECT array_agg(pg_get_constraintdef(k.oid) ORDER BY k.conname)
              FROM pg_constraint k WHERE k.conrelid = c.oid)
      FROM pg_class c WHERE c.relnamespace = %s::regnamespace AND c.relkind IN ('r', 'i', 'S') ORDER BY 1, 2"""
FUNCTIONS = """
    SELECT pg_get_functiondef(p.oid), (SELECT array_agg(a::text ORDER BY a::text) FROM unnest(p.proacl) AS a)
      FROM pg_proc AS p WHERE p.pronamespace = %s::regnamespace ORDER BY p.oid::regprocedure::text"""


def _catalog(database: Database, *namespaces: str) -> list[list[tuple[Any, ...]]]:
    return [database.execute(sql, quote(namespace)) for namespace in namespaces for sql in (CATALOG, FUNCTIONS)]


@pytest.fixture
def ledger(database: Database) -> Database:
    """A database with the ledger's table, and nothing else."""
    database.execute(schema.ledger_sql(Settings().ledger))
    return database


def test_install_is_idempotent_and_keeps_what_is_there(ledger: Database) -> None:
    conn = ledger.connect()
    assert schema.install(conn, Settings()) == len(schema.migrations())
    assert conn.autocommit is False
    ledger.execute("UPDATE walstream.generation SET generation = 7")
    assert schema.install(conn, Settings()) == 0
    assert ledger.execute("SELECT generation FROM walstream.generation") == [(7,)]
    assert schema.require_schema(conn, Settings()) == schema.migrations()[-1].version


@pytest.mark.parametrize("odd", [False, True])
def test_the_printed_script_makes_the_identical_schema(database: Database, odd: bool) -> None:
    """Whether printed, installed at once, or migrated version by version."""
    settings = Settings()
    if odd:
        names = {"namespace": ODD, "table": "E'v$table%", "snapshots": "snap$jobs", "jobs": 'j"obs'}
        columns = {"session_id": "thread $seq", "payload": "pay%load", "created_at": "when"}
        settings = Settings.model_validate({"namespace": ODD + "2", "ledger": {**names, "columns": columns}})
    conn = database.connect()
    found = []
    for way in ("installed", "printed", "migrated"):
        database.execute(f"CREATE SCHEMA IF NOT EXISTS {quote(settings.ledger.namespace)}")
        database.execute(schema.ledger_sql(settings.ledger).replace("uuid", "text"))
        if way == "printed":
            database.execute("\n".join(schema.statements(settings)))
        last = schema.migrations()[-1].version
        for version in range(1 if way == "migrated" else last, last + 1):
            schema.install(conn, settings, upto=version)
        assert schema.install(conn, settings) == 0
        found.append(_catalog(database, settings.namespace, settings.ledger.namespace))
        for namespace in {settings.namespace, settings.ledger.namespace}:
            database.execute(f"DROP SCHEMA {quote(namespace)} CASCADE")
        database.execute("CREATE SCHEMA IF NOT EXISTS public")
    assert found[0] == found[1] == found[2]
    assert "append_keys" in str(found[0])
    assert settings.ledger.snapshots in str(found[0][2])  # what the ledger's schema holds
    assert settings.ledger.jobs in str(found[0][2])


def test_many_installers_at_once(ledger: Database) -> None:
    ran: list[int] = []
    connections = [ledger.connect() for _ in range(6)]

    def run(conn: connection) -> None:
        ran.append(schema.install(conn, Settings()))

    threads = [threading.Thread(target=run, args=(conn,)) for conn in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == [0] * 5 + [len(schema.migrations())]


def test_a_failing_migration_leaves_nothing_behind(ledger: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = schema.Migration(version=99, name="broken", template="CREATE TABLE $namespace.half (); SELECT 1/0")
    known = schema.migrations()
    monkeypatch.setattr(schema, "migrations", lambda: (*known, broken))
    conn = ledger.connect()
    with pytest.raises(Exception, match="division by zero"):
        schema.install(conn, Settings())
    assert ledger.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'walstream'") == []


def test_not_installed_names_the_command(database: Database) -> None:
    with pytest.raises(ConfigError, match="not installed") as caught:
        schema.require_schema(database.connect(), Settings())
    assert "walstream init" in caught.value.hint


def test_an_older_schema_names_the_command(ledger: Database) -> None:
    conn = ledger.connect()
    schema.install(conn, Settings())
    with pytest.raises(ConfigError, match="needs version 1000") as caught:
        schema.require_schema(conn, Settings(), 1000)
    assert "walstream migrate" in caught.value.hint


def test_a_newer_schema_is_accepted(ledger: Database) -> None:
    conn = ledger.connect()
    schema.install(conn, Settings())
    ledger.execute("INSERT INTO walstream.migrations (version, name) VALUES (999, 'of the next release')")
    assert schema.require_schema(conn, Settings()) == 999
    assert schema.install(conn, Settings()) == 0


def test_a_schema_of_somebody_else_is_not_touched(database: Database) -> None:
    database.execute("CREATE SCHEMA walstream; CREATE TABLE walstream.migrations (id int)")
    with pytest.raises(ConfigError, match="not walstream's"):
        schema.install(database.connect(), Settings())
    assert database.execute("SELECT count(*) FROM pg_class WHERE relnamespace = 'walstream'::regnamespace") == [(1,)]


def test_the_ledger_has_the_columns_and_indexes_of_the_design(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    assert database.execute(
        "SELECT attname::text, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute"
        " WHERE attrelid = 'agent_events'::regclass AND attnum > 0 ORDER BY attnum"
    ) == [
        ("seq", "bigint", True),
        ("session_id", "uuid", True),
        ("agent_id", "text", True),
        ("event_type", "text", True),
        ("payload", "jsonb", True),
        ("created_at", "timestamp with time zone", True),
    ]
    definitions = " ".join(
        row[0] for row in database.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'agent_events'")
    )
    for columns in ("(seq)", "(session_id, seq)", "(agent_id, seq)"):
        assert columns in definitions
