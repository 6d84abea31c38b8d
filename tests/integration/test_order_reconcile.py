"""The reconciler on a real server: what the slot did not deliver gets an offset, once, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.conftest import Database, Server
from tests.integration.order_bench import OrderBench, bench, module_database
from walstream.config import Columns, LedgerTable
from walstream.lsn import parse_lsn
from walstream.order.reconcile import MissingRow, fill, in_commit_order, missing_seqs, recovered_segments
from walstream.order.writer import OrderWriter, Tail
from walstream.postgres import PostgresServer
from walstream.source.connection import replication_connect


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Database]:
    with module_database(server, "reconcile") as made:
        yield made


@pytest.fixture
def order(shared: Database) -> Iterator[OrderBench]:
    with bench(shared.dsn) as made:
        made.create_ledger()
        yield made


def missing(
    order: OrderBench,
    writer: OrderWriter,
    wait: Callable[[int], None] | None = None,
    *,
    chunk: int = 20_000,
    floor_seq: int | None = None,
    after_seq: int | None = None,
    through_seq: int | None = None,
) -> list[int]:
    found = missing_seqs(
        order.connect(),
        order.ledger,
        writer.known,
        wait=wait,
        chunk=chunk,
        floor_seq=floor_seq,
        after_seq=after_seq,
        through_seq=through_seq,
    )
    return [seq for seqs in found for seq in seqs]


def read_all(order: OrderBench) -> list[int]:
    return [event.seq for event in order.reader().read(0, 100_000, 1 << 30).events]


def test_what_has_no_offset_is_found(order: OrderBench) -> None:
    seqs = order.insert(50)
    writer = order.writer()
    assert missing(order, writer) == seqs
    order.order(writer, seqs[30:40])
    order.order(writer, [*seqs[3:10], seqs[45]])
    rest = [seq for seq in seqs if seq not in {*seqs[30:40], *seqs[3:10], seqs[45]}]
    for chunk in (1, 7, 50, 1000):
        assert missing(order, writer, chunk=chunk) == rest
    assert missing(order, writer, floor_seq=seqs[20]) == [seq for seq in rest if seq > seqs[20]]
    assert missing(order, writer, floor_seq=seqs[2], after_seq=seqs[20], through_seq=seqs[41], chunk=3) == [
        seq for seq in rest if seqs[20] < seq <= seqs[41]
    ]


def test_seqs_at_the_edges(order: OrderBench) -> None:
    least, most = -(1 << 63), (1 << 63) - 1
    for seq in (least, most, 0):
        order.execute(
            "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
            " VALUES (%s, gen_random_uuid(), 'a', 'b', '{}')",
            seq,
        )
    writer = order.writer()
    assert missing(order, writer, chunk=1) == [least, 0, most]
    assert [segment.seqs for segment in fill(writer, order.connect(), order.ledger, [[least, 0, most]])] == [
        [least, 0, most]
    ]
    assert missing(order, writer, chunk=1) == []


def test_what_is_on_its_way_is_not_missing(order: OrderBench) -> None:
    """The protocol: look, take the position after that, wait for ingest to pass it, look again."""
    seqs = order.insert(10)
    writer = order.writer()
    order.order(writer, seqs[:4])
    waited: list[int] = []

    def ingest_catches_up(position: int) -> None:
        waited.append(position)
        end = parse_lsn(order.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        assert 0 < position <= end
        order.insert(3)  # committed after the first look: the slot delivers it later, so it is nobody's business here
        order.order(writer, [*seqs[5:8], seqs[4]])

    looked: list[int] = []

    def known(asked: Sequence[int]) -> set[int]:
        order.insert(1)  # moves the WAL: a position taken before the rows were read lies below
        looked.append(parse_lsn(order.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0]))
        return writer.known(asked)

    found = missing_seqs(order.connect(), order.ledger, known, wait=ingest_catches_up)
    assert list(found) == [seqs[8:]]
    assert len(waited) == 1
    assert waited[0] >= looked[0], "the position is taken after the look, so all that was seen lies before it"
    order.order(writer, missing(order, writer))
    assert missing(order, writer, waited.append) == []
    assert len(waited) == 1, "nothing to wait for"


def test_a_fill_is_ordered_flagged_and_repeatable(order: OrderBench) -> None:
    seqs = order.insert(25)
    writer = order.writer()
    streamed = order.order(writer, seqs[10:13], [3], partial_inserts=3)
    tail = writer.tail()
    source = missing_seqs(order.connect(), order.ledger, writer.known, wait=None, chunk=6)
    first = next(fill(writer, order.connect(), order.ledger, source, window=5))  # and then it "crashes"
    assert first.recovered
    assert (first.last_lsn, first.partial_inserts) == (streamed.last_lsn, 3), "the stream stands where it stood"
    heir = order.writer()
    again = missing_seqs(order.connect(), order.ledger, heir.known, wait=None, chunk=6)
    segments = list(fill(heir, order.connect(), order.ledger, again, window=5))
    assert sum(segment.events for segment in (first, *segments)) == 22
    assert heir.tail() == Tail(26, tail.last_lsn, tail.partial_lsn, 3, seqs[-1])
    assert read_all(order) == [*seqs[10:13], *seqs[:10], *seqs[13:]]
    events = order.reader().read(0, 100, 1 << 20).events
    assert [event.recovered for event in events] == [False] * 3 + [True] * 22
    assert {event.lsn for event in events[3:]} == {0}
    assert missing(order, heir) == []
    assert list(fill(heir, order.connect(), order.ledger, [])) == []


def test_transactions_stay_whole(order: OrderBench) -> None:
    seqs = [seq for count in (2, 1, 3) for seq in order.insert(count)]
    rows = in_commit_order(order.sql, order.ledger, [*seqs, 10_000])
    assert [row.seq for row in rows] == seqs, "a row that is gone is left out"
    assert all(200 > row.size > 60 for row in rows)
    (segment,) = recovered_segments(rows, Tail(1, 0, 0, 0, None), 1, 1)
    assert segment.tx_sizes == [2, 1, 3]


def test_segments_are_cut_between_transactions() -> None:
    rows = [MissingRow(seq, 10, seq // 4000, 0) for seq in range(36_000)]
    rows += [MissingRow(seq, 10, 77, 0) for seq in range(36_000, 61_000)]
    segments = list(recovered_segments(rows, Tail(8, 500, 500, 3, None), 8, 2))
    assert [segment.events for segment in segments] == [8_000] * 4 + [4_000, 10_000, 10_000, 5_000]
    offset = 8
    for segment in segments:
        segment.check()
        assert segment.first_offset == offset
        assert (segment.last_lsn, segment.partial_inserts) == (500, 3)
        offset = segment.next_offset
    assert [seq for segment in segments for seq in segment.seqs] == list(range(61_000))


def test_sizes_bound_the_rows(shared: Database) -> None:
    """All columns count, not the payload alone: a reader's memory is bounded by them."""
    ledger = LedgerTable(table="log %s", columns=Columns(seq='n"%s'))
    with bench(shared.dsn, ledger) as order:
        order.create_ledger()
        order.execute(
            'ALTER TABLE "log %s" ADD COLUMN note text, ADD COLUMN twice bigint GENERATED ALWAYS AS (1) STORED'
        )
        order.execute(
            'INSERT INTO "log %%s" (session_id, agent_id, event_type, payload, note)'
            " VALUES (gen_random_uuid(), 'a', 'b', '{}', repeat('é', %s))",
            100_000,
        )
        writer = order.writer()
        source = missing_seqs(order.connect(), ledger, writer.known, wait=None)
        (segment,) = fill(writer, order.connect(), ledger, source)
        assert (1 << segment.sizes[0]) - 1 > 200_000
        (event,) = order.reader().read(0, 10, 1 << 20).events
        assert event.extras["note"] == "é" * 100_000


def test_commit_times_decide_where_the_server_knows_them(own_server: Callable[..., PostgresServer]) -> None:
    """seq order is not commit order (C21); a row from before the tracking began has no time and goes first."""
    server = own_server(track_commit_timestamp=False, wal_writer_delay="10s", wal_writer_flush_after="1GB")
    with bench(server.dsn()) as order:
        order.create_ledger()
        (old,) = order.insert()
    server.settings = {**server.settings, "track_commit_timestamp": True}
    server.restart()
    with bench(server.dsn(), fresh=False) as order:
        slow = order.connect()
        slow.autocommit = False
        with slow.cursor() as cursor:
            cursor.execute(
                "INSERT INTO public.agent_events (session_id, agent_id, event_type, payload)"
                " SELECT gen_random_uuid(), 'a', 'b', '{}' FROM generate_series(1, 2) RETURNING seq"
            )
            early = [seq for (seq,) in cursor.fetchall()]
        between = order.insert(2)
        slow.commit()
        late = order.insert(1)
        assert early < between
        writer = order.writer()
        source = missing_seqs(order.connect(), order.ledger, writer.known, wait=None)
        segments = fill(writer, order.connect(), order.ledger, source)
        segment = next(segments)
        assert order.unflushed() <= 0, "rule 11: durable before anybody hears of it"
        assert list(segments) == []
        assert segment.seqs == [old, *between, *early, *late]
        assert segment.tx_sizes == [1, 2, 2, 1]
        assert segment.commit_times[0] == 0
        assert segment.commit_times[1:] == sorted(segment.commit_times[1:])
        events = order.reader().read(0, 10, 1 << 20).events
        assert events[0].committed_at is None
        ((committed,),) = order.execute(
            "SELECT pg_xact_commit_timestamp(xmin) FROM agent_events WHERE seq = %s", between[0]
        )
        assert events[1].committed_at == committed


def test_the_birth_of_a_slot_and_the_stream_meet(database: Database) -> None:
    """C60: rows from before, during and after; each gets exactly one offset."""
    with bench(database.dsn) as order:
        order.create_ledger()
        order.execute("CREATE PUBLICATION p FOR TABLE agent_events")
        before = order.insert(30)
        writer = order.writer()

        def fill_from(connection: object) -> list[int]:
            source = missing_seqs(connection, order.ledger, writer.known, wait=None)  # type: ignore[arg-type]
            return [seq for segment in fill(writer, connection, order.ledger, source) for seq in segment.seqs]  # type: ignore[arg-type]

        assert fill_from(order.connect()) == before
        rest = order.insert(4)  # while the long fill ran
        slot = f"{database.name}_birth"[-60:]
        replication = replication_connect(database.dsn, application_name="walstream:test")
        with replication.cursor() as cursor:
            cursor.execute(f'CREATE_REPLICATION_SLOT "{slot}" LOGICAL pgoutput')
            (_, _, snapshot, _) = cursor.fetchone() or ("", "", "", "")
            between = order.insert(2)  # after the slot's point, before its snapshot is read
            reader = order.connect()
            reader.autocommit = False
            with reader.cursor() as snapshotted:
                snapshotted.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                snapshotted.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
            assert fill_from(reader) == rest
            reader.rollback()
        replication.close()
        after = order.insert(3)
        streamed = [row[0] for row in order.streamed(slot, "p")]
        assert streamed == [*between, *after]
        assert writer.known(streamed) == set()
        order.order(writer, streamed)
        assert read_all(order) == [*before, *rest, *between, *after]
        assert missing(order, writer) == []


def test_a_slot_that_was_advanced_by_hand_loses_nothing(database: Database) -> None:
    """C26: the hole is found, and filled behind what came after it."""
    with bench(database.dsn) as order:
        order.create_ledger()
        order.execute("CREATE PUBLICATION p FOR TABLE agent_events")
        slot = f"{database.name}_hole"[-60:]
        order.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
        writer = order.writer()
        order.insert(2)
        order.order(writer, [row[0] for row in order.streamed(slot, "p")])
        hole = order.insert(3)
        order.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", slot)
        after = order.insert(2)

        def ingest_catches_up(_: int) -> None:
            order.order(writer, [row[0] for row in order.streamed(slot, "p")])

        assert missing(order, writer, ingest_catches_up) == hole
        list(fill(writer, order.connect(), order.ledger, [hole]))
        assert read_all(order)[2:] == [*after, *hole]
        assert missing(order, writer) == []
