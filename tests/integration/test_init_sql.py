"""``walstream init --sql`` and ``--grants``: for a DBA, and for a login that may do nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from typer.testing import CliRunner

from tests.cli_calls import Called, call, ok
from tests.conftest import Database, Server
from tests.integration.births import insert_rows, streamed_seqs
from tests.integration.streams import Installed
from walstream.cli import app
from walstream.config import Settings, load
from walstream.errors import ExitCode
from walstream.ledger import schema
from walstream.ledger.identity import check_identity
from walstream.postgres import PostgresServer
from walstream.source.connection import connect
from walstream.source.preflight import preflight


@pytest.fixture
def slot(database: Database) -> str:
    return f"q_{database.name[-8:]}"


def without_database(*arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Called:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return Called(result.exit_code, result.stdout, result.stderr)


def psql(database: Database, script: str) -> None:
    """Run a script as a DBA does."""
    process = subprocess.run(
        [str(database.server.bin_dir / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.dsn],
        input=script,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr


def would_run(dsn: str, slot: str, **fields: object) -> None:
    settings = load(arguments={"dsn": dsn, "slot": slot, **fields})
    conn = connect(dsn, application_name="test")
    try:
        check_identity(conn, settings)
        preflight(settings, conn)
    finally:
        conn.close()


def test_the_script_is_complete_and_needs_no_database(
    database: Database, slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = without_database("init", "--slot", slot, "--sql", tmp_path=tmp_path, monkeypatch=monkeypatch).stdout
    psql(database, script)
    would_run(database.dsn, slot)
    assert ok("init", "--slot", slot, "--json", dsn=database.dsn).json["done"] == []
    insert_rows(database, 2)
    assert streamed_seqs(database, slot) == [1, 2]


def test_it_is_the_same_as_what_init_makes(
    database: Database, slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.integration.test_schema import CATALOG

    def catalog() -> list[object]:
        return [
            database.execute(CATALOG, "walstream"),
            database.execute(CATALOG, "public"),
            database.execute("SELECT to_jsonb(p) - 'oid' FROM pg_publication AS p"),
            database.execute("SELECT plugin, two_phase FROM pg_replication_slots WHERE slot_name = %s", slot),
            database.execute("SELECT environment, slot, slot_state, floor_seq FROM walstream.identity"),
        ]

    psql(database, without_database("init", "--slot", slot, "--sql", tmp_path=tmp_path, monkeypatch=monkeypatch).stdout)
    by_script = catalog()
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    database.execute("DROP PUBLICATION walstream; DROP SCHEMA walstream CASCADE; DROP TABLE agent_events")
    ok("init", "--slot", slot, dsn=database.dsn)
    assert catalog() == by_script


def test_odd_names_do_not_break_out_of_the_script(
    database: Database, slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = "x\"\n; DROP SCHEMA public CASCADE; --'\\"
    script = without_database(
        *("init", "--sql", "--slot", slot, "--namespace", odd, "--table", f"{odd}.t", "--publication", odd),
        *("--environment", odd, "--from", "now"),
        tmp_path=tmp_path,
        monkeypatch=monkeypatch,
    ).stdout
    psql(database, script)
    assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname IN ('public', %s)", odd) == [(2,)]
    would_run(
        database.dsn,
        slot,
        namespace=odd,
        ledger={"namespace": odd, "table": "t"},
        publication=odd,
        environment=odd,
    )


def test_with_a_database_only_what_is_missing_is_printed(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    assert ok("init", "--slot", slot, "--sql", dsn=database.dsn).stdout == "-- everything is there already\n"
    insert_rows(database, 1)
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    script = ok("init", "--slot", slot, "--sql", dsn=database.dsn).stdout
    assert "CREATE TABLE" not in script
    psql(database, script)
    would_run(database.dsn, slot)


def test_a_failing_script_makes_no_slot(
    database: Database, slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot without a stream would hold WAL for nobody, also where psql goes on after an error."""
    script = without_database("init", "--slot", slot, "--sql", tmp_path=tmp_path, monkeypatch=monkeypatch).stdout
    database.execute("CREATE TABLE agent_events (nothing int)")
    subprocess.run(
        [str(database.server.bin_dir / "psql"), "-X", "-q", "-d", database.dsn],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert database.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", slot) == [(0,)]
    assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'walstream'") == [(0,)]


def test_statements_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = without_database(
        *("init", "--sql", "--json", "--slot-wal-keep", "10GB", "--grants", "runner"),
        tmp_path=tmp_path,
        monkeypatch=monkeypatch,
    ).json["sql"]
    assert found[0] == "ALTER SYSTEM SET max_slot_wal_keep_size = '10GB';"
    assert any(statement.startswith("CREATE PUBLICATION") for statement in found)
    assert any('CREATE TABLE "walstream".commit_order' in statement for statement in found)
    assert any('CREATE TABLE "public"."agent_events"' in statement for statement in found)
    assert not any(all(line.startswith("--") for line in statement.splitlines()) for statement in found)
    assert 'GRANT USAGE ON SCHEMA "walstream" TO "runner";' in found


@pytest.fixture
def login(database: Database, server: Server) -> Iterator[str]:
    """A role that may log in and replicate, and nothing else."""
    name = f"runner_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD 'irrelevant'")
    yield name
    database.execute(f"DROP OWNED BY {name}")
    server.execute(f"DROP ROLE {name}")


def as_role(database: Database, role: str) -> str:
    return str(make_dsn(database.dsn, user=role, password="irrelevant"))


def test_a_login_with_the_grants_passes_every_check(database: Database, slot: str, login: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    dsn = as_role(database, login)
    called = call("doctor", "--slot", slot, "--json", dsn=dsn)
    assert called.exit_code == ExitCode.FAILED
    grants = next(check for check in called.json["checks"] if check["check"] == "grants")
    assert grants["state"] == "failed"
    assert f'--grants "{login}"' in grants["fix"]

    ok("init", "--slot", slot, "--grants", login, dsn=database.dsn)
    ok("init", "--slot", slot, "--grants", login, dsn=database.dsn)
    report = ok("doctor", "--slot", slot, "--json", dsn=dsn).json
    assert [check for check in report["checks"] if check["state"] == "failed"] == []
    would_run(dsn, slot)
    assert call("status", "--json", dsn=dsn).json["problems"] == ["no ingest is running: start `walstream run`"]


def test_what_only_a_superuser_can_give_is_said(database: Database, server: Server, slot: str) -> None:
    called = call("init", "--slot", slot, "--grants", "nobody_at_all", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert 'CREATE ROLE "nobody_at_all"' in called.stderr
    assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'walstream'") == [(0,)]

    role = f"plain_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {role} LOGIN")
    try:
        ok("init", "--slot", slot, dsn=database.dsn)
        database.execute("ALTER TABLE agent_events ENABLE ROW LEVEL SECURITY")
        notes = ok("init", "--slot", slot, "--grants", role, "--json", dsn=database.dsn).json["notes"]
        assert any(f'ALTER ROLE "{role}" REPLICATION' in note for note in notes)
        assert any(f'ALTER ROLE "{role}" BYPASSRLS' in note for note in notes)
    finally:
        database.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_rows_that_stood_there_before_the_script_are_found_by_run(
    database: Database,
) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    insert_rows(database, 3)
    psql(database, ok("init", "--slot", database.name[:60], "--sql", dsn=database.dsn).stdout)
    stream = Installed(database)
    with stream.host():
        insert_rows(database, 2)
        stream.wait_ordered()
    assert sorted(stream.ordered()) == [1, 2, 3, 4, 5]


def test_a_role_that_may_not_set_up_is_told_what_to_do(database: Database, slot: str, login: str) -> None:
    called = call("init", "--slot", slot, dsn=as_role(database, login))
    assert called.exit_code == ExitCode.CONFIG
    assert "permission denied" in called.stderr
    assert "init --sql" in called.stderr
    assert database.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", slot) == [(0,)]


def test_an_owner_without_superuser_can_set_up(database: Database, slot: str, login: str) -> None:
    database.execute(f'GRANT CREATE ON DATABASE "{database.name}" TO {login}; GRANT CREATE ON SCHEMA public TO {login}')
    ok("init", "--slot", slot, dsn=as_role(database, login))
    would_run(as_role(database, login), slot)
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    database.execute(
        f"DROP PUBLICATION walstream; DROP SCHEMA walstream CASCADE; REVOKE ALL ON SCHEMA public FROM {login}"
    )


def test_the_slot_bound_is_set_where_that_is_permitted(
    own_server: Callable[..., PostgresServer],
) -> None:
    server = own_server(max_slot_wal_keep_size="-1")
    server.execute("CREATE DATABASE ledger")
    dsn = server.dsn("ledger")
    done = ok("init", "--slot", "bounded", "--json", dsn=dsn).json
    assert any("max_slot_wal_keep_size is -1" in note and "ALTER SYSTEM" in note for note in done["notes"])
    server.execute("CREATE ROLE owner LOGIN REPLICATION")
    server.execute("GRANT CREATE ON DATABASE ledger TO owner; GRANT CREATE ON SCHEMA public TO owner", dbname="ledger")
    done = ok(
        *("init", "--slot", "other", "--namespace", "other", "--publication", "other", "--slot-wal-keep", "10GB"),
        *("--table", "other.events", "--json"),
        dsn=make_dsn(dsn, user="owner"),
    ).json
    assert any(
        "may not set" in note and "ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'" in note for note in done["notes"]
    )
    if server.major >= 15:  # a right of its own, and the reload is another
        server.execute("GRANT ALTER SYSTEM ON PARAMETER max_slot_wal_keep_size TO owner")
        words = ("--slot", "other", "--namespace", "other", "--publication", "other", "--table", "other.events")
        owner = make_dsn(dsn, user="owner")
        notes = ok("init", *words, "--slot-wal-keep", "9GB", "--json", dsn=owner).json["notes"]
        assert any("may not reload it" in note and "pg_reload_conf()" in note for note in notes)
        server.execute("GRANT EXECUTE ON FUNCTION pg_reload_conf() TO owner", dbname="ledger")
        ok("init", *words, "--slot-wal-keep", "9GB", dsn=owner)
        assert server.execute("SHOW max_slot_wal_keep_size") == [("9GB",)]
    ok("init", "--slot", "bounded", "--slot-wal-keep", "10GB", dsn=dsn)
    assert server.execute("SHOW max_slot_wal_keep_size") == [("10GB",)]
    assert parse_dsn(dsn)["dbname"] == "ledger"
