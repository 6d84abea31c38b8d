"""A ledger with its order on a real server, for the tests of walstream.order."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from psycopg2.extensions import connection as Connection

from tests.conftest import Database, Server
from walstream.config import LedgerTable, Settings, quote
from walstream.event import Row
from walstream.ledger.schema import REQUIRED_VERSION, install, ledger_sql
from walstream.order.reader import ColdReader
from walstream.order.segment import Segment, size_codes
from walstream.order.writer import OrderWriter
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import compile_row_decoder
from walstream.protocol.messages import Relation
from walstream.source.connection import connect

NAMESPACE = "walstream"


class OrderBench:
    """Everything that a test needs around the order, in one database."""

    def __init__(self, dsn: str, ledger: LedgerTable | None = None, *, namespace: str = NAMESPACE) -> None:
        self.dsn = dsn
        self.ledger = ledger or LedgerTable()
        self.namespace = namespace
        self._stack = contextlib.ExitStack()
        self.sql = connect(dsn, application_name="walstream:test", search_path="public")
        self._stack.callback(self.sql.close)
        # What a worker needs as well refers to the ledger, which tests make later and in shapes of their own.
        install(self.sql, Settings(namespace=namespace), upto=REQUIRED_VERSION)

    def create_ledger(self) -> None:
        self.execute(ledger_sql(self.ledger))

    def connect(self, dsn: str | None = None, **settings: str) -> Connection:
        made = connect(dsn or self.dsn, application_name="walstream:test", options=settings)
        self._stack.callback(made.close)
        return made

    def close(self) -> None:
        self._stack.close()

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        with self.sql.cursor() as cursor:
            cursor.execute(sql, args or None)
            return cursor.fetchall() if cursor.description else []

    def insert(self, count: int = 1, payload: str = "{}", event_type: str = "step") -> list[int]:
        """Append rows in one transaction; return their seqs."""
        rows = self.execute(
            f"INSERT INTO {self.ledger.qualified} (session_id, agent_id, event_type, payload)"
            " SELECT '5f0c6a54-1d9f-4c7e-9f3b-0c8c1b1e2a55', 'planner', %s, %s FROM generate_series(1, %s)"
            " RETURNING seq",
            event_type,
            payload,
            count,
        )
        return [seq for (seq,) in rows]

    def unflushed(self) -> int:
        """Bytes of WAL that a crash of the server would take (nothing but its WAL writer lessens them by itself)."""
        ((bytes_behind,),) = self.execute("SELECT (pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn())::bigint")
        return int(bytes_behind)

    def take_over(self) -> int:
        """What a take-over does: one UPDATE of the generation's row."""
        rows = self.execute(
            f"UPDATE {quote(self.namespace)}.generation SET generation = generation + 1 RETURNING generation"
        )
        return int(rows[0][0])

    def writer(self) -> OrderWriter:
        """A writer under a new generation."""
        connection = self.connect(synchronous_commit="off")
        return OrderWriter(connection, self.namespace, self.take_over())

    def reader(self) -> ColdReader:
        return ColdReader(self.connect(), self.namespace, self.ledger, "ledger:1")

    def order(
        self,
        writer: OrderWriter,
        seqs: Sequence[int],
        tx_sizes: Sequence[int] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        partial_inserts: int | None = None,
        recovered: bool = False,
        durable: bool = False,
    ) -> Segment:
        """Append a segment of ``seqs`` at the end of the order."""
        made = self.segment(writer, seqs, tx_sizes, sizes=sizes, partial_inserts=partial_inserts, recovered=recovered)
        writer.append(made, durable=durable)
        return made

    def segment(
        self,
        writer: OrderWriter,
        seqs: Sequence[int],
        tx_sizes: Sequence[int] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        partial_inserts: int | None = None,
        recovered: bool = False,
    ) -> Segment:
        """The segment of ``seqs`` that continues the order."""
        tail = writer.tail()
        pieces = list(tx_sizes or [1] * len(seqs))
        lsns = [0 if recovered else 0x1000 * (tail.next_offset + index) for index in range(len(pieces))]
        last = tail.last_lsn if recovered else lsns[-1] if partial_inserts else lsns[-1] + 48
        return Segment(
            first_offset=tail.next_offset,
            seqs=list(seqs),
            tx_sizes=pieces,
            commit_lsns=lsns,
            commit_times=[0 if recovered else 824_000_000_000_000 + lsn for lsn in lsns],
            sizes=size_codes(list(sizes or [100] * len(seqs))),
            last_lsn=last,
            partial_inserts=partial_inserts,
            recovered=recovered,
            generation=writer.generation,
        )

    def streamed(self, slot: str, publication: str) -> list[Row]:
        """What pgoutput sends for everything that was inserted since the slot was made, decoded by the hot path."""
        found = self.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', %s)",
            slot,
            quote(publication),
        )
        decoder = Decoder(1)
        decoders: dict[int, Callable[[bytes], Row]] = {}
        rows = []
        for (data,) in found:
            payload = bytes(data)
            if payload[:1] == b"I":
                rows.append(decoders[int.from_bytes(payload[1:5], "big")](payload))
            elif payload[:1] == b"R":
                relation = decoder.decode(payload)
                assert isinstance(relation, Relation)
                decoders[relation.oid] = compile_row_decoder(relation, self.ledger.columns.names())
        return rows


@contextlib.contextmanager
def module_database(server: Server, name: str) -> Iterator[Database]:
    """One database for many tests: making one takes longer than most of them."""
    made = Database(server, f"t_order_{name}_{secrets.token_hex(4)}")
    made.create()
    try:
        yield made
    finally:
        made.drop()


@contextlib.contextmanager
def bench(
    dsn: str, ledger: LedgerTable | None = None, *, namespace: str = NAMESPACE, fresh: bool = True
) -> Iterator[OrderBench]:
    """A bench in a database that is emptied first (schemas and tables), unless it is not to be ``fresh``."""
    if fresh:
        connection = connect(dsn, application_name="walstream:test")
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute(
                f"DROP SCHEMA IF EXISTS {quote(namespace)} CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public;"
                " GRANT USAGE ON SCHEMA public TO PUBLIC"
            )
    made = OrderBench(dsn, ledger, namespace=namespace)
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """Poll until ``condition`` gives something true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.01)
