"""``walstream migrate``: from one version to the next while everybody works, and tables that are there already."""

from __future__ import annotations

import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import call, ok
from tests.conftest import Database, Server
from tests.integration.streams import Installed, Recorder, eventually
from tests.integration.test_schema import CATALOG, FUNCTIONS
from walstream.config import Settings
from walstream.errors import ExitCode
from walstream.ledger import schema

SEED_SNAPSHOTS = """
CREATE TABLE agent_snapshots (
    session_id   UUID NOT NULL,
    upto_seq     BIGINT NOT NULL,
    context      JSONB NOT NULL,
    created_at   TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (session_id, upto_seq)
)"""
APPEND = "SELECT seq FROM walstream.append('11111111-1111-1111-1111-111111111111', 'a', 'appended', '{}')"


@pytest.fixture
def old(database: Database) -> Database:
    """A database with the ledger's table and the schema's first version."""
    database.execute(schema.ledger_sql(Settings().ledger))
    schema.install(database.connect(), Settings(), upto=1)
    return database


@pytest.mark.parametrize("version", [1, 2, 3])
def test_run_works_on_the_old_schema_and_goes_on_while_it_is_migrated(
    database: Database, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Releases N and N+1 run on one schema: the consumer notices nothing."""
    known = schema.migrations()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "migrations", lambda: known[:version])
        stream = Installed(database)
    assert database.execute("SELECT max(version) FROM walstream.migrations") == [(version,)]
    slot = ["--slot", stream.settings.slot]
    report = call("doctor", *slot, "--json", dsn=database.dsn).json
    assert report["ok"]
    assert [each["fix"] for each in report["checks"] if each["check"] == "schema"] == ["walstream migrate"]
    assert [each for each in report["checks"] if each["state"] == "failed"] == []

    steps = [f"{each.version:03}_{each.name}" for each in known]
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("before")
        eventually(lambda: recorder.types == ["before"], "an event on the old version")
        assert ok("status", *slot, "--json", dsn=database.dsn).json["problems"] == []
        done = ok("migrate", "--json", dsn=database.dsn).json
        assert (done["from_version"], done["to_version"], done["migrations"]) == (version, len(steps), steps[version:])
        database.execute(APPEND)
        eventually(lambda: recorder.types == ["before", "appended"], "an event on the new version")
    with stream.host(recorder):
        stream.insert("after a restart")
        eventually(lambda: recorder.types[2:] == ["after a restart"], "an event after a restart")
    report = call("doctor", *slot, "--json", dsn=database.dsn).json
    assert [each for each in report["checks"] if each["state"] == "failed"] == []


def test_run_works_on_the_schema_of_the_next_release(database: Database) -> None:
    stream = Installed(database)
    database.execute("INSERT INTO walstream.migrations (version, name) VALUES (999, 'of the next release')")
    database.execute("ALTER TABLE walstream.identity ADD COLUMN of_the_next_release int NOT NULL DEFAULT 0")
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.types == ["one"], "an event")
    assert "of a newer release" in ok("migrate", dsn=database.dsn).stdout


def test_it_says_what_it_would_do_and_what_it_did(old: Database) -> None:
    before = old.execute("SELECT count(*) FROM pg_class")
    said = ok("migrate", "--dry-run", dsn=old.dsn).stdout
    assert "would be applied: 002_ledger\nwould be applied: 003_jobs" in said
    printed = ok("migrate", "--sql", dsn=old.dsn).stdout
    assert "agent_snapshots" in printed
    assert ok("migrate", "--sql", "--json", dsn=old.dsn).json["sql"]
    assert old.execute("SELECT count(*) FROM pg_class") == before

    assert "applied: 002_ledger\napplied: 003_jobs" in ok("migrate", dsn=old.dsn).stdout
    assert "nothing to do" in ok("migrate", dsn=old.dsn).stdout
    assert ok("migrate", "--sql", dsn=old.dsn).stdout.strip() == "-- nothing to do"


def test_the_printed_script_is_enough(old: Database) -> None:
    old.execute(ok("migrate", "--sql", dsn=old.dsn).stdout)
    assert "nothing to do" in ok("migrate", dsn=old.dsn).stdout


def test_not_installed(database: Database) -> None:
    called = call("migrate", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "not installed" in called.stderr
    assert "walstream init" in called.stderr


def test_not_permitted(old: Database, server: Server) -> None:
    role = f"nobody_{old.name[-8:]}"
    server.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'irrelevant'")
    try:
        old.execute(f"GRANT USAGE ON SCHEMA walstream TO {role}")
        old.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA walstream, public TO {role}")
        called = call("migrate", dsn=str(make_dsn(old.dsn, user=role, password="irrelevant")))
        assert called.exit_code == ExitCode.CONFIG
        assert "may not" in called.stderr
        assert "migrate --sql" in called.stderr
    finally:
        old.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_a_lock_in_the_way_is_named(old: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walstream.cli.session.LOCK_TIMEOUT", "200ms")
    holder = old.connect(application_name="long report")
    with holder.cursor() as cur:
        cur.execute("LOCK TABLE agent_events IN ACCESS EXCLUSIVE MODE")
        called = call("migrate", dsn=old.dsn)
    assert called.exit_code == ExitCode.UNAVAILABLE
    assert "long report" in called.stderr
    holder.rollback()
    ok("migrate", dsn=old.dsn)


def test_who_lacks_grants_afterwards_is_said(old: Database, server: Server) -> None:
    role = f"runner_{old.name[-8:]}"
    server.execute(f"CREATE ROLE {role}")
    try:
        old.execute(f"GRANT SELECT, UPDATE ON walstream.ingest TO {role}")
        assert f'--grants "{role}"' in " ".join(ok("migrate", "--json", dsn=old.dsn).json["notes"])
    finally:
        old.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_functions_under_other_names_are_made_anew(old: Database) -> None:
    ok("migrate", dsn=old.dsn)
    old.execute("ALTER TABLE agent_events RENAME COLUMN payload TO body")
    old.execute("DROP FUNCTION walstream.fork")
    env = ["--config", "/dev/null"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALSTREAM_LEDGER__COLUMNS__PAYLOAD", "body")
        done = ok("migrate", *env, "--json", dsn=old.dsn).json
        assert {"append_one", "fork"} <= set(done["functions"])
        assert done["migrations"] == []
        assert old.execute(APPEND) == [(1,)]
        assert ok("migrate", *env, "--json", dsn=old.dsn).json["functions"] == []


def test_another_table_than_the_one_that_was_set_up_is_refused(database: Database) -> None:
    Installed(database)
    database.execute("ALTER TABLE agent_events RENAME TO gone")
    database.execute(schema.ledger_sql(Settings().ledger))
    called = call("migrate", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "walstream adopt" in called.stderr


# -- tables that are there already ---------------------------------------------------------------------------


def test_a_table_of_snapshots_made_from_the_source_design_is_taken_over(old: Database) -> None:
    """With its rows, and with the same catalogue as a fresh one."""
    old.execute(SEED_SNAPSHOTS)
    old.execute("INSERT INTO agent_snapshots VALUES (gen_random_uuid(), 7, '{}')")
    ok("migrate", dsn=old.dsn)
    assert old.execute("SELECT upto_seq, fold_version FROM agent_snapshots") == [(7, None)]
    taken = [old.execute(sql, name) for name in ("public", "walstream") for sql in (CATALOG, FUNCTIONS)]
    old.execute("DROP SCHEMA walstream CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    old.execute(schema.ledger_sql(Settings().ledger))
    schema.install(old.connect(), Settings())
    fresh = [old.execute(sql, name) for name in ("public", "walstream") for sql in (CATALOG, FUNCTIONS)]
    assert taken == fresh


REFUSED = [
    ("CREATE TABLE agent_snapshots (id int)", "ledger.snapshots", "no column session_id"),
    (SEED_SNAPSHOTS.replace("JSONB", "TEXT"), "ledger.snapshots", "context is text, not jsonb"),
    (SEED_SNAPSHOTS.replace("UUID", "TEXT"), "ledger.snapshots", "session_id is text, not uuid"),
    (
        SEED_SNAPSHOTS.replace("(session_id, upto_seq)", "(session_id)"),
        "ledger.snapshots",
        "primary key is (session_id)",
    ),
    (SEED_SNAPSHOTS.replace("PRIMARY", "owner text NOT NULL, PRIMARY"), "ledger.snapshots", "its own column owner"),
    ("CREATE VIEW agent_snapshots AS SELECT 1 AS one", "ledger.snapshots", "not a table"),
    ("CREATE TABLE agent_jobs (job_id uuid PRIMARY KEY, session_id uuid)", "ledger.jobs", "job_id is uuid"),
    ("CREATE TABLE agent_jobs (job_id bigint PRIMARY KEY)", "ledger.jobs", "no column session_id"),
    ("CREATE TABLE agent_jobs (job_id bigint, session_id uuid)", "ledger.jobs", "primary key is missing"),
]


def test_tables_that_do_not_fit_are_refused_with_the_setting_that_names_them(old: Database) -> None:
    for statement, setting, words in REFUSED:
        old.execute(statement)
        for command in (["migrate"], ["migrate", "--dry-run"], ["init", "--dry-run"], ["init"]):
            called = call(*command, dsn=old.dsn)
            assert called.exit_code == ExitCode.CONFIG, (statement, called)
            assert setting in called.stderr
            assert words in called.stderr, statement
        kind, name = statement.split()[1:3]
        old.execute(f"DROP {kind} {name}")
    assert old.execute("SELECT max(version) FROM walstream.migrations") == [(1,)]


def test_another_name_goes_round_a_table_of_somebody_else(old: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    old.execute("CREATE TABLE agent_jobs (id int); CREATE TABLE agent_snapshots (id int)")
    monkeypatch.setenv("WALSTREAM_LEDGER__JOBS", "swarm_jobs")
    monkeypatch.setenv("WALSTREAM_LEDGER__SNAPSHOTS", "swarm_snapshots")
    ok("migrate", dsn=old.dsn)
    assert old.execute(APPEND) == [(1,)]
    assert old.execute("SELECT to_regclass('swarm_jobs') IS NOT NULL, to_regclass('swarm_snapshots') IS NOT NULL") == [
        (True, True)
    ]
