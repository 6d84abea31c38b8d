"""The Python Ledger through every driver it takes: the same rows, the same results, the same errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras
import pytest
import sqlalchemy
import sqlalchemy.orm
from psycopg2.extensions import connection, make_dsn
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.conftest import Database, Server
from tests.ready import make_tables
from tests.recorded import run_files, run_lines
from walstream import Draft, Fenced, Ledger, LedgerError, PayloadError
from walstream.config import Settings
from walstream.errors import ConfigError
from walstream.ledger import ledger as ledger_module
from walstream.ledger.json_values import MAX_DEPTH, MAX_INTEGER_DIGITS
from walstream.payloads import TAXONOMY, ContextLoaded, ToolInvoked, ToolObserved

A, B = "00000000-0000-4000-8000-00000000000a", "00000000-0000-4000-8000-00000000000b"
EXACT = {
    "text": 'é😀"\\%s :x\n',
    "big": 2**70,
    "fine": Decimal("0.1234567890123456789"),
    "cents": Decimal("1.10"),
    "none": None,
    "list": [1, 2.5, True],
}


@pytest.fixture
def installed(database: Database) -> Database:
    make_tables(database, Settings())
    return database


def rows(database: Database) -> list[tuple[Any, ...]]:
    return database.execute(
        "SELECT seq, session_id::text, agent_id, event_type, payload::text FROM public.agent_events ORDER BY seq"
    )


# -- what `on` may be --------------------------------------------------------------------------------------------------

On = tuple[Any, Callable[[], None], Callable[[], None]]  # the object, commit, rollback


@contextlib.contextmanager
def psycopg2_connection(dsn: str) -> Iterator[On]:
    with contextlib.closing(psycopg2.connect(dsn)) as conn:
        yield conn, conn.commit, conn.rollback


@contextlib.contextmanager
def psycopg2_cursor(dsn: str) -> Iterator[On]:
    with contextlib.closing(psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)) as conn:
        yield conn.cursor(), conn.commit, conn.rollback


@contextlib.contextmanager
def psycopg_connection(dsn: str) -> Iterator[On]:
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as conn:
        yield conn, conn.commit, conn.rollback


@contextlib.contextmanager
def psycopg_cursor(dsn: str) -> Iterator[On]:
    with psycopg.connect(dsn) as conn, psycopg.RawCursor(conn) as cur:
        yield cur, conn.commit, conn.rollback


@contextlib.contextmanager
def engine(dsn: str, driver: str) -> Iterator[sqlalchemy.Engine]:
    def connect() -> Any:
        return psycopg2.connect(dsn) if driver == "psycopg2" else psycopg.connect(dsn)

    made = sqlalchemy.create_engine(f"postgresql+{driver}://", creator=connect)
    try:
        yield made
    finally:
        made.dispose()


@contextlib.contextmanager
def sqlalchemy_session(dsn: str) -> Iterator[On]:
    with engine(dsn, "psycopg2") as made, sqlalchemy.orm.Session(made) as session:
        yield session, session.commit, session.rollback


@contextlib.contextmanager
def sqlalchemy_scoped_session(dsn: str) -> Iterator[On]:
    with engine(dsn, "psycopg") as made:
        session = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(made))
        yield session, session.commit, session.rollback
        session.remove()


@contextlib.contextmanager
def sqlalchemy_connection(dsn: str) -> Iterator[On]:
    with engine(dsn, "psycopg") as made, made.connect() as conn:
        yield conn, conn.commit, conn.rollback


@contextlib.contextmanager
def sqlalchemy_raw_connection(dsn: str) -> Iterator[On]:
    with engine(dsn, "psycopg2") as made, contextlib.closing(made.raw_connection()) as conn:
        yield conn, conn.commit, conn.rollback


@contextlib.contextmanager
def django_connection(dsn: str) -> Iterator[On]:
    wrapper = pytest.importorskip("django.db.backends.postgresql.base")
    import django
    from django.conf import settings
    from django.db import connections
    from django.db.utils import load_backend

    if not settings.configured:
        settings.configure()
        django.setup()
    assert load_backend("django.db.backends.postgresql") is wrapper
    defaults = connections.configure_settings({"default": {"ENGINE": "django.db.backends.postgresql"}})["default"]
    parts = psycopg2.extensions.parse_dsn(dsn)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    made = wrapper.DatabaseWrapper({**defaults, **{key: parts.get(name, "") for key, name in names.items()}})
    made.set_autocommit(False)
    try:
        yield made, made.commit, made.rollback
    finally:
        made.close()


@contextlib.contextmanager
def django_cursor(dsn: str) -> Iterator[On]:
    with django_connection(dsn) as (made, commit, rollback), made.cursor() as cur:
        yield cur, commit, rollback


EVERY = (
    psycopg2_connection,
    psycopg2_cursor,
    psycopg_connection,
    psycopg_cursor,
    sqlalchemy_session,
    sqlalchemy_scoped_session,
    sqlalchemy_connection,
    sqlalchemy_raw_connection,
    django_connection,
    django_cursor,
)


def test_every_driver_does_the_same(installed: Database) -> None:
    installed.execute("INSERT INTO agent_jobs (session_id, status, fencing_token) VALUES (%s, 'IN_PROGRESS', 3)", A)
    ledger = Ledger(Settings(), job=1, fencing_token=3)
    for number, kind in enumerate(EVERY):
        key = f"key {number}"
        with kind(installed.dsn) as (on, commit, rollback):
            ledger.append(A, "agent", "note", {}, on=on)
            rollback()
            before = len(rows(installed))
            first = ledger.append(A, "agent", "note", EXACT, key=key, durability="off", on=on)
            assert len(rows(installed)) == before, kind  # nothing is committed behind the caller's back
            again = ledger.append(uuid.UUID(A), "agent", "note", {}, key=key, on=on)
            batch = ledger.append_batch(
                [
                    Draft(B, "agent", "note", EXACT),
                    Draft(A, "other", "context.loaded", {"messages": [{"role": "user"}]}, store_messages=True),
                    Draft(A, "agent", "note", {}, key),
                ],
                durability="local",
                on=on,
            )
            child, fork_seq = ledger.fork(A, first.seq, "forker", on=on)
            assert ledger.find(A, key, on=on) == again, kind
            assert ledger.find(B, key, on=on) is None
            commit()
        assert first._replace(created_at=None) == (first.seq, True, None, None)
        assert first.created_at is not None
        assert abs((datetime.now(UTC) - first.created_at).total_seconds()) < 60
        assert again == (first.seq, False, first.created_at, {**EXACT, "cents": 1.1}), kind
        assert [each.appended for each in batch] == [True, True, False], kind
        assert batch[2] == again
        assert [each.seq for each in batch[:2]] == [first.seq + 1, first.seq + 2]
        written = rows(installed)[before:]
        assert [row[:4] for row in written] == [
            (first.seq, A, "agent", "note"),
            (batch[0].seq, B, "agent", "note"),
            (batch[1].seq, A, "other", "context.loaded"),
            (fork_seq, child, "forker", "session.forked"),
        ], kind
        assert written[0][4] == written[1][4]
        assert json.loads(written[0][4], parse_float=Decimal) == {**EXACT, "list": [1, Decimal("2.5"), True]}, kind
        assert '"cents": 1.10' in written[0][4]


def test_every_driver_says_the_same_about_what_is_refused(installed: Database, server: Server) -> None:
    installed.execute("INSERT INTO agent_jobs (session_id, status, fencing_token) VALUES (%s, 'IN_PROGRESS', 3)", A)
    name = f"nobody_{installed.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'irrelevant'")
    other = Settings(namespace="elsewhere")
    installed.execute(f"GRANT USAGE ON SCHEMA walstream TO {name}; CREATE SCHEMA empty")
    try:
        for kind in EVERY:
            with kind(installed.dsn) as (on, _, rollback):

                def refused(ledger: Ledger, kind: type[Exception], *words: str, on: Any = on, session: str = A) -> None:
                    with pytest.raises(kind) as caught:
                        ledger.append(session, "agent", "note", {}, on=on)
                    said = f"{caught.value} [{getattr(caught.value, 'hint', '')}]"
                    assert [word for word in words if word not in said] == []

                refused(
                    Ledger(Settings(), job=1, fencing_token=2), Fenced, A, "token 2 of job 1", "is 3 now", "roll back"
                )
                rollback()
                with pytest.raises(Fenced, match="token 2 of job 1"):
                    Ledger(Settings(), job=1, fencing_token=2).fork(A, 1, "agent", on=on)
                rollback()
                refused(Ledger(Settings(), job=9, fencing_token=2), LedgerError, A, "no job 9")
                rollback()
                refused(Ledger(Settings()), LedgerError, "my session", "UUID", session="my session")
                rollback()
                refused(Ledger(other), ConfigError, "not installed", "walstream init")
                rollback()
                refused(Ledger(Settings(namespace="empty")), ConfigError, "'append'", "walstream migrate")
                rollback()
                with pytest.raises(LedgerError, match="no event up to seq 1"):
                    Ledger(Settings()).fork(A, 1, "agent", on=on)
                rollback()
            with kind(make_dsn(installed.dsn, user=name, password="irrelevant")) as (on, _, rollback):
                refused(Ledger(Settings()), ConfigError, "may not append", "walstream init --worker", on=on)
                rollback()
    finally:
        installed.execute(f"DROP OWNED BY {name}")
        server.execute(f"DROP ROLE {name}")
    assert rows(installed) == []


def test_what_is_not_ours_stays_the_drivers(installed: Database) -> None:
    """Whoever tries again after a serialization failure looks for the error that his driver has always raised."""
    other = installed.connect()
    Ledger(Settings()).append(A, "agent", "note", {}, key="k", on=other)
    for kind, error in (
        (psycopg2_connection, psycopg2.errors.LockNotAvailable),
        (psycopg_connection, psycopg.errors.LockNotAvailable),
        (sqlalchemy_session, sqlalchemy.exc.OperationalError),
    ):
        with kind(make_dsn(installed.dsn, options="-c lock_timeout=50ms")) as (on, _, rollback):
            with pytest.raises(error):
                Ledger(Settings()).append(A, "agent", "note", {}, on=on)
            rollback()
    other.rollback()
    installed.execute(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN nowhere(); END';"
        "CREATE TRIGGER broken BEFORE INSERT ON agent_events FOR EACH ROW EXECUTE FUNCTION broken()"
    )
    with pytest.raises(psycopg2.errors.UndefinedFunction):  # of the trigger: nothing that `walstream migrate` brings
        Ledger(Settings()).append(A, "agent", "note", {}, on=other)


def test_what_cannot_be_appended_on(installed: Database) -> None:
    ledger = Ledger(Settings())
    with engine(installed.dsn, "psycopg2") as made:
        for on, words in (
            (made, "an Engine has no transaction"),
            (installed.dsn, "a str"),
            (None, "a NoneType"),
            (object(), "SQLAlchemy Session"),
        ):
            with pytest.raises(TypeError, match=words):
                ledger.append(A, "agent", "note", {}, on=on)
    asynchronous = psycopg2.connect(installed.dsn, async_=1)
    psycopg2.extras.wait_select(asynchronous)
    with pytest.raises(TypeError, match="asynchronous"):
        ledger.append(A, "agent", "note", {}, on=asynchronous)
    asynchronous.close()


def test_an_async_session_of_sqlalchemy(installed: Database) -> None:
    ledger = Ledger(Settings())

    async def work() -> None:
        parts = psycopg2.extensions.parse_dsn(installed.dsn)
        made = create_async_engine(
            "postgresql+asyncpg://",
            connect_args={
                "host": parts["host"], "port": int(parts["port"]), "user": parts["user"], "database": parts["dbname"]
            },
        )  # fmt: skip
        async with AsyncSession(made) as session:
            with pytest.raises(TypeError, match="run_sync"):
                ledger.append(A, "agent", "note", {}, on=session)
            done = await session.run_sync(lambda on: ledger.append(A, "agent", "note", EXACT, key="k", on=on))
            again = await session.run_sync(lambda on: ledger.append(A, "agent", "note", {}, key="k", on=on))
            assert (again.seq, again.appended) == (done.seq, False)
            await session.commit()
            installed.execute(
                "INSERT INTO agent_jobs (session_id, status, fencing_token) VALUES (%s, 'IN_PROGRESS', 2)", A
            )
            late = Ledger(Settings(), fencing_token=1, job=1)
            with pytest.raises(Fenced):
                await session.run_sync(lambda on: late.append(A, "agent", "note", {}, on=on))
        await made.dispose()

    asyncio.run(work())
    assert len(rows(installed)) == 1


# -- nothing is sent that would be refused -----------------------------------------------------------------------------


class Note(BaseModel):
    text: str
    id: str = Field(default_factory=lambda: "made")
    weight: Decimal | None = None
    at: datetime | None = Field(None, serialization_alias="when")


class Untouched:
    """Fails if anything is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked of the connection")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"payload": {"a": ["x", "\0"]}}, PayloadError, "payload.a[1]: the string holds U+0000"),
        ({"payload": {"a": float("nan")}}, PayloadError, "payload.a: nan"),
        ({"agent_id": "a\0"}, PayloadError, "agent_id"),
        ({"event_type": "\ud800"}, PayloadError, "event_type"),
        ({"session_id": "\0"}, PayloadError, "session_id"),
        ({"session_id": 1}, TypeError, "session's id"),
        ({"key": ""}, ValueError, "1 to 1024 bytes"),
        ({"key": "é" * 513}, ValueError, "1 to 1024 bytes"),
        ({"durability": "maybe"}, ValueError, "'maybe'"),
        ({"store_messages": True}, PayloadError, "context.loaded"),
        ({"event_type": "tool.invoked"}, PayloadError, "tool.invoked: call_id: Field required"),
        ({"event_type": "tool.invoked", "payload": {"call_id": 1}}, PayloadError, "call_id: Input should be"),
        ({"event_type": "tool.invoked", "payload": ["x"]}, PayloadError, "payload: "),
        ({"event_type": "tool.invoked", "payload": ToolObserved(call_id="c")}, PayloadError, "ToolInvoked"),
        ({"event_type": "context.loaded", "payload": {"messages": ["hi"]}}, PayloadError, "messages.0"),
        (
            {"event_type": "context.loaded", "payload": {"messages": [], "message_digests": []}},
            PayloadError,
            "message_digests",
        ),
        ({"event_type": "note.added", "payload": {"words": "x"}}, PayloadError, "note.added: text: Field required"),
    ],
)
def test_a_refusal_costs_no_transaction(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    ledger = Ledger(Settings(), types={**TAXONOMY, "note.added": Note})
    full = {"session_id": A, "agent_id": "agent", "event_type": "note", "payload": {}, **arguments}
    with pytest.raises(error) as caught:
        ledger.append(**full, on=Untouched())
    assert words in str(caught.value)
    if not {"durability", "session_id"} & arguments.keys():
        with pytest.raises(error) as caught:
            ledger.append_batch([Draft(A, "agent", "note", {}), Draft(**full)], on=Untouched())
        assert error is ValueError or "event 2 of the batch" in str(caught.value)


def test_an_empty_batch_sends_nothing_and_a_huge_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(Settings())
    assert ledger.append_batch([], on=Untouched()) == []
    monkeypatch.setattr(ledger_module, "MAX_BATCH_BYTES", 1000)
    with pytest.raises(PayloadError, match="the most is 1000"):
        ledger.append_batch([Draft(A, "agent", "note", {"text": "x" * 100})] * 10, on=Untouched())


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_the_limits_are_those_of_postgres(installed: Database) -> None:
    """What is just let through arrives as it was; what is just refused would have been refused by the server, too,
    but for depth and integers, where Python's own limits come first."""
    ledger, on = Ledger(Settings()), installed.connect()
    edge = [
        nested(MAX_DEPTH),
        10**MAX_INTEGER_DIGITS - 1,
        Decimal("1e-16383"),
        Decimal("9" * 131_072 + "." + "9" * 16_383),
        Decimal("-0.00"),
        Decimal("0e999999"),
        5e-324,
        -1.7976931348623157e308,
        {"": "\x01\x7f\u2028\ufffe\U0010ffff"},
    ]
    for number, value in enumerate(edge):
        done = ledger.append(A, "agent", "note", value, key=f"edge {number}", on=on)
        again = ledger.append(A, "agent", "note", None, key=f"edge {number}", on=on)
        assert (again.seq, again.appended) == (done.seq, False)
        if isinstance(value, int | float | Decimal):
            assert Decimal(str(again.stored)) == Decimal(str(value))
        else:
            assert again.stored == value
    on.commit()
    for text in ("1e131072", "1e-16384", f"{'9' * 131_073}.5", '"\\u0000"', '"\\ud800"', "NaN"):
        with on.cursor() as cur, pytest.raises(psycopg2.DataError):
            cur.execute("SELECT %s::jsonb", (text,))
        on.rollback()


def test_payloads_of_models_and_of_unknown_types() -> None:
    ledger = Ledger(Settings(), types={**TAXONOMY, "note.added": Note})

    def stored(event_type: str, payload: Any) -> Any:
        return json.loads(ledger.payload_text(event_type, payload), parse_float=Decimal)

    call = ToolInvoked(call_id="c", name="search", arguments={"q": 1}, extra=Decimal("1.10"))
    assert stored("tool.invoked", call) == {
        "call_id": "c", "name": "search", "arguments": {"q": 1}, "extra": Decimal("1.10")
    }  # fmt: skip
    assert stored("tool.observed", ToolObserved(call_id="c", result=None)) == {"call_id": "c", "result": None}
    assert stored("context.loaded", ContextLoaded(messages=[{"role": "user"}])) == {"messages": [{"role": "user"}]}
    when = datetime(2026, 1, 2, tzinfo=UTC)
    note = Note(text="x", weight=Decimal("0.10"), at=when)
    assert stored("note.added", note) == {
        "text": "x", "id": "made", "weight": Decimal("0.10"), "when": "2026-01-02T00:00:00+00:00"
    }  # fmt: skip
    assert stored("note.added", {"text": "x", "more": 1}) == {"text": "x", "more": 1}
    assert stored("unheard.of", [1, None]) == [1, None]
    assert stored("unheard.of", Note(text="x")) == {"text": "x", "id": "made"}
    loose = Ledger(Settings(), replace_invalid=True)
    assert loose.payload_text("unheard.of", "\0") == '"\ufffd"'
    assert ledger.payload_text("unheard.of", "\0", replace_invalid=True) == '"\ufffd"'


@pytest.mark.recorded
def test_the_recorded_runs_fit_the_taxonomy_and_arrive_unchanged(installed: Database) -> None:
    ledger = Ledger(Settings())
    on = installed.connect()
    for file in run_files():
        events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        done = ledger.append_batch([Draft(**event) for event in events], on=on)
        for event in events:
            model = TAXONOMY[event["event_type"]].model_validate(event["payload"])
            assert json.loads(ledger.payload_text(event["event_type"], model)) == event["payload"]
        on.commit()
        found = installed.execute(
            "SELECT seq, payload::text FROM agent_events WHERE session_id = %s ORDER BY seq", events[0]["session_id"]
        )
        assert [row[0] for row in found] == [each.seq for each in done]
        assert [json.loads(row[1]) for row in found] == [event["payload"] for event in events]


@pytest.mark.recorded
def test_stored_messages_yield_the_exact_windows_at_a_fraction_of_the_size(installed: Database) -> None:
    ledger = Ledger(Settings())
    on = installed.connect()
    events = list(run_lines("marshmallow-tools-edited"))
    windows = [event["payload"] for event in events if event["event_type"] == "context.loaded"]
    for event in events:
        ledger.append(**event, store_messages=event["event_type"] == "context.loaded", on=on)
    on.commit()
    found = installed.execute(
        "SELECT e.seq, (SELECT jsonb_agg(m.message ORDER BY d.place)"
        " FROM jsonb_array_elements_text(e.payload -> 'message_digests') WITH ORDINALITY AS d (hex, place)"
        " JOIN walstream.messages AS m ON m.session_id = e.session_id AND m.digest = decode(d.hex, 'hex'))"
        "  FROM agent_events AS e WHERE e.event_type = 'context.loaded' ORDER BY e.seq"
    )
    assert [row[1] for row in found] == [window["messages"] for window in windows]
    ((distinct, size),) = installed.execute("SELECT count(*), sum(length(message::text)) FROM walstream.messages")
    assert distinct == len({json.dumps(each, sort_keys=True) for window in windows for each in window["messages"]})
    assert size < sum(len(json.dumps(window)) for window in windows) / 5


# -- rights ------------------------------------------------------------------------------------------------------------


def test_a_worker_with_what_init_grants_appends_and_cannot_insert(installed: Database, server: Server) -> None:
    from walstream.ledger.grants import worker_statements

    name = f"worker_{installed.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'irrelevant'")
    try:
        installed.execute("".join(worker_statements(Settings(), name)))
        with psycopg2_connection(make_dsn(installed.dsn, user=name, password="irrelevant")) as (on, commit, rollback):
            ledger = Ledger(Settings())
            first = ledger.append(A, "agent", "note", {}, key="k", on=on)
            ledger.append_batch([Draft(A, "agent", "context.loaded", {"messages": []}, None, True)], on=on)
            ledger.fork(A, first.seq, "agent", on=on)
            found = ledger.find(A, "k", on=on)
            assert found is not None
            assert found.seq == first.seq
            commit()
            with on.cursor() as cur, pytest.raises(psycopg2.errors.InsufficientPrivilege):
                cur.execute("INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                            " VALUES (%s, 'a', 'b', '{}')", (A,))  # fmt: skip
            rollback()
    finally:
        installed.execute(f"DROP OWNED BY {name}")
        server.execute(f"DROP ROLE {name}")
    assert len(rows(installed)) == 3


def test_one_ledger_for_many_threads(installed: Database) -> None:
    ledger = Ledger(Settings())
    results: list[int] = []

    def work(on: connection) -> None:
        for number in range(20):
            results.append(ledger.append(A, "agent", "note", {}, key=f"k{number}", on=on).seq)
            on.commit()

    threads = [threading.Thread(target=work, args=(installed.connect(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 80
    assert len(rows(installed)) == len(set(results)) == 20


def test_a_connection_of_another_encoding_is_named(installed: Database) -> None:
    on = installed.connect()
    on.set_client_encoding("LATIN1")
    ledger = Ledger(Settings())
    ledger.append(A, "agent", "note", {"text": "é"}, on=on)
    with pytest.raises(UnicodeEncodeError) as caught:
        ledger.append(A, "agent", "note", {"text": "😀"}, on=on)
    assert "set it to UTF8" in str(caught.value.__notes__)
    on.commit()  # nothing was sent, so the transaction is whole
    assert [json.loads(row[4]) for row in rows(installed)] == [{"text": "é"}]
