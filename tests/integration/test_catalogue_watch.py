"""What never reaches the stream is noticed in the catalogue: each way once, also when nobody ran meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import ok
from tests.conftest import Database
from walstream.audit import findings
from walstream.engine import ingest_supervisor
from walstream.engine.backlog import Noticed
from walstream.engine.catalogue_watch import OPEN, CatalogueWatch
from walstream.engine.leadership import Lease
from walstream.engine.violation_store import ViolationStore
from walstream.metrics import METRICS
from walstream.source.connection import connect

from .births import INSERT, insert_rows
from .streams import Installed, Recorder, eventually
from .test_tamper_alarm import WIDENED


class Watched:
    """A ledger whose catalogue is looked at whenever the test says so."""

    def __init__(self, database: Database, *words: str, **settings: Any) -> None:
        stream = Installed(database, "--audit", *words)
        self.database = database
        self.settings = stream.settings.model_copy(update=settings)
        self.connection = connect(database.dsn, application_name="test")
        self.restart()

    def restart(self) -> None:
        """Forget everything that is in memory."""
        ((oid, generation),) = self.database.execute(
            "SELECT i.table_oid::bigint, g.generation FROM walstream.identity AS i, walstream.generation AS g"
        )
        lease = Lease.for_ingest("walstream", owner="o", seconds=10)
        lease.generation = generation
        self.store = ViolationStore("walstream", lease, self.settings.violations)
        self.watch = CatalogueWatch(self.settings, oid, self._write)

    def _write(self, noticed: Noticed) -> None:
        with self.connection.cursor() as cur:
            self.store.record_noticed(cur, noticed)
        noticed.done.set()

    def look(self) -> list[tuple[str, str]]:
        """Look; what is new since the last time."""
        before = self.database.execute("SELECT coalesce(max(id), 0) FROM walstream.violations")[0][0]
        self.watch.look(self.connection)
        return self.database.execute("SELECT kind, detail FROM walstream.violations WHERE id > %s ORDER BY id", before)

    def after(self, sql: str) -> list[tuple[str, str]]:
        """What is noticed after ``sql``; looking again, also after a restart, notices nothing more."""
        self.database.execute(sql)
        found = self.look()
        assert self.look() == []
        self.restart()
        assert self.look() == []
        return found


@pytest.fixture
def ledger(database: Database) -> Iterator[Watched]:
    made = Watched(database)
    insert_rows(database, 5)
    assert made.look() == []
    yield made
    made.connection.close()


@pytest.fixture
def parted(database: Database) -> Iterator[Watched]:
    made = Watched(database, "--partition-by", "hash:2")
    insert_rows(database, 20)
    assert made.look() == []
    yield made
    made.connection.close()


def leaf_of(watched: Watched) -> str:
    return str(watched.database.execute("SELECT tableoid::regclass::text FROM agent_events LIMIT 1")[0][0])


def test_what_is_no_alarm(ledger: Watched) -> None:
    insert_rows(ledger.database, 5)
    ledger.database.execute("VACUUM agent_events")
    ledger.database.execute("REINDEX TABLE agent_events")
    harmless = (
        "ALTER TABLE agent_events ADD more text; CREATE INDEX ON agent_events (agent_id); ANALYZE agent_events;"
        "COMMENT ON TABLE agent_events IS 'x'; GRANT SELECT ON agent_events TO PUBLIC"
    )
    assert ledger.after(harmless) == []


def test_a_partition_that_is_dropped_or_detached(parted: Watched) -> None:
    leaf = leaf_of(parted)
    ((first, last),) = parted.database.execute(f"SELECT min(seq), max(seq) FROM {leaf}")
    found = parted.after(f"ALTER TABLE agent_events DETACH PARTITION {leaf}")
    assert found == [("detached", f"partition public.{leaf} with rows from seq {first} to {last} was detached")]
    others = parted.database.execute("SELECT tableoid::regclass::text, min(seq), max(seq) FROM agent_events GROUP BY 1")
    other, first, last = others[0]
    found = parted.after(f"DROP TABLE {other}")
    assert found == [("dropped", f"partition public.{other} with rows from seq {first} to {last} was dropped")]


@pytest.mark.parametrize("by", ["month", pytest.param("hash:2", marks=pytest.mark.slow)])
def test_who_may_read_the_ledger_alone_notices_it_too(database: Database, by: str) -> None:
    """Rights on a partitioned table do not hold for its partitions by their own names."""
    role = f"r_{database.name[-8:]}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        watched = Watched(database, "--partition-by", by, "--grants", role)
        watched.connection.close()
        watched.connection = connect(make_dsn(database.dsn, user=role, password="irrelevant"), application_name="test")
        insert_rows(database, 20)
        assert watched.look() == []
        leaf = leaf_of(watched)
        ((kind, detail),) = watched.after(f"ALTER TABLE agent_events DETACH PARTITION {leaf}")
        assert (kind, " with rows from seq 1 to 20 " in detail) == ("detached", by == "month")
        watched.connection.close()
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_what_may_not_be_seen_does_not_end_ingest(ledger: Watched, caplog: pytest.LogCaptureFixture) -> None:
    ledger.database.execute("ALTER TABLE walstream.ledger_catalogue RENAME TO elsewhere")
    for _ in range(2):
        ledger.watch.look(ledger.connection)
    assert caplog.text.count("the tamper alarm does not see the catalogue") == 1


def test_one_whose_rows_are_declared_erased_goes_in_silence(parted: Watched) -> None:
    leaf = leaf_of(parted)
    declared = f"INSERT INTO walstream.erasures (first_seq, last_seq, reason) SELECT seq, seq, 'retention' FROM {leaf}"
    assert parted.after(f"{declared}; DROP TABLE {leaf}") == []


def test_new_partitions_and_empty_ones_that_go(database: Database) -> None:
    watched = Watched(database, "--partition-by", "month")
    insert_rows(database, 3)
    assert watched.look() == []
    ok("partitions", "--ahead", "9", dsn=database.dsn)
    assert watched.look() == []
    ((empty,),) = database.execute(
        "SELECT max(relid::text) FROM pg_partition_tree('agent_events') WHERE isleaf AND relid::text ~ '[0-9]$'"
    )
    assert watched.after(f"DROP TABLE {empty}") == []
    watched.connection.close()


def test_a_truncate_of_a_partition_that_is_published_under_its_root(parted: Watched) -> None:
    """C15: nothing of it is streamed."""
    leaf = leaf_of(parted)
    ((kind, detail),) = parted.after(f"TRUNCATE {leaf}")
    assert (kind, detail.startswith(f"public.{leaf} with rows from seq ")) == ("emptied", True)


def test_a_partition_that_is_not_in_the_wal_any_more(parted: Watched) -> None:
    assert [kind for kind, _ in parted.after(f"ALTER TABLE {leaf_of(parted)} SET UNLOGGED")] == ["unlogged"]


def test_it_is_noticed(ledger: Watched) -> None:
    ways = (
        ('ALTER TABLE agent_events ALTER payload TYPE jsonb USING \'{"all": "gone"}\'', "rewritten", ""),
        ("ALTER TABLE agent_events RENAME TO elsewhere", "renamed", "ALTER TABLE elsewhere RENAME TO agent_events"),
        ("ALTER TABLE agent_events DROP COLUMN created_at", "columns", ""),
        ("ALTER PUBLICATION walstream SET (publish = 'insert')", "publication", WIDENED),
        (
            "ALTER PUBLICATION walstream DROP TABLE agent_events",
            "publication",
            "ALTER PUBLICATION walstream ADD TABLE agent_events",
        ),
        ("CREATE RULE r AS ON INSERT TO agent_events WHERE NEW.agent_id = 'x' DO INSTEAD NOTHING", "rule", ""),
        ("DROP PUBLICATION walstream", "publication", ""),
        ("DROP TABLE agent_events CASCADE", "dropped", ""),
    )
    for sql, kind, undo in ways:
        assert [found for found, _ in ledger.after(sql)] == [kind], sql
        if undo:
            ledger.database.execute(undo)
            ledger.look()


def test_a_filter(ledger: Watched) -> None:
    if ledger.connection.server_version < 150000:
        pytest.skip("no row filters before 15")
    found = ledger.after("ALTER PUBLICATION walstream SET TABLE agent_events WHERE (seq < 3)")
    assert found == [("publication", "publication walstream sends only rows with (seq < 3)")]


def test_a_swap(ledger: Watched) -> None:
    swap = "ALTER TABLE agent_events RENAME TO old; CREATE TABLE agent_events (LIKE old INCLUDING ALL)"
    ((kind, detail),) = ledger.after(swap)
    assert (kind, "is called public.old now" in detail) == ("renamed", True)
    ((oid,),) = ledger.database.execute("SELECT 'agent_events'::regclass::oid::bigint")
    ledger.database.execute("ALTER PUBLICATION walstream SET TABLE agent_events")
    ledger.database.execute("UPDATE walstream.identity SET table_oid = %s", oid)  # as `walstream adopt` does
    ledger.restart()
    ((kind, detail),) = ledger.look()
    assert (kind, detail.startswith(f"the ledger is the table with OID {oid} now")) == ("swapped", True)


PUT_BACK = {
    "made anew": ["DROP PUBLICATION walstream", "CREATE PUBLICATION walstream FOR TABLE agent_events", WIDENED],
    "narrowed": ["ALTER PUBLICATION walstream SET (publish = 'insert')", WIDENED],
    "without the table": [
        "ALTER PUBLICATION walstream DROP TABLE agent_events",
        "ALTER PUBLICATION walstream ADD TABLE agent_events",
    ],
    "called otherwise": [
        "ALTER PUBLICATION walstream RENAME TO elsewhere",
        "ALTER PUBLICATION elsewhere RENAME TO walstream",
    ],
}


@pytest.mark.parametrize("way", PUT_BACK)
def test_a_publication_that_was_put_back_between_two_looks(ledger: Watched, way: str) -> None:
    """A DELETE in between, in the same transaction even, is never sent; and the publication is what it was."""
    before, after = PUT_BACK[way][0], PUT_BACK[way][1:]
    ((kind, detail),) = ledger.after("; ".join([before, "DELETE FROM agent_events WHERE seq = 2", *after]))
    assert kind == "publication"
    assert "was changed and publishes what it did before" in detail
    assert ledger.look() == []


def test_a_publication_that_is_widened_or_takes_other_tables_is_no_alarm(ledger: Watched) -> None:
    assert [kind for kind, _ in ledger.after("ALTER PUBLICATION walstream SET (publish = 'insert')")] == ["publication"]
    assert ledger.after(WIDENED) == []
    assert ledger.after("CREATE TABLE other (n int); ALTER PUBLICATION walstream ADD TABLE other") == []
    assert ledger.after("ALTER PUBLICATION walstream DROP TABLE other") == []
    assert ledger.after("VACUUM (FREEZE) pg_publication, pg_publication_rel, pg_inherits") == []


def test_what_the_release_before_has_seen_is_no_alarm(ledger: Watched) -> None:
    ledger.after("UPDATE walstream.ledger_catalogue SET facts = facts - 'version' - 'entries' - 'attached'")
    assert ledger.after("VACUUM pg_publication") == []
    assert ledger.database.execute(
        "SELECT count(*) FROM walstream.ledger_catalogue WHERE facts ? 'version' OR facts ? 'attached'"
    ) == [(2,)]


def test_a_partition_that_was_detached_and_attached_again_between_two_looks(parted: Watched) -> None:
    leaf = leaf_of(parted)
    ((bound,),) = parted.database.execute(
        "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = %s::regclass", leaf
    )
    ((kind, detail),) = parted.after(
        f"ALTER TABLE agent_events DETACH PARTITION {leaf}; UPDATE {leaf} SET agent_id = 'somebody else';"
        f" ALTER TABLE agent_events ATTACH PARTITION {leaf} {bound}"
    )
    assert kind == "detached"
    assert "was detached and attached again" in detail
    assert parted.look() == []


def test_triggers(ledger: Watched) -> None:
    make = (
        "CREATE FUNCTION lie() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.payload = '{}'; RETURN NEW; END $$;"
        "CREATE TRIGGER t BEFORE INSERT ON agent_events FOR EACH ROW EXECUTE FUNCTION lie()"
    )
    ((kind, detail),) = ledger.after(make)
    assert (kind, detail.startswith("trigger t of public.agent_events was added: CREATE TRIGGER t")) == (
        "trigger",
        True,
    )
    ((kind, detail),) = ledger.after("ALTER TABLE agent_events DISABLE TRIGGER t")
    assert "was changed and does not fire any more" in detail
    assert ledger.after("DROP TRIGGER t ON agent_events") == [
        ("trigger", "trigger t of public.agent_events was dropped")
    ]


def test_a_trigger_of_a_partition_that_is_switched_off(parted: Watched) -> None:
    parted.database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;"
        "CREATE TRIGGER t BEFORE DELETE ON agent_events FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    assert [kind for kind, _ in parted.look()] == ["trigger"], "one, not one for each partition"
    leaf = leaf_of(parted)
    ((_, detail),) = parted.after(f"ALTER TABLE {leaf} DISABLE TRIGGER t")
    assert detail.startswith(f"trigger t of public.{leaf} was changed and does not fire any more")


def test_the_policy_to_ignore(database: Database) -> None:
    watched = Watched(database, violations="ignore")
    insert_rows(database, 1)
    assert watched.look() == []
    assert watched.after("ALTER PUBLICATION walstream SET (publish = 'insert')") == []
    watched.connection.close()


def test_in_a_running_stream(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on record although the same look ends ingest; and it is a gauge until somebody acknowledges."""
    monkeypatch.setattr(ingest_supervisor, "_WATCH_SECONDS", 0.2)
    stream = Installed(database, "--audit")
    with stream.host(Recorder()) as host:
        database.execute(INSERT)
        stream.wait_ordered()
        eventually(lambda: database.execute("SELECT 1 FROM walstream.ledger_catalogue"), "the first look")
        database.execute("ALTER PUBLICATION walstream SET (publish = 'insert')")
        eventually(lambda: database.execute("SELECT kind FROM walstream.violations") == [("publication",)], "the next")
        eventually(lambda: METRICS.value(OPEN) == 1, "the gauge")
        ok("audit", "acknowledge", dsn=database.dsn)
        eventually(lambda: METRICS.value(OPEN) == 0, "the gauge falls")
        database.execute("ALTER TABLE agent_events RENAME TO elsewhere")
        eventually(lambda: host.ingest is not None and host.ingest.error is not None, "ingest ends")
        assert database.execute("SELECT kind FROM walstream.violations ORDER BY id DESC LIMIT 1") == [("renamed",)]


def test_what_the_audit_sink_finds_halts_as_well(database: Database) -> None:
    """It is no news of the stream: ingest looks every few seconds."""
    stream = Installed(database, violations="halt")
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("a")
        eventually(lambda: recorder.types == ["a"], "what comes before")
        finding = findings.Finding(1, 1, {"agent_id": ("a", "b")})
        with database.connect() as connection:
            findings.report(connection, "walstream", [finding])
        eventually(lambda: "ingest halts" in str(host.ingest and host.ingest.state.error), "it is seen")
        stream.insert("behind")
        ok("audit", "acknowledge", dsn=database.dsn)
        eventually(lambda: recorder.types == ["a", "behind"], "it goes on")
