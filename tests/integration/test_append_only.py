"""``walstream init --append-only``: nobody changes or removes rows, but by declaration."""

from __future__ import annotations

from typing import Any

import psycopg2
import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.test_append_sql import ODD, A, B, Ledger, refused
from walstream.config import Settings
from walstream.event import ERASED_PAYLOAD
from walstream.ledger import schema
from walstream.ledger.append_only import standing, statement

ERASED = ERASED_PAYLOAD.decode()
HASHED = schema.partitioned_sql(Settings().ledger, "HASH", "session_id") + "".join(
    f"CREATE TABLE part_{n} PARTITION OF agent_events FOR VALUES WITH (MODULUS 2, REMAINDER {n});" for n in (0, 1)
)
SHAPES = {"plain": (Settings(), ""), "odd": (ODD, ""), "partitioned": (Settings(), HASHED)}


@pytest.fixture(params=SHAPES)
def ledger(request: pytest.FixtureRequest, database: Database) -> Ledger:
    settings, shape = SHAPES[request.param]
    made = Ledger(database, settings, shape)
    on = database.connect()
    with on:
        for session in (A, B):
            made.append(on, session, payload={"n": 1})
            made.append(on, session, payload={"n": 2})
    return made


def guard(ledger: Ledger) -> None:
    ledger.database.execute(statement(ledger.settings))


def leaves(ledger: Ledger) -> list[str]:
    rows = ledger.database.execute(
        "SELECT relid::regclass::text FROM pg_partition_tree(%s::regclass) WHERE isleaf",
        ledger.settings.ledger.qualified,
    )
    names = rows or ledger.database.execute("SELECT %s::regclass::text", ledger.settings.ledger.qualified)
    return [name for (name,) in names]


def state(ledger: Ledger) -> Any:
    with ledger.database.connect() as on, on.cursor() as cur:
        return standing(cur, ledger.settings)


def test_nobody_changes_or_removes_a_row(ledger: Ledger) -> None:
    """Not the owner either, nor a superuser who makes the server skip triggers."""
    guard(ledger)
    before = ledger.rows()
    _, _, agent, _, payload = ledger.columns
    on = ledger.database.connect()
    for table in {ledger.settings.ledger.qualified, *leaves(ledger)}:
        rows = ledger.database.execute(f"SELECT 1 FROM {table}")
        changes = [
            f"UPDATE {table} SET {payload} = '{{}}'",
            f"UPDATE {table} SET {agent} = 'x'",
            f"DELETE FROM {table}",
        ]
        for sql in (*(changes if rows else ()), f"TRUNCATE {table}"):
            for role in ("origin", "replica"):
                on.cursor().execute(f"SET session_replication_role = {role}")
                error = refused(on, lambda sql=sql: on.cursor().execute(sql))  # type: ignore[misc]
                assert (error.pgcode, "is append-only" in str(error)) == ("WS007", True)
    assert ledger.rows() == before
    assert state(ledger).whole


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_an_erasure_gets_through(ledger: Ledger, mode: str) -> None:
    guard(ledger)
    on = ledger.database.connect()
    with on:
        ledger.call(on, "erase_session", session_id=A, reason="asked for", mode=mode)
    left = [row[4] for row in ledger.rows(A)]
    assert left == ([] if mode == "remove" else ['{"walstream_erased": true}'] * 2)
    assert [row[4] for row in ledger.rows(B)] == ['{"n": 1}', '{"n": 2}']


def test_a_declaration_is_for_its_rows_its_way_and_its_transaction(ledger: Ledger) -> None:
    guard(ledger)
    seq, _, agent, _, payload = ledger.columns
    table, home = ledger.settings.ledger.qualified, ledger.home
    declared = f"INSERT INTO {home}.erasures (first_seq, last_seq, reason, mode) VALUES (1, 2, 'x', '%s');"
    on = ledger.database.connect()
    ledger.database.execute(declared % "removed")  # in a transaction of its own: good for nothing
    for sql in (
        f"DELETE FROM {table} WHERE {seq} = 1",
        declared % "removed" + f"DELETE FROM {table} WHERE {seq} = 3",
        declared % "redacted" + f"DELETE FROM {table} WHERE {seq} = 1",
        declared % "removed" + f"UPDATE {table} SET {payload} = '{ERASED}' WHERE {seq} = 1",
        declared % "redacted" + f"UPDATE {table} SET {payload} = '{{}}' WHERE {seq} = 1",
    ):
        assert refused(on, lambda sql=sql: on.cursor().execute(sql)).pgcode == "WS007"  # type: ignore[misc]
    with on, on.cursor() as cur:
        cur.execute(declared % "redacted" + f"UPDATE {table} SET {payload} = '{ERASED}', {agent} = 'x' WHERE {seq} = 1")
        cur.execute(declared.replace("(1, 2,", "(2, 2,") % "removed" + f"DELETE FROM {table} WHERE {seq} = 2")
        # Ranges that overlap: the one that begins later does not hide the other.
        cur.execute(declared.replace("(1, 2,", "(1, 9,") % "removed" + f"DELETE FROM {table} WHERE {seq} = 4")
    assert [(row[0], row[2], row[4]) for row in ledger.rows()] == [(1, "agent", ERASED), (3, "agent", '{"n": 1}')]


def test_privileges_go_and_come_not_back(ledger: Ledger) -> None:
    table = ledger.settings.ledger.qualified
    ledger.database.execute("DROP ROLE IF EXISTS writer; CREATE ROLE writer")
    try:
        ledger.database.execute(
            f"GRANT ALL ON {table} TO writer; GRANT UPDATE ({ledger.columns[4]}) ON {table} TO PUBLIC"
        )
        guard(ledger)
        rows = ledger.database.execute(
            "SELECT has_table_privilege('writer', %s, 'UPDATE'), has_table_privilege('writer', %s, 'DELETE'),"
            " has_table_privilege('writer', %s, 'TRUNCATE'), has_any_column_privilege('writer', %s, 'UPDATE'),"
            " has_table_privilege('writer', %s, 'INSERT'), has_table_privilege('writer', %s, 'SELECT')",
            *[table] * 6,
        )
        assert rows == [(False, False, False, False, True, True)]
        ledger.database.execute(f"GRANT DELETE ON {table} TO writer")
        found = state(ledger)
        assert (found.whole, found.roles) == (False, ("writer",))
        guard(ledger)
        assert state(ledger).whole
    finally:
        ledger.database.execute("DROP OWNED BY writer; DROP ROLE writer")


def test_what_is_missing_is_told_and_made_again(ledger: Ledger) -> None:
    assert not state(ledger).asked
    guard(ledger)
    leaf = leaves(ledger)[0]
    ledger.database.execute(f"ALTER TABLE {leaf} DISABLE TRIGGER ALL")
    assert state(ledger).unguarded == (leaf,)
    guard(ledger)
    assert state(ledger).whole
    ledger.database.execute(f"ALTER TABLE {leaf} ENABLE TRIGGER ALL")  # fires, but not always
    assert state(ledger).unguarded == (leaf,)


def test_a_new_partition_is_guarded_once_it_is_told(database: Database) -> None:
    ok("init", "--partition-by", "month", "--append-only", dsn=database.dsn)
    made = ok("partitions", "--ahead", "6", "--json", dsn=database.dsn).json["made"]
    assert len(made) == 3
    with database.connect() as on, on.cursor() as cur:
        assert standing(cur, Settings()).whole
    # And what the default partition holds can be moved by the transaction that is printed.
    database.execute(
        "INSERT INTO agent_events VALUES (7, gen_random_uuid(), 'a', 'b', '{}', now() + interval '8 months')"
    )
    called = call("partitions", "--ahead", "8", "--json", dsn=database.dsn)
    assert called.exit_code == 1
    (held,) = called.json["held"]
    database.execute("\n".join(held["sql"]))
    assert database.execute("SELECT count(*) FROM ONLY agent_events_default") == [(0,)]
    assert database.execute("SELECT seq FROM agent_events") == [(7,)]
    with database.connect() as on, on.cursor() as cur:
        assert standing(cur, Settings()).whole


def test_init_doctor_and_teardown(database: Database) -> None:
    dsn = database.dsn
    assert "make_append_only()" in ok("init", "--append-only", "--sql", dsn=dsn).stdout
    assert "append-only" in ok("init", "--append-only", "--dry-run", dsn=dsn).stdout
    ok("init", dsn=dsn)
    assert "not enforced" in finding(dsn)["found"]
    done = ok("init", "--append-only", "--json", dsn=dsn).json["done"]
    assert done == ['"public"."agent_events" append-only']
    assert ok("init", "--append-only", "--json", dsn=dsn).json["done"] == []
    assert finding(dsn)["state"] == "ok"
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " VALUES (gen_random_uuid(), 'a', 'b', '{}')"
    )
    with pytest.raises(psycopg2.Error, match="append-only"):
        database.execute("DELETE FROM agent_events")
    database.execute("ALTER TABLE agent_events DISABLE TRIGGER USER")
    found = finding(dsn)
    assert (found["state"], "--append-only" in found["fix"]) == ("warning", True)
    assert ok("init", "--json", dsn=dsn).json["done"] == done  # once it was asked for it is kept up
    ok("teardown", "--yes", dsn=dsn)
    database.execute("DELETE FROM agent_events")


def finding(dsn: str) -> dict[str, Any]:
    found = call("doctor", "--json", dsn=dsn).json
    (one,) = [each for each in found["checks"] if each["check"] == "append-only"]
    return dict(one)
