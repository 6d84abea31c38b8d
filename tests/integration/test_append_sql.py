"""The SQL functions that everybody appends through, called as any language would call them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors
from psycopg2.extensions import (
    ISOLATION_LEVEL_READ_COMMITTED,
    ISOLATION_LEVEL_REPEATABLE_READ,
    ISOLATION_LEVEL_SERIALIZABLE,
    connection,
    make_dsn,
)

from tests.conftest import Database, Server
from tests.ready import make_tables
from walstream.config import Settings, quote
from walstream.ledger import schema

S = "00000000-0000-4000-8000-00000000000%x"
A, B, C = S % 1, S % 2, S % 3

ODD = Settings.model_validate(
    {
        "namespace": 'our "own" $seq',
        "ledger": {
            "namespace": 'odd "schema" 100%',
            "table": "v$table%\"E'",
            "snapshots": "snap shots",
            "jobs": "Jobs$seq",
            "columns": {
                "seq": "v_seq",
                "session_id": "session",
                "agent_id": "agent",
                "event_type": "type",
                "payload": "v_session",
                "created_at": "stored",
            },
        },
    }
)
"""Names that need quotes, and names that the functions' own variables have."""


class Ledger:
    """A ledger of any shape, and calls of its functions."""

    def __init__(self, database: Database, settings: Settings | None = None, shape: str = "") -> None:
        self.database = database
        self.settings = settings or Settings()
        table = self.settings.ledger
        if shape:
            database.execute(f"CREATE SCHEMA IF NOT EXISTS {quote(table.namespace)}")
            database.execute(shape)
            schema.install(database.connect(), self.settings)
        else:
            make_tables(database, self.settings)
        self.home = quote(self.settings.namespace)
        c = table.columns
        self.columns = [quote(name) for name in (c.seq, c.session_id, c.agent_id, c.event_type, c.payload)]

    def call(self, on: connection, function: str, **arguments: Any) -> list[tuple[Any, ...]]:
        """Call by name, with untyped literals, as psql or any driver does."""
        home = self.home.replace("%", "%%")
        words = ", ".join(f"{name} => %s" for name in arguments)
        with on.cursor() as cur:
            cur.execute(f"SELECT * FROM {home}.{function}({words})", tuple(arguments.values()))
            return cur.fetchall()

    def append(self, on: connection, session: str, event_type: str = "note", payload: Any = None, **more: Any) -> Any:
        """One event by ``agent``; the row that the function returns."""
        text = payload if isinstance(payload, str) else json.dumps({} if payload is None else payload)
        (row,) = self.call(
            on, "append", session_id=session, agent_id="agent", event_type=event_type, payload=text, **more
        )
        return row

    def batch(self, on: connection, *events: dict[str, Any], **more: Any) -> list[tuple[Any, ...]]:
        full = [{"agent_id": "agent", "event_type": "note", "payload": {}, **event} for event in events]
        return self.call(on, "append_batch", events=json.dumps(full), **more)

    def rows(self, session: str | None = None) -> list[tuple[Any, ...]]:
        """(seq, session, agent, type, payload as text) in the order of seq."""
        seq, session_id, agent, kind, payload = self.columns
        sql = (
            f"SELECT {seq}, {session_id}::text, {agent}, {kind}, {payload}::text FROM {self.settings.ledger.qualified}"
        )
        found = self.database.execute(f"{sql} ORDER BY {seq}")
        return [row for row in found if session in (None, row[1])]

    def job(self, token: int, session: str = A) -> int:
        ((number,),) = self.database.execute(
            f"INSERT INTO {self.settings.ledger.beside(self.settings.ledger.jobs)} (session_id, status, fencing_token)"
            f" VALUES ('{session}', 'IN_PROGRESS', {token}) RETURNING job_id"
        )
        return int(number)


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database)


def refused(on: connection, call: Callable[[], Any]) -> psycopg2.Error:
    """The error that ``call`` ends with; the transaction is over afterwards."""
    with pytest.raises(psycopg2.Error) as caught:
        call()
    on.rollback()
    return caught.value


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """Run all at once; their results, or what they raised."""
    results: list[Any] = [None] * len(work)

    def run(place: int, each: Callable[[], Any]) -> None:
        try:
            results[place] = each()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def blocked(database: Database) -> Callable[[], bool]:
    """Whether somebody waits for a session's lock."""
    return lambda: bool(
        database.execute(
            "SELECT 1 FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
            " WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted"
        )
    )


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- one event, in ledgers of every shape ------------------------------------------------------------------------------


def shapes() -> Iterator[Any]:
    plain, odd = Settings().ledger, ODD.ledger
    text = schema.ledger_sql(odd).replace("uuid", "text").replace("jsonb", "json")
    partitioned = (
        "CREATE TABLE agent_events (seq bigserial, session_id uuid NOT NULL, agent_id text NOT NULL, event_type text"
        " NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now()) PARTITION BY"
    )
    yield pytest.param(Settings(), schema.ledger_sql(plain), id="as designed")
    yield pytest.param(ODD, schema.ledger_sql(odd), id="odd names")
    yield pytest.param(ODD, text, id="text sessions, json payloads, odd names")
    yield pytest.param(
        Settings(),
        f"{partitioned} HASH (session_id);"
        + "".join(
            f"CREATE TABLE p{n} PARTITION OF agent_events FOR VALUES WITH (MODULUS 3, REMAINDER {n});" for n in range(3)
        ),
        id="partitioned by session",
    )
    yield pytest.param(
        Settings(),
        f"{partitioned} RANGE (created_at); CREATE TABLE p PARTITION OF agent_events DEFAULT;",
        id="partitioned by time",
    )


@pytest.mark.parametrize(("settings", "shape"), list(shapes()))
def test_every_function_in_ledgers_of_every_shape(database: Database, settings: Settings, shape: str) -> None:
    ledger = Ledger(database, settings, shape)
    on = database.connect()
    first = ledger.append(on, A, "note", {"n": 1}, key="k")
    again = ledger.append(on, A, "note", {"n": 2}, key="k")
    assert (first[1], again[1]) == (True, False)
    assert (again[0], again[2]) == (first[0], first[2])
    assert (first[3], again[3]) == (None, {"n": 1})
    window = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}], "more": 1}
    ledger.append(on, A, "context.loaded", window, store_messages=True)
    places = ledger.batch(on, {"session_id": B, "payload": {"n": 3}}, {"session_id": A, "key": "k"})
    assert [(place, appended) for place, _, appended, _, _ in places] == [(1, True), (2, False)]
    ((child, fork_seq),) = ledger.call(on, "fork", parent_id=A, at_seq=10**9, agent_id="agent")
    assert ledger.call(on, "appended", session_id=A, key="k") == [(first[0], first[2], {"n": 1})]
    assert ledger.call(on, "appended", session_id=B, key="k") == []
    on.commit()

    rows = ledger.rows()
    assert [(row[1], row[3]) for row in rows] == [
        (A, "note"), (A, "context.loaded"), (B, "note"), (child, "session.forked")
    ]  # fmt: skip
    assert rows[-1][0] == fork_seq
    stored = json.loads(rows[1][4])
    assert set(stored) == {"message_digests", "more"}
    assert len(stored["message_digests"]) == 2
    assert database.execute(
        f"SELECT encode(digest, 'hex'), message FROM {ledger.home}.messages WHERE session_id = '{A}'"
    ) == [(stored["message_digests"][0], {"role": "user", "content": "hi"})]
    assert json.loads(rows[-1][4]) == {"parent_session": A, "at_seq": rows[1][0]}
    assert database.execute(f"SELECT session_id::text, parent_id::text, at_seq FROM {ledger.home}.forks") == [
        (child, A, rows[1][0])
    ]


def test_numbers_keep_their_digits(ledger: Ledger) -> None:
    on = ledger.database.connect()
    payload = '{"n": [9007199254740993, 0.1234567890123456789, 1.10, 123456789012345678901234567890, 1e30]}'
    ledger.append(on, A, payload=payload)
    ledger.call(
        on,
        "append_batch",
        events=f'[{{"session_id": "{A}", "agent_id": "a", "event_type": "note", "payload": {payload}}}]',
    )
    on.commit()
    for row in ledger.rows():
        assert json.loads(row[4], parse_float=Decimal)["n"] == [
            9007199254740993,
            Decimal("0.1234567890123456789"),
            Decimal("1.10"),
            123456789012345678901234567890,
            10**30,
        ]
        assert "1.10" in row[4]


def test_one_session_however_its_uuid_is_written(ledger: Ledger) -> None:
    """The lock and the key belong to the value, not to its spelling."""
    one, other = ledger.database.connect(), ledger.database.connect()
    ledger.append(one, "abcdefab-0000-4000-8000-000000000001", key="k")
    with other.cursor() as cur:
        cur.execute("SET lock_timeout = '100ms'")
    other.commit()
    spelled = "{ABCDEFAB00004000 8000000000000001}".replace(" ", "")
    error = refused(other, lambda: ledger.append(other, spelled, key="k"))
    assert isinstance(error, errors.LockNotAvailable)
    one.commit()
    assert ledger.append(other, spelled, key="k")[1] is False


MISFITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"session": "no uuid"}, errors.InvalidTextRepresentation, "uuid"),
    ({"session": None}, errors.NotNullViolation, "session_id"),
    ({"session": A, "event_type": None}, errors.NotNullViolation, "event_type"),
    ({"session": A, "payload": '{"a": "\\u0000"}'}, errors.UntranslatableCharacter, "Unicode"),
    ({"session": A, "durability": "maybe"}, errors.InvalidParameterValue, "durability"),
    ({"session": A, "key": "x" * 1025}, errors.InvalidParameterValue, "1024 bytes"),
    ({"session": A, "store_messages": True}, errors.InvalidParameterValue, "context.loaded"),
    ({"session": A, "event_type": "context.loaded", "store_messages": True}, errors.InvalidParameterValue, "array"),
    (
        {
            "session": A,
            "event_type": "context.loaded",
            "store_messages": True,
            "payload": {"messages": [], "message_digests": []},
        },
        errors.InvalidParameterValue,
        "message_digests",
    ),
]


def test_what_does_not_fit_is_refused(ledger: Ledger) -> None:
    on = ledger.database.connect()
    for arguments, error, words in MISFITS:
        raised = refused(on, lambda arguments=arguments: ledger.append(on, **arguments))  # type: ignore[misc]  # mypy does not infer lambdas with defaults
        assert isinstance(raised, error), arguments
        assert words in str(raised)
    assert ledger.rows() == []


def test_a_batch_that_does_not_fit_appends_nothing(ledger: Ledger) -> None:
    on = ledger.database.connect()
    good = f'{{"session_id": "{A}", "agent_id": "a", "event_type": "note", "payload": {{}}}}'
    for events, words in (
        (f'[{good}, {{"idempotency_key": "k"}}]', "event 2 of the batch"),
        ('[["session_id"]]', "event 1 of the batch"),
        (good, "an object"),
    ):
        error = refused(on, lambda events=events: ledger.call(on, "append_batch", events=events))  # type: ignore[misc]  # as above
        assert error.pgcode == "22023"
        assert words in str(error)
    assert ledger.rows() == []


def test_an_insert_that_a_trigger_swallows_is_an_error(ledger: Ledger) -> None:
    ledger.database.execute(
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER swallow BEFORE INSERT ON agent_events FOR EACH ROW EXECUTE FUNCTION swallow()"
    )
    on = ledger.database.connect()
    assert "took no row" in str(refused(on, lambda: ledger.append(on, A, key="k")))
    assert ledger.database.execute("SELECT count(*) FROM walstream.append_keys") == [(0,)]


# -- rights ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(ledger: Ledger, server: Server) -> Iterator[connection]:
    """A connection of a role that may call the functions and nothing else."""
    name = f"worker_{ledger.database.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'irrelevant'")
    ledger.database.execute(
        f"GRANT USAGE ON SCHEMA walstream TO {name};"
        + "".join(
            f"GRANT EXECUTE ON FUNCTION walstream.{function} TO {name};"
            for function in ("append", "append_batch", "fork", "appended")
        )
    )
    made = psycopg2.connect(make_dsn(ledger.database.dsn, user=name, password="irrelevant"))
    yield made
    made.close()
    ledger.database.execute(f"DROP OWNED BY {name}")
    server.execute(f"DROP ROLE {name}")


def test_a_worker_appends_without_the_right_to_insert(ledger: Ledger, worker: connection) -> None:
    job = ledger.job(3)
    first = ledger.append(worker, A, key="k", job_id=job, fencing_token=3, durability="off")
    window = {"messages": [{"role": "user"}]}
    ledger.append(worker, A, "context.loaded", window, store_messages=True)
    ledger.batch(worker, {"session_id": B, "key": "k"})
    ledger.call(worker, "fork", parent_id=A, at_seq=first[0], agent_id="agent", session_id=C)
    assert ledger.call(worker, "appended", session_id=A, key="k")[0][0] == first[0]
    worker.commit()
    assert len(ledger.rows()) == 4
    for statement in (
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) SELECT gen_random_uuid(), '', '', '{}'",
        "SELECT 1 FROM agent_events",
        "UPDATE agent_jobs SET fencing_token = 9",
        "INSERT INTO walstream.append_keys VALUES (gen_random_uuid(), 'k', 1)",
        "SELECT walstream.append_one(gen_random_uuid()::text, '', '', '{}', NULL, false)",
        "SELECT walstream.store_messages(gen_random_uuid()::text, '{\"messages\": []}')",
        "SELECT walstream.begin_append(NULL, NULL, NULL)",
    ):
        with worker.cursor() as cur, pytest.raises(errors.InsufficientPrivilege):
            cur.execute(statement)
        worker.rollback()


def test_nobody_appends_who_was_not_granted_it(ledger: Ledger, worker: connection) -> None:
    ledger.database.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA walstream FROM " + worker.info.user)
    for call in (
        lambda: ledger.append(worker, A),
        lambda: ledger.batch(worker),
        lambda: ledger.call(worker, "fork", parent_id=A, at_seq=1, agent_id="a"),
        lambda: ledger.call(worker, "appended", session_id=A, key="k"),
    ):
        assert isinstance(refused(worker, call), errors.InsufficientPrivilege)


def test_what_stands_in_the_way_of_a_name_is_not_called(ledger: Ledger, worker: connection) -> None:
    """The functions run with their owner's rights: nothing that a caller can put up may take the place of a name."""
    ledger.database.execute("GRANT TEMPORARY ON DATABASE " + quote(ledger.database.name) + " TO " + worker.info.user)
    ledger.database.execute("CREATE SCHEMA trap; GRANT ALL ON SCHEMA trap TO " + worker.info.user)
    with worker.cursor() as cur:
        cur.execute(
            "CREATE FUNCTION trap.hashtextextended(text, bigint) RETURNS bigint LANGUAGE plpgsql"
            " AS $$BEGIN RAISE 'trapped as %', current_user; END$$;"
            "CREATE FUNCTION trap.sha256(bytea) RETURNS bytea LANGUAGE plpgsql"
            " AS $$BEGIN RAISE 'trapped as %', current_user; END$$;"
            "CREATE FUNCTION trap.trapped(text, text) RETURNS boolean LANGUAGE plpgsql"
            " AS $$BEGIN RAISE 'trapped as %', current_user; END$$;"
            "CREATE OPERATOR trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.trapped);"
            "CREATE TEMP TABLE agent_events (n int); CREATE TEMP TABLE append_keys (n int);"
            "SET search_path = trap, pg_temp, pg_catalog"
        )
    assert ledger.append(worker, A, "context.loaded", {"messages": [1]}, key="k", store_messages=True)[1] is True
    worker.commit()
    assert len(ledger.rows()) == 1


# -- fencing -----------------------------------------------------------------------------------------------------------


def test_a_stale_token_and_an_unknown_job_append_nothing(ledger: Ledger) -> None:
    job = ledger.job(5)
    on = ledger.database.connect()
    for call in (
        lambda: ledger.append(on, A, job_id=job, fencing_token=4),
        lambda: ledger.append(on, A, job_id=job, fencing_token=6),
        lambda: ledger.append(on, A, job_id=job),
        lambda: ledger.batch(on, {"session_id": A}, job_id=job, fencing_token=4),
        lambda: ledger.call(on, "fork", parent_id=A, at_seq=1, agent_id="a", job_id=job, fencing_token=4),
    ):
        error = refused(on, call)
        assert error.pgcode == "WS001"
        assert f"job {job}" in str(error)
        assert "its token is 5" in str(error)
    for call in (
        lambda: ledger.append(on, A, job_id=job + 1, fencing_token=5),
        lambda: ledger.append(on, A, fencing_token=5),
        lambda: ledger.batch(on, job_id=job + 1, fencing_token=5),
        lambda: ledger.call(on, "fork", parent_id=A, at_seq=1, agent_id="a", fencing_token=5),
    ):
        assert refused(on, call).pgcode == "WS002"
    assert ledger.rows() == []
    assert ledger.append(on, A, job_id=job, fencing_token=5)[1] is True


def test_a_claim_waits_for_the_append_and_then_the_old_worker_is_out(ledger: Ledger) -> None:
    job = ledger.job(1)
    old, new = ledger.database.connect(), ledger.database.connect()
    ledger.append(old, A, job_id=job, fencing_token=1)
    claim = f"UPDATE agent_jobs SET fencing_token = fencing_token + 1 WHERE job_id = {job}"
    with new.cursor() as cur:
        cur.execute("SET lock_timeout = '100ms'")
        new.commit()
        with pytest.raises(errors.LockNotAvailable):
            cur.execute(claim)
        new.rollback()
        old.commit()
        cur.execute(claim)
    waiting = threading.Thread(target=lambda: results.append(refused(old, late)))
    results: list[psycopg2.Error] = []

    def late() -> None:
        ledger.append(old, A, job_id=job, fencing_token=1)

    waiting.start()  # while the claim is open it waits; then it reads the token anew, and is stale
    time.sleep(0.1)
    assert waiting.is_alive()
    new.commit()
    waiting.join(60)
    assert [error.pgcode for error in results] == ["WS001"]
    assert len(ledger.rows()) == 1


def test_who_gave_his_job_back_appends_nothing_more(ledger: Ledger) -> None:
    """The token is the last one still, but nobody has the job."""
    on = ledger.database.connect()
    on.autocommit = True
    for end in (
        "release_job({job}, 1)",
        "complete_job({job}, 1)",
        "fail_job({job}, 1, 'no')",
        "fail_job({job}, 1, 'no', 60)",
        "await_human({job}, 1)",
    ):
        ledger.database.execute("DELETE FROM agent_jobs")
        namespace = ledger.settings.namespace
        ((job, _),) = ledger.database.execute(f"SELECT * FROM {namespace}.submit_job(%s, 'a')", A)
        ledger.database.execute(f"SELECT {namespace}.claim_job('a', 'me')")
        assert ledger.append(on, A, job_id=job, fencing_token=1)[1] is True, "it is delivered"
        ledger.database.execute(f"SELECT {namespace}.begin_job({job}, 1)")
        assert ledger.append(on, A, job_id=job, fencing_token=1)[1] is True, "it is in progress"
        before = len(ledger.rows())
        ledger.database.execute(f"SELECT {namespace}.{end.format(job=job)}")

        def late(job: int = job) -> None:
            ledger.append(on, A, job_id=job, fencing_token=1)

        error = refused(on, late)
        assert error.pgcode == "WS001"
        assert "good for nothing any more" in str(error)
        assert len(ledger.rows()) == before


# -- durability --------------------------------------------------------------------------------------------------------


def durability(on: connection) -> str:
    with on.cursor() as cur:
        cur.execute("SHOW synchronous_commit")
        ((value,),) = cur.fetchall()
    return str(value)


DEMANDS: list[tuple[str, list[str | None], str]] = [
    ("on", ["off"], "off"),
    ("on", ["local"], "local"),
    ("off", ["on"], "on"),
    ("on", [None], "on"),
    ("off", [None], "off"),
    ("on", ["off", "local", "off"], "local"),
    ("on", ["off", "on", "local"], "on"),
    ("on", ["off", None], "on"),  # the second one wants what the session has
    ("on", [None, "off"], "on"),
    ("local", ["off", None], "local"),
    ("off", [None, "local"], "local"),
    ("remote_apply", [None, "local", "on"], "remote_apply"),
]


def test_the_most_demanding_append_of_a_transaction_decides(ledger: Ledger) -> None:
    on = ledger.database.connect()
    for before, asked, after in DEMANDS:
        with on.cursor() as cur:
            cur.execute(f"SET synchronous_commit = {before}")
        on.commit()
        for each in asked:
            ledger.append(on, A, durability=each)
        assert durability(on) == after, (before, asked)
        on.commit()
        assert durability(on) == before  # of this transaction only
        ledger.batch(on, {"session_id": A}, durability="off")
        assert durability(on) == "off"
        on.rollback()
        assert durability(on) == before


def test_durability_and_savepoints(ledger: Ledger) -> None:
    on = ledger.database.connect()
    ledger.append(on, A, durability="off")
    with on.cursor() as cur:
        cur.execute("SAVEPOINT s")
        ledger.append(on, A, durability="local")
        assert durability(on) == "local"
        cur.execute("ROLLBACK TO s")
        assert durability(on) == "off"  # what asked for more is not there any more
        cur.execute("SET LOCAL synchronous_commit = on")
        ledger.append(on, A, durability="off")
        assert durability(on) == "on"  # the caller's own wish is not lowered
        cur.execute("SET LOCAL synchronous_commit = off")
        ledger.append(on, A, durability="on")
        assert durability(on) == "on"


# -- at once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "isolation", [ISOLATION_LEVEL_READ_COMMITTED, ISOLATION_LEVEL_REPEATABLE_READ, ISOLATION_LEVEL_SERIALIZABLE]
)
def test_one_key_at_once_is_one_row(ledger: Ledger, isolation: int) -> None:
    """Ten at once, each again after a serialization failure, as whoever uses these levels has to."""
    start = threading.Barrier(10)

    def work(on: connection) -> tuple[int, bool]:
        on.set_session(isolation_level=isolation)
        start.wait()
        while True:
            try:
                with on.cursor() as cur:
                    cur.execute("SELECT 1")  # the snapshot is older than the wait for the lock
                seq, appended, _, _ = ledger.append(on, A, key="k")
                on.commit()
                return seq, appended
            except errors.SerializationFailure:
                assert isolation != ISOLATION_LEVEL_READ_COMMITTED
                on.rollback()

    connections = [ledger.database.connect() for _ in range(10)]
    results = in_threads(*(lambda on=on: work(on) for on in connections))
    assert sorted(appended for _, appended in results) == [False] * 9 + [True]
    ((seq, *_),) = ledger.rows()
    assert {each for each, _ in results} == {seq}


def test_a_key_that_an_older_snapshot_does_not_see_is_a_serialization_failure(ledger: Ledger) -> None:
    one, other = ledger.database.connect(), ledger.database.connect()
    other.set_session(isolation_level=ISOLATION_LEVEL_REPEATABLE_READ)
    with other.cursor() as cur:
        cur.execute("SELECT 1 FROM agent_events")
    first = ledger.append(one, A, key="k")
    one.commit()
    assert isinstance(refused(other, lambda: ledger.append(other, A, key="k")), errors.SerializationFailure)
    assert ledger.append(other, A, key="k")[:2] == (first[0], False)


def test_a_key_is_free_again_after_a_rollback(ledger: Ledger) -> None:
    one, other = ledger.database.connect(), ledger.database.connect()
    ledger.append(one, A, key="k")
    waiting = threading.Thread(target=lambda: results.append(ledger.append(other, A, key="k")))
    results: list[Any] = []
    waiting.start()
    wait_until(blocked(ledger.database))
    one.rollback()
    waiting.join(60)
    other.commit()
    assert results[0][1] is True
    assert [row[0] for row in ledger.rows()] == [results[0][0]]


def test_a_savepoint_takes_back_the_event_and_its_key(ledger: Ledger) -> None:
    on = ledger.database.connect()
    ledger.append(on, A, payload={"n": 1})
    with on.cursor() as cur:
        cur.execute("SAVEPOINT s")
        ledger.append(on, A, payload={"n": 2}, key="k")
        cur.execute("ROLLBACK TO s")
    assert ledger.append(on, A, payload={"n": 3}, key="k")[1] is True
    on.commit()
    assert [row[4] for row in ledger.rows()] == ['{"n": 1}', '{"n": 3}']


def test_a_session_commits_in_the_order_of_its_seqs(ledger: Ledger) -> None:
    """Many writers on few sessions, transactions of different lengths, some rolled back. Each transaction notes, after
    its commit, that it is visible; the oracle is the snapshot: whoever sees a seq of a session sees all lower ones."""
    sessions = [A, B, C]
    stop = threading.Event()
    problems: list[Any] = []

    def write(number: int) -> int:
        on, written = ledger.database.connect(), 0
        for step in range(25):
            # With several sessions, always in the same order: who takes them crosswise has to use a batch.
            for session in [sessions[(number + step) % 3]] if step % 3 else sessions[: 1 + step % 2]:
                ledger.append(on, session, payload={"writer": number, "step": step})
                written += 1
            if step % 7 == 5:
                on.rollback()
            else:
                on.commit()
        return written

    def watch() -> None:
        on = ledger.database.connect()
        on.autocommit = True
        seen: dict[str, set[int]] = {session: set() for session in sessions}
        while not stop.is_set():
            with on.cursor() as cur:
                cur.execute("SELECT session_id::text, seq FROM agent_events")
                now: dict[str, set[int]] = {session: set() for session in sessions}
                for session, seq in cur:
                    now[session].add(seq)
            for session in sessions:
                late = now[session] - seen[session]
                if late and seen[session] and min(late) < max(seen[session]):
                    problems.append((session, min(late), max(seen[session])))
            seen = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    written = in_threads(*(lambda n=n: write(n) for n in range(8)))
    stop.set()
    watcher.join(60)
    assert problems == []
    assert all(isinstance(each, int) for each in written), written
    assert 200 < len(ledger.rows()) < sum(written)


def test_plain_inserts_do_commit_out_of_order(ledger: Ledger) -> None:
    """What the lock is for: without it the watcher above would find this."""
    one, other = ledger.database.connect(), ledger.database.connect()
    insert = (
        f"INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES ('{A}', '', '', '{{}}')"
        " RETURNING seq"
    )
    with one.cursor() as cur, other.cursor() as second:
        cur.execute(insert)
        second.execute(insert)
    other.commit()
    ((visible, *_),) = ledger.rows()
    one.commit()
    assert ledger.rows()[0][0] < visible


def test_batches_in_crossing_order_do_not_wait_in_a_ring(ledger: Ledger) -> None:
    start = threading.Barrier(4)

    def work(order: list[str]) -> int:
        on = ledger.database.connect()
        start.wait()
        for _ in range(30):
            ledger.batch(on, *({"session_id": session} for session in order))
            on.commit()
        return 30

    orders = ([A, B, C], [C, B, A], [B, C, A], [C, A, B])
    results = in_threads(*(lambda order=order: work(order) for order in orders))
    assert results == [30] * 4
    assert len(ledger.rows()) == 360
    for session in (A, B, C):
        assert len(ledger.rows(session)) == 120


def test_a_batch_keeps_its_order_and_is_all_or_nothing(ledger: Ledger) -> None:
    on = ledger.database.connect()
    events = [{"session_id": (A, B)[n % 2], "payload": {"n": n}} for n in range(50)]
    results = ledger.batch(on, *events)
    assert [row[0] for row in results] == list(range(1, 51))
    assert [row[1] for row in results] == sorted(row[1] for row in results)
    on.commit()
    assert [json.loads(row[4])["n"] for row in ledger.rows()] == list(range(50))
    refused(on, lambda: ledger.batch(on, {"session_id": A}, {"session_id": A, "agent_id": None}))
    assert len(ledger.rows()) == 50
    assert ledger.batch(on) == []


def test_one_key_twice_in_a_batch_is_one_event(ledger: Ledger) -> None:
    on = ledger.database.connect()
    first, second = ledger.batch(
        on, {"session_id": A, "key": "k", "payload": {"n": 1}}, {"session_id": A, "key": "k", "payload": {"n": 2}}
    )
    assert (first[1], first[2], second[1], second[2], second[4]) == (second[1], True, first[1], False, {"n": 1})


# -- what dies ---------------------------------------------------------------------------------------------------------

_CLIENT = """
import sys, time, psycopg2
on = psycopg2.connect(sys.argv[1])
cur = on.cursor()
cur.execute("CREATE TABLE IF NOT EXISTS effects (n int)")
on.commit()
cur.execute("INSERT INTO effects VALUES (1)")
cur.execute("SELECT walstream.append(%s, 'agent', 'note', '{}', key => 'k')", (sys.argv[2],))
print("appended", flush=True)
time.sleep(60)
"""


def test_a_client_killed_between_append_and_commit_leaves_nothing(ledger: Ledger) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, ledger.database.dsn, A], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "appended\n"
        client.send_signal(signal.SIGKILL)
    finally:
        client.kill()
        client.wait(60)
        client.stdout.close()
    on = ledger.database.connect()
    assert ledger.append(on, A, key="k")[1] is True  # waits for the lock until the server has noticed
    on.commit()
    assert len(ledger.rows()) == 1
    assert ledger.database.execute("SELECT count(*) FROM effects") == [(0,)]


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_fork_begins_at_the_last_event_up_to_the_seq(ledger: Ledger) -> None:
    on = ledger.database.connect()
    seqs = [ledger.append(on, session)[0] for session in (A, B, A, B, A)]
    ((child, seq),) = ledger.call(on, "fork", parent_id=A, at_seq=seqs[3], agent_id="forker", session_id=C)
    on.commit()
    assert (child, seq) == (C, seqs[-1] + 1)
    assert ledger.rows(C) == [
        (seq, C, "forker", "session.forked", json.dumps({"at_seq": seqs[2], "parent_session": A}))
    ]


def test_what_cannot_be_forked(ledger: Ledger) -> None:
    on = ledger.database.connect()
    seq = ledger.append(on, A)[0]
    on.commit()
    for parent, at, child in ((A, seq - 1, C), (B, seq, C), (A, seq, A)):
        words = {"parent_id": parent, "at_seq": at, "agent_id": "agent", "session_id": child}
        error = refused(on, lambda words=words: ledger.call(on, "fork", **words))  # type: ignore[misc]  # as above
        assert error.pgcode == "WS003"
    assert len(ledger.rows()) == 1
