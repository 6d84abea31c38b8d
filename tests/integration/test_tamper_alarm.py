"""The tamper alarm on a real server: each way in which somebody can touch the ledger, and what is on record then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from walstream.event import ERASED_PAYLOAD
from walstream.postgres import PostgresServer

from .streams import INSERT, Installed, Recorder, eventually

ERASED = ERASED_PAYLOAD.decode()
WIDENED = "ALTER PUBLICATION walstream SET (publish = 'insert, update, delete, truncate')"


class Alarmed(Installed):
    """A stream whose publication is widened."""

    def __init__(self, place: Any, *init: str, **settings: Any) -> None:
        super().__init__(place, *init, **settings)
        place.execute(WIDENED)

    def recorded(self) -> list[tuple[str, int | None]]:
        """(kind, seq) of what is on record from the stream, in its order. The catalogue has its own tests."""
        return self.place.execute("SELECT kind, seq FROM walstream.violations WHERE origin = 'stream' ORDER BY id")

    def expect(self, *wanted: tuple[str, int | None]) -> None:
        """These are on record, and no others."""
        eventually(lambda: len(self.recorded()) >= len(wanted), f"{wanted} are on record")
        self.insert("afterwards")
        self.wait_ordered_up_to_now()
        assert self.recorded() == list(wanted)

    def wait_ordered_up_to_now(self) -> None:
        eventually(lambda: set(self.ledger()) <= set(self.ordered()), "every row has an offset")

    def column(self, name: str) -> list[Any]:
        return [
            row[0]
            for row in self.place.execute(
                f"SELECT {name} FROM walstream.violations WHERE origin = 'stream' ORDER BY id"
            )
        ]


@pytest.fixture
def alarmed(database: Database) -> Iterator[Alarmed]:
    stream = Alarmed(database)
    with stream.host(Recorder()):
        stream.insert("a", "b", "c")
        stream.wait_ordered()
        yield stream


def test_an_update_a_delete_and_a_truncate(alarmed: Alarmed, database: Database) -> None:
    database.execute("UPDATE agent_events SET event_type = 'redacted' WHERE seq = 2")
    database.execute("DELETE FROM agent_events WHERE seq IN (1, 3)")
    database.execute("TRUNCATE agent_events")
    alarmed.expect(("update", 2), ("delete", 1), ("delete", 3), ("truncate", None))
    assert alarmed.column("keys") == [{"seq": "2"}, None, None, None]
    assert alarmed.column("old_keys") == [None, {"seq": "1"}, {"seq": "3"}, None]
    assert alarmed.column("origin") == ["stream"] * 4
    assert len(set(alarmed.column("xid"))) == 3
    assert None not in alarmed.column("xid")
    age = database.execute("SELECT max(noticed_at - committed_at), min(noticed_at - committed_at) FROM"
                           " walstream.violations")  # fmt: skip
    assert -1 < age[0][1].total_seconds() <= age[0][0].total_seconds() < 30


def test_a_large_value_that_an_update_did_not_touch(alarmed: Alarmed, database: Database) -> None:
    """C14, as it is written down there: the payload is TOASTed, so the stream brings it as unchanged."""
    ((seq,),) = database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) SELECT gen_random_uuid(), 'a', 'large',"
        " to_jsonb(string_agg(md5(n::text), '')) FROM generate_series(1, 1000) AS n RETURNING seq"
    )
    recorder = Recorder()
    recorder.name = "late"
    database.execute("UPDATE agent_events SET event_type = 'redacted' WHERE seq = %s", seq)
    alarmed.expect(("update", seq))
    with alarmed.host(recorder, ingest=False):
        eventually(lambda: len(recorder.got) == 5, "the others")
    large = next(event for event in recorder.got if event.seq == seq)
    assert len(large.payload) == 32_000


def test_a_row_changed_or_deleted_in_the_transaction_that_inserted_it(alarmed: Alarmed, database: Database) -> None:
    connection = database.connect()
    with connection, connection.cursor() as cur:
        cur.execute(INSERT, ("rewritten",))
        cur.execute("UPDATE agent_events SET event_type = 'harmless' WHERE seq = 4")
        cur.execute(INSERT, ("hidden",))
        cur.execute("DELETE FROM agent_events WHERE seq = 5")
    alarmed.expect(("update", 4), ("delete", 5))
    assert 5 in alarmed.ordered()


def test_triggers_that_are_switched_off_hide_nothing(alarmed: Alarmed, database: Database) -> None:
    """``session_replication_role = replica`` skips the triggers that refuse changes; the WAL knows no such role."""
    database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'append only'; END $$;"
        "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON agent_events FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    with pytest.raises(psycopg2.errors.RaiseException):
        database.execute("DELETE FROM agent_events WHERE seq = 1")
    connection = database.connect()
    with connection, connection.cursor() as cur:
        cur.execute("SET LOCAL session_replication_role = replica")
        cur.execute("DELETE FROM agent_events WHERE seq = 1")
        cur.execute("UPDATE agent_events SET agent_id = 'b' WHERE seq = 2")
    eventually(lambda: ("update", 2) in alarmed.recorded(), "both are on record")
    assert [each for each in alarmed.recorded() if each[1] is not None] == [("delete", 1), ("update", 2)]


def test_a_seq_that_comes_twice(alarmed: Alarmed, database: Database) -> None:
    database.execute("ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey, REPLICA IDENTITY FULL")
    database.execute(INSERT.replace("(session_id", "(seq, session_id").replace("VALUES (", "VALUES (2, "), "twin")
    eventually(lambda: ("duplicate-seq", 2) in alarmed.recorded(), "it is on record")


@pytest.mark.parametrize("by", ["month", pytest.param("hash:3", marks=pytest.mark.slow)])
def test_changes_in_a_partition(database: Database, by: str) -> None:
    stream = Alarmed(database, "--partition-by", by)
    with stream.host(Recorder()):
        stream.insert("a", "b", "c")
        stream.wait_ordered()
        ((leaf, seq),) = database.execute("SELECT tableoid::regclass::text, seq FROM agent_events WHERE seq = 2")
        database.execute(f"UPDATE {leaf} SET agent_id = 'b' WHERE seq = {seq}")
        database.execute(f"DELETE FROM {leaf} WHERE seq = {seq}")
        database.execute("TRUNCATE agent_events")
        eventually(lambda: ("truncate", None) in stream.recorded(), "all three are on record")
        assert stream.recorded()[:2] == [("update", 2), ("delete", 2)]


def test_what_is_rolled_back_is_nothing(alarmed: Alarmed, database: Database) -> None:
    connection = database.connect()
    with connection.cursor() as cur:
        cur.execute("DELETE FROM agent_events")
    connection.rollback()
    with connection, connection.cursor() as cur:
        cur.execute("SAVEPOINT s")
        cur.execute("DELETE FROM agent_events WHERE seq = 1")
        cur.execute("ROLLBACK TO SAVEPOINT s")
        cur.execute("DELETE FROM agent_events WHERE seq = 2")
    alarmed.expect(("delete", 2))


def test_a_declared_erasure_is_silent_and_nothing_else_is(alarmed: Alarmed, database: Database) -> None:
    connection = database.connect()
    with connection, connection.cursor() as cur:
        cur.execute("DELETE FROM agent_events WHERE seq = 1")
        cur.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (1, 1, 'asked for')")
    with connection, connection.cursor() as cur:  # declared in another transaction than the one that did it
        cur.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (2, 2, 'asked for')")
    with connection, connection.cursor() as cur:
        cur.execute("UPDATE agent_events SET payload = '{}' WHERE seq = 2")
    with connection, connection.cursor() as cur:  # and more than was declared
        cur.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (2, 2, 'again')")
        cur.execute(f"UPDATE agent_events SET payload = '{ERASED}' WHERE seq IN (2, 3)")
    with connection, connection.cursor() as cur:  # and something else than what is left by an erasure
        cur.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (2, 2, 'forged')")
        cur.execute("UPDATE agent_events SET payload = '{\"forged\": 1}' WHERE seq = 2")
    alarmed.expect(("update", 2), ("update", 3), ("update", 2))


@pytest.mark.parametrize(
    ("mode", "by"),
    [
        ("redact", None),
        pytest.param("remove", None, marks=pytest.mark.slow),
        pytest.param("redact", "month", marks=pytest.mark.slow),
        ("remove", "month"),
    ],
)
def test_walstream_erase_is_silent(database: Database, mode: str, by: str | None) -> None:
    stream = Alarmed(database, *(() if by is None else ("--partition-by", by)))
    with stream.host(Recorder()):
        database.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " SELECT ('00000000-0000-0000-0000-00000000000' || n % 2)::uuid, 'a', 't', '{}'"
            " FROM generate_series(1, 2500) AS n"
        )
        stream.wait_ordered()
        session = "00000000-0000-0000-0000-000000000001"
        ok("erase", session, "--reason", "asked for", "--mode", mode, "--yes", dsn=database.dsn)
        stream.insert("afterwards")
        stream.wait_ordered_up_to_now()
        assert stream.recorded() == []
        database.execute("UPDATE agent_events SET payload = '{}' WHERE seq = 4")
        stream.expect(("update", 4))


def test_many_changes_in_one_transaction(alarmed: Alarmed, database: Database) -> None:
    """Told one by one up to a thousand, then in stretches; what an erasure declares is taken out of these, too."""
    database.execute(
        INSERT.replace("VALUES (", "SELECT ").removesuffix(")") + " FROM generate_series(1, 15000)", "many"
    )
    connection = database.connect()
    with connection, connection.cursor() as cur:
        cur.execute(f"UPDATE agent_events SET payload = '{ERASED}'")
        cur.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (5001, 6000, 'asked for')")
    eventually(lambda: sum(alarmed.column("changes")) >= 14_003, "all are on record")
    alarmed.insert("afterwards")
    alarmed.wait_ordered_up_to_now()
    assert sum(alarmed.column("changes")) == 14_003
    stretches = [seqs for seqs in alarmed.column("seqs") if seqs]
    assert stretches == [[[1001, 5000], [6001, 11000]], [[11001, 15003]]]


def test_a_resend_gives_the_same_records(alarmed: Alarmed, database: Database) -> None:
    """The consumer loses its connection before the slot is confirmed, again and again."""
    stop = threading.Event()

    def cut() -> None:
        while not stop.is_set():
            database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
                alarmed.settings.slot,
            )
            time.sleep(0.3)

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        for n in range(40):
            database.execute("UPDATE agent_events SET agent_id = %s WHERE seq = 1", f"a{n}")
            time.sleep(0.05)
    finally:
        stop.set()
        cutting.join()
    alarmed.expect(*[("update", 1)] * 40)
    assert alarmed.column("id") == sorted(alarmed.column("id"))


def test_on_the_schema_of_the_last_release(database: Database) -> None:
    """`walstream migrate` may come later, while the stream runs: nothing is lost, and more is known from then on."""
    stream = Alarmed(database)
    database.execute("DROP TABLE walstream.violations, walstream.ledger_catalogue")
    database.execute(
        "CREATE TABLE walstream.violations (kind text NOT NULL, commit_lsn pg_lsn NOT NULL, ordinal integer NOT NULL,"
        " seq bigint, xid bigint, detail text, noticed_at timestamptz NOT NULL DEFAULT now(),"
        " PRIMARY KEY (commit_lsn, ordinal))"
    )
    database.execute("DELETE FROM walstream.migrations WHERE version >= 7")
    with stream.host(Recorder()):
        stream.insert("a", "b")
        database.execute("DELETE FROM agent_events WHERE seq = 1")
        eventually(lambda: stream.place.execute("SELECT seq FROM walstream.violations") == [(1,)], "it is on record")
        database.execute(
            "ALTER TABLE walstream.violations ADD id bigint GENERATED ALWAYS AS IDENTITY,"
            " ADD origin text NOT NULL DEFAULT 'stream', ADD committed_at timestamptz,"
            " ADD keys jsonb, ADD old_keys jsonb, ADD changes bigint NOT NULL DEFAULT 1, ADD seqs jsonb"
        )
        database.execute("INSERT INTO walstream.migrations (version, name) VALUES (7, 'tamper_alarm')")
        database.execute("DELETE FROM agent_events WHERE seq = 2")
        stream.expect(("delete", 1), ("delete", 2))
        assert stream.column("old_keys") == [None, {"seq": "2"}]


@pytest.mark.slow
def test_a_change_that_is_not_visible_is_not_on_record(own_server: Callable[..., PostgresServer]) -> None:
    """Rule 2 holds for violations: with a synchronous standby away the change is streamed and visible to nobody. An
    erasure would not be seen yet, either."""
    server = own_server()
    place = _Place(server)
    stream = Alarmed(place)
    with stream.host(Recorder()):
        stream.insert("a", "b")
        stream.wait_ordered()
        server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        server.reload()
        eventually(lambda: server.execute("SHOW synchronous_standby_names") == [("nobody",)], "the setting")
        erased = (
            "DELETE FROM agent_events WHERE seq = 1;"
            "INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (1, 1, 'asked for');"
        )
        for change in (erased, "DELETE FROM agent_events WHERE seq = 2"):
            threading.Thread(target=place.execute, args=(change,), daemon=True).start()
            eventually(
                lambda: server.execute("SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"),
                "the commit waits",
            )
        time.sleep(1.0)
        assert stream.recorded() == []
        server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.reload()
        stream.expect(("delete", 2))


class _Place:
    """The database ``postgres`` of a server of our own."""

    name = "postgres"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.dsn = server.dsn()

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        return self._server.execute(sql, *args)


def test_to_halt_until_somebody_acknowledges(database: Database) -> None:
    stream = Alarmed(database, violations="halt")
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("a", "b")
        eventually(lambda: recorder.types == ["a", "b"], "what comes before")
        database.execute("DELETE FROM agent_events WHERE seq = 1")
        eventually(lambda: stream.recorded() == [("delete", 1)], "it is on record")
        stream.insert("behind")
        time.sleep(1.5)
        assert recorder.types == ["a", "b"], "nothing behind it is delivered"
        assert host.ingest is not None
        assert host.ingest.error is None, "the process goes on, and looks again"
        assert "ingest halts" in str(host.ingest.state.error)
        assert host.ingest.state.state == "halted"
        status = call("status", "--json", "--slot", stream.settings.slot, dsn=database.dsn).json
        assert status["ingest"]["state"] == "halted", "it has its lease: it is not away"
        assert any("ingest halts" in problem for problem in status["problems"])
        acknowledged = time.monotonic()
        ok("audit", "acknowledge", dsn=database.dsn)
        eventually(lambda: recorder.types == ["a", "b", "behind"], "it goes on")
        assert time.monotonic() - acknowledged < 30, "at once, not at the end of a pause that grows"
    assert stream.recorded() == [("delete", 1)]


def test_to_ignore(database: Database) -> None:
    stream = Alarmed(database, violations="ignore")
    with stream.host(Recorder()):
        stream.insert("a", "b")
        stream.wait_ordered()
        database.execute("DELETE FROM agent_events WHERE seq = 1")
        database.execute(INSERT.replace("(session_id", "(seq, session_id").replace("VALUES (", "VALUES (1, "), "again")
        stream.insert("afterwards")
        stream.wait_ordered_up_to_now()
        assert stream.recorded() == []
        assert len(stream.ordered()) == 3, "a seq that comes twice is no event all the same"


def test_ingest_of_a_halted_stream_does_not_even_begin(database: Database) -> None:
    stream = Alarmed(database, violations="halt")
    database.execute(
        "INSERT INTO walstream.violations (kind, commit_lsn, ordinal, seq, detail) VALUES ('delete', '0/5', 1, 1, '')"
    )
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("a")
        eventually(lambda: host.ingest is not None and "ingest halts" in str(host.ingest.state.error), "it halts")
        assert stream.ordered() == []
        ok("audit", "acknowledge", dsn=database.dsn)
        eventually(lambda: recorder.types == ["a"], "it begins")
