"""What `run` refuses, each with the statement that heals it (C15, C24, C29, C34, C37, C40, C41, C46)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from tests.conftest import Database
from tests.integration.source_ledgers import TABLE, Ledger, slot_name
from walstream.config import Columns, LedgerTable
from walstream.errors import ConfigError, LedgerError, PublicationGone, SlotError, Unavailable, WalstreamError
from walstream.ledger import schema
from walstream.postgres import PostgresServer
from walstream.source.connection import connect
from walstream.source.facts import Facts, role_facts, server_facts
from walstream.source.preflight import preflight
from walstream.source.stream import ReplicationStream
from walstream.source.table_facts import publication_facts, table_facts

PARTITIONED = """
CREATE TABLE {name} (
    seq bigserial, session_id uuid NOT NULL DEFAULT gen_random_uuid(), agent_id text NOT NULL DEFAULT 'a',
    event_type text NOT NULL, payload jsonb NOT NULL DEFAULT '{{}}', created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (seq, created_at)) PARTITION BY RANGE (created_at);
CREATE TABLE leaf_one PARTITION OF {name} FOR VALUES FROM ('2000-01-01') TO ('2020-01-01');
CREATE TABLE leaf_two PARTITION OF {name} FOR VALUES FROM ('2020-01-01') TO ('2200-01-01');
"""


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database.dsn, database.execute, slot_name(database.name))


@pytest.fixture
def conn(database: Database) -> Iterator[Connection]:
    made = connect(database.dsn, application_name="walstream:test")
    yield made
    made.close()


def look(ledger: Ledger) -> Facts:
    made = connect(ledger.settings.dsn, application_name="walstream:test")
    try:
        return preflight(ledger.settings, made)
    finally:
        made.close()


def refusal(ledger: Ledger) -> WalstreamError:
    with pytest.raises(WalstreamError) as caught:
        look(ledger)
    assert caught.value.hint
    return caught.value


def test_a_ledger_as_init_makes_it_passes(ledger: Ledger, database: Database) -> None:
    facts = look(ledger.make())
    assert facts.server.major == database.server.major
    assert facts.server.database == database.name
    assert facts.server.encoding == "UTF8"
    assert facts.server.wal_end > 0
    assert facts.server.slot_keep_bytes > 0
    assert facts.role.superuser
    assert facts.publication.operations == ("insert", "truncate")
    assert not facts.publication.all_tables
    assert facts.table.unique_on("seq")
    assert facts.table.seq_sequence is not None
    assert facts.table.seq_sequence.cache == 1
    assert facts.slot.retained_bytes(facts.server.wal_end) is not None


def test_the_application_may_go_on_updating_and_deleting(ledger: Ledger) -> None:
    """C40: our publication asks for no replica identity."""
    ledger.make()
    ledger.execute("ALTER TABLE agent_events REPLICA IDENTITY NOTHING")
    ledger.insert("x")
    ledger.execute("UPDATE agent_events SET event_type = 'redacted'")
    ledger.execute("DELETE FROM agent_events")
    assert look(ledger).table.replica_identity == "n"
    ledger.execute("ALTER PUBLICATION p SET (publish = 'insert, update, delete')")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
        ledger.execute("DELETE FROM agent_events")


@pytest.mark.parametrize(
    ("breaking", "error", "words", "remedy"),
    [
        ("DROP TABLE agent_events", ConfigError, "no table", "walstream init"),
        (
            "ALTER TABLE agent_events RENAME TO t; CREATE VIEW agent_events AS SELECT * FROM t",
            ConfigError,
            "a view",
            "[ledger]",
        ),
        ("DROP PUBLICATION p; ALTER TABLE agent_events SET UNLOGGED", ConfigError, "unlogged", "SET LOGGED"),
        ("ALTER TABLE agent_events RENAME payload TO body", ConfigError, "'payload'", "[ledger.columns]"),
        ("ALTER TABLE agent_events ALTER seq TYPE numeric", ConfigError, "numeric", "[ledger.columns]"),
        ("ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey", ConfigError, "unique key", "UNIQUE INDEX"),
        (
            "ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey;"
            " CREATE UNIQUE INDEX ON agent_events (seq) WHERE seq > 5",
            ConfigError,
            "unique key",
            "UNIQUE INDEX",
        ),
        (
            "ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey;"
            " ALTER TABLE agent_events ADD UNIQUE (seq) DEFERRABLE",
            ConfigError,
            "unique key",
            "UNIQUE INDEX",
        ),
        ("DROP PUBLICATION p", PublicationGone, "no publication", "walstream init"),
        ("ALTER PUBLICATION p SET (publish = 'truncate')", ConfigError, "not publish inserts", "'insert, truncate'"),
        ("ALTER PUBLICATION p DROP TABLE agent_events", PublicationGone, "does not hold", "ADD TABLE"),
        (
            # C37: rename and swap; the publication follows the old table
            "CREATE TABLE new (LIKE agent_events INCLUDING ALL); ALTER TABLE agent_events RENAME TO old;"
            " ALTER TABLE new RENAME TO agent_events",
            PublicationGone,
            "swapped or recreated",
            'ALTER PUBLICATION "p" ADD TABLE "public"."agent_events"',
        ),
    ],
)
def test_table_and_publication(
    ledger: Ledger, breaking: str, error: type[WalstreamError], words: str, remedy: str
) -> None:
    ledger.make()
    ledger.execute(breaking)
    found = refusal(ledger)
    assert type(found) is error
    assert words in str(found)
    assert remedy in found.hint


@pytest.mark.parametrize(
    "content", ["agent_events WHERE (seq > 5)", "agent_events (seq, event_type, session_id, agent_id, payload)"]
)
def test_row_filters_and_column_lists(ledger: Ledger, database: Database, content: str) -> None:
    if database.server.major < 15:
        pytest.skip("row filters and column lists exist from 15 on")
    ledger.make()
    ledger.execute(f"ALTER PUBLICATION p SET TABLE {content}")
    found = refusal(ledger)
    assert isinstance(found, ConfigError)
    assert "seq > 5" in str(found) or "created_at" in str(found)
    ledger.execute(found.hint.split(" (")[0])  # the remedy heals it
    look(ledger)


def test_the_remedy_for_a_table_that_was_dropped_and_made_again_works(ledger: Ledger) -> None:
    ledger.make()
    ledger.execute("DROP TABLE agent_events")
    ledger.execute(TABLE.format(name="agent_events"))
    ledger.execute(refusal(ledger).hint.split(";")[0])
    look(ledger)


def test_a_swapped_table_is_known_by_the_oid_that_was_written_down(ledger: Ledger, database: Database) -> None:
    """C37: even if the publication was corrected."""
    ledger.make()
    conn = database.connect()
    conn.autocommit = True
    schema.install(conn, ledger.settings)
    ledger.execute(
        "INSERT INTO walstream.identity (environment, system_identifier, timeline, table_namespace, table_name,"
        " table_oid, publication, slot) VALUES ('default', 'x', 1, 'public', 'agent_events',"
        " 'agent_events'::regclass::oid, 'p', 's')"
    )
    look(ledger)
    ledger.execute("ALTER TABLE agent_events RENAME TO old; CREATE TABLE agent_events (LIKE old INCLUDING ALL)")
    ledger.execute("ALTER PUBLICATION p SET TABLE agent_events")
    found = refusal(ledger)
    assert isinstance(found, LedgerError)
    assert "walstream adopt" in found.hint


def test_columns_and_names_can_be_mapped(ledger: Ledger) -> None:
    ledger.settings = ledger.settings.model_copy(
        update={
            "ledger": LedgerTable(
                namespace="App", table='Ev"ents', columns=Columns(seq="Nr", event_type="kind", payload="body")
            )
        }
    )
    ledger.execute('CREATE SCHEMA "App"')
    ledger.make(TABLE.replace("seq ", '"Nr" ').replace("event_type ", "kind ").replace("payload ", "body "))
    assert look(ledger).table.unique_on("Nr")


@pytest.mark.parametrize("via_root", [True, False])
def test_a_partitioned_ledger(ledger: Ledger, via_root: bool) -> None:
    """C15: rows come under the root's name or under the leaves', but new leaves must come as well."""
    ledger.make(PARTITIONED, via_root=via_root)
    facts = look(ledger)
    assert facts.table.partitioned
    assert facts.table.keyed_by("seq")
    assert not facts.table.unique_on("seq")
    assert [name for _, name, _ in facts.table.leaves] == ["public.leaf_one", "public.leaf_two"]
    names = {table.name for table in facts.publication.tables}
    assert names == ({"agent_events"} if via_root else {"leaf_one", "leaf_two"})
    ledger.insert("x")
    with ledger.reading() as reading:
        reading.until_rows(1)
    relations = [message[2] for message in reading.messages if message[0] == "R"]
    assert any(b"agent_events\0" in relation for relation in relations) is via_root
    ledger.execute("ALTER PUBLICATION p SET TABLE leaf_one, leaf_two")
    found = refusal(ledger)
    assert isinstance(found, ConfigError)
    assert "ADD TABLE" in found.hint
    for statement in found.hint.split("; ")[:2]:
        if statement.startswith("ALTER"):
            ledger.execute(statement)
    look(ledger)


def test_a_partition_is_not_a_ledger(ledger: Ledger) -> None:
    ledger.make(PARTITIONED)
    ledger.settings = ledger.settings.model_copy(update={"ledger": LedgerTable(table="leaf_one")})
    assert "partition of another table" in str(refusal(ledger))


def test_publications_of_whole_schemas_and_databases_are_good_enough(ledger: Ledger, database: Database) -> None:
    ledger.make()
    ledger.execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR ALL TABLES")
    assert look(ledger).publication.all_tables
    if database.server.major >= 15:
        ledger.execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLES IN SCHEMA public")
        assert look(ledger).publication.schemas == {"public"}


@pytest.mark.parametrize(
    ("plugin", "two_phase", "words"), [("test_decoding", False, "test_decoding"), ("pgoutput", True, "two_phase")]
)
def test_slots_of_another_kind(ledger: Ledger, plugin: str, two_phase: bool, words: str) -> None:
    """C29, C41."""
    ledger.make(slot=False)
    ledger.make_slot(plugin, two_phase=two_phase)
    found = refusal(ledger)
    assert isinstance(found, SlotError)
    assert words in str(found)
    assert f"pg_drop_replication_slot('{ledger.settings.slot}')" in found.hint


def test_slots_that_are_not_there_or_not_ours(ledger: Ledger, database: Database) -> None:
    ledger.make(slot=False)
    assert "walstream init" in refusal(ledger).hint
    database.server.execute("SELECT pg_create_physical_replication_slot(%s)", ledger.settings.slot)
    try:
        assert "physical" in str(refusal(ledger))
    finally:
        database.server.execute("SELECT pg_drop_replication_slot(%s)", ledger.settings.slot)
    database.server.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", ledger.settings.slot)
    try:
        found = refusal(ledger)
        assert isinstance(found, SlotError)
        assert "belongs to database postgres" in str(found)
    finally:
        database.server.execute("SELECT pg_drop_replication_slot(%s)", ledger.settings.slot)


def test_a_slot_that_somebody_moved_is_noticed(ledger: Ledger, database: Database) -> None:
    """C26: not refused, because the reconciler fills the gap; but everything has to be compared."""
    ledger.make()
    conn = database.connect()
    conn.autocommit = True
    schema.install(conn, ledger.settings)
    ledger.execute("UPDATE walstream.ingest SET confirmed_lsn = pg_current_wal_lsn()")
    assert not look(ledger).slot_moved
    ledger.insert("hole")
    ledger.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", ledger.settings.slot)
    assert look(ledger).slot_moved


def test_positions_beyond_the_wal_are_refused(ledger: Ledger, database: Database) -> None:
    """C24: both ours and the slot's own; the server accepts either in silence."""
    ledger.make()
    conn = database.connect()
    conn.autocommit = True
    schema.install(conn, ledger.settings)
    ledger.execute("UPDATE walstream.ingest SET confirmed_lsn = 'FFFF/0'")
    found = refusal(ledger)
    assert isinstance(found, SlotError)
    assert "another history" in str(found)
    ledger.execute("UPDATE walstream.ingest SET confirmed_lsn = NULL")
    with ledger.reading() as reading:
        ledger.insert("x")
        reading.until_rows(1)
        reading.stream.passed = reading.commits[0] + 2**32
        reading.stream.confirm(reading.stream.passed)
        reading.stream.feedback(force=True)
        reading.until(lambda: ledger.confirmed() > ledger.wal_end())
    assert "beyond the server's WAL" in str(refusal(ledger))


def test_a_replication_dsn_that_leads_elsewhere_is_refused(ledger: Ledger, database: Database) -> None:
    ledger.make()
    elsewhere = database.server.dsn("postgres")
    ledger.settings = ledger.settings.model_copy(update={"replication_dsn": elsewhere})
    found = refusal(ledger)
    assert isinstance(found, ConfigError)
    assert "another ledger's rows" in str(found)


def test_row_security_and_privileges(ledger: Ledger, database: Database) -> None:
    """Decoding does not know policies, so a role that is subject to one would miss rows in every cold read."""
    ledger.make()
    role = f"r_{database.name}"[:60]
    database.server.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    ledger.settings = ledger.settings.model_copy(update={"dsn": make_dsn(database.dsn, user=role)})
    try:
        assert f'GRANT SELECT ON "public"."agent_events" TO "{role}"' in refusal(ledger).hint
        ledger.execute(f"GRANT SELECT ON agent_events TO {role}")
        facts = look(ledger)
        assert (facts.role.name, facts.role.superuser, facts.role.replication) == (role, False, True)
        ledger.execute("ALTER TABLE agent_events ENABLE ROW LEVEL SECURITY")
        assert "BYPASSRLS" in refusal(ledger).hint
        made = connect(ledger.settings.dsn, application_name="walstream:test")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="row-level security"):
            made.cursor().execute("SELECT * FROM public.agent_events")  # and never: no rows
        made.close()
        database.server.execute(f"ALTER ROLE {role} BYPASSRLS")
        assert look(ledger).table.row_security
        database.server.execute(f"ALTER ROLE {role} NOREPLICATION")
        found = refusal(ledger)
        assert isinstance(found, ConfigError)
        assert "REPLICATION" in found.hint
    finally:
        database.execute(f"DROP OWNED BY {role}")
        database.server.execute(f"DROP ROLE {role}")


def test_servers_that_would_lose_or_hang(own_server: Callable[..., PostgresServer]) -> None:
    """C46: a lost slot; an unbounded one; a walsender that counts as a synchronous standby; a wal_level."""
    server = own_server(max_slot_wal_keep_size="1MB", max_wal_size="32MB", synchronous_commit="local")
    ledger = Ledger(server.dsn(), server.execute, "s").make()
    look(ledger)
    for _ in range(4):
        server.execute("SELECT pg_switch_wal(); CREATE TABLE t AS SELECT generate_series(1, 1000) n; DROP TABLE t")
    server.execute("CHECKPOINT")
    found = refusal(ledger)
    assert isinstance(found, SlotError)
    assert "is lost" in str(found)
    with pytest.raises(SlotError):
        ReplicationStream.open(ledger.settings, start_lsn=0, generation=1)
    server.execute("SELECT pg_drop_replication_slot('s')")
    ledger.make_slot()
    look(ledger)

    server.settings["max_slot_wal_keep_size"] = -1
    server.reload()
    end = time.monotonic() + 60
    while server.execute("SHOW max_slot_wal_keep_size") != [("-1",)]:
        assert time.monotonic() < end
    found = refusal(ledger)
    assert isinstance(found, ConfigError)
    assert "ALTER SYSTEM SET max_slot_wal_keep_size" in found.hint
    ledger.settings = ledger.settings.model_copy(update={"allow_unbounded_slot": True})
    look(ledger)

    server.settings["synchronous_standby_names"] = "*"
    server.reload()
    while server.execute("SHOW synchronous_standby_names") != [("*",)]:
        assert time.monotonic() < end
    found = refusal(ledger)
    assert isinstance(found, ConfigError)
    assert "synchronous standby" in str(found)


@pytest.mark.slow
def test_what_a_standby_is_told(own_server: Callable[..., PostgresServer]) -> None:
    server = own_server()
    ledger = Ledger(server.dsn(), server.execute, "s").make()
    server.stop()
    (server.data_dir / "standby.signal").touch()
    server.start()
    found = refusal(ledger)
    assert isinstance(found, Unavailable)
    assert "target_session_attrs" in found.hint


def test_facts_of_things_that_are_not_there(conn: Connection, ledger: Ledger) -> None:
    assert table_facts(conn, LedgerTable()) is None
    assert publication_facts(conn, "p") is None
    ledger.make(slot=False)
    server, role = server_facts(conn), role_facts(conn)
    assert server.timeline == 1
    assert not server.in_recovery
    assert not server.any_standby_is_synchronous
    assert role.name == "postgres"
