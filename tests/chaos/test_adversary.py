"""Faults that a hostile reader of the code found, each as the shortest run of events that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database
from tests.integration.streams import INSERT, Installed, Recorder, eventually
from tests.runner_world import World
from walstream import Context, Event
from walstream.config import Columns, Settings
from walstream.engine import ingest_supervisor, reconciler
from walstream.engine.duty import Duty
from walstream.engine.host import Host
from walstream.engine.ingest_supervisor import Ports
from walstream.engine.intake import Intake, Resume
from walstream.engine.leadership import Lease
from walstream.engine.order_store import FencedStore
from walstream.engine.violations import Violation
from walstream.errors import ConfigError, ConnectionLost, Fenced, LedgerError
from walstream.order.compaction import Compactor
from walstream.order.segment import Segment
from walstream.order.table import segments_with_seqs_between
from walstream.postgres import PostgresServer
from walstream.source.connection import connect
from walstream.source.failures import classify
from walstream.source.preflight import preflight
from walstream.source.stream import ReplicationStream
from walstream.testing import FaultyProjector, wire
from walstream.testing.scripted import ScriptedStream
from walstream.wiring import SourceSlots


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    made = World(database)
    yield made
    made.close()


def order_one_by_one(world: World, seqs: range) -> None:
    """A segment for each, as ingest writes them at a low rate; the ledger's rows are not looked at."""
    for offset, seq in enumerate(seqs, world.writer.tail().next_offset):
        world.writer.append(
            Segment(offset, [seq], [1], [seq * 100], [1], b"\x06", seq * 100 + 50, None, False, generation=0)
        )


def test_a_search_for_seqs_survives_compaction_between_its_pages(world: World) -> None:
    """Else an insert that comes again (rule 6) would look new, and get a second offset."""
    order_one_by_one(world, range(1, 251))
    search = segments_with_seqs_between(world.connection, "walstream", 1, 250)
    found = list(next(search).seqs)  # the first page is read
    beside = world.beside()
    try:
        assert Compactor(beside.connection, "walstream", 0).run() == 1
    finally:
        beside.connection.close()
    for segment in search:
        found += segment.seqs
    assert set(found) == set(range(1, 251))


def test_who_stood_by_during_an_adoption_works_under_the_new_identity(database: Database) -> None:
    """Else it gives new events the keys of lost ones, and receivers take them for repetitions."""
    stream = Installed(database)
    holder = database.connect()
    holder.autocommit = True
    lease = Lease.for_ingest("walstream", owner="another", seconds=60)
    recorder = Recorder()
    with holder.cursor() as cur:
        assert lease.acquire(cur) is not None
        with stream.host(recorder) as host:
            assert host.ingest is not None
            eventually(lambda: host.ingest and host.ingest.state.state == "standby", "it stands by")
            cur.execute("BEGIN; UPDATE walstream.identity SET epoch = 7")
            lease.release(cur)
            cur.execute("COMMIT")
            stream.insert("one")
            eventually(lambda: recorder.got, "the event")
    assert recorder.got[0].key.split(":")[1:] == ["7", "1"]


def test_keys_follow_an_adoption_beneath_a_reader_that_lives_on(world: World) -> None:
    """A process that only runs projectors holds no lease, so nothing fences it when the epoch rises."""
    reader = world.cold()
    world.add("before")
    (first,) = reader.read(0, 10, 1 << 20).events
    world.execute("UPDATE walstream.identity SET epoch = epoch + 1")
    world.add("after")
    (second,) = reader.read(1, 10, 1 << 20).events
    assert [event.key.split(":")[1] for event in (first, second)] == ["1", "2"]


def test_a_moved_slot_is_remembered_until_the_whole_ledger_was_compared(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session confirms further than the slot had been moved, and dies before its comparison."""
    stream = Installed(database, idle_persist_seconds=0.1)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.types == ["one"], "the event")
    database.execute("UPDATE walstream.ingest SET proven_seq = 1000")
    database.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " VALUES (500, gen_random_uuid(), 'a', 'missed', '{}')"
    )
    database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", stream.settings.slot)
    moved_to = stream.confirmed()

    def cut(*_: object, **__: object) -> None:
        raise ConnectionLost("the comparison is cut short")

    confirmed = "SELECT confirmed_lsn - '0/0' FROM walstream.ingest"
    with monkeypatch.context() as patch:
        patch.setattr(reconciler, "missing_seqs", cut)
        with stream.host(recorder):
            eventually(lambda: (database.execute(confirmed)[0][0] or 0) > moved_to, "the position goes on")
    with stream.host(recorder):
        stream.wait_ordered()


def test_two_slow_starts_do_not_take_turns_for_ever(database: Database) -> None:
    """Each start takes longer than a lease: who was first must be left to finish it."""
    stream = Installed(database)
    settings = stream.settings.model_copy(update={"lease_seconds": 1})

    def slow(settings: Settings, connection: Connection) -> bool:
        time.sleep(2)
        return preflight(settings, connection).slot_moved

    recorders = Recorder(), Recorder()
    hosts = [Host(settings, [recorder], Ports(slow, ReplicationStream.open, SourceSlots())) for recorder in recorders]
    try:
        for host in hosts:
            host.start()
        stream.insert("one")
        eventually(lambda: any(recorder.got for recorder in recorders), "the event")
        assert database.execute("SELECT generation FROM walstream.generation") == [(2,)], "init's, and one take-over"
    finally:
        for host in hosts:
            host.stop()


def test_what_came_before_an_undecodable_change_is_ordered(database: Database) -> None:
    """It came in the same breath, and would wait, unordered, until somebody corrects what came after it."""
    stream = Installed(database)
    database.execute("ALTER TABLE agent_events ALTER COLUMN agent_id DROP NOT NULL")
    stream.insert("good")
    database.execute(INSERT.replace("'a'", "NULL"), "bad")
    recorder = Recorder()
    with stream.host(recorder) as host:
        eventually(lambda: host.wait(0), "it ends at the second row")
        assert isinstance(host.error, LedgerError)
        assert "agent_id" in str(host.error)
    assert stream.ordered() == [1]


def test_a_login_without_statistics_sees_that_its_walsender_is_at_work(database: Database) -> None:
    """With the grants of `init` it has neither position nor reply: a long decoding looked like a dead connection."""
    role = f"plain_{database.name[-8:]}"
    database.execute(f"CREATE TABLE other (n int); CREATE PUBLICATION nothing; CREATE ROLE {role} LOGIN REPLICATION")
    try:
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", database.name)
        database.execute("INSERT INTO other SELECT generate_series(1, 100000)")
        dsn = database.server.dsn(database.name, user=role)
        settings = Settings(dsn=dsn, slot=database.name, publication="nothing")
        looking = connect(dsn, application_name="test")
        with ReplicationStream.open(settings, start_lsn=0, generation=1) as stream:
            busy = [stream.progress(looking) for _ in range(2)]
            eventually(lambda: stream.progress(looking) == stream.progress(looking), "it has nothing to do any more")
        looking.close()
    finally:
        database.execute(f"DROP ROLE {role}")
    assert None not in busy
    assert busy[0] != busy[1]


def test_lanes_are_not_rewritten_below_the_last_commit_of_a_replaced_runner(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the middle of its commit when it was replaced; what it did must not be done again."""
    world.add("a", "b", "c")
    first = world.start(FaultyProjector("p"))
    eventually(lambda: world.reached("p", 3), "the first three")
    assert first.stop(5)
    world.add("d", "e")
    levelled = Duty.wait_for_lanes

    def commit_late(duty: Duty) -> None:
        levelled(duty)
        if len(duty.lanes) == 1:
            monkeypatch.undo()
            database.execute("UPDATE walstream.cursors SET position = 5 WHERE position = 3")

    monkeypatch.setattr(Duty, "wait_for_lanes", commit_late)
    second = FaultyProjector("p", lanes=2)
    world.start(second)
    eventually(lambda: world.positions("p") == [5, 5], "two lanes")
    assert second.done == []


def test_a_reload_does_not_shorten_the_timeout_beneath_an_open_stream(
    own_server: Callable[..., PostgresServer],
) -> None:
    """Rule 9 is a matter of times that are agreed upon at the start: feedback leaves before the server asks for it."""
    server = own_server()
    server.execute("CREATE PUBLICATION nothing")
    server.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    settings = Settings(dsn=server.dsn(), slot="s", publication="nothing")
    with ReplicationStream.open(settings, start_lsn=0, generation=1):
        server.execute("ALTER SYSTEM SET wal_sender_timeout = '300ms'")
        server.reload()
        eventually(lambda: server.execute("SHOW wal_sender_timeout") == [("300ms",)], "the setting")
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # nothing is read and nothing is sent: the old timeout is far away
            assert server.execute("SELECT active FROM pg_replication_slots") == [(True,)]


def test_rows_of_a_partition_that_is_attached_are_found_below_what_was_proven(database: Database) -> None:
    """They were loaded into a table of its own, with seqs that were drawn long ago, and no slot ever sends them."""
    database.execute(
        "CREATE TABLE agent_events (seq bigserial, session_id uuid NOT NULL,"
        " agent_id text NOT NULL, event_type text NOT NULL, payload jsonb NOT NULL,"
        " created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (seq, created_at))"
        " PARTITION BY RANGE (created_at);"
        "CREATE TABLE present PARTITION OF agent_events FOR VALUES FROM ('2020-01-01') TO (MAXVALUE);"
        "CREATE TABLE past (LIKE agent_events INCLUDING ALL)"
    )
    insert = "INSERT INTO past VALUES (%s, gen_random_uuid(), 'a', 'old', '{}', '2010-01-01')"
    stream = Installed(database)
    recorder = Recorder()
    attach = "ALTER TABLE agent_events ATTACH PARTITION {} FOR VALUES FROM ('{}') TO ('{}')"
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.types == ["one"], "the event")
        database.execute("UPDATE walstream.ingest SET proven_seq = 1000")
    database.execute(insert, 500)
    database.execute(attach.format("past", "2010-01-01", "2015-01-01"))
    with stream.host(recorder):
        eventually(lambda: recorder.types == ["one", "old"], "the row that was attached")


def test_a_seq_of_somebody_s_choice_proves_nothing_about_those_below(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row with a seq far above the sequence's: all that came later was below what counted as proven, so what the
    slot missed was never found again."""
    monkeypatch.setattr(ingest_supervisor, "_RECONCILE_SECONDS", 0.2)
    stream = Installed(database)
    recorder = Recorder()
    insert = (
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " VALUES (1000000, gen_random_uuid(), 'a', 'chosen', '{}')"
    )
    with stream.host(recorder):
        database.execute(insert)
        proven = "SELECT proven_seq FROM walstream.ingest"
        eventually(lambda: database.execute(proven) == [(1000000,)], "the proof")
    database.execute("ALTER PUBLICATION walstream DROP TABLE agent_events")
    stream.insert("missed")
    database.execute("ALTER PUBLICATION walstream ADD TABLE agent_events")
    stream.insert("seen")
    with stream.host(recorder):
        eventually(lambda: "seen" in recorder.types, "the row that the slot delivers")
        eventually(lambda: "missed" in recorder.types, "the row that it does not")


def test_a_flood_of_violations_is_held_back_like_rows_and_written_many_at_once(world: World) -> None:
    """A migration that updates every row: they took all memory, and their writing more than the lease."""
    intake = Intake(Columns(), lambda _: True, key_prefix="l:1", resume=Resume(), chunk_bytes=1 << 20)
    update = b"U" + (1).to_bytes(4, "big") + wire.event(7)[5:]
    for message in (wire.begin(100), wire.relation(), *[update] * 3000, wire.commit(100, 130)):
        intake.handle(message, 7)
    burst = intake.take()
    assert burst is not None
    assert len(burst.violations) == 1001  # the first thousand one by one, the others in a stretch
    assert burst.nbytes >= 1000 * 200
    lease = Lease.for_ingest("walstream", owner="o", seconds=10)
    store = FencedStore(
        world.writer, world.connection, "walstream", lease, ScriptedStream(), classify, idle_persist_seconds=1
    )
    for _ in range(2):  # they come again after a resend
        store.record_violations(burst.violations)
    assert world.execute(
        "SELECT count(*), sum(changes), count(DISTINCT xmin::text), min(seq) FROM walstream.violations"
    ) == [(1001, 3000, 1, 7)]
    lease.generation = 99
    with pytest.raises(Fenced):
        store.announce(nothing_proven=False)
    store.record_violations([Violation("update", 200, 1, None, 5, "")])
    assert world.execute("SELECT count(*) FROM walstream.violations") == [(1001,)]


def test_rows_in_the_table_s_former_shape_are_ordered_by_their_seq_alone(database: Database) -> None:
    """A migration as it is usually done: stop the consumer, rename, correct the mapping, start. Writers go on."""
    stream = Installed(database, chunk_bytes=64 * 1024)
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT gen_random_uuid(), 'a', 'old', to_jsonb(n) FROM generate_series(1, 300) AS n"
    )
    database.execute("ALTER TABLE agent_events RENAME COLUMN payload TO body")
    database.execute(INSERT.replace("payload", "body"), "new")
    columns = stream.settings.ledger.columns.model_copy(update={"payload": "body"})
    recorder = Recorder()
    with stream.host(recorder, ledger=stream.settings.ledger.model_copy(update={"columns": columns})):
        eventually(lambda: len(recorder.got) == 301, "all of them")
    assert [event.payload for event in recorder.got] == [*range(1, 301), {}]
    assert [event.recovered for event in recorder.got] == [False] * 301
    assert len({event.lsn for event in recorder.got}) == 2, "two commits"


@pytest.mark.parametrize("column", ["session_id", "payload"])
def test_a_cold_row_without_what_an_event_needs_is_an_alarm_and_no_event(world: World, column: str) -> None:
    """As it is hot. An event with a hole ended the whole process, again at every start."""
    world.add("good")
    world.execute(f"ALTER TABLE agent_events ALTER COLUMN {column} DROP NOT NULL")
    seqs = world.insert("bad")
    world.execute(f"UPDATE agent_events SET {column} = NULL WHERE seq = %s", seqs[0])
    world.order(seqs)
    reader = world.cold()
    with pytest.raises(LedgerError, match=f"'{column}'.* NULL .*seq {seqs[0]}"):
        reader.read(1, 10, 1 << 20)
    world.execute(
        f"UPDATE agent_events SET {column} = good.{column} FROM agent_events AS good WHERE good.seq < %s", seqs[0]
    )
    assert len(reader.read(0, 10, 1 << 20).events) == 2


def test_a_lost_connection_that_a_projector_reports_in_its_own_words_ends_no_process(world: World) -> None:
    """As SQLAlchemy does: what it raises is no error of the driver."""

    class Wrapping(FaultyProjector):
        transactional = True

        def effect(self, event: Event, ctx: Context) -> None:
            if self.tries.count(event.offset) == 1:
                try:
                    ctx.cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
                except psycopg2.Error as error:
                    raise ValueError("the engine is disposed") from error

    projector = Wrapping("p")
    group = world.start(projector)
    world.add("a")
    eventually(lambda: world.reached("p", 1) or group.error, "the event")
    assert group.error is None
    assert projector.tries == [1, 1]
    assert world.parked("p") == []


def test_a_batch_may_take_its_deadline_whatever_the_database_allows_a_transaction(world: World) -> None:
    """Else it is tried again for ever: a session that the server ends looks like a lost one, which is no attempt."""
    if world.connection.server_version < 170000:
        pytest.skip("transaction_timeout came with 17")

    class Slow(FaultyProjector):
        transactional = True

        def effect(self, event: Event, ctx: Context) -> None:
            super().effect(event, ctx)
            ctx.cursor.execute("SELECT pg_sleep(0.8)")

    world.execute(f"ALTER DATABASE {world.database.name} SET transaction_timeout = '500ms'")
    world.start(Slow("p"))
    world.add("a")
    eventually(lambda: world.reached("p", 1), "it is done")


def test_generated_columns_are_not_streamed_for_they_are_not_read_cold(database: Database) -> None:
    """Else an event would have one more column while it is fresh than in every replay."""
    stream = Installed(database)
    database.execute("ALTER TABLE agent_events ADD COLUMN half bigint GENERATED ALWAYS AS (seq / 2) STORED")
    if int(database.execute("SHOW server_version_num")[0][0]) < 180000:
        pytest.skip("publish_generated_columns came with 18")
    database.execute("ALTER PUBLICATION walstream SET (publish_generated_columns = stored)")
    with stream.host() as host:
        eventually(lambda: host.wait(0), "it refuses")
        assert isinstance(host.error, ConfigError)
        assert "publish_generated_columns = none" in host.error.hint
    database.execute("ALTER PUBLICATION walstream SET (publish_generated_columns = none)")
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.got, "the event")
    assert recorder.got[0].extras == {}
