"""Ingest end to end on a real server: the rules of ingest, one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg2
import pytest

from tests.conftest import Database
from walstream.errors import ExitCode, LedgerError
from walstream.postgres import PostgresServer

from .streams import INSERT, Installed, Recorder, eventually


def test_commit_order_decides_not_seq(database: Database) -> None:
    """C16, C20, C21: a lower seq that commits later comes later, a rolled-back one never; nobody waits for the gap."""
    stream = Installed(database)
    early, gone = database.connect(), database.connect()
    recorder = Recorder()
    with stream.host(recorder):
        early.cursor().execute(INSERT, ("early",))
        gone.cursor().execute(INSERT, ("gone",))
        gone.rollback()
        stream.insert("mid1", "mid2", "mid3")
        early.cursor().execute(INSERT, ("late",))
        early.commit()
        eventually(lambda: len(recorder.got) == 5, "five events")
    assert recorder.types == ["mid1", "mid2", "mid3", "early", "late"]
    assert [event.offset for event in recorder.got] == [1, 2, 3, 4, 5]
    assert recorder.got[3].seq < recorder.got[0].seq
    assert recorder.got[3].lsn == recorder.got[4].lsn, "one commit"
    committed = [event.committed_at for event in recorder.got]
    assert None not in committed
    assert committed == sorted(committed, key=str)


def test_rows_of_one_copy_share_an_lsn_and_are_all_delivered_once_across_restarts(database: Database) -> None:
    """C20, C22: the position is a commit's end, and what is ordered is skipped exactly."""
    stream = Installed(database)
    recorder = Recorder()
    for n in range(3):
        with stream.host(recorder):
            stream.insert(f"single{n}")
            database.execute(
                "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                " SELECT gen_random_uuid(), 'a', 'copy', '{}' FROM generate_series(1, 3)"
            )
            eventually(lambda n=n: len(recorder.got) == 4 * (n + 1), "all events")  # type: ignore[misc]
    assert [event.offset for event in recorder.got] == list(range(1, 13))
    assert stream.ordered() == stream.ledger()


def test_a_transaction_that_is_not_visible_is_not_delivered(own_server: Callable[..., PostgresServer]) -> None:
    """Rule 2: with a synchronous standby away the commit is streamed and visible to nobody."""
    server = own_server()
    place = Place(server)
    stream = Installed(place)
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("before")
        eventually(lambda: recorder.types == ["before"], "the first event")
        server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        server.reload()
        eventually(lambda: server.execute("SHOW synchronous_standby_names") == [("nobody",)], "the setting")
        writer = threading.Thread(target=stream.insert, args=("held",), daemon=True)
        writer.start()
        eventually(
            lambda: server.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"), "the commit waits"
        )
        # A second one that does not wait for the standby commits behind it, and has to wait for its turn all the same.
        connection = psycopg2.connect(place.dsn)
        with connection.cursor() as cur:
            cur.execute("SET synchronous_commit = local")
            cur.execute(INSERT, ("behind",))
        connection.commit()
        connection.close()
        time.sleep(1.0)
        assert place.execute("SELECT event_type FROM agent_events ORDER BY seq") == [("before",), ("behind",)]
        assert recorder.types == ["before"]
        assert len(stream.ordered()) == 1
        assert host.ingest is not None
        assert host.ingest.state.state == "streaming"
        server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.reload()
        writer.join(60)
        eventually(lambda: recorder.types == ["before", "held", "behind"], "the rest, in commit order")


def test_the_slot_is_confirmed_only_behind_the_flushed_order(own_server: Callable[..., PostgresServer]) -> None:
    """Rules 3 and 4: the order is lost with the server while the consumer lives, and comes again."""
    server = own_server(wal_writer_delay="10s")
    place = Place(server)
    stream = Installed(place)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("a", "b", "c")
        eventually(lambda: recorder.types == ["a", "b", "c"], "three events")
        assert len(stream.ordered()) == 3
        before = server.execute("SELECT pg_current_wal_flush_lsn() - '0/0'")[0][0]
        # Nothing flushes the order rows now: as long as that is so, their commits must not be confirmed.
        assert stream.confirmed() <= before
        server.restart("immediate")
        eventually(lambda: sorted(stream.ordered()) == stream.ledger(), "ordered again")
        stream.insert("d")
        eventually(lambda: recorder.types[-1] == "d", "it goes on")
    assert stream.ordered() == stream.ledger()
    offsets = {event.seq: event.offset for event in recorder.got}
    assert offsets == {seq: offset for offset, seq in enumerate(stream.ordered(), 1)}, "the same offsets as before"


def test_a_large_transaction_is_ordered_in_pieces_that_say_how_far_they_got(database: Database) -> None:
    """Rule 5."""
    stream = Installed(database, chunk_bytes=64 * 1024)
    recorder = Recorder()
    with stream.host(recorder):
        database.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " SELECT gen_random_uuid(), 'a', 'big', jsonb_build_object('n', n) FROM generate_series(1, 60000) n"
        )
        stream.insert("after")
        eventually(lambda: len(recorder.got) == 60_001, "all of it")
    partial = [segment.partial_inserts for segment in stream.segments() if segment.partial_inserts]
    assert len(partial) > 2
    assert partial == sorted(set(partial))
    assert stream.ordered() == stream.ledger()
    assert [event.offset for event in recorder.got] == list(range(1, 60_002))


def test_a_seq_that_comes_twice_is_a_violation(database: Database) -> None:
    """Rule 6: TRUNCATE … RESTART IDENTITY gives the seqs a second time."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("old1", "old2")
        eventually(lambda: recorder.types == ["old1", "old2"], "two events")
        database.execute("TRUNCATE agent_events RESTART IDENTITY")
        stream.insert("new1", "new2", "new3")
        eventually(lambda: recorder.types[-1] == "new3", "the third, whose seq is new")
    assert recorder.types == ["old1", "old2", "new3"]
    assert stream.ordered() == [1, 2, 3]
    kinds = database.execute(
        "SELECT kind, seq FROM walstream.violations WHERE origin = 'stream' ORDER BY commit_lsn, ordinal DESC"
    )
    assert kinds == [("truncate", None), ("duplicate-seq", 1), ("duplicate-seq", 2)]


def test_a_row_that_moves_between_partitions_is_no_new_event(database: Database) -> None:
    """Rule 6, and C15."""
    database.execute(
        "CREATE TABLE agent_events (seq bigserial, session_id uuid NOT NULL, agent_id text NOT NULL,"
        " event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),"
        " PRIMARY KEY (seq, created_at)) PARTITION BY RANGE (created_at);"
        "CREATE TABLE leaf_default PARTITION OF agent_events DEFAULT;"
        "CREATE TABLE leaf_2020 PARTITION OF agent_events FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')"
    )
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("first")
        database.execute("UPDATE agent_events SET created_at = '2020-05-05' WHERE event_type = 'first'")
        database.execute(
            "CREATE TABLE leaf_new PARTITION OF agent_events FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')"
        )
        database.execute(
            INSERT.replace("payload)", "payload, created_at)").replace("'{}')", "'{}', '2030-02-02')"), "x"
        )
        eventually(lambda: len(recorder.got) == 2, "the second, in a partition that is new")
    assert recorder.types == ["first", "x"]
    assert [seq for (seq,) in database.execute("SELECT seq FROM walstream.violations")] == [recorder.got[0].seq]


def test_an_idle_ledger_in_a_busy_database_advances_the_slot_and_writes_no_order(database: Database) -> None:
    """Rule 10, C44."""
    stream = Installed(database, idle_persist_seconds=0.2)
    database.execute("CREATE TABLE elsewhere (t text)")
    with stream.host(Recorder()):
        stream.insert("one")
        eventually(lambda: len(stream.ordered()) == 1, "one event")
        for _ in range(3):
            database.execute("INSERT INTO elsewhere SELECT repeat('x', 500) FROM generate_series(1, 4000)")
        goal = database.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")[0][0]
        eventually(lambda: stream.confirmed() >= goal, "the slot has passed what others wrote")
    assert len(stream.segments()) == 1
    confirmed, known = database.execute(
        "SELECT (SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s) <= confirmed_lsn, state"
        " FROM walstream.ingest",
        stream.settings.slot,
    )[0]
    assert confirmed, "an idle position is written down before it is confirmed"
    assert known == "stopped"


def test_rows_that_the_slot_did_not_deliver_are_recovered(database: Database) -> None:
    """Rule 11, C26: somebody reads the slot by hand while nobody runs."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("before")
        eventually(lambda: recorder.types == ["before"], "one event")
    stream.insert("hole1", "hole2")
    database.execute(
        "SELECT count(*) FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'walstream')",
        stream.settings.slot,
    )
    stream.insert("after")
    with stream.host(recorder):
        eventually(lambda: len(recorder.got) == 4, "all four")
    assert sorted(recorder.types) == ["after", "before", "hole1", "hole2"]
    assert {event.event_type for event in recorder.got if event.recovered} == {"hole1", "hole2"}
    assert [event.offset for event in recorder.got] == [1, 2, 3, 4]
    assert database.execute("SELECT recovered FROM walstream.ingest") == [(2,)]


def test_a_table_that_was_swapped_is_noticed_while_it_runs(database: Database) -> None:
    """C37: connected, healthy and deaf is not an option."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("one")
        eventually(lambda: recorder.types == ["one"], "one event")
        database.execute(
            "CREATE TABLE agent_events_new (LIKE agent_events INCLUDING ALL);"
            "ALTER TABLE agent_events RENAME TO agent_events_old;"
            "ALTER TABLE agent_events_new RENAME TO agent_events"
        )
        stream.insert("lost?")
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, LedgerError)
        assert "another table" in str(host.error)
        assert host.exit_code == ExitCode.DATA
    assert recorder.types == ["one"]
    (state, error) = database.execute("SELECT state, error FROM walstream.ingest")[0]
    assert (state, "another table" in error) == ("failed", True)


def test_a_column_that_is_renamed_stops_it_and_nothing_is_lost(database: Database) -> None:
    """C10: fixed by configuration, the events since then come."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("one")
        eventually(lambda: recorder.types == ["one"], "one event")
        database.execute("ALTER TABLE agent_events RENAME COLUMN payload TO body")
        database.execute(INSERT.replace("payload", "body"), "two")
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, LedgerError)
        assert "payload" in str(host.error)
    columns = stream.settings.ledger.columns.model_copy(update={"payload": "body"})
    mapped = stream.settings.ledger.model_copy(update={"columns": columns})
    database.execute("ALTER TABLE agent_events ADD COLUMN trace_id text DEFAULT 'd'")
    database.execute(INSERT.replace("payload", "body"), "three")
    with stream.host(recorder, ledger=mapped):
        eventually(lambda: recorder.types == ["one", "two", "three"], "the others")
    assert recorder.got[2].extras == {"trace_id": "d"}


def test_prepared_transactions_come_once_when_they_commit(database: Database) -> None:
    """C29."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        connection = database.connect()
        connection.cursor().execute(INSERT, ("prepared",))
        connection.cursor().execute(f"PREPARE TRANSACTION '{database.name}'")
        stream.insert("later")
        eventually(lambda: recorder.types == ["later"], "only the one that committed")
        database.execute(f"COMMIT PREPARED '{database.name}'")
        eventually(lambda: recorder.types == ["later", "prepared"], "the prepared one, at its commit")


def test_savepoints_that_were_rolled_back_are_no_events(database: Database) -> None:
    """C28, with a transaction that is larger than logical_decoding_work_mem."""
    stream = Installed(database)
    recorder = Recorder()
    many = INSERT.replace("VALUES (", "SELECT ").removesuffix(")") + " FROM generate_series(1, 500)"
    with stream.host(recorder):
        connection = database.connect()
        with connection.cursor() as cur:
            cur.execute(many, ("keep",))
            cur.execute("SAVEPOINT s")
            cur.execute(many, ("gone",))
            cur.execute("ROLLBACK TO SAVEPOINT s")
            cur.execute(INSERT, ("last",))
        connection.commit()
        eventually(lambda: recorder.types[-1:] == ["last"], "all of it")
    assert recorder.types == ["keep"] * 500 + ["last"]


def test_a_second_host_stands_by_and_takes_over(database: Database) -> None:
    """C52: one works, one waits; the late write of the first is refused."""
    stream = Installed(database)
    first, second = Recorder(), Recorder()
    with stream.host(first) as one:
        stream.insert("a")
        eventually(lambda: first.types == ["a"], "the first works")
        with stream.host(second) as two:
            assert two.ingest is not None
            eventually(lambda: two.ingest is not None and two.ingest.state.state == "standby", "the second stands by")
            one.stop()
            stream.insert("b")
            eventually(lambda: second.types == ["b"], "the second took over")
    assert first.types == ["a"]
    assert stream.ordered() == stream.ledger()


@pytest.mark.parametrize("victim", ["walsender", "control"])
def test_it_goes_on_after_a_backend_was_terminated(database: Database, victim: str) -> None:
    """C50: whatever psycopg2 says about the connection."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("a")
        eventually(lambda: recorder.types == ["a"], "the first event")
        eventually(
            lambda: database.execute(f"SELECT 1 FROM walstream.ingest WHERE {victim}_pid IS NOT NULL"), "it is known"
        )
        database.execute(f"SELECT pg_terminate_backend({victim}_pid) FROM walstream.ingest")
        stream.insert("b")
        eventually(lambda: recorder.types == ["a", "b"], "the second event")
    assert stream.ordered() == stream.ledger()
    assert database.execute("SELECT generation > 1 FROM walstream.ingest") == [(True,)]


class Place:
    """The database ``postgres`` of a server of one's own."""

    name = "place"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    @property
    def dsn(self) -> str:
        return self._server.dsn()

    def execute(self, sql: str, *args: object) -> list[tuple[object, ...]]:
        return self._server.execute(sql, *args)
