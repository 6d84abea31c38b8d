"""The fixtures that all other tests stand on."""

from __future__ import annotations

from collections.abc import Callable

from tests.conftest import Database, Server
from walstream.postgres import PostgresServer


def test_server_decodes_logically(server: Server) -> None:
    assert server.execute("SHOW wal_level") == [("logical",)]
    assert server.execute("SHOW server_encoding") == [("UTF8",)]
    assert server.major >= 14


def test_database_is_dropped_with_its_slots_prepared_transactions_and_sessions(server: Server) -> None:
    made = Database(server, "t_dropped_with_everything")
    made.create()
    made.execute("SELECT pg_create_logical_replication_slot('t_dropped', 'pgoutput')")
    cursor = made.connect().cursor()
    cursor.execute("CREATE TABLE t(n int)")
    cursor.execute("PREPARE TRANSACTION 't_dropped'")
    made.connect().cursor().execute("SELECT 1")
    made.drop()
    assert server.execute("SELECT 1 FROM pg_database WHERE datname = %s", made.name) == []
    assert server.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = 't_dropped'") == []
    assert server.execute("SELECT 1 FROM pg_prepared_xacts WHERE gid = 't_dropped'") == []


def test_own_server_is_another_one(server: Server, own_server: Callable[..., PostgresServer]) -> None:
    own = own_server(wal_sender_timeout="2s")
    assert own.execute("SHOW wal_sender_timeout") == [("2s",)]
    identifier = "SELECT system_identifier FROM pg_control_system()"
    assert own.execute(identifier) != server.execute(identifier)
    assert own.major == server.major
