"""Tool calls that were in flight: listed, retried under the same key, abandoned, and never by two at once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INTRANS
from psycopg2.extensions import connection as Connection

from tests.cli_calls import ok, set_up
from tests.conftest import Database
from walstream import (
    CallSettled,
    ConfigError,
    PayloadError,
    RecoveryBusy,
    UnknownSession,
    call_key,
    inflight,
    recover,
)
from walstream.config import Columns, LedgerTable, Settings, quote
from walstream.ledger.ledger import Draft, Ledger
from walstream.ledger.rebuild import rebuild_context

ROOT = Path(__file__).resolve().parents[2]
RENAMED = LedgerTable(
    namespace="app 100%",
    table='event"s',
    columns=Columns(
        seq="n%", session_id="thread_id", agent_id="who", event_type="kind", payload="body", created_at="at"
    ),
)


@pytest.fixture
def settings(database: Database) -> Settings:
    return set_up(database)


@pytest.fixture
def conn(database: Database) -> Connection:
    made = database.connect(application_name="worker one")
    made.autocommit = True
    return made


def session() -> str:
    return str(uuid.uuid4())


def invoke(conn: Connection, settings: Settings, session_id: str, call_id: str, **payload: Any) -> int:
    """A call begins; its seq."""
    event = {"call_id": call_id, "name": "search", "arguments": '{"q": 1}', **payload}
    return Ledger(settings).append(session_id, "planner", "tool.invoked", event, on=conn).seq


def observe(
    conn: Connection, settings: Settings, session_id: str, call_id: str, event_type: str = "tool.observed"
) -> None:
    payload = {"call_id": call_id, "result": "found"}
    Ledger(settings).append(session_id, "planner", event_type, payload, on=conn)


def listed(calls: Any) -> list[tuple[str, int]]:
    return [(call.call_id, call.attempt) for call in calls]


def recorded(database: Database, session_id: str) -> list[tuple[str, Any]]:
    return database.execute(
        "SELECT event_type, payload FROM agent_events WHERE session_id = %s ORDER BY seq", session_id
    )


def test_a_call_is_in_flight_from_its_invocation_to_its_answer(settings: Settings, conn: Connection) -> None:
    one, other = session(), session()
    seq = invoke(conn, settings, one, "a")
    invoke(conn, settings, one, "b")
    invoke(conn, settings, other, "a", idempotency_key="mine")
    invoke(conn, settings, other, "gone")
    observe(conn, settings, one, "b")
    observe(conn, settings, other, "gone", "tool.abandoned")
    (call,) = inflight(conn, one, settings=settings)
    assert (call.session_id, call.agent_id, call.call_id, call.name) == (one, "planner", "a", "search")
    assert (call.seq, call.attempt, call.arguments, call.inherited_from) == (seq, 1, '{"q": 1}', None)
    assert call.idempotency_key == call_key(one, "a") == call_key(uuid.UUID(one), "a") == call_key(one.upper(), "a")
    assert call.since is not None
    assert abs(call.since.timestamp() - time.time()) < 60
    (call,) = inflight(conn, other, settings=settings)
    assert call.idempotency_key == "mine"
    assert [(each.session_id, each.call_id) for each in inflight(conn, settings=settings)] == [(one, "a"), (other, "a")]
    observe(conn, settings, one, "a")
    assert inflight(conn, one, settings=settings) == []


def test_a_call_id_that_is_used_again_is_another_call(settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "call_0")
    observe(conn, settings, where, "call_0")
    assert inflight(conn, where, settings=settings) == []
    seq = invoke(conn, settings, where, "call_0")
    (call,) = inflight(conn, where, settings=settings)
    assert (call.seq, call.attempt) == (seq, 1)


def test_retry_is_an_event_with_the_same_key_and_the_attempts_number(
    database: Database, settings: Settings, conn: Connection
) -> None:
    where = session()
    invoke(conn, settings, where, "a", idempotency_key="k1")
    for attempt in (2, 3):
        with recover(conn, where, settings=settings, agent_id="rescuer") as recovery:
            (call,) = recovery.calls
            again = recovery.retry(call)
        assert (again.attempt, again.idempotency_key, again.arguments) == (attempt, "k1", '{"q": 1}')
        assert listed(inflight(conn, where, settings=settings)) == [("a", attempt)]
    retries = [payload for kind, payload in recorded(database, where) if kind == "tool.retried"]
    assert retries == [
        {"call_id": "a", "name": "search", "attempt": attempt, "idempotency_key": "k1"} for attempt in (2, 3)
    ]
    assert database.execute("SELECT DISTINCT agent_id FROM agent_events WHERE event_type = 'tool.retried'") == [
        ("rescuer",)
    ]


def test_abandon_resolves_a_call_and_says_why(database: Database, settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    with recover(conn, where, settings=settings) as recovery:
        recovery.abandon(recovery.calls[0], "the page is gone")
        assert recovery.context["pending_tools"] == {}
        assert "the page is gone" in recovery.context["messages"][-1]["content"]
    assert inflight(conn, where, settings=settings) == []
    assert recorded(database, where)[-1] == ("tool.abandoned", {"call_id": "a", "reason": "the page is gone"})


def test_the_context_is_the_fold_of_what_was_recorded(settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    with recover(conn, where, settings=settings) as recovery:
        again = recovery.retry(recovery.calls[0])
        pending = recovery.context["pending_tools"]["a"]
        assert (pending["attempt"], pending["seq"]) == (2, again.seq)
        assert pending["idempotency_key"] == again.idempotency_key


def test_a_call_with_a_very_long_id_is_recovered(settings: Settings, conn: Connection) -> None:
    """Some gateways put what a model wants back (a signature of its thoughts) into the id of the call."""
    where, long = session(), "call_" + "\u00e9" * 20_000
    invoke(conn, settings, where, long)
    invoke(conn, settings, where, long + "2")
    with recover(conn, where, settings=settings) as recovery:
        one, other = recovery.calls
        recovery.retry(one)
        recovery.abandon(other, "no")
    assert listed(inflight(conn, where, settings=settings)) == [(long, 2)]


def test_an_attempt_is_recorded_once(database: Database, settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    with recover(conn, where, settings=settings) as recovery:
        (call,) = recovery.calls
        recovery.retry(call)
        with pytest.raises(CallSettled, match=r"tool.retried is in the ledger already, as seq \d+"):
            recovery.retry(call)
        with pytest.raises(CallSettled, match=r"seq \d+ is tool\.retried"):
            recovery.abandon(call, "no")
    assert [kind for kind, _ in recorded(database, where)] == ["tool.invoked", "tool.retried"]


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_result_that_comes_late_settles_the_call(
    database: Database, settings: Settings, conn: Connection, autocommit: bool
) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    invoke(conn, settings, where, "b")
    other = database.connect()
    other.autocommit = True
    conn.autocommit = autocommit
    with recover(conn, where, settings=settings) as recovery:
        late, fine = recovery.calls
        observe(other, settings, where, "a")  # its worker was not dead, only slow
        with pytest.raises(CallSettled, match=r"is tool\.observed"):
            recovery.retry(late)
        with pytest.raises(CallSettled, match=r"is tool\.observed"):
            recovery.abandon(late, "too slow")
        assert recovery.retry(fine).attempt == 2  # the transaction, if there is one, goes on
        if not autocommit:
            conn.commit()
    assert [kind for kind, _ in recorded(database, where)][2:] == ["tool.observed", "tool.retried"]
    # The key of the attempt that was taken back is not taken.
    assert database.execute("SELECT count(*) FROM walstream.append_keys") == [(1,)]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_late_result_is_seen_at_every_isolation_or_nothing_is_written(
    database: Database, settings: Settings, conn: Connection, isolation: str
) -> None:
    where = session()
    worker = database.connect()
    worker.set_session(isolation_level=isolation, autocommit=True)
    invoke(conn, settings, where, "a")
    late = database.connect()
    with recover(worker, where, settings=settings) as recovery:
        (call,) = recovery.calls
        observe(late, settings, where, "a")  # holds the session's lock until it commits
        timer = threading.Timer(0.5, late.commit)
        timer.start()
        with pytest.raises(CallSettled):
            recovery.retry(call)
        timer.join()
    worker.autocommit = False
    invoke(conn, settings, where, "b")
    with recover(worker, where, settings=settings) as recovery:
        for attempt in (recovery.retry, lambda call: recovery.abandon(call, "no")):
            with pytest.raises(ConfigError, match=isolation):
                attempt(recovery.calls[0])
        worker.commit()
    assert listed(inflight(conn, where, settings=settings)) == [("b", 1)]


def test_a_late_result_waits_for_the_retry_and_not_for_the_recovery(
    database: Database, settings: Settings, conn: Connection
) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    other = database.connect(options="-c lock_timeout=200")
    with recover(conn, where, settings=settings):
        observe(other, settings, where, "a")
        other.commit()
    assert inflight(conn, where, settings=settings) == []


def test_a_second_worker_is_told_who_recovers(database: Database, settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    other = database.connect(application_name="worker two")
    with recover(conn, where, settings=settings):
        with pytest.raises(RecoveryBusy, match=rf"process {conn.info.backend_pid} of the server \(worker one") as busy:
            recover(other, where, settings=settings).__enter__()
        assert busy.value.transient
        with pytest.raises(RecoveryBusy, match="on this very connection"):
            recover(conn, where, settings=settings).__enter__()
        with pytest.raises(RecoveryBusy):  # the same session, written in another way
            recover(other, where.upper(), settings=settings).__enter__()
        elsewhere = session()
        invoke(conn, settings, elsewhere, "a")
        with recover(other, elsewhere, settings=settings) as recovery:
            assert len(recovery.calls) == 1
    with recover(other, where, settings=settings) as recovery:
        assert len(recovery.calls) == 1


def test_who_waits_gets_it_when_the_other_one_is_done_or_dead(
    database: Database, settings: Settings, conn: Connection
) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    other = database.connect()
    dying = database.connect()
    holder = recover(dying, where, settings=settings)
    holder.__enter__()
    started = time.monotonic()
    with pytest.raises(RecoveryBusy):
        recover(other, where, settings=settings, wait=0.2).__enter__()
    assert time.monotonic() - started >= 0.2
    database.execute("SELECT pg_terminate_backend(%s)", dying.info.backend_pid)
    with recover(other, where, settings=settings, wait=10) as recovery:
        assert len(recovery.calls) == 1
    with pytest.raises(psycopg2.Error):
        holder.retry(holder.calls[0])
    holder.__exit__(None, None, None)  # its connection is gone, and with it there is nothing to give back


def test_the_callers_transaction_is_the_callers(database: Database, settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    mine = database.connect()
    with recover(mine, where, settings=settings) as recovery:
        assert recovery.context["pending_tools"]
        assert mine.info.transaction_status == TRANSACTION_STATUS_IDLE  # listing leaves no transaction open
        recovery.retry(recovery.calls[0])
        assert mine.info.transaction_status == TRANSACTION_STATUS_INTRANS
        mine.rollback()
    assert mine.info.transaction_status == TRANSACTION_STATUS_IDLE
    assert [kind for kind, _ in recorded(database, where)] == ["tool.invoked"]
    with mine.cursor() as cur:
        cur.execute("CREATE TABLE effects (n int)")
        with recover(mine, where, settings=settings) as recovery:
            assert mine.info.transaction_status == TRANSACTION_STATUS_INTRANS
            recovery.retry(recovery.calls[0])
            cur.execute("INSERT INTO effects VALUES (1)")
    mine.commit()
    assert [kind for kind, _ in recorded(database, where)] == ["tool.invoked", "tool.retried"]
    assert database.execute("SELECT * FROM effects") == [(1,)]


def test_an_aborted_transaction_does_not_keep_the_lock(
    database: Database, settings: Settings, conn: Connection
) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    mine = database.connect()

    def fail() -> None:
        with recover(mine, where, settings=settings) as recovery, mine.cursor() as cur:
            recovery.retry(recovery.calls[0])
            cur.execute("SELECT 1 / 0")

    with pytest.raises(psycopg2.errors.DivisionByZero):
        fail()
    with recover(conn, where, settings=settings) as recovery:
        assert listed(recovery.calls) == [("a", 1)]


def test_a_session_that_never_existed_is_an_error_and_aborts_nothing(
    database: Database, settings: Settings, conn: Connection
) -> None:
    mine = database.connect()
    with mine.cursor() as cur:
        cur.execute("CREATE TABLE kept (n int)")
    never = session()
    for wrong, words in ((never, f"no event of session {never}"), ("no-uuid", "'no-uuid' cannot be a session id")):
        with pytest.raises(UnknownSession, match=words):
            inflight(mine, wrong, settings=settings)
        with pytest.raises(UnknownSession, match=words):
            recover(mine, wrong, settings=settings).__enter__()
    mine.commit()
    assert database.execute("SELECT to_regclass('kept') IS NOT NULL") == [(True,)]
    assert database.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
    del conn


def test_a_payload_that_cannot_be_parsed_hides_no_call(
    database: Database, settings: Settings, conn: Connection
) -> None:
    """C06: the depth stands in the arguments of one call, and in the results of others."""
    where = session()
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES"
        " (%s, 'a', 'tool.invoked', ('{\"call_id\": \"deep\", \"arguments\": '"
        " || repeat('[', 7000) || repeat(']', 7000) || '}')::jsonb),"
        ' (%s, \'a\', \'tool.invoked\', \'{"call_id": "big", "arguments": {"n": 12345678901234567890.123}}\'),'
        " (%s, 'a', 'tool.invoked', '{\"call_id\": \"done\"}'),"
        " (%s, 'a', 'tool.observed', ('{\"call_id\": \"done\", \"result\": ' || repeat('[', 7000) || repeat(']', 7000)"
        " || '}')::jsonb),"
        " (%s, 'a', 'tool.invoked', '5'), (%s, 'a', 'tool.observed', '[\"call_id\"]')",
        *[where] * 6,
    )
    deep, big = inflight(conn, where, settings=settings)
    assert (deep.call_id, big.call_id) == ("deep", "big")
    assert str(big.arguments["n"]) == "12345678901234567890.123"
    assert deep.arguments_text == "[" * 7000 + "]" * 7000
    with pytest.raises(PayloadError, match=rf"'deep' \(seq {deep.seq}"):
        _ = deep.arguments
    with recover(conn, where, settings=settings) as recovery:
        assert recovery.retry(deep).attempt == 2


def test_a_json_column_with_nul_escapes_and_times_that_python_has_not(database: Database) -> None:
    settings = Settings(dsn=database.dsn)
    database.execute(
        "CREATE TABLE agent_events (seq bigserial PRIMARY KEY, session_id text NOT NULL, agent_id text NOT NULL,"
        " event_type text NOT NULL, payload json NOT NULL, created_at timestamptz DEFAULT now());"
        "CREATE INDEX ON agent_events (session_id, seq)"
    )
    from walstream.ledger import schema

    schema.install(database.connect(), settings)
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload, created_at) VALUES"
        ' (\'s\', \'a\', \'tool.invoked\', \'{"call_id": "1", "name": "x", "arguments": "\\u0000"}\', \'infinity\'),'
        " ('s', 'a', 'tool.invoked', '{\"call_id\": \"2\"}', '4713-01-01 BC'),"
        " ('s', 'a', 'tool.invoked', '{\"call_id\": \"3\"}', NULL),"
        " ('s', 'a', 'tool.observed', '{\"call_id\": \"3\", \"result\": \"\\u0000\"}', now())"
    )
    conn = database.connect()
    found = inflight(conn, "s", settings=settings)
    assert [(call.call_id, call.since) for call in found] == [("1", None), ("2", None)]
    assert found[0].arguments == "\0"
    with recover(conn, "s", settings=settings) as recovery:
        recovery.retry(recovery.calls[0])
        conn.commit()
    assert listed(inflight(conn, "s", settings=settings)) == [("1", 2), ("2", 1)]


@pytest.mark.parametrize("partitions", ["", "HASH (thread_id)", "RANGE (at)"])
def test_renamed_columns_text_sessions_and_partitions(database: Database, partitions: str) -> None:
    settings = Settings(dsn=database.dsn, namespace="own", ledger=RENAMED)
    table = RENAMED.qualified
    database.execute(
        f'CREATE SCHEMA "app 100%"; CREATE TABLE {table} ("n%" bigserial, thread_id text NOT NULL, who text NOT NULL,'
        " kind text NOT NULL, body jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now())"
        + (f" PARTITION BY {partitions}" if partitions else "")
        + f'; CREATE INDEX ON {table} (thread_id, "n%"); CREATE INDEX ON {table} ("n%")'
    )
    if partitions.startswith("HASH"):
        for number in range(3):
            database.execute(
                f'CREATE TABLE "app 100%".p{number} PARTITION OF {table}'
                f" FOR VALUES WITH (MODULUS 3, REMAINDER {number})"
            )
    elif partitions:
        database.execute(f'CREATE TABLE "app 100%".p PARTITION OF {table} DEFAULT')
    from walstream.ledger import schema

    schema.install(database.connect(), settings)
    conn = database.connect()
    conn.autocommit = True
    for name in ("thread '1' 100%", "thread 2"):
        invoke(conn, settings, name, "a")
        invoke(conn, settings, name, "b")
        observe(conn, settings, name, "b")
        with recover(conn, name, settings=settings) as recovery:
            assert listed(recovery.calls) == [("a", 1)]
            recovery.retry(recovery.calls[0])
            assert recovery.context["pending_tools"]["a"]["attempt"] == 2
    assert [(call.session_id, call.attempt) for call in inflight(conn, settings=settings)] == [
        ("thread '1' 100%", 2),
        ("thread 2", 2),
    ]
    fork = Ledger(settings).fork("thread 2", 10_000, "x", on=conn).session
    assert [call.idempotency_key for call in inflight(conn, fork, settings=settings)] == [call_key("thread 2", "a")]
    assert quote(settings.namespace) == '"own"'


def test_a_fork_goes_on_with_what_its_parent_had_in_flight(settings: Settings, conn: Connection) -> None:
    ledger, parent = Ledger(settings), session()
    for call in "abc":
        seq = invoke(conn, settings, parent, call)
    child = ledger.fork(parent, seq, "brancher", on=conn).session
    observe(conn, settings, parent, "a")  # after the fork: of no concern to the child
    grandchild_at = invoke(conn, settings, child, "own")
    observe(conn, settings, child, "b")
    grandchild = ledger.fork(child, grandchild_at, "brancher", on=conn).session
    assert listed(inflight(conn, parent, settings=settings)) == [("b", 1), ("c", 1)]
    assert listed(inflight(conn, child, settings=settings)) == [("a", 1), ("c", 1), ("own", 1)]
    with recover(conn, grandchild, settings=settings) as recovery:
        assert listed(recovery.calls) == [("a", 1), ("b", 1), ("c", 1), ("own", 1)]
        first, *_, own = recovery.calls
        assert (first.session_id, first.inherited_from, first.idempotency_key) == (
            grandchild,
            parent,
            call_key(parent, "a"),
        )
        assert (own.inherited_from, own.idempotency_key) == (child, call_key(child, "own"))
        recovery.retry(first)
        recovery.abandon(own, "not here")
        assert set(recovery.context["pending_tools"]) == {"a", "b", "c"}
        assert recovery.context["pending_tools"]["a"]["attempt"] == 2
        with pytest.raises(CallSettled):
            recovery.retry(first)
    assert listed(inflight(conn, grandchild, settings=settings)) == [("a", 2), ("b", 1), ("c", 1)]
    everywhere = [(call.session_id, call.call_id) for call in inflight(conn, settings=settings)]
    assert sorted(everywhere) == sorted(
        [
            *((parent, call) for call in ("b", "c")),
            *((child, call) for call in ("a", "c", "own")),
            *((grandchild, call) for call in "abc"),
        ]
    )


def test_many_calls_at_once(settings: Settings, conn: Connection) -> None:
    where = session()
    conn.autocommit = False
    events = [Draft(where, "a", "tool.invoked", {"call_id": f"c{n}"}) for n in range(200)]
    Ledger(settings).append_batch(events, on=conn)
    conn.commit()
    with recover(conn, where, settings=settings) as recovery:
        assert len(recovery.calls) == 200
        for call in recovery.calls:
            recovery.retry(call)
        conn.commit()
    assert {call.attempt for call in inflight(conn, where, settings=settings)} == {2}


def _agree(conn: Connection, settings: Settings, where: str, upto_seq: int | None = None) -> None:
    """The ledger asked by SQL and the folded context name the same calls, each with its seq and attempt."""
    pending = rebuild_context(conn, where, upto_seq, settings=settings)["pending_tools"]
    by_fold = {name: (each["seq"], each["attempt"]) for name, each in pending.items()}
    by_sql = inflight(conn, where, settings=settings, upto_seq=upto_seq)
    assert {call.call_id: (call.seq, call.attempt) for call in by_sql} == by_fold


def test_in_flight_by_sql_is_pending_by_the_fold(settings: Settings, conn: Connection) -> None:
    """Whatever was recorded by whom in whichever order, ids and numbers that are none included: both say the same."""
    chance = random.Random(5)
    ledger = Ledger(settings, types={})
    kinds = ("tool.invoked", "tool.invoked", "tool.observed", "tool.abandoned", "tool.retried", "note", "fork")
    ids: list[Any] = ["c0", "c1", "c2", "c3", "5", 5, "", "true", True, None, 1.5, {"a": 1}, [1]]
    attempts: list[Any] = [1, 2, 7, 999_999_999, 10**9, 10**40, 0, -3, 2.0, Decimal("3.5"), True, None, "4", [5], {}]
    for _ in range(8):
        where = session()
        ledger.append(where, "a", "note", {}, on=conn)
        for _step in range(30):
            kind, payload = chance.choice(kinds), {"call_id": chance.choice(ids)}
            if kind == "tool.retried" and chance.random() < 0.8:
                payload["attempt"] = chance.choice(attempts)
            if kind == "fork":
                where = ledger.fork(where, 10**9, "a", on=conn).session if chance.random() < 0.4 else where
                continue
            seq = ledger.append(where, "a", kind, payload, on=conn).seq
            _agree(conn, settings, where)
            _agree(conn, settings, where, seq)
        _agree(conn, settings, where, seq - 1)


def test_in_flight_follows_the_fork_that_the_fold_follows(
    database: Database, settings: Settings, conn: Connection
) -> None:
    """Where numbers come from stock, a fork's own events can have lower seqs than its parent's, and than its birth."""
    parent, child, middle = session(), session(), session()

    def row(seq: int, where: str, kind: str, payload: dict[str, Any]) -> None:
        database.execute(
            "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload) VALUES (%s, %s, 'a', %s, %s)",
            *(seq, where, kind, json.dumps(payload)),
        )

    row(50, parent, "tool.invoked", {"call_id": "early"})
    row(90, parent, "tool.invoked", {"call_id": "late"})
    row(10, child, "tool.invoked", {"call_id": "before the fork"})
    row(20, child, "session.forked", {"parent_session": parent, "at_seq": 90})
    row(30, child, "tool.observed", {"call_id": "early", "result": 1})
    row(40, middle, "session.forked", {"parent_session": child, "at_seq": 30})
    row(60, child, "session.forked", {"parent_session": parent, "at_seq": 50})
    for where in (parent, child, middle):
        for upto in (None, 5, 10, 20, 30, 60, 90):
            _agree(conn, settings, where, upto)
    everywhere = [(call.session_id, call.call_id) for call in inflight(conn, settings=settings)]
    assert sorted(everywhere) == sorted([(parent, "early"), (parent, "late"), (child, "early"), (middle, "late")])
    with recover(conn, middle, settings=settings) as recovery:
        row(41, middle, "tool.observed", {"call_id": "late", "result": 1})
        with pytest.raises(CallSettled):
            recovery.retry(recovery.calls[0])


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_parent_that_can_be_none_hides_nobody_elses_calls(
    database: Database, settings: Settings, conn: Connection, autocommit: bool
) -> None:
    good, bad, gone = session(), session(), session()
    invoke(conn, settings, good, "a")
    for where, parent in ((bad, "no id"), (gone, session())):
        Ledger(settings, types={}).append(
            where, "a", "session.forked", {"parent_session": parent, "at_seq": 10**25}, on=conn
        )
        invoke(conn, settings, where, "own")
    conn.autocommit = autocommit
    everywhere = [(call.session_id, call.call_id) for call in inflight(conn, settings=settings)]
    assert everywhere == [(good, "a"), (bad, "own"), (gone, "own")]
    assert listed(inflight(conn, bad, settings=settings)) == [("own", 1)]
    listing = {each["session_id"]: each["in_flight"] for each in ok("sessions", "--json", dsn=database.dsn).json}
    assert listing == {good: 1, bad: 1, gone: 1}


def test_a_worker_that_may_not_insert_recovers_through_the_function(database: Database, settings: Settings) -> None:
    role = f"worker_{uuid.uuid4().hex[:8]}"
    owner = database.connect()
    where = session()
    invoke(owner, settings, where, "a")
    owner.commit()
    database.execute(f'CREATE ROLE "{role}" LOGIN')
    try:
        from walstream.ledger.grants import worker_statements

        for statement in worker_statements(settings, role):
            database.execute(statement)
        mine = psycopg2.connect(database.server.dsn(database.name, role))
        with pytest.raises(psycopg2.errors.InsufficientPrivilege), mine, mine.cursor() as cur:
            cur.execute(
                "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, 'a', 'b', '{}')",
                (where,),
            )
        with recover(mine, where, settings=settings) as recovery:
            again = recovery.retry(recovery.calls[0])
            mine.commit()
            assert recovery.context["pending_tools"]["a"]["attempt"] == again.attempt == 2
            other = psycopg2.connect(database.server.dsn(database.name, role), application_name="second")
            with pytest.raises(RecoveryBusy):
                recover(other, where, settings=settings).__enter__()
            other.close()
        mine.close()
    finally:
        database.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_a_recovery_outside_of_its_block_writes_nothing(settings: Settings, conn: Connection) -> None:
    where = session()
    invoke(conn, settings, where, "a")
    with recover(conn, where, settings=settings) as recovery:
        pass
    with pytest.raises(RuntimeError, match="inside of its `with` block"):
        recovery.retry(recovery.calls[0])


# -- many at once ----------------------------------------------------------------------------------------


class Recoverers:
    """Processes that recover one session at once; each request is a round (see tests/chaos/recoverer.py)."""

    def __init__(self, dsn: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.recoverer"],
            cwd=ROOT,
            env={**os.environ, "WALSTREAM_DSN": dsn},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, **request: Any) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks recoverers is gone"
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


@pytest.fixture
def recoverers(database: Database) -> Iterator[Recoverers]:
    made = Recoverers(database.dsn)
    yield made
    made.close()


def test_twenty_processes_recover_one_session_at_once(
    database: Database, settings: Settings, conn: Connection, recoverers: Recoverers, tmp_path: Path
) -> None:
    """Some are killed in the middle. Every retry is an event, no attempt runs twice, no two run at the same time."""
    killed = 0
    for number in range(3):
        where = session()
        for call in ("a", "b", "c"):
            invoke(conn, settings, where, call)
        log = tmp_path / f"log{number}"
        ends = recoverers.round(session=where, processes=20, doomed=6, seed=number, log=str(log))
        assert {end["code"] for end in ends} <= {0, -9}, ends
        dead = {str(end["pid"]) for end in ends if end["code"] == -9}
        killed += len(dead)
        begun = []
        running: str | None = None
        for line in log.read_text().splitlines():
            word, pid, call, attempt = line.split()
            if word == "begin":
                assert running is None or running in dead, "two execute at the same time"
                running = pid
                begun.append((call, int(attempt)))
            else:
                assert running == pid
                running = None
        assert len(begun) == len(set(begun)), "an attempt ran twice"
        retried = database.execute(
            "SELECT payload ->> 'call_id', (payload ->> 'attempt')::int FROM agent_events"
            " WHERE session_id = %s AND event_type = 'tool.retried' ORDER BY seq",
            where,
        )
        assert len(retried) == len(set(retried))
        assert set(begun) <= set(retried), "an attempt ran that is no event"
        # What was recorded and did not run belongs to one that died between the two.
        assert len(set(retried) - set(begun)) <= len(dead)
        for call in ("a", "b", "c"):
            attempts = [attempt for name, attempt in retried if name == call]
            assert attempts == list(range(2, 2 + len(attempts)))
        assert database.execute(
            "SELECT payload ->> 'call_id', count(*) FROM agent_events WHERE session_id = %s"
            " AND event_type = 'tool.observed' GROUP BY 1 ORDER BY 1",
            where,
        ) == [("a", 1), ("b", 1), ("c", 1)]
        assert inflight(conn, where, settings=settings) == []
    assert killed >= 3


def test_keys_are_stable() -> None:
    """What an older release sent along is what this one sends along."""
    fixed = "00000000-0000-4000-8000-00000000000a"
    assert call_key(fixed, "call_1") == "3aba643cf8b9d09465c96e24a64adf053b2a67e0345a96f8183c750de53ba1cb"
    assert len({call_key(fixed, "call_1"), call_key(fixed, "call_2"), call_key("s", "call_1")}) == 3
