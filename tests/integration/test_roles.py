"""`walstream run`, and an agent's worker, under logins that have the documented grants, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import psycopg2
import pytest
from psycopg2.errors import InsufficientPrivilege
from psycopg2.extensions import make_dsn

from tests.cli_calls import call, ok
from tests.conftest import Database, Server
from tests.integration.streams import Installed, Recorder, eventually
from walstream import Context, Event, Ledger, Projector, rebuild_context, recover
from walstream.order.compaction import Compactor
from walstream.projectors.snapshot_writer import SnapshotWriter
from walstream.source.connection import connect


class Counter(Projector):
    """Counts in a table of its own, which was granted to the login."""

    name = "counter"
    transactional = True

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        ctx.cursor.execute("UPDATE public.counts SET n = n + %s", (len(events),))


class Failing(Projector):
    """Cannot project one type, so that its session is parked."""

    name = "failing"
    max_attempts = 1

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        if any(event.event_type == "bad" for event in events):
            raise ValueError("this one is bad")


@pytest.fixture
def login(database: Database, server: Server) -> Iterator[str]:
    name = f"walstream_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE REPLICATION PASSWORD 'irrelevant'")
    yield name
    database.execute(f"DROP OWNED BY {name}")
    server.execute(f"DROP ROLE {name}")


def test_everything_that_run_does_works_with_the_grants(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    database.execute("CREATE TABLE public.counts (n bigint); INSERT INTO public.counts VALUES (0)")
    database.execute(f"GRANT SELECT, UPDATE ON public.counts TO {login}")
    dsn = make_dsn(database.dsn, user=login, password="irrelevant")
    assert ok("doctor", "--slot", stream.settings.slot, "--json", dsn=dsn).json["ok"]

    recorder = Recorder()
    with stream.host(Counter(), recorder, Failing(), dsn=dsn):
        stream.insert("good", "bad", *["good"] * 40)
        stream.wait_ordered()
        eventually(lambda: database.execute("SELECT n FROM public.counts") == [(42,)], "the counter has them all")
        eventually(lambda: database.execute("SELECT 1 FROM walstream.parked"), "the bad one is parked")
        # A seq that comes twice is a violation.
        database.execute("DELETE FROM agent_events WHERE seq = 1; INSERT INTO walstream.erasures VALUES (1, 1, 'test')")
        database.execute(
            "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
            " VALUES (1, gen_random_uuid(), 'a', 'again', '{}')"
        )
        eventually(lambda: database.execute("SELECT 1 FROM walstream.violations"), "the violation is recorded")
        eventually(lambda: database.execute("SELECT 1 FROM walstream.ledger_catalogue"), "the catalogue was looked at")
        assert "TAMPER ALARM" in call("status", "--json", dsn=dsn).json["problems"][0]
        ok("audit", "acknowledge", dsn=database.dsn)
        status = call("status", "--json", dsn=dsn)
        (parked,) = status.json["problems"]
        assert "events parked behind a failure: 1 " in parked

    # A run merges small segments once there are 64 of them: no need to wait for so many.
    conn = connect(dsn, application_name="test")
    generation = database.execute("SELECT generation FROM walstream.generation")[0][0]
    assert Compactor(conn, "walstream", generation, min_run=2).run() > 0
    conn.close()

    # Rows that the slot missed are recovered, and a restart goes on where it stood.
    stream.insert("missed")
    database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", stream.settings.slot)
    with stream.host(Counter(), Failing(), dsn=dsn):
        stream.insert("seen")
        stream.wait_ordered()
        eventually(lambda: database.execute("SELECT n FROM public.counts") == [(44,)], "the counter has them all")
        ok("parked", "discard", "failing", "2", "--yes", dsn=dsn)
        ok("projectors", "pause", "failing", dsn=dsn)


def test_a_login_without_one_of_the_grants_is_told_which(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    database.execute(f"REVOKE UPDATE ON walstream.generation FROM {login}")
    dsn = make_dsn(database.dsn, user=login, password="irrelevant")
    called = call("doctor", "--slot", stream.settings.slot, "--json", dsn=dsn)
    (grants,) = [check for check in called.json["checks"] if check["check"] == "grants"]
    assert 'UPDATE on "walstream".generation' in grants["found"]


@pytest.fixture
def worker(database: Database, server: Server) -> Iterator[str]:
    name = f"worker_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD 'irrelevant'")
    yield name
    database.execute(f"DROP OWNED BY {name}")
    server.execute(f"DROP ROLE {name}")


SESSION = "11111111-1111-1111-1111-111111111111"
BATCH = f'[{{"session_id": "{SESSION}", "agent_id": "a", "event_type": "b", "payload": {{}}}}]'
WINDOW = '{"messages": [{"role": "user", "content": "hello"}]}'


@pytest.mark.parametrize("by", ["", "month", "hash:2"])
def test_a_worker_appends_and_reads_and_can_write_nothing_else(database: Database, worker: str, by: str) -> None:
    stream = Installed(database, *(("--partition-by", by) if by else ()), "--worker", worker)
    conn = psycopg2.connect(make_dsn(database.dsn, user=worker, password="irrelevant"))
    conn.autocommit = True
    try:
        with conn.cursor() as cur:
            cur.execute("SELECT seq FROM walstream.append(%s, 'a', 'x', '{}', key => 'k')", (SESSION,))
            cur.execute(
                "SELECT seq FROM walstream.append(%s, 'a', 'context.loaded', %s, store_messages => true)",
                (SESSION, WINDOW),
            )
            cur.execute("SELECT seq FROM walstream.append_batch(%s)", (BATCH,))
            cur.execute("SELECT session FROM walstream.fork(%s, 1, 'a')", (SESSION,))
            for table in (
                *("agent_events", "agent_snapshots", "agent_jobs"),
                *(f"walstream.{name}" for name in ("migrations", "identity", "messages", "forks", "commit_order")),
            ):
                cur.execute(f"SELECT count(*) FROM {table}")
            for refused in (
                "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                " VALUES (gen_random_uuid(), 'a', 'x', '{}')",
                "UPDATE agent_events SET payload = '{}'",
                "DELETE FROM agent_events",
                "TRUNCATE agent_events",
                "SELECT nextval('agent_events_seq_seq')",
                "INSERT INTO agent_snapshots (session_id, upto_seq, context) VALUES (gen_random_uuid(), 1, '{}')",
                "DELETE FROM walstream.messages",
                "DELETE FROM walstream.append_keys",
                "UPDATE walstream.generation SET generation = 9",
                "SELECT walstream.append_one('11111111-1111-1111-1111-111111111111', 'a', 'x', '{}', 'k', false)",
                "CREATE TABLE walstream.mine (id int)",
            ):
                with pytest.raises(InsufficientPrivilege):
                    cur.execute(refused)
    finally:
        conn.close()
    recorder = Recorder()
    with stream.host(recorder):
        stream.wait_ordered()
        eventually(lambda: recorder.types == ["x", "context.loaded", "b", "session.forked"], "what the worker wrote")


def test_without_the_grants_nobody_appends(database: Database, worker: str) -> None:
    Installed(database)
    database.execute(f"GRANT USAGE ON SCHEMA walstream TO {worker}")
    conn = psycopg2.connect(make_dsn(database.dsn, user=worker, password="irrelevant"))
    try:
        with conn.cursor() as cur, pytest.raises(InsufficientPrivilege):
            cur.execute("SELECT walstream.append(%s, 'a', 'x', '{}')", (SESSION,))
    finally:
        conn.close()


@pytest.mark.parametrize("by", ["", "hash:2"])
def test_who_erases_can_do_that_and_nothing_else(database: Database, worker: str, by: str) -> None:
    """The role that is called `worker` elsewhere is the eraser here."""
    partitioned = ("--partition-by", by) if by else ()
    stream = Installed(database, *partitioned, "--append-only")
    said = ok("init", "--slot", stream.settings.slot, "--eraser", worker, dsn=database.dsn).stdout
    assert f"note: {worker} may erase sessions (`walstream erase`" in said
    database.execute("SELECT walstream.append(%s, 'a', 'x', %s)", SESSION, '{"name": "Ada"}')
    dsn = make_dsn(database.dsn, user=worker, password="irrelevant")
    conn = psycopg2.connect(dsn)
    conn.autocommit = True
    try:
        with conn.cursor() as cur:
            for refused in (
                "SELECT payload FROM agent_events",
                "UPDATE agent_events SET payload = '{}'",
                "DELETE FROM agent_events",
                "SELECT walstream.append(gen_random_uuid()::text, 'a', 'x', '{}')",
                "INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (1, 1, 'mine')",
                "SELECT walstream.make_append_only()",
            ):
                with pytest.raises(InsufficientPrivilege):
                    cur.execute(refused)
    finally:
        conn.close()
    assert ok("erase", SESSION, "--reason", "asked for", "--dry-run", "--json", dsn=dsn).json["touched"]["events"] == 1
    assert ok("erase", SESSION, "--reason", "asked for", "--yes", "--json", dsn=dsn).json["left"] == 0
    assert database.execute("SELECT payload::text FROM agent_events") == [('{"walstream_erased": true}',)]
    assert database.execute("SELECT erased_by FROM walstream.erasures") == [(worker,)]
    script = ok("init", "--slot", stream.settings.slot, "--eraser", worker, "--sql", dsn=database.dsn).stdout
    database.execute(script)  # as often as one likes


def test_the_grants_can_be_printed_for_a_dba(database: Database, worker: str, login: str) -> None:
    stream = Installed(database)
    words = ["init", "--slot", stream.settings.slot, "--worker", worker, "--grants", login, "--sql"]
    database.execute(ok(*words, dsn=database.dsn).stdout)
    conn = psycopg2.connect(make_dsn(database.dsn, user=worker, password="irrelevant"))
    try:
        with conn, conn.cursor() as cur:
            cur.execute("SELECT seq FROM walstream.append(%s, 'a', 'x', '{}')", (SESSION,))
            assert cur.fetchall() == [(1,)]
    finally:
        conn.close()
    called = call("init", "--slot", stream.settings.slot, "--worker", "nobody at all", dsn=database.dsn)
    assert "no role" in called.stderr
    assert 'CREATE ROLE "nobody at all" LOGIN\n' in called.stderr, "a worker reads no slot"
    called = call("init", "--slot", stream.settings.slot, "--grants", "nobody at all", dsn=database.dsn)
    assert "LOGIN REPLICATION" in called.stderr


def test_the_login_of_run_may_write_snapshots_and_no_more(database: Database, login: str) -> None:
    Installed(database, "--grants", login)
    conn = psycopg2.connect(make_dsn(database.dsn, user=login, password="irrelevant"))
    conn.autocommit = True
    try:
        with conn.cursor() as cur:
            cur.execute("INSERT INTO agent_snapshots (session_id, upto_seq, context) VALUES (%s, 1, '{}')", (SESSION,))
            cur.execute("UPDATE agent_snapshots SET quarantined_at = now()")
            cur.execute("DELETE FROM agent_snapshots")
            cur.execute("SELECT count(*) FROM walstream.messages, walstream.forks")
            for refused in ("DELETE FROM walstream.messages", "SELECT walstream.append('x', 'a', 'x', '{}')"):
                with pytest.raises(InsufficientPrivilege):
                    cur.execute(refused)
    finally:
        conn.close()


@pytest.mark.parametrize("by", ["", "month"])
def test_a_session_is_written_snapshotted_and_recovered_with_these_grants(
    database: Database, login: str, worker: str, by: str
) -> None:
    """The snapshot writer under the login of `run`; append, rebuild, recovery, forks and reading under a worker's."""
    ways = ("--partition-by", by) if by else ()
    stream = Installed(database, *ways, "--grants", login, "--worker", worker)
    dsn = str(make_dsn(database.dsn, user=worker, password="irrelevant"))
    ledger = Ledger(stream.settings)
    conn = psycopg2.connect(dsn)
    call_of = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call_of]}
    try:
        with conn:
            ledger.append(SESSION, "a", "context.loaded", json.loads(WINDOW), store_messages=True, on=conn)
            ledger.append(SESSION, "a", "model.responded", {"message": asked}, on=conn)
            invoked = {"call_id": "c1", "name": "pay", "arguments": {}}
            ledger.append(SESSION, "a", "tool.invoked", invoked, on=conn)
        writer = make_dsn(database.dsn, user=login, password="irrelevant")
        with stream.host(SnapshotWriter(every_events=1), dsn=writer):
            stream.wait_ordered()
            eventually(lambda: database.execute("SELECT max(upto_seq) FROM agent_snapshots") == [(3,)], "a snapshot")
        # The writer may see which number was drawn last; without that, every rebuild would count its whole session.
        assert database.execute("SELECT max(settled_seq) > 0 FROM agent_snapshots") == [(True,)]
        context = rebuild_context(conn, SESSION, settings=stream.settings)
        assert [message["content"] for message in context["messages"]][:1] == ["hello"]
        assert rebuild_context(conn, SESSION, settings=stream.settings, snapshots=False) == context
        with recover(conn, SESSION, settings=stream.settings) as recovery:
            (open_call,) = recovery.calls
            assert recovery.retry(open_call).attempt == 2
        conn.commit()
        for words in (
            ["sessions"],
            ["events", SESSION],
            ["context", SESSION],
            ["context", SESSION, "--at-offset", "2"],
            ["context", SESSION, "--at-time", "2100-01-01"],
            ["inflight", SESSION],
            ["fork", SESSION, "--at", "2"],
        ):
            ok(*words, "--json", "--slot", stream.settings.slot, dsn=dsn)
    finally:
        conn.close()
