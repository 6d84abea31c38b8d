"""Ledgers that are partitioned by month or by hash: made by `init`, kept ahead by `partitions`, streamed gaplessly."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from tests.cli_calls import Called, call, ok
from tests.conftest import Database
from tests.integration.streams import Installed, Recorder, eventually
from walstream.config import LedgerTable, Settings
from walstream.engine.partition_watch import warn_of_partitions
from walstream.errors import ConfigError, ExitCode
from walstream.ledger import partitions
from walstream.ledger.partitions import Month, PartitionBy

INSERT = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload, created_at)"
    " VALUES (gen_random_uuid(), 'a', %s, %s, %s)"
)


def make(database: Database, by: str) -> None:
    """The table alone, as `init` makes it."""
    database.execute("\n".join(partitions.table_statements(LedgerTable(), PartitionBy.parse(by), today())))


def today() -> date:
    return datetime.now(UTC).date()


def month(ahead: int) -> Month:
    return partitions.months(today(), ahead)[-1]


def middle(ahead: int) -> str:
    """A moment of a month that is so many months ahead."""
    return f"{month(ahead)}-15 12:00:00+00"


def names(database: Database) -> list[str]:
    rows = database.execute(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'agent_events'::regclass ORDER BY 1"
    )
    return [name for (name,) in rows]


def named(*ahead: int) -> list[str]:
    return [f"agent_events_{month(each).first:%Y_%m}" for each in ahead]


def where(database: Database, event_type: str) -> list[str]:
    """The partitions that hold events of a type."""
    rows = database.execute("SELECT tableoid::regclass::text FROM agent_events WHERE event_type = %s", event_type)
    return [name for (name,) in rows]


# -- names and bounds ---------------------------------------------------------------------------


def test_months_go_over_the_end_of_a_year() -> None:
    found = partitions.months(date(2026, 11, 30), 3)
    assert list(map(str, found)) == ["2026-11", "2026-12", "2027-01", "2027-02"]
    assert (found[1].low, found[1].high) == ("2026-12-01 00:00:00+00", "2027-01-01 00:00:00+00")


def test_a_name_that_would_be_too_long_is_shortened_at_a_whole_character() -> None:
    ledger = LedgerTable(table="é" * 31)
    name = partitions.month_name(ledger, Month(date(2026, 12, 1)))
    assert name == f'"public"."{"é" * 27}_2026_12"'


@pytest.mark.parametrize("text", ["", "day", "hash", "hash:0", "hash:1025", "hash:-1", "month:2"])
def test_other_ways_to_partition_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--partition-by"):
        PartitionBy.parse(text)


# -- init ---------------------------------------------------------------------------


def test_init_by_month(database: Database) -> None:
    stream = Installed(database, "--partition-by", "month")
    assert names(database) == [*named(0, 1, 2, 3), "agent_events_default"]
    assert database.execute("SELECT pubviaroot FROM pg_publication") == [(True,)]
    keys = database.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'agent_events'")
    for columns in (
        "UNIQUE INDEX agent_events_pkey ON ONLY public.agent_events USING btree (seq, created_at)",
        "(session_id, seq)",
        "(agent_id, seq)",
    ):
        assert columns in str(keys)
    # Again: nothing to do. Another way: refused.
    slot = ["--slot", stream.settings.slot]
    assert ok("init", "--partition-by", "month", *slot, "--json", dsn=database.dsn).json["done"] == []
    called = call("init", "--partition-by", "hash:4", *slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "is there already and is partitioned by range (created_at)" in called.stderr


def test_init_does_not_convert_a_table(database: Database) -> None:
    stream = Installed(database)
    called = call("init", "--partition-by", "month", "--slot", stream.settings.slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "is not partitioned" in called.stderr


def test_everything_works_on_a_ledger_by_hash(database: Database) -> None:
    stream = Installed(database, "--partition-by", "hash:3")
    slot = ["--slot", stream.settings.slot]
    assert names(database) == ["agent_events_h0", "agent_events_h1", "agent_events_h2"]
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert(*[f"event {n}" for n in range(20)])
        database.execute("SELECT walstream.append('11111111-1111-1111-1111-111111111111', 'a', 'appended', '{}')")
        stream.wait_ordered()
        eventually(lambda: len(recorder.got) == 21, "all events")
    assert len({name for n in range(20) for name in where(database, f"event {n}")}) > 1
    called = ok("tail", "--from", "1", "--limit", "21", "--json", *slot, dsn=database.dsn)
    assert len(called.stdout.splitlines()) == 21
    assert call("partitions", "--ahead", "1", dsn=database.dsn).exit_code == ExitCode.CONFIG
    listed = ok("partitions", "--json", dsn=database.dsn).json
    assert (listed["by"], len(listed["partitions"])) == ("hash (session_id)", 3)


def test_printed_and_made_are_the_same(database: Database) -> None:
    catalog = """SELECT c.relname::text, pg_get_expr(c.relpartbound, c.oid), pg_get_partkeydef(c.oid), (
                        SELECT array_agg(d.def ORDER BY d.def)
                          FROM pg_index i, pg_get_indexdef(i.indexrelid) AS d (def) WHERE i.indrelid = c.oid)
                   FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
                  ORDER BY 1"""
    slot = f"p_{database.name[-8:]}"
    for by in ("month", "hash:2"):
        script = ok("init", "--partition-by", by, "--sql", "--json", "--slot", slot, dsn="").json["sql"]
        script = script[: script.index("COMMIT;")]  # what makes the slot comes after it
        database.execute("SET timezone = 'Asia/Kathmandu'; SET datestyle = 'SQL, DMY';" + "\n".join(script) + "COMMIT")
        printed = database.execute(catalog)
        database.execute(
            "DROP PUBLICATION walstream; DROP SCHEMA walstream CASCADE; DROP SCHEMA public CASCADE;CREATE SCHEMA public"
        )
        ok("init", "--partition-by", by, "--slot", slot, dsn=database.dsn)
        assert database.execute(catalog) == printed
        ok("teardown", "--slot", slot, "--yes", dsn=database.dsn)
        database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


# -- partitions ---------------------------------------------------------------------------


def test_months_are_made_once_however_often_it_is_called(database: Database) -> None:
    make(database, "month")
    planned = ok("partitions", "--ahead", "5", "--dry-run", "--json", dsn=database.dsn).json
    assert [name.split('"')[3] for name in planned["would_make"]] == named(4, 5)
    assert names(database) == [*named(0, 1, 2, 3), "agent_events_default"]
    called: list[Called] = []
    threads = [
        threading.Thread(target=lambda: called.append(_in_a_process(database, "--ahead", "6"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.exit_code for each in called] == [0, 0, 0], called
    assert names(database) == [*named(0, 1, 2, 3, 4, 5, 6), "agent_events_default"]
    assert sum(len(each.json["made"]) for each in called) == 3
    assert "is there" in ok("partitions", "--ahead", "6", dsn=database.dsn).stdout
    # What was attached is like what was there: key, indexes, and a row finds its way.
    database.execute(INSERT, "far", "{}", middle(6))
    assert where(database, "far") == named(6)
    indexes = "SELECT count(*) FROM pg_indexes WHERE tablename = %s"
    assert database.execute(indexes, named(6)[0]) == database.execute(indexes, named(0)[0]) == [(3,)]


def _in_a_process(database: Database, *words: str) -> Called:
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "walstream", "partitions", *words, "--json", "--dsn", database.dsn],
        capture_output=True,
        text=True,
        check=False,
    )
    return Called(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/Los_Angeles"])
def test_names_and_bounds_do_not_depend_on_the_time_zone(database: Database, zone: str) -> None:
    make(database, "month")
    database.execute(f"ALTER DATABASE \"{database.name}\" SET timezone = '{zone}'")
    database.execute(f"ALTER DATABASE \"{database.name}\" SET datestyle = 'SQL, DMY'")
    script = ok("partitions", "--ahead", "4", "--sql", dsn=database.dsn).stdout
    assert month(4).low in script
    database.execute(script.replace("BEGIN;", "").replace("COMMIT;", ""))
    ok("partitions", "--ahead", "5", dsn=database.dsn)
    assert names(database) == [*named(0, 1, 2, 3, 4, 5), "agent_events_default"]
    database.execute(INSERT, "last", "{}", f"{month(5)}-01 00:00:00+00")
    database.execute(
        f"INSERT INTO agent_events (session_id, agent_id, event_type, payload, created_at) VALUES"
        f" (gen_random_uuid(), 'a', 'before', '{{}}', timestamptz '{month(5).low}' - interval '1 us')"
    )
    assert (where(database, "last"), where(database, "before")) == (named(5), named(4))
    assert ok("partitions", "--json", dsn=database.dsn).json["prepared_until"] == month(5).high


def test_a_default_partition_in_use_is_named_and_nothing_is_left_half_done(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walstream.cli.partitions._PAUSE", 0.01)
    monkeypatch.setattr("walstream.cli.partitions.LOCK_TIMEOUT", "50ms")
    make(database, "month")
    reader = database.connect(application_name="long report")
    with reader.cursor() as cur:
        cur.execute("SELECT count(*) FROM agent_events")
        called = call("partitions", "--ahead", "4", dsn=database.dsn)
        assert called.exit_code == ExitCode.UNAVAILABLE
        assert "long report" in called.stderr
        assert database.execute("SELECT to_regclass(%s)::text", named(4)[0]) == [(None,)]
    reader.rollback()
    ok("partitions", "--ahead", "4", dsn=database.dsn)


def test_what_cannot_be_made_is_said(database: Database) -> None:
    assert "no table" in call("partitions", dsn=database.dsn).stderr
    make(database, "month")
    database.execute(f"CREATE TABLE {named(4)[0]} (id int)")
    called = call("partitions", "--ahead", "4", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "is there already" in called.stderr
    # Weeks instead of months: what they cover is there, what they cover in part is said.
    database.execute(f"DROP TABLE {named(4)[0]}")
    attach = "CREATE TABLE {} PARTITION OF agent_events FOR VALUES FROM ('{}') TO ('{}')"
    database.execute(attach.format("one", month(4).low, middle(4)))
    called = call("partitions", "--ahead", "5", "--json", dsn=database.dsn)
    assert called.exit_code == ExitCode.FAILED
    assert called.json["partly"] == [{"month": str(month(4)), "partitions": ["public.one"]}]
    assert called.json["made"] == [f'"public"."{named(5)[0]}"']
    database.execute(attach.format("two", middle(4), month(4).high))
    assert ok("partitions", "--ahead", "5", "--json", dsn=database.dsn).json["partly"] == []


def test_a_table_that_is_not_partitioned_by_time(database: Database) -> None:
    database.execute(
        "CREATE TABLE agent_events (seq bigserial, session_id uuid, agent_id text, event_type text, payload jsonb,"
        " created_at timestamptz, PRIMARY KEY (seq, agent_id)) PARTITION BY LIST (agent_id);"
        "CREATE TABLE a PARTITION OF agent_events FOR VALUES IN ('a')"
    )
    assert "list (agent_id)" in ok("partitions", dsn=database.dsn).stdout
    assert "no months" in call("partitions", "--ahead", "1", dsn=database.dsn).stderr
    database.execute("DROP TABLE agent_events; CREATE TABLE agent_events (seq int)")
    assert "is not partitioned" in call("partitions", dsn=database.dsn).stderr


# -- the stream ---------------------------------------------------------------------------


def test_no_event_is_lost_while_partitions_come_and_go(database: Database) -> None:
    """The consumer runs: rows of now, of the edges of a month, of months that nobody made (into the default partition);
    partitions are attached, and rows are moved out of the default one. Hot and cold readers get each row once."""
    stream = Installed(database, "--partition-by", "month")
    hot = Recorder()
    payload = '{"n": 12345678901234567890.5}'

    def insert(event_type: str, *moments: str) -> None:
        conn = database.connect()
        with conn, conn.cursor() as cur:
            for moment in moments:
                cur.execute(INSERT, (event_type, payload, moment))

    with stream.host(hot):
        insert("now", "now")
        insert("edges", month(1).low, month(1).high, f"{month(0)}-01 00:00:00+00")
        insert("not prepared", middle(4), middle(5), "infinity", "2001-01-01 00:00:00+00")
        stream.wait_ordered()
        assert where(database, "not prepared") == ["agent_events_default"] * 4

        called = call("partitions", "--ahead", "6", "--json", dsn=database.dsn)
        assert called.exit_code == ExitCode.FAILED
        assert called.json["made"] == [f'"public"."{named(6)[0]}"']
        assert [(held["month"], held["rows"]) for held in called.json["held"]] == [
            (str(month(4)), 1),
            (str(month(5)), 1),
        ]
        insert("attached", middle(6), "now", middle(4))

        held = call("partitions", "--ahead", "6", "--json", dsn=database.dsn).json["held"]
        assert held[0]["rows"] == 2
        for each in held:
            run_as_shown(database, each["sql"])

        # A transaction that is open over an attachment, with rows before and after it.
        writer = database.connect()
        with writer.cursor() as cur:
            cur.execute(INSERT, ("over", payload, middle(0)))
            assert ok("partitions", "--ahead", "7", "--json", dsn=database.dsn).json["made"]
            cur.execute(INSERT, ("over", payload, middle(7)))
        writer.commit()
        insert("moved", middle(4), middle(5))
        assert where(database, "moved") == named(4, 5)
        assert where(database, "not prepared") == [*named(4, 5), *["agent_events_default"] * 2]
        stream.wait_ordered()
        rows = database.execute("SELECT count(*) FROM agent_events")[0][0]
        eventually(lambda: len(hot.got) == rows, "the hot reader has them all")
    cold = Recorder()
    cold.name = "cold"
    with stream.host(cold):
        eventually(lambda: len(cold.got) == rows, "the cold reader has them all")
    assert [(e.offset, e.seq, e.payload_text, str(e.created_at)) for e in hot.got] == [
        (e.offset, e.seq, e.payload_text, str(e.created_at)) for e in cold.got
    ]
    assert database.execute("SELECT count(*) FROM walstream.violations WHERE origin = 'stream'") == [(0,)]
    assert database.execute("SELECT recovered FROM walstream.ingest") == [(0,)]


def test_a_partition_that_was_filled_before_it_is_attached_is_found(database: Database) -> None:
    """Its rows went through no publication: the reconciler finds them at the next start."""
    stream = Installed(database, "--partition-by", "month")
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        stream.wait_ordered()
        settings = Settings(dsn=database.dsn)
        make_it, attach = partitions.attach_statements(settings.ledger, month(4))
        database.execute(make_it)
        database.execute(
            f"INSERT INTO {named(4)[0]} SELECT nextval('agent_events_seq_seq'), gen_random_uuid(), 'a',"
            f" 'prepared', '{{}}', '{middle(4)}'"
        )
        database.execute(attach)
    with stream.host(recorder):
        stream.wait_ordered()
        eventually(lambda: recorder.types == ["one", "prepared"], "the row that was attached")


def test_run_says_when_less_than_a_month_is_prepared(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    stream = Installed(database, "--partition-by", "month")
    conn = database.connect()
    warn_of_partitions(conn, stream.settings.ledger)
    assert caplog.text == ""
    conn.rollback()
    for name in named(1, 2, 3):
        database.execute(f"DROP TABLE {name}")
    with stream.host(Recorder()):
        eventually(lambda: "walstream partitions --ahead 3" in caplog.text, "the warning")
    assert "into the default partition" in caplog.text


# -- what docs/ledger.md shows ---------------------------------------------------------------------------


def shown(words: str) -> list[str]:
    """The statements of the SQL block in the docs that holds these words."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")
    (block,) = [found for found in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if words in found]
    return [statement.strip() for statement in block.split(";\n") if statement.strip()]


def run_as_shown(database: Database, statements: list[str]) -> None:
    """In one session, each by itself, as psql does it."""
    conn = database.connect()
    conn.autocommit = True
    with conn.cursor() as cur:
        for statement in statements:
            cur.execute(statement)
    conn.close()


def test_a_table_is_converted_as_the_docs_say(database: Database) -> None:
    """Events that were written before and not yet read included; nothing is recovered, for nothing was missed."""
    stream = Installed(database)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("read before")
        stream.wait_ordered()
    stream.insert("not read", "not read")
    database.execute("UPDATE agent_events SET created_at = '2026-12-31 23:59:59+00'")
    statements = shown("agent_events_before_pkey")
    run_as_shown(database, statements)
    words = ["--slot", stream.settings.slot, "--yes"]
    assert {each["what"] for each in ok("adopt", *words, "--json", dsn=database.dsn).json["changes"]} == {"table_oid"}
    stream.insert("converted")
    database.execute("SELECT walstream.append('11111111-1111-1111-1111-111111111111', 'a', 'appended', '{}')")
    database.execute(INSERT, "next year", "{}", "2027-01-01 00:00:00+00")
    with stream.host(recorder):
        stream.insert("running")
        stream.wait_ordered()
        wanted = ["read before", "not read", "not read", "converted", "appended", "next year", "running"]
        eventually(lambda: recorder.types == wanted, "every event once, in order")
    assert database.execute(
        "SELECT recovered, (SELECT count(*) FROM walstream.violations WHERE origin = 'stream') FROM walstream.ingest"
    ) == [(0, 0)]
    assert call("doctor", *words[:2], "--json", dsn=database.dsn).json["ok"]
    assert where(database, "next year") == ["agent_events_default"]


def test_a_month_is_taken_away_as_the_docs_say(database: Database) -> None:
    stream = Installed(database, "--partition-by", "month")
    attach = (
        "CREATE TABLE agent_events_2024_01 PARTITION OF agent_events FOR VALUES FROM ('2024-01-01') TO ('2024-02-01')"
    )
    database.execute(attach)
    database.execute(INSERT, "old", "{}", "2024-01-05 00:00:00+00")
    stream.insert("new")  # overlaps: its seq lies between those of the old month
    database.execute(INSERT, "old", "{}", "2024-01-31 23:00:00+00")
    hot = Recorder()
    with stream.host(hot):
        stream.wait_ordered()
        eventually(lambda: hot.types == ["old", "new", "old"], "all of them")
    run_as_shown(database, shown("archived 2024-01"))
    assert database.execute("SELECT first_seq, last_seq FROM walstream.erasures ORDER BY 1") == [(1, 1), (3, 3)]
    cold = Recorder()
    cold.name = "cold"
    with stream.host(cold):
        stream.insert("later")
        eventually(lambda: cold.types == ["new", "later"], "a cold reader passes what was declared")


@pytest.mark.slow
def test_partitions_are_made_under_writers_and_a_running_consumer(database: Database) -> None:
    """Writers never stop, into months that are there, that come, and that nobody made; partitions are made and rows
    moved out of the default one all the while. Every row is delivered once, and no writer got an error."""
    stream = Installed(database, "--partition-by", "month")
    recorder = Recorder()
    stop = threading.Event()
    errors: list[BaseException] = []
    written = [0] * 3

    def write(number: int) -> None:
        chosen = random.Random(number)
        conn = database.connect()
        try:
            while not stop.is_set():
                with conn, conn.cursor() as cur:
                    for _ in range(chosen.randrange(1, 4)):
                        cur.execute(INSERT, (f"w{number}", "{}", middle(chosen.choice([0, 0, 0, 1, 4, 5, 6, 7, 20]))))
                        written[number] += 1
                time.sleep(chosen.random() * 0.01)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(written))]
    moved = 0
    with stream.host(recorder):
        for thread in threads:
            thread.start()
        for ahead in (4, 5, 6, 7):
            time.sleep(1)
            held = call("partitions", "--ahead", str(ahead), "--json", dsn=database.dsn).json["held"]
            for each in held:
                moved += each["rows"]
                run_as_shown(database, each["sql"])
        time.sleep(1)
        stop.set()
        for thread in threads:
            thread.join()
        stream.wait_ordered()
        eventually(lambda: len(recorder.got) == sum(written), "everything is delivered")
    assert errors == []
    assert moved > 0
    assert len({event.seq for event in recorder.got}) == sum(written)
    assert names(database) == [*named(0, 1, 2, 3, 4, 5, 6, 7), "agent_events_default"]
    assert database.execute("SELECT count(*) FROM walstream.violations WHERE origin = 'stream'") == [(0,)]
    assert database.execute("SELECT recovered FROM walstream.ingest") == [(0,)]
