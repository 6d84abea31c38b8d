"""Positions of another cluster, another history or another environment are refused, not resumed."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg2.extensions import connection

from tests.conftest import Database
from tests.ready import make_tables
from walstream.config import Settings
from walstream.errors import ConfigError, SlotError
from walstream.ledger.identity import check_identity, identity_sql, read_identity


def _set_up(database: Database, **fields: Any) -> tuple[connection, Settings]:
    make_tables(database, Settings(**fields))
    settings = Settings(dsn=database.dsn, **fields)
    conn = database.connect()
    conn.autocommit = True
    with conn.cursor() as cur:
        cur.execute(identity_sql(settings))
        cur.execute("UPDATE walstream.identity SET slot_state = 'ready'")
    return conn, settings


def test_the_server_that_was_set_up_is_accepted(database: Database) -> None:
    conn, settings = _set_up(database, environment="it's \\ odd", ledger={"table": 'E"v$table'})
    identity = check_identity(conn, settings)
    assert identity.environment == "it's \\ odd"
    assert identity.key_prefix == f"{identity.ledger_id}:1"
    assert database.execute("SELECT %s::oid::regclass::text", identity.table_oid) == [('"E""v$table"',)]


def test_identity_is_written_once(database: Database) -> None:
    conn, settings = _set_up(database)
    before = check_identity(conn, settings)
    with conn.cursor() as cur:
        cur.execute(identity_sql(settings))
        assert read_identity(cur, settings.namespace) == before


@pytest.mark.parametrize("state", ["creating", "filling"])
def test_a_slot_that_is_not_ready_is_refused(database: Database, state: str) -> None:
    conn, settings = _set_up(database)
    database.execute("UPDATE walstream.identity SET slot_state = %s", state)
    with pytest.raises(ConfigError, match=state) as caught:
        check_identity(conn, settings)
    assert "walstream init" in caught.value.hint


def test_a_copy_in_another_environment_is_refused(database: Database) -> None:
    conn, settings = _set_up(database, environment="production")
    with pytest.raises(ConfigError, match="'production'") as caught:
        check_identity(conn, settings.model_copy(update={"environment": "staging"}))
    assert "walstream adopt --environment staging" in caught.value.hint


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [("system_identifier", "7000000000000000001", "system identifier"), ("timeline", "77", "timeline 77")],
)
def test_another_history_is_refused(database: Database, column: str, value: str, words: str) -> None:
    conn, settings = _set_up(database)
    database.execute(f"UPDATE walstream.identity SET {column} = %s", value)
    with pytest.raises(SlotError, match=words) as caught:
        check_identity(conn, settings)
    assert "walstream adopt" in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [{"slot": "other"}, {"publication": "other"}, {"ledger": Settings(ledger={"table": "other"}).ledger}],
)
def test_a_configuration_that_means_another_stream_is_refused(database: Database, change: dict[str, Any]) -> None:
    conn, settings = _set_up(database)
    with pytest.raises(ConfigError, match="other"):
        check_identity(conn, settings.model_copy(update=change))


def test_a_copy_within_the_cluster_is_refused(database: Database) -> None:
    """Before a projector of the copy sends what the original's has sent already."""
    slot = database.name[:60]
    conn, settings = _set_up(database, slot=slot)
    with conn.cursor() as cur:
        cur.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    check_identity(conn, settings)
    conn.close()
    copy = Database(database.server, f"{database.name[:50]}_copy")
    copy.create(template=database.name)
    try:
        copied = copy.connect()
        with pytest.raises(SlotError, match="copy of it within the same cluster"):
            check_identity(copied, settings)
    finally:
        copy.drop()
