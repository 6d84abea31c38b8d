"""The cold path on a real server: the same events as the hot path, byte for byte, whatever the ledger looks like."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from psycopg2.extensions import make_dsn

from tests.conftest import Database, Server
from tests.integration.order_bench import OrderBench, bench, module_database
from walstream.config import Columns, LedgerTable, quote
from walstream.errors import ConfigError, LedgerError, RowMissing
from walstream.event import Event
from walstream.order.compaction import Compactor
from walstream.order.reader import ColdReader
from walstream.order.segment import Segment, size_codes

MiB = 1 << 20


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Database]:
    with module_database(server, "reader") as made:
        yield made


@pytest.fixture
def order(shared: Database) -> Iterator[OrderBench]:
    with bench(shared.dsn) as made:
        made.create_ledger()
        yield made


def everything(reader: ColdReader, *, limit: int = 1000, max_bytes: int = 16 * MiB) -> list[Event]:
    """Read from the beginning to the end, checking that progress is whole."""
    found: list[Event] = []
    after = 0
    while True:
        batch = reader.read(after, limit, max_bytes)
        assert len(batch.events) <= limit
        assert [event.offset for event in batch.events] == sorted({event.offset for event in batch.events})
        assert all(after < event.offset <= batch.through for event in batch.events)
        if batch.through == after:
            assert not batch.events
            return found
        found += batch.events
        after = batch.through


def test_an_empty_order(order: OrderBench) -> None:
    reader = order.reader()
    assert reader.head() == 0
    assert reader.offset_of(1) is None
    assert reader.read(0, 10, MiB).through == 0
    assert reader.read(77, 10, MiB).through == 77
    with pytest.raises(ValueError):
        reader.read(-1, 10, MiB)
    with pytest.raises(ValueError):
        reader.read(0, 0, MiB)


def test_offsets_follow_the_commits_and_not_the_seqs(order: OrderBench) -> None:
    """C21: a lower seq that commits later keeps its place; a gap of a rollback is nothing."""
    seqs = order.insert(6)
    order.execute("DELETE FROM agent_events WHERE seq = %s", seqs[2])  # as if it had been rolled back
    writer = order.writer()
    ordered = [seqs[1], seqs[0], seqs[5], seqs[3], seqs[4]]
    first = order.order(writer, ordered[:3], [2, 1])
    second = order.order(writer, ordered[3:], [2])
    reader = order.reader()
    assert reader.head() == 5
    events = everything(reader)
    assert [event.seq for event in events] == ordered
    assert [event.offset for event in events] == [1, 2, 3, 4, 5]
    assert [event.lsn for event in events] == [
        first.commit_lsns[0],
        first.commit_lsns[0],
        first.commit_lsns[1],
        second.commit_lsns[0],
        second.commit_lsns[0],
    ]
    assert events[0].commit is events[1].commit
    assert events[0].key == f"ledger:1:{ordered[0]}"
    assert not events[0].recovered
    assert [reader.offset_of(seq) for seq in ordered] == [1, 2, 3, 4, 5]
    assert reader.offset_of(seqs[2]) is None
    assert [event.seq for event in everything(reader, limit=1)] == ordered


def test_what_is_new_is_found_by_the_same_reader(order: OrderBench) -> None:
    """A reader that follows the end re-uses what it has decoded, also when compaction rewrites it underneath."""
    seqs = order.insert(40)
    writer = order.writer()
    compactor = Compactor(order.connect(), order.namespace, writer.generation, min_run=2)
    reader = order.reader()
    found: list[Event] = []
    for index, seq in enumerate(seqs):
        order.order(writer, [seq])
        if index % 7 == 3:
            compactor.run()
        batch = reader.read(len(found), 3, MiB)
        found += batch.events
        assert batch.through == len(found) == index + 1
    assert [event.seq for event in found] == seqs
    assert [event.seq for event in everything(order.reader(), limit=7)] == seqs


def test_transactions_are_not_split(order: OrderBench) -> None:
    seqs = order.insert(30)
    writer = order.writer()
    order.order(writer, seqs[:10], [4, 3, 3])
    order.order(writer, seqs[10:18], [2, 6], partial_inserts=6)
    tail = writer.tail()
    # The commit that began in the segment before goes on and ends here; after it comes another.
    writer.append(
        Segment(
            19,
            seqs[18:],
            [4, 8],
            [tail.partial_lsn, tail.partial_lsn + 800],
            [1, 2],
            size_codes([100] * 12),
            tail.partial_lsn + 848,
            None,
            False,
            writer.generation,
        )
    )
    reader = order.reader()

    def through(after: int, limit: int, max_bytes: int = MiB) -> int:
        return reader.read(after, limit, max_bytes).through

    assert through(0, 4) == 4
    assert through(0, 6) == 4
    assert through(0, 7) == 7
    assert through(0, 3) == 3, "larger than the limit"
    assert through(2, 4) == 4
    assert through(0, 9) == 7
    assert through(0, 10) == 10
    assert through(7, 12) == 12, "ends before the commit of ten, which lies in two segments"
    assert through(12, 9) == 21, "larger than the limit"
    assert through(12, 10) == 22
    assert through(12, 17) == 22
    assert through(12, 18) == 30
    assert through(12, 1000) == 30
    assert through(0, 1000, 5 * 1024) == 4, "bytes are a limit like any other"
    assert through(12, 1000, 7 * 1024) == 19
    assert through(12, 1000, 1) == 13, "at least one"


SHAPES = {
    "plain": (LedgerTable(), ""),
    "renamed": (
        LedgerTable(
            namespace='odd "schema" %s',
            table="log %d",
            columns=Columns(
                seq='n"o', session_id="thread", agent_id="who %", event_type="Kind", payload="body", created_at="at"
            ),
        ),
        """CREATE SCHEMA "odd ""schema"" %s";
           CREATE TABLE "odd ""schema"" %s"."log %d" (body jsonb NOT NULL, "Kind" text NOT NULL, thread text NOT NULL,
           at timestamptz NOT NULL DEFAULT now(), "n""o" bigint PRIMARY KEY, "who %" text NOT NULL)""",
    ),
    "extras": (
        LedgerTable(),
        """CREATE DOMAIN small AS smallint CHECK (VALUE >= 0);
           CREATE TYPE mood AS ENUM ('fine', 'tired');
           CREATE TABLE agent_events (flag bool, gone int, seq bigint PRIMARY KEY, session_id uuid NOT NULL, f8 float8,
             agent_id varchar(20) NOT NULL, event_type text NOT NULL, tag char(9), payload json NOT NULL, address inet,
             created_at timestamp, bytes bytea, parent bigint, n small, m mood, span interval, parts int[],
             price numeric, double_seq bigint GENERATED ALWAYS AS (seq * 2) STORED, doc tsvector,
             tenant text NOT NULL DEFAULT 'é');
           ALTER TABLE agent_events DROP COLUMN gone""",
    ),
    "partitioned": (
        LedgerTable(),
        """CREATE TABLE agent_events (seq bigint NOT NULL, session_id uuid NOT NULL, agent_id text NOT NULL, event_type
             text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
             PRIMARY KEY (seq, created_at)) PARTITION BY RANGE (created_at);
           CREATE TABLE past PARTITION OF agent_events FOR VALUES FROM (MINVALUE) TO ('2024-01-01');
           CREATE TABLE present PARTITION OF agent_events DEFAULT""",
    ),
}

PAYLOADS = (
    "{}",
    '{"b": 1.10, "a": [1, 2, {"x": null}], "big": 123456789012345678901234567890, "small": 1e-7}',
    '{"text": "é 漢字 \\ud83d\\ude80 \\"quoted\\" \\\\ \\u0001"}',
    '"just a string"',
    "3.14159265358979323846264338327950288",
)
SESSION = "5f0c6a54-1d9f-4c7e-9f3b-0c8c1b1e2a55"


@pytest.mark.parametrize("shape", SHAPES)
def test_cold_rows_are_hot_rows_byte_for_byte(database: Database, shape: str) -> None:
    """Rendered for the cold path, and for the stream by pgoutput, under settings that are the same on both."""
    ledger, ddl = SHAPES[shape]
    # What a role or a database sets must not show.
    for setting in ("datestyle = 'SQL, DMY'", "timezone = 'Asia/Kolkata'", "bytea_output = 'escape'"):
        database.execute(f'ALTER DATABASE "{database.name}" SET {setting}')
    with bench(database.dsn, ledger) as order:
        order.execute(ddl) if ddl else order.create_ledger()
        order.execute(f"CREATE PUBLICATION p FOR TABLE {ledger.qualified}")
        order.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"{database.name}_hot"[-60:])
        names = ledger.columns
        seqs = []
        for number, payload in enumerate(PAYLOADS * 2, 1):
            created = ("2023-02-03 04:05:06.789+05:30", "2024-07-01", "infinity", "0044-03-15 BC", "12000-01-01")[
                number % 5
            ]
            values: dict[str, object] = {
                names.seq: number * 3,
                names.session_id: SESSION,
                names.agent_id: "planner é",
                names.event_type: "model.requested",
                names.payload: payload,
                names.created_at: created,
            }
            if shape == "extras":
                values |= {
                    "flag": number % 2 == 0,
                    "f8": 0.1 * number,
                    "tag": "ab",
                    "address": "10.0.0.1",
                    "bytes": memoryview(b"\x00\xff'\\"),
                    "parent": number,
                    "n": 7,
                    "m": "tired",
                    "span": "1 year 2 days 03:04:05.6",
                    "price": "1.50",
                }
            columns = ", ".join(quote(name) for name in values).replace("%", "%%")
            marks = ", ".join(["%s"] * len(values))
            order.execute(
                f"INSERT INTO {ledger.qualified.replace('%', '%%')} ({columns}) VALUES ({marks})", *values.values()
            )
            seqs.append(number * 3)
        if shape == "extras":
            order.execute(
                "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload, parts, doc)"
                " VALUES (100, %s, '', '', 'null', '{1,NULL,3}', 'fat:2 cat:1')",
                SESSION,
            )
            seqs.append(100)
        hot = order.streamed(f"{database.name}_hot"[-60:], "p")
        writer = order.writer()
        order.order(writer, seqs[::-1])
        cold = everything(order.reader(), limit=3)
    assert [event.seq for event in cold] == seqs[::-1]
    by_seq = {row[0]: row for row in hot}
    assert [event.row for event in cold] == [by_seq[seq] for seq in seqs[::-1]]
    if shape == "extras":
        first = cold[-1].extras
        assert first["flag"] == "f"
        assert first["tag"] == "ab       "
        assert first["address"] == "10.0.0.1"
        assert first["bytes"] == "\\x00ff275c"
        assert first["parent"] == "1"
        assert first["span"] == "1 year 2 days 03:04:05.6"
        assert first["parts"] is None
        assert "double_seq" not in first
        assert cold[0].created_at_text is None


def test_columns_that_come_and_go(order: OrderBench) -> None:
    seqs = order.insert(4)
    writer = order.writer()
    reader = order.reader()
    order.order(writer, seqs[:1])
    assert reader.read(0, 10, MiB).events[0].extras == {}
    order.execute("ALTER TABLE agent_events ADD COLUMN tenant text DEFAULT 'one'")
    order.order(writer, seqs[1:2])
    assert reader.read(1, 10, MiB).events[0].extras == {"tenant": "one"}
    order.execute("ALTER TABLE agent_events ALTER COLUMN tenant DROP DEFAULT, ALTER COLUMN tenant TYPE int USING 5")
    order.order(writer, seqs[2:3])
    assert reader.read(2, 10, MiB).events[0].extras == {"tenant": "5"}
    order.execute("ALTER TABLE agent_events DROP COLUMN tenant")
    assert reader.read(0, 10, MiB).events[1].extras == {}
    order.execute("ALTER TABLE agent_events RENAME COLUMN payload TO body")
    with pytest.raises(LedgerError, match="has no column 'payload'"):
        reader.read(0, 10, MiB)
    order.execute("ALTER TABLE agent_events RENAME COLUMN body TO payload")
    assert len(reader.read(0, 10, MiB).events) == 3
    order.execute("ALTER TABLE agent_events RENAME TO old")
    with pytest.raises(LedgerError, match="does not exist"):
        reader.read(0, 10, MiB)


def test_a_ledger_whose_seq_is_no_integer(shared: Database) -> None:
    with bench(shared.dsn) as order:
        order.execute(
            "CREATE TABLE agent_events (seq text, session_id text, agent_id text, event_type text, payload json,"
            " created_at timestamptz)"
        )
        writer = order.writer()
        order.order(writer, [1])
        with pytest.raises(LedgerError, match="no integer"):
            order.reader().read(0, 1, MiB)


def test_a_row_that_is_gone_is_an_alarm_unless_it_was_declared(order: OrderBench) -> None:
    seqs = order.insert(10)
    order.order(order.writer(), seqs)
    order.execute("DELETE FROM agent_events WHERE seq = ANY(%s)", [seqs[3], seqs[4], seqs[7]])
    order.execute(
        "INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (%s, %s, 'asked for')", seqs[3], seqs[4]
    )
    reader = order.reader()
    batch = reader.read(0, 100, MiB)
    assert [event.offset for event in batch.events] == [1, 2, 3, 6, 7]
    assert batch.through == 7, "events before the missing one are given first"
    with pytest.raises(RowMissing, match=rf"offset 8 .*seq = {seqs[7]}\b") as caught:
        reader.read(batch.through, 100, MiB)
    assert "INSERT INTO" in caught.value.hint
    order.execute(caught.value.hint[caught.value.hint.index("INSERT INTO") :])
    assert [event.offset for event in reader.read(7, 100, MiB).events] == [9, 10]
    # Nothing but erased events: no event, but progress.
    assert reader.read(3, 2, MiB).events == []
    assert reader.read(3, 2, MiB).through == 5
    assert [event.offset for event in everything(reader, limit=2)] == [1, 2, 3, 6, 7, 9, 10]


def test_two_rows_with_one_seq_are_an_alarm(shared: Database) -> None:
    """A partitioned table's key need not be the seq alone, so nothing keeps the same seq out of another partition."""
    with bench(shared.dsn) as order:
        order.execute(SHAPES["partitioned"][1])
        for created in ("2023-01-01", "2025-01-01"):
            order.execute("INSERT INTO agent_events VALUES (5, gen_random_uuid(), 'a', 'b', '{}', %s)", created)
        order.order(order.writer(), [5])
        with pytest.raises(LedgerError, match=r"two rows .* = 5"):
            order.reader().read(0, 1, MiB)


def test_a_hole_in_the_order_is_an_alarm(order: OrderBench) -> None:
    seqs = order.insert(6)
    writer = order.writer()
    for seq in seqs:
        order.order(writer, [seq])
    order.execute("DELETE FROM walstream.commit_order WHERE first_offset IN (1, 4)")
    reader = order.reader()
    with pytest.raises(LedgerError, match="after offset 0 it goes on at 2"):
        reader.read(0, 100, MiB)
    with pytest.raises(LedgerError, match="after offset 3 it goes on at 5"):
        reader.read(1, 100, MiB)
    assert reader.read(4, 100, MiB).through == 6


def test_row_security_hides_nothing(shared: Database) -> None:
    """The owner reads past the policy; another role is told so, instead of finding rows missing."""
    with bench(shared.dsn) as order:
        order.create_ledger()
        seqs = order.insert(3)
        order.order(order.writer(), seqs)
        role = f"reader_{shared.name[-8:]}"
        order.execute(
            f"""CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA walstream TO {role};
                GRANT SELECT ON ALL TABLES IN SCHEMA walstream TO {role}; GRANT SELECT ON agent_events TO {role};
                ALTER TABLE agent_events ENABLE ROW LEVEL SECURITY;
                CREATE POLICY mine ON agent_events USING (agent_id = 'nobody')"""
        )
        try:
            policed = order.connect(make_dsn(shared.dsn, user=role))
            reader = ColdReader(policed, order.namespace, order.ledger, "ledger:1")
            with pytest.raises(ConfigError, match="row-level security"):
                reader.read(0, 10, MiB)
            order.execute(f"ALTER TABLE agent_events OWNER TO {role}")
            assert [event.seq for event in reader.read(0, 10, MiB).events] == seqs
            order.execute("ALTER TABLE agent_events FORCE ROW LEVEL SECURITY")
            with pytest.raises(ConfigError, match="row-level security"):
                reader.read(0, 10, MiB)
            order.execute(f"GRANT SELECT ON agent_events TO {role}; ALTER ROLE {role} BYPASSRLS")
            assert [event.seq for event in reader.read(0, 10, MiB).events] == seqs
            policed.close()
        finally:
            order.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


_MEASURE = """
import resource, sys
from walstream.config import LedgerTable
from walstream.order.reader import ColdReader
from walstream.source.connection import connect
reader = ColdReader(connect(sys.argv[1], application_name="walstream:test"), "walstream", LedgerTable(), "l:1")
reader.read(0, 1, 1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
after, largest = 1, 0
while True:
    batch = reader.read(after, 1000, 4 << 20)
    if batch.through == after:
        break
    largest = max([largest, *(len(event.payload_bytes) for event in batch.events)])
    after = batch.through
    del batch
print(after, largest, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_payloads_of_50_megabytes_are_read_one_by_one(order: OrderBench) -> None:
    seqs = order.insert(2)
    for _ in range(2):
        ((seq,),) = order.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES"
            " (gen_random_uuid(), 'a', 'big', jsonb_build_object('k', repeat('x', 50 * 1024 * 1024))) RETURNING seq"
        )
        seqs.append(seq)
    writer = order.writer()
    order.order(writer, seqs, sizes=[100, 100, *[50 * MiB + 100] * 2])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, order.dsn], capture_output=True, text=True, timeout=120, check=True
    )
    through, largest, grown = map(int, done.stdout.split())
    assert through == 4
    assert largest > 50 * MiB
    assert grown < 4 * largest


def test_a_large_payload_comes_in_pieces_and_is_the_same(order: OrderBench) -> None:
    """Characters of one to four bytes, so that pieces end inside of some."""
    ((seq, text),) = order.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (gen_random_uuid(), 'a', 'big',"
        " jsonb_build_object('k', repeat('aé€😀', 700000))) RETURNING seq, payload::text"
    )
    seqs = [*order.insert(1), seq]
    order.order(order.writer(), seqs, sizes=[100, len(text.encode())])
    batch = order.reader().read(0, 10, 1 << 20)
    assert [event.seq for event in batch.events] == seqs[:1]
    (event,) = order.reader().read(1, 10, 1 << 20).events
    assert event.seq == seq
    assert event.payload_text == text
    assert (event.event_type, event.agent_id) == ("big", "a")
    order.execute("DELETE FROM agent_events WHERE seq = %s", seq)
    with pytest.raises(RowMissing):
        order.reader().read(1, 10, 1 << 20)


def test_a_long_order_is_read_in_bounded_queries(order: OrderBench) -> None:
    """Twelve thousand events, in segments of all sizes, read with limits that never fit them."""
    seqs = order.insert(12_000)
    writer = order.writer()
    start = 0
    for size in (1, 999, 5_000, 1, 1, 5_998):
        order.order(writer, seqs[start : start + size])
        start += size
    for limit in (777, 6_000, 20_000):
        assert [event.seq for event in everything(order.reader(), limit=limit)] == seqs
    assert order.reader().offset_of(seqs[6_500]) == 6_501
