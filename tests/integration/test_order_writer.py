"""The writer of the order on a real server: fencing, visibility, durability."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg2
import pytest

from tests.conftest import Database, Server
from tests.integration.order_bench import OrderBench, bench, module_database, until
from walstream.config import quote
from walstream.errors import ConfigError, Fenced, LedgerError, WalstreamError
from walstream.order.compaction import Compactor
from walstream.order.segment import Segment, encode_body
from walstream.order.wake import Notifier
from walstream.order.writer import OrderWriter, Tail
from walstream.postgres import PostgresServer


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Database]:
    with module_database(server, "writer") as made:
        yield made


@pytest.fixture
def order(shared: Database) -> Iterator[OrderBench]:
    with bench(shared.dsn, namespace='my "order"') as made:
        made.create_ledger()
        yield made


def rows_of(order: OrderBench) -> list[tuple[int, int]]:
    return order.execute(f"SELECT first_offset, events FROM {quote(order.namespace)}.commit_order ORDER BY 1")


def open_transaction(order: OrderBench) -> tuple[psycopg2.extensions.connection, int]:
    """A transaction that runs, and its id."""
    connection = order.connect()
    connection.autocommit = False
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::bigint")
        (xid,) = cursor.fetchone() or (0,)
    return connection, xid


def finished_transaction(order: OrderBench) -> int:
    """The id of a transaction that is over."""
    return int(order.execute("SELECT pg_current_xact_id()::text::bigint")[0][0])


def waits_for_lock(order: OrderBench, connection: psycopg2.extensions.connection) -> bool:
    pid = connection.info.backend_pid
    return bool(order.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", pid))


def test_the_tail_follows_what_is_appended(order: OrderBench) -> None:
    writer = order.writer()
    assert writer.tail() == Tail(1, 0, 0, 0, None)
    first = order.order(writer, [10, 12, 11], [2, 1])
    assert writer.tail() == Tail(4, first.last_lsn, 0, 0, 12)
    partial = order.order(writer, [13, 14], [2], partial_inserts=2)
    assert writer.tail() == Tail(6, partial.last_lsn, partial.last_lsn, 2, 14)
    assert partial.last_lsn == partial.commit_lsns[-1]
    # A recovered segment repeats where the stream stands, so a commit that goes on goes on behind it, too.
    order.order(writer, [5], recovered=True, partial_inserts=2)
    assert writer.tail() == Tail(7, partial.last_lsn, partial.last_lsn, 2, 14)
    assert OrderWriter(order.connect(), order.namespace, 1).tail() == writer.tail()


def test_offsets_must_continue_the_order(order: OrderBench) -> None:
    writer = order.writer()
    segment = order.order(writer, [1, 2])
    with pytest.raises(LedgerError, match="does not continue"):
        writer.append(segment)
    # A writer that never asked for the tail meets the primary key.
    blind = OrderWriter(order.connect(), order.namespace, writer.generation)
    with pytest.raises(LedgerError, match="offset 1 is given already"):
        blind.append(segment)
    with pytest.raises(ValueError, match="1 to"):
        blind.append(Segment(3, [], [], [], [], b"", 0, None, False, 1))
    assert rows_of(order) == [(1, 2)]


def test_a_writer_needs_autocommit_and_the_schema(order: OrderBench, shared: Database) -> None:
    with pytest.raises(ValueError, match="autocommit"):
        OrderWriter(shared.connect(), order.namespace, 1)
    elsewhere = OrderWriter(order.connect(), "nowhere", 1)
    for call in (elsewhere.tail, lambda: elsewhere.known([1])):
        with pytest.raises(ConfigError, match="nowhere") as caught:
            call()
        assert "walstream init" in caught.value.hint


@pytest.mark.parametrize("durable", [False, True])
def test_a_replaced_generation_writes_nothing(order: OrderBench, durable: bool) -> None:
    zombie = order.writer()
    order.order(zombie, [1, 2])
    heir = order.writer()
    with pytest.raises(Fenced, match=f"generation {zombie.generation}"):
        order.order(zombie, [3], durable=durable)
    order.order(heir, [3], durable=durable)
    assert rows_of(order) == [(1, 2), (3, 1)]


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
@pytest.mark.parametrize("durable", [False, True])
def test_an_append_waits_for_a_take_over_and_then_fails(order: OrderBench, isolation: str, durable: bool) -> None:
    """Rule 7, the race: without FOR SHARE the append reads the old generation and commits behind the take-over."""
    connection = order.connect(synchronous_commit="off", default_transaction_isolation=isolation)
    zombie = OrderWriter(connection, order.namespace, order.take_over())
    order.order(zombie, [1])
    heir = order.connect()
    heir.autocommit = False
    with heir.cursor() as cursor:
        cursor.execute(f"UPDATE {quote(order.namespace)}.generation SET generation = generation + 1")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(order.order, zombie, [2], durable=durable)
        until(lambda: waits_for_lock(order, connection), "the append waits for the take-over")
        heir.commit()
        with pytest.raises(Fenced):
            late.result(60)
    assert rows_of(order) == [(1, 1)]


def test_a_take_over_waits_for_an_append_and_sees_it(order: OrderBench) -> None:
    """The other way round: whoever took over never computes its first offset before the last append is decided."""
    schema = quote(order.namespace)
    connection = order.connect(synchronous_commit="off")
    writer = OrderWriter(connection, order.namespace, order.take_over())
    blocker = order.connect()
    blocker.autocommit = False
    with blocker.cursor() as cursor:  # the same offset, undecided: the append stops at the primary key
        cursor.execute(
            f"INSERT INTO {schema}.commit_order (first_offset, events, last_lsn, min_seq, max_seq, generation, body)"
            " VALUES (1, 1, '0/1', 1, 1, 0, '')"
        )
    with ThreadPoolExecutor(2) as pool:
        append = pool.submit(order.order, writer, [7])
        until(lambda: waits_for_lock(order, connection), "the append waits for the blocker")
        heir = order.connect()

        def take_over() -> Tail:
            with heir.cursor() as cursor:
                cursor.execute(f"UPDATE {schema}.generation SET generation = generation + 1 RETURNING generation")
                (generation,) = cursor.fetchone() or (0,)
            return OrderWriter(heir, order.namespace, generation).tail()

        tail = pool.submit(take_over)
        until(lambda: waits_for_lock(order, heir), "the take-over waits for the append")
        blocker.rollback()
        append.result(60)
        assert tail.result(60).next_offset == 2


def test_a_zombie_after_compaction_is_refused(order: OrderBench) -> None:
    """The primary key alone would let it in: the offset it wants is no row's first any more."""
    zombie = order.writer()
    for seq in range(1, 10):
        order.order(zombie, [seq])
    late = Segment(10, [99], [1], [1], [1], b"\x0a", 1, None, False, zombie.generation)
    heir = order.writer()
    for seq in range(10, 20):
        order.order(heir, [seq])
    connection = order.connect()
    assert Compactor(connection, order.namespace, heir.generation, min_run=2).run() == 1
    assert rows_of(order) == [(1, 18), (19, 1)]
    with pytest.raises(Fenced):
        zombie.append(late)
    assert rows_of(order) == [(1, 18), (19, 1)]


def test_a_snapshot_tells_finished_from_running(order: OrderBench) -> None:
    writer = order.writer()
    open_one, running = open_transaction(order)
    finished = finished_transaction(order)
    assert finished > running
    snapshot = writer.snapshot()
    assert snapshot.shows_finished(finished & 0xFFFFFFFF)
    assert not snapshot.shows_finished(running & 0xFFFFFFFF)
    assert not snapshot.shows_finished(snapshot.xmax & 0xFFFFFFFF)
    open_one.commit()
    assert writer.snapshot().shows_finished(running & 0xFFFFFFFF)


def test_a_segment_is_written_only_if_its_transactions_are_finished(order: OrderBench) -> None:
    """Question and row in one statement. The newer transaction is finished while the older one runs."""
    writer = order.writer()
    open_one, running = open_transaction(order)
    finished = finished_transaction(order)
    first = order.segment(writer, [7])
    assert not writer.append_if_finished(first, [finished]), "it cannot tell yet what the ids are in full"
    ahead = writer.snapshot().xmax
    for xids in ([running], [finished, running], [finished, ahead]):
        assert not writer.append_if_finished(first, [xid & 0xFFFFFFFF for xid in xids])
    assert rows_of(order) == []
    assert writer.append_if_finished(first, [finished & 0xFFFFFFFF])
    assert rows_of(order) == [(1, 1)]
    open_one.commit()
    second = order.segment(writer, [8, 9])
    assert writer.append_if_finished(second, [running & 0xFFFFFFFF, finished & 0xFFFFFFFF])
    assert writer.tail().next_offset == 4


def test_a_segment_is_not_written_on_the_word_of_an_old_snapshot(
    order: OrderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a busy cluster ids go round while the ledger is quiet."""
    writer = order.writer()
    finished = finished_transaction(order) & 0xFFFFFFFF
    writer.snapshot()
    now = time.monotonic()
    monkeypatch.setattr("walstream.order.writer.time.monotonic", lambda: now + 61)
    assert not writer.append_if_finished(order.segment(writer, [7]), [finished])
    assert rows_of(order) == []


def test_a_replaced_generation_does_not_write_what_is_finished(order: OrderBench) -> None:
    writer = order.writer()
    finished = finished_transaction(order) & 0xFFFFFFFF
    writer.snapshot()
    order.take_over()
    assert not writer.append_if_finished(order.segment(writer, [7]), [finished])
    with pytest.raises(Fenced):
        order.order(writer, [7])
    assert rows_of(order) == []


def test_known_finds_every_seq_that_has_an_offset(order: OrderBench) -> None:
    writer = order.writer()
    order.order(writer, [1, 3, 2, 500_000])
    order.order(writer, list(range(10, 2000, 2)))
    order.order(writer, [-(1 << 63), (1 << 63) - 1, 11])
    every = {1, 2, 3, 500_000, *range(10, 2000, 2), -(1 << 63), (1 << 63) - 1, 11}
    asked = [*every, 4, 13, 499_999, 1 << 40, 0]
    assert writer.known(asked) == every
    assert writer.known([]) == set()
    assert writer.known([4, 13]) == set()


def test_a_damaged_segment_is_named(order: OrderBench) -> None:
    writer = order.writer()
    order.order(writer, [5])
    order.execute(f"UPDATE {quote(order.namespace)}.commit_order SET body = set_byte(body, 3, get_byte(body, 3) # 1)")
    with pytest.raises(LedgerError, match="segment at offset 1 cannot be read"):
        writer.known([5])


# -- servers that are stopped, crashed, or wait for a standby ----------------------------------------------------------


def test_only_what_is_durable_survives_a_crash(own_server: Callable[..., PostgresServer]) -> None:
    """Rule 11, and the ground of rule 4: the asynchronous row vanishes with the server, the recovered one does not."""
    server = own_server(wal_writer_delay="10s", wal_writer_flush_after="1GB")
    with bench(server.dsn()) as order:
        order.create_ledger()
        writer = order.writer()
        order.order(writer, [1], durable=True)
        position = writer.wal_position()
        order.order(writer, [2])
        assert order.unflushed() > 0
        order.order(writer, [3], recovered=True, durable=True)
        assert order.unflushed() <= 0
        order.order(writer, [4])  # the setting was of that one transaction only
        assert order.unflushed() > 0
        assert writer.wal_position() > position
        server.stop("immediate")
        with pytest.raises(WalstreamError) as caught:
            order.order(writer, [5])
        assert caught.value.transient
    server.start()
    with bench(server.dsn(), fresh=False) as order:
        assert order.writer().tail().next_offset == 4


def test_a_standby_that_is_away_blocks_no_append(own_server: Callable[..., PostgresServer]) -> None:
    """Rules 2 and 8 under synchronous replication: an event that is streamed long before it is visible, a NOTIFY that
    everybody else's has to wait for, and a writer of the order that waits for neither."""
    server = own_server()
    with bench(server.dsn()) as order:
        order.create_ledger()
        order.execute("CREATE PUBLICATION p FOR TABLE agent_events")
        order.execute("SELECT pg_create_logical_replication_slot('waits', 'pgoutput')")
        writer = order.writer()
        order.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        order.execute("SELECT pg_reload_conf()")
        until(lambda: order.execute("SHOW synchronous_standby_names") == [("nobody",)], "the setting arrives")
        order.execute("SET synchronous_commit = off")
        victim = psycopg2.connect(server.dsn())

        def commit_and_wait() -> None:
            with victim.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                    " VALUES (gen_random_uuid(), 'a', 'handoff', '{}'); NOTIFY somebody"
                )
            victim.commit()

        waiting = threading.Thread(target=commit_and_wait, daemon=True)
        waiting.start()
        until(
            lambda: order.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"),
            "the commit waits for the standby",
        )
        streamed = order.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('waits', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'p')"
        )
        begins = [bytes(data) for (data,) in streamed if bytes(data)[:1] == b"B"]
        xid = int.from_bytes(begins[-1][17:21], "big")
        assert order.execute("SELECT count(*) FROM agent_events") == [(0,)]
        assert not writer.snapshot().shows_finished(xid)

        notifier = Notifier(lambda: order.connect(), order.namespace)
        notifier.notify()
        until(
            lambda: order.execute("SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'object'"),
            "the notifier waits for the other NOTIFY",
        )
        with ThreadPoolExecutor(1) as pool:
            for seq, durable in ((1, False), (2, True)):
                pool.submit(order.order, writer, [seq], durable=durable).result(60)
        assert waiting.is_alive()
        notifier.close()

        order.execute("ALTER SYSTEM RESET synchronous_standby_names")
        order.execute("SELECT pg_reload_conf()")
        waiting.join(60)
        assert not waiting.is_alive()
        victim.close()
        assert writer.snapshot().shows_finished(xid)
        assert order.execute("SELECT count(*) FROM agent_events") == [(1,)]


def test_bodies_are_stored_as_they_are(order: OrderBench) -> None:
    writer = order.writer()
    segment = order.order(writer, [7, 8, 9], [2, 1])
    ((body,),) = order.execute(f"SELECT body FROM {quote(order.namespace)}.commit_order")
    assert bytes(body) == encode_body(segment)
