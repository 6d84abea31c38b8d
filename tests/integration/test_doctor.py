"""``walstream doctor``: what is missing is found, each with its fix, and nothing is left behind."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from tests.cli_calls import call, ok
from tests.conftest import Database, Server
from tests.integration.source_ledgers import Relay
from walstream.cli.provider import OWN, provider_of
from walstream.errors import ExitCode
from walstream.postgres import PostgresServer


@pytest.fixture
def slot(database: Database) -> str:
    return f"d_{database.name[-8:]}"


@pytest.fixture
def ledger(database: Database, slot: str) -> Database:
    ok("init", "--slot", slot, dsn=database.dsn)
    return database


class Report:
    """What the doctor said."""

    def __init__(self, database: Database | str, slot: str, *more: str) -> None:
        dsn = database if isinstance(database, str) else database.dsn
        called = call("doctor", "--slot", slot, "--json", *more, dsn=dsn)
        self.exit_code = called.exit_code
        self.document = called.json
        self.findings: dict[str, list[dict[str, Any]]] = {}
        for check in self.document["checks"]:
            self.findings.setdefault(check["check"], []).append(check)

    def the(self, check: str) -> dict[str, Any]:
        """The worst finding of that name."""
        return max(self.findings[check], key=lambda each: ("ok", "warning", "failed").index(each["state"]))

    def state(self, check: str) -> str:
        return str(self.the(check)["state"])

    def failed(self) -> list[str]:
        return [name for name, found in self.findings.items() if any(each["state"] == "failed" for each in found)]


def test_a_stream_that_is_set_up_is_healthy(ledger: Database, slot: str) -> None:
    report = Report(ledger, slot)
    assert report.failed() == []
    assert (report.exit_code, report.document["ok"], report.document["provider"]) == (0, True, "own")
    assert report.state("role") == "warning"  # the tests' own superuser
    shown = call("doctor", "--slot", slot, dsn=ledger.dsn)
    assert shown.exit_code == 0
    assert "0 to mend" in shown.stdout


def test_before_set_up_init_is_the_fix(database: Database, slot: str) -> None:
    report = Report(database, slot)
    assert report.exit_code == ExitCode.FAILED
    assert report.failed() == ["set-up", "ledger", "publication", "slot"]
    for check in report.failed():
        assert report.the(check)["fix"] == "walstream init"
    assert "FAIL" in call("doctor", "--slot", slot, dsn=database.dsn).stdout


def test_a_ledger_that_was_renamed_or_dropped_is_told_apart(ledger: Database, slot: str) -> None:
    """By all three who look for it, and none of them offers to make another one."""

    def told(words: str) -> list[bool]:
        ended = []
        for command in ("doctor", "init", "run"):
            called = call(command, "--slot", slot, dsn=ledger.dsn)
            assert called.exit_code == (1 if command == "doctor" else 3)
            ended.append(" ".join((called.stdout + called.stderr).split()))
        assert not ledger.execute("SELECT FROM pg_class WHERE relname = 'agent_events'")
        return [words in each for each in ended]

    ledger.execute("ALTER TABLE agent_events RENAME TO other_name")
    assert told("the ledger that was set up is called public.other_name now") == [True, True, True]
    ledger.execute("DROP TABLE other_name CASCADE")
    assert told("was dropped") == [True, True, True]


def test_it_leaves_nothing_behind(ledger: Database, slot: str) -> None:
    def everything() -> list[Any]:
        return [
            ledger.execute("SELECT slot_name FROM pg_replication_slots WHERE database = %s ORDER BY 1", ledger.name),
            ledger.execute("SELECT * FROM pg_publication"),
            ledger.execute("SELECT count(*) FROM pg_class"),
            ledger.execute("SELECT * FROM walstream.identity, walstream.generation, walstream.ingest"),
            ledger.execute(
                "SELECT application_name FROM pg_stat_activity WHERE datname = %s AND application_name ~ 'walstream'",
                ledger.name,
            ),
        ]

    before = everything()
    Report(ledger, slot)
    assert everything() == before


# Rounds of faults that do not hide each other: statement -> the finding, its state, and words of its fix.
Fault = tuple[str, str, str]
ROUNDS: list[dict[str, Fault]] = [
    {
        "ALTER PUBLICATION walstream SET (publish = 'truncate')": ("publication", "failed", "ALTER PUBLICATION"),
        "CREATE TABLE other (); ALTER PUBLICATION walstream ADD TABLE other": (
            "publication contents",
            "warning",
            'SET TABLE "public"."agent_events"',
        ),
        "ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey": ("ledger", "failed", "CREATE UNIQUE INDEX"),
        "ALTER SEQUENCE agent_events_seq_seq CACHE 50": ("sequence", "warning", "CACHE 1"),
        "ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'": (
            "default_transaction_isolation",
            "warning",
            "RESET default_transaction_isolation",
        ),
        "ALTER DATABASE {database} SET synchronous_commit = off": (
            "synchronous_commit",
            "warning",
            "RESET synchronous_commit",
        ),
        "CREATE PUBLICATION walstream_tail_1_1 FOR TABLE agent_events": (
            "leftovers of tail",
            "warning",
            'DROP PUBLICATION "walstream_tail_1_1"',
        ),
        "UPDATE walstream.identity SET timeline = 99": ("identity", "failed", "walstream adopt"),
        "SELECT pg_drop_replication_slot('{slot}')": ("slot", "failed", "walstream init"),
    },
    {
        "ALTER PUBLICATION walstream DROP TABLE agent_events": ("publication", "failed", "ADD TABLE"),
        "ALTER TABLE agent_events ALTER payload DROP NOT NULL": ("ledger", "failed", "SET NOT NULL"),
        "UPDATE walstream.identity SET environment = 'x'": ("identity", "failed", "walstream adopt"),
    },
    {
        "ALTER PUBLICATION walstream SET (publish = 'insert, update')": ("publication", "ok", ""),
        "ALTER TABLE agent_events REPLICA IDENTITY NOTHING": (
            "replica identity",
            "failed",
            "publish = 'insert, truncate'",
        ),
        "UPDATE walstream.identity SET slot_state = 'filling'": ("identity", "failed", "walstream init"),
    },
    {
        "DROP PUBLICATION walstream": ("publication", "failed", "walstream init"),
        "ALTER TABLE agent_events SET UNLOGGED": ("ledger", "failed", "SET LOGGED"),
        "DELETE FROM walstream.identity": ("identity", "failed", "walstream init"),
    },
    {
        "ALTER TABLE agent_events RENAME TO former": ("ledger", "ok", ""),
        "CREATE TABLE agent_events (LIKE former INCLUDING ALL)": ("table identity", "failed", "walstream adopt"),
    },
    {"DROP SCHEMA walstream CASCADE": ("set-up", "failed", "walstream init")},
]
FROM_15: list[dict[str, Fault]] = [
    {"ALTER PUBLICATION walstream SET TABLE agent_events WHERE (seq > 5)": ("publication", "failed", "SET TABLE")},
    {"ALTER PUBLICATION walstream SET TABLE agent_events (seq, agent_id)": ("publication", "failed", "SET TABLE")},
]


def test_every_fault_is_found_with_its_fix(database: Database, slot: str) -> None:
    """Rounds in one database: making a database takes longer than a look."""
    for faults in (*ROUNDS, *(FROM_15 if database.server.major >= 15 else ())):
        ok("init", "--slot", slot, dsn=database.dsn)
        for statement in faults:
            for part in statement.format(database=f'"{database.name}"', slot=slot).split("; "):
                database.execute(part)
        report = Report(database, slot)
        for statement, (check, state, fix) in faults.items():
            found = report.the(check)
            assert (found["state"], fix in found["fix"]) == (state, True), (statement, found)
        assert report.exit_code == ExitCode.FAILED
        _start_over(database, slot)


def _start_over(database: Database, slot: str) -> None:
    database.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", slot)
    for (name,) in database.execute("SELECT pubname FROM pg_publication"):
        database.execute(f'DROP PUBLICATION "{name}"')
    database.execute(
        "DROP SCHEMA IF EXISTS walstream CASCADE; DROP TABLE IF EXISTS agent_events, former, other CASCADE"
    )
    database.execute(f'ALTER DATABASE "{database.name}" RESET ALL')


def test_jobs_that_nothing_holds_to_their_state_machine(ledger: Database, slot: str) -> None:
    name = ledger.execute("SELECT tgname FROM pg_trigger WHERE tgrelid = 'agent_jobs'::regclass")[0][0]
    strange = "INSERT INTO agent_jobs (session_id, status) VALUES (gen_random_uuid(), 'NONSENSE') RETURNING job_id"
    for statement, why, mend in (
        (f"DROP TRIGGER {name} ON agent_jobs", "missing", "migrate"),
        (f"ALTER TABLE agent_jobs DISABLE TRIGGER {name}", "disabled", "migrate"),
        (f"ALTER TABLE agent_jobs ENABLE REPLICA TRIGGER {name}", "disabled", "init"),
    ):
        assert Report(ledger, slot).state("job status") == "ok"
        ledger.execute(statement)
        ledger.execute("DELETE FROM agent_jobs WHERE job_id = %s", ledger.execute(strange)[0][0])
        report = Report(ledger, slot)
        assert report.failed() == ["job status"], statement
        assert f'the trigger on "public"."agent_jobs" is {why}' in report.the("job status")["found"]
        assert report.the("job status")["fix"] == "walstream migrate"
        assert "check_job_status" in ok(mend, "--slot", slot, dsn=ledger.dsn).stdout
        with pytest.raises(psycopg2.DatabaseError, match="a job has no status NONSENSE"):
            ledger.execute(strange)
    ledger.execute(f"ALTER TABLE agent_jobs ENABLE ALWAYS TRIGGER {name}")
    assert Report(ledger, slot).failed() == []
    assert "nothing to do" in ok("migrate", dsn=ledger.dsn).stdout


def test_a_partitioned_ledger_that_is_not_published_by_its_root(database: Database, slot: str) -> None:
    database.execute(
        "CREATE TABLE agent_events (seq bigserial, session_id uuid NOT NULL, agent_id text NOT NULL,"
        " event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),"
        " PRIMARY KEY (seq, created_at)) PARTITION BY RANGE (created_at)"
    )
    database.execute("CREATE TABLE leaf PARTITION OF agent_events DEFAULT")
    ok("init", "--slot", slot, dsn=database.dsn)
    assert Report(database, slot).failed() == []
    database.execute("ALTER PUBLICATION walstream SET (publish_via_partition_root = false)")
    database.execute("ALTER PUBLICATION walstream SET TABLE leaf")
    assert "publish_via_partition_root = true" in Report(database, slot).the("publication")["fix"]


def test_for_all_tables(ledger: Database, slot: str) -> None:
    ledger.execute("DROP PUBLICATION walstream")
    ledger.execute("CREATE PUBLICATION walstream FOR ALL TABLES")
    found = Report(ledger, slot).the("publication contents")
    assert (found["state"], "all tables" in found["found"]) == ("warning", True)


def test_a_role_that_row_security_applies_to(ledger: Database, server: Server, slot: str) -> None:
    role = f"d_{ledger.name[-8:]}"
    server.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'irrelevant'")
    try:
        ok("init", "--slot", slot, "--grants", role, dsn=ledger.dsn)
        ledger.execute("ALTER TABLE agent_events ENABLE ROW LEVEL SECURITY")
        report = Report(make_dsn(ledger.dsn, user=role, password="irrelevant"), slot)
        assert report.failed() == ["replication privilege", "replication connection", "ledger"]
        assert report.the("replication privilege")["fix"] == f'ALTER ROLE "{role}" REPLICATION'
        assert "BYPASSRLS" in report.the("ledger")["fix"]
        # A provider's role instead of the attribute.
        server.execute("CREATE ROLE rds_superuser")
        try:
            report = Report(make_dsn(ledger.dsn, user=role, password="irrelevant"), slot)
            assert report.document["provider"] == "rds"
            assert report.the("replication privilege")["fix"] == f'GRANT rds_replication TO "{role}"'
        finally:
            server.execute("DROP ROLE rds_superuser")
    finally:
        ledger.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("statement", "key"),
    [
        ("CREATE ROLE cloudsqlsuperuser", "cloudsql"),
        ("CREATE ROLE azure_pg_admin", "azure"),
        ("CREATE ROLE supabase_admin", "supabase"),
        ("CREATE ROLE neon_superuser", "neon"),
        ("CREATE ROLE rds_superuser", "rds"),
        ("CREATE FUNCTION aurora_version() RETURNS text LANGUAGE sql AS 'SELECT 1::text'", "aurora"),
        ("SELECT 1", "own"),
    ],
)
def test_providers(database: Database, statement: str, key: str) -> None:
    conn = database.connect()
    conn.cursor().execute(statement)  # never committed
    provider = provider_of(conn)
    assert provider.key == key
    assert ("ALTER SYSTEM" in provider.set_parameter("max_slot_wal_keep_size", "50GB")) == (key == "own")
    assert "50GB" in provider.set_parameter("max_slot_wal_keep_size", "50GB")
    assert provider.logical


def test_server_settings(own_server: Callable[..., PostgresServer]) -> None:
    server = own_server(
        max_slot_wal_keep_size="-1",
        max_replication_slots="1",
        wal_sender_timeout="0",
        idle_session_timeout="1h",
        synchronous_standby_names="*",
        synchronous_commit="local",
        fsync="off",
    )
    report = Report(server.dsn("postgres"), "s")
    for check, state, fix in (
        ("max_slot_wal_keep_size", "failed", "ALTER SYSTEM SET max_slot_wal_keep_size"),
        ("max_replication_slots", "warning", "ALTER SYSTEM SET max_replication_slots"),
        ("wal_sender_timeout", "warning", "wal_sender_timeout"),
        ("idle_session_timeout", "warning", "idle_session_timeout = 0"),
        ("synchronous_standby_names", "failed", "FIRST 1"),
        ("fsync", "warning", "fsync"),
    ):
        found = report.the(check)
        assert (found["state"], fix in found["fix"]) == (state, True), found
    server.execute("SELECT pg_create_physical_replication_slot('taken')")
    assert Report(server.dsn("postgres"), "s").state("max_replication_slots") == "failed"


def test_wal_level(own_server: Callable[..., PostgresServer]) -> None:
    server = own_server(wal_level="replica")
    report = Report(server.dsn("postgres"), "s")
    assert "wal_level = 'logical'" in report.the("wal_level")["fix"]
    called = call("init", "--slot", "s", dsn=server.dsn("postgres"))
    assert called.exit_code == ExitCode.CONFIG
    assert "wal_level" in called.stderr


def test_a_forgotten_transaction_is_named(ledger: Database, slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walstream.cli.checks_server.OLD_TRANSACTION", "0 seconds")
    conn = ledger.connect(application_name="forgotten")
    conn.cursor().execute("CREATE TEMP TABLE t ()")
    found = Report(ledger, slot).the("open transactions")
    assert found["state"] == "warning"
    assert "forgotten" in found["found"]
    conn.rollback()


def test_without_a_server() -> None:
    called = call("doctor", "--json", dsn="host=127.0.0.1 port=1 dbname=x password=s3cret")
    assert called.exit_code == ExitCode.UNAVAILABLE
    assert "s3cret" not in called.stderr


class Pooler(Relay):
    """Announces a process id of its own at the start of a session, as poolers do."""

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                # BackendKeyData of protocol 3.0: `K`, length 12, process id, secret (documentation, 55.7)
                data = re.sub(rb"K\0\0\0\x0c.{4}", b"K\0\0\0\x0c\0\0\0\x07", data, count=1, flags=re.DOTALL)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_pooler_in_the_path(database: Database, slot: str) -> None:
    database.create()
    direct = parse_dsn(database.server.dsn(database.name, tcp=True))
    with Pooler(direct["host"], int(direct["port"])) as pooler:
        dsn = make_dsn(database.server.dsn(database.name, tcp=True), port=str(pooler.port), sslmode="disable")
        found = Report(dsn, slot).the("pooler")
    assert found["state"] == "warning"
    assert "replication_dsn" in found["fix"]


def test_own_server_is_no_provider() -> None:
    assert OWN.allow_replication('x"y') == 'ALTER ROLE "x""y" REPLICATION'


# -- what workers and rebuilds rely on ---------------------------------------------------------------------------


WORKER_ROUNDS: list[dict[str, Fault]] = [
    {
        "DROP FUNCTION walstream.append_batch": ("append functions", "failed", "walstream migrate"),
        "GRANT EXECUTE ON FUNCTION walstream.fork TO PUBLIC": ("append privileges", "warning", "REVOKE EXECUTE"),
        "ALTER TABLE agent_events ALTER seq DROP DEFAULT": ("sequence", "warning", "SET DEFAULT nextval"),
        "ALTER TABLE agent_snapshots DROP COLUMN digest": ("snapshots and jobs", "failed", "ledger.snapshots"),
    },
    {
        "ALTER TABLE agent_events RENAME COLUMN payload TO body": ("ledger", "failed", "[ledger.columns]"),
        "ALTER TABLE agent_jobs RENAME TO jobs": ("snapshots and jobs", "failed", "ledger.jobs"),
        "ALTER SEQUENCE agent_events_seq_seq OWNED BY NONE; ALTER SEQUENCE agent_events_seq_seq CACHE 7": (
            "sequence",
            "warning",
            "CACHE 1",
        ),
    },
]


@pytest.mark.parametrize("faults", WORKER_ROUNDS)
def test_what_a_worker_lacks_is_found(ledger: Database, slot: str, faults: dict[str, Fault]) -> None:
    before = Report(ledger, slot)
    assert {before.state(check) for check, _, _ in faults.values()} == {"ok"}
    for statement in faults:
        ledger.execute(statement)
    report = Report(ledger, slot)
    for check, state, words in faults.values():
        assert report.state(check) == state, report.findings[check]
        assert words in report.the(check)["fix"]


def test_functions_of_the_former_column_names_are_found(
    ledger: Database, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.execute("ALTER TABLE agent_events RENAME COLUMN session_id TO thread_id")
    monkeypatch.setenv("WALSTREAM_LEDGER__COLUMNS__SESSION_ID", "thread_id")
    report = Report(ledger, slot)
    assert report.failed() == ["append functions"]
    ok("migrate", dsn=ledger.dsn)
    assert Report(ledger, slot).failed() == []


def test_the_owner_of_the_functions_has_to_be_able_to_insert(ledger: Database, slot: str, server: Server) -> None:
    role = f"owner_{ledger.name[-8:]}"
    server.execute(f"CREATE ROLE {role}")
    try:
        ledger.execute(f"GRANT USAGE ON SCHEMA public TO {role}; ALTER FUNCTION walstream.append OWNER TO {role}")
        report = Report(ledger, slot)
        assert report.failed() == ["append privileges"]
        for finding in report.findings["append privileges"]:
            ledger.execute(finding["fix"])
        assert Report(ledger, slot).failed() == []
    finally:
        ledger.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_months_that_are_not_prepared(database: Database, slot: str) -> None:
    ok("init", "--partition-by", "month", "--slot", slot, dsn=database.dsn)
    report = Report(database, slot)
    assert report.state("partitions ahead") == "ok"
    assert "default partition" not in report.findings
    leaves = [
        name
        for (name,) in database.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'agent_events'::regclass"
            " AND inhrelid::regclass::text <> 'agent_events_default' ORDER BY 1"
        )
    ]
    for leaf in leaves[1:]:
        database.execute(f"DROP TABLE {leaf}")
    assert Report(database, slot).state("partitions ahead") == "warning"
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload, created_at)"
        " VALUES (gen_random_uuid(), 'a', 'x', '{}', now() + interval '70 days')"
    )
    assert Report(database, slot).state("default partition") == "warning"
    database.execute("DROP TABLE agent_events_default")
    assert Report(database, slot).state("partitions ahead") == "warning"
    database.execute(f"DROP TABLE {leaves[0]}")
    report = Report(database, slot)
    assert report.state("partitions ahead") == "failed"
    assert "--ahead 3" in report.the("partitions ahead")["fix"]
    ok("partitions", "--ahead", "3", dsn=database.dsn)
    assert Report(database, slot).state("partitions ahead") == "ok"
