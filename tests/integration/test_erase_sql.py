"""Erasing a session, by the SQL function that everybody calls; every table is searched for what should be gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from psycopg2.extensions import ISOLATION_LEVEL_REPEATABLE_READ, connection

from tests.conftest import Database
from tests.integration.test_append_sql import ODD, A, B, C, Ledger, refused
from tests.integration.test_jobs_sql import Jobs
from walstream.config import Settings
from walstream.ledger import schema

SECRET = "Ada-Lovelace-4711"
SECRET_PAYLOAD = {"name": SECRET}
BY_MONTH = schema.partitioned_sql(Settings().ledger, "RANGE", "created_at") + (
    "CREATE TABLE events_old PARTITION OF agent_events FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');"
    "CREATE TABLE events_rest PARTITION OF agent_events DEFAULT;"
)
OF_JSON = schema.ledger_sql(Settings().ledger).replace("jsonb", "json").replace("uuid", "text")
SHAPES = {
    "plain": (Settings(), ""),
    "odd": (ODD, ""),
    "by month": (Settings(), BY_MONTH),
    "json": (Settings(), OF_JSON),
}


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database)


def contents(ledger: Ledger) -> dict[str, list[str]]:
    """Each row of every table of walstream's schema and of the ledger's, as text; but for the declarations."""
    found: dict[str, list[str]] = {}
    with ledger.database.connect() as on, on.cursor() as cur:
        cur.execute(
            "SELECT format('%%I.%%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n"
            " ON n.oid = c.relnamespace WHERE n.nspname IN (%s, %s) AND c.relkind = 'r' AND c.relname <> 'erasures'",
            (ledger.settings.namespace, ledger.settings.ledger.namespace),
        )
        for (name,) in cur.fetchall():
            cur.execute(f"SELECT t::text FROM {name} AS t")
            found[name] = [text for (text,) in cur.fetchall()]
    return found


def holding(ledger: Ledger, secret: str = SECRET) -> list[str]:
    """The tables in which a row says ``secret`` anywhere."""
    return [name for name, rows in contents(ledger).items() if any(secret in row for row in rows)]


def erase(ledger: Ledger, on: connection, session: str = A, **more: Any) -> dict[str, int]:
    with on:
        return dict(ledger.call(on, "erase_session", session_id=session, reason="asked for", **more))


def fill(ledger: Ledger, session: str = A, secret: str = SECRET) -> None:
    """Puts the secret wherever walstream keeps something of a session."""
    on = ledger.database.connect()
    home, beside = ledger.home.replace("%", "%%"), ledger.settings.ledger.beside
    jobs = beside(ledger.settings.ledger.jobs).replace("%", "%%")
    snapshots = beside(ledger.settings.ledger.snapshots).replace("%", "%%")
    said = {"messages": [{"role": "user", "content": f"I am {secret}"}]}
    with on, on.cursor() as cur:
        ledger.append(on, session, "context.loaded", said, store_messages=True)
        seq = ledger.append(on, session, "agent.handoff", {"to": secret}, key=f"handoff of {secret}")[0]
        ledger.append(on, session, "tool.invoked", {"call_id": "1", "name": "mail", "arguments": {"to": secret}})
        cur.execute(
            f"INSERT INTO {jobs} (session_id, agent_id, event_seq, status, error)"
            " VALUES (%s, 'a', %s, 'SUBMITTED', %s), (%s, 'a', NULL, 'COMPLETED', %s)",
            (session, seq, secret, session, secret),
        )
        cur.execute(
            f"INSERT INTO {snapshots} (session_id, upto_seq, context, fold_version)"
            " VALUES (%s, %s, to_jsonb(%s::text), '2')",
            (session, seq, secret),
        )
        cur.execute(
            f"INSERT INTO {home}.projectors (name, kind) VALUES ('p', 'external') ON CONFLICT DO NOTHING;"
            f"INSERT INTO {home}.projectors (name, kind, error, error_seqs)"
            " VALUES (%s, 'external', %s, ARRAY[%s]::bigint[]);"
            f"INSERT INTO {home}.parked (projector, event_offset, seq, session_id, event_type, state, error, traceback)"
            " VALUES ('p', %s, %s, %s, 'agent.handoff', 'failed', %s, %s)",
            (f"p of {session}", f"ValueError: {secret}", seq, seq, seq, session, secret, f"KeyError: {secret}"),
        )
        cur.execute(
            f"INSERT INTO {home}.dead_letters (event_seq, session_id, reason) VALUES (%s, %s, %s)",
            (seq, session, f"nobody is called {secret}"),
        )


@pytest.mark.parametrize("mode", ["redact", "remove"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_of_it_stands_anywhere_and_the_rest_is_as_it_was(database: Database, shape: str, mode: str) -> None:
    ledger = Ledger(database, *SHAPES[shape])
    fill(ledger)
    fill(ledger, B, "Grace-Hopper-0815")
    if shape == "by month":
        database.execute("INSERT INTO agent_events VALUES (99, %s, 'a', 'note', %s, '2020-05-05')", A, f'"{SECRET}"')
    assert len(holding(ledger)) >= 7
    others = contents(ledger)
    on = database.connect()
    before = [row for row in ledger.rows() if row[1] == A]
    with on, on.cursor() as cur:
        found = dict(ledger.call(on, "erasure_preview", session_id=A))
        assert (found["events"], found["messages"], found["open jobs"], found["idempotency keys"]) == (
            len(before),
            1,
            1,
            1,
        )
        cur.execute("SELECT pg_current_xact_id()::text::bigint")
        (own,) = cur.fetchone() or (None,)
        touched = dict(ledger.call(on, "erase_session", session_id=A, reason="asked for", mode=mode))
    assert {place: found[place] for place in touched} == touched
    assert holding(ledger) == []
    now = contents(ledger)
    for name, rows in others.items():
        assert [row for row in rows if ("Grace" in row or B in row) and row not in now[name]] == []
    after = [row for row in ledger.rows() if row[1] == A]
    gone = '{"walstream_erased": true}'
    assert after == ([] if mode == "remove" else [(*row[:4], gone) for row in before])
    declared = database.execute(
        f"SELECT first_seq, last_seq, session_id, xid, mode, reason FROM {ledger.home}.erasures"
    )
    assert sorted(seq for first, last, *_ in declared for seq in range(first, last + 1)) == [row[0] for row in before]
    assert {row[2:] for row in declared} == {(A, own, {"redact": "redacted", "remove": "removed"}[mode], "asked for")}


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_errors_of_projectors_go_if_they_may_tell_of_it(ledger: Ledger, mode: str) -> None:
    fill(ledger)
    fill(ledger, B, "Grace-Hopper-0815")
    ledger.database.execute(
        "INSERT INTO walstream.projectors (name, kind, state, error, error_offset, error_seqs) VALUES"
        " ('of a batch', 'external', 'halted', %s, 3, '{2, 6}'),"
        " ('of it is not known what', 'external', 'halted', %s, 3, NULL),"
        " ('of our own words', 'external', 'hung', 'too late', NULL, '{}')",
        SECRET,
        SECRET,
    )
    shown = 'SELECT name, error FROM walstream.projectors WHERE error IS NOT NULL ORDER BY name COLLATE "C"'
    assert erase(ledger, ledger.database.connect(), mode=mode)["errors of projectors"] == 3
    gone = "erased, with a session that it may have told of"
    assert ledger.database.execute(shown) == [
        ("of a batch", gone),
        ("of it is not known what", gone),
        ("of our own words", "too late"),
        (f"p of {A}", gone),
        (f"p of {B}", "ValueError: Grace-Hopper-0815"),
    ]
    # What a runner of an older release wrote after it was redacted is found by the declaration.
    ledger.database.execute("UPDATE walstream.projectors SET error = %s WHERE name = %s", SECRET, f"p of {A}")
    assert erase(ledger, ledger.database.connect(), mode=mode)["errors of projectors"] == 1
    assert holding(ledger) == []


def test_a_schema_before_the_ninth_version_forgets_every_error(database: Database) -> None:
    ledger = Ledger(database)
    fill(ledger)
    database.execute("ALTER TABLE walstream.projectors DROP COLUMN error_seqs")
    assert erase(ledger, database.connect())["errors of projectors"] == 1
    assert holding(ledger) == []


def test_it_can_be_said_again_and_a_redacted_session_can_be_removed(ledger: Ledger) -> None:
    fill(ledger)
    on = ledger.database.connect()
    assert erase(ledger, on)["events"] == 3
    assert set(erase(ledger, on).values()) == {0, 1}  # one session, and nothing in it
    ledger.append(on, A, payload={"more": 1})
    assert erase(ledger, on)["events"] == 1
    assert erase(ledger, on, mode="remove")["events"] == 4
    assert ledger.rows() == []
    modes = "SELECT first_seq, last_seq, mode FROM walstream.erasures ORDER BY id"
    assert ledger.database.execute(modes) == [(1, 3, "redacted"), (4, 4, "redacted"), (1, 4, "removed")]


@pytest.mark.parametrize("mode", ["redact", "remove"])
def test_a_repeated_append_is_still_known_by_its_key(ledger: Ledger, mode: str) -> None:
    """A worker that comes back with what it had in hand must not put it into the ledger again."""
    on = ledger.database.connect()
    seq = ledger.append(on, A, payload=SECRET_PAYLOAD, key="once")[0]
    erase(ledger, on, mode=mode)
    again = ledger.append(on, A, payload=SECRET_PAYLOAD, key="once")
    assert again[:2] == (seq, False)
    assert ledger.append(on, A, payload={}, key="another")[1] is True
    assert ledger.call(on, "appended", session_id=A, key="once")[0][0] == seq
    on.commit()
    assert holding(ledger) == []


def test_forks_are_erased_or_kept_and_never_forgotten(ledger: Ledger) -> None:
    on = ledger.database.connect()
    on.autocommit = True
    ledger.append(on, A, payload=SECRET_PAYLOAD)
    for child, parent in ((B, A), (C, B)):
        ledger.call(on, "fork", parent_id=parent, at_seq=99, agent_id="a", session_id=child)
        ledger.append(on, child, "context.loaded", {"messages": [SECRET]}, store_messages=True)
        ledger.database.execute(
            "INSERT INTO agent_snapshots (session_id, upto_seq, context) VALUES (%s, 1, '1')", child
        )
    error = refused(on, lambda: ledger.call(on, "erase_session", session_id=A, reason="x"))
    assert error.pgcode == "WS006"
    assert "2 sessions go on from session" in str(error)
    assert len(holding(ledger)) == 2
    kept = erase(ledger, on, forks="keep")
    assert (kept["sessions"], kept["events"], kept["snapshots"]) == (1, 1, 2)
    assert holding(ledger) == ["walstream.messages"]
    all_of_them = erase(ledger, on, forks="erase")
    assert (all_of_them["sessions"], all_of_them["events"]) == (3, 4)
    assert holding(ledger) == []
    assert ledger.database.execute("SELECT * FROM walstream.forks") == []
    assert {row[1] for row in ledger.rows()} == {A, B, C}


def test_a_job_at_work_is_in_the_way_until_it_is_canceled(database: Database) -> None:
    jobs = Jobs(Ledger(database))
    jobs.call("append", A, "a", "note", '{"x": 1}')
    number = jobs.submit()
    held = jobs.begun()
    waiting = jobs.submit()
    on = jobs.connect()
    error = refused(on, lambda: jobs.call("erase_session", A, "asked for", on=on))
    assert (error.pgcode, f"job {number} of session {A} is at work: worker has its lease" in str(error)) == (
        "WS006",
        True,
    )
    assert database.execute("SELECT * FROM walstream.erasures") == []
    jobs.call("erase_session", A, "asked for", force=True)
    assert [jobs.row(each)["status"] for each in (number, waiting)] == ["CANCELED"] * 2
    jobs.refused("WS001", "append", A, "a", "note", "{}", None, number, held["fencing_token"])


def test_a_job_whose_lease_is_over_is_in_nobodys_way(database: Database) -> None:
    jobs = Jobs(Ledger(database))
    jobs.call("append", A, "a", "note", '{"x": 1}')
    number = jobs.submit()
    jobs.begun()
    jobs.expire(number)
    jobs.call("erase_session", A, "asked for")
    assert jobs.row(number)["status"] == "CANCELED"


@pytest.mark.parametrize("first", ["append", "erase"])
def test_an_append_at_the_same_time_is_before_it_or_after_it(ledger: Ledger, first: str) -> None:
    one, other = ledger.database.connect(), ledger.database.connect()
    ledger.append(one, A, payload=SECRET_PAYLOAD)
    one.commit()
    done = threading.Event()

    def second() -> None:
        if first == "append":
            erase(ledger, other)
        else:
            with other:
                ledger.append(other, A, payload={"later": True})
        done.set()

    if first == "append":
        ledger.append(one, A, payload=SECRET_PAYLOAD)
    else:
        ledger.call(one, "erase_session", session_id=A, reason="asked for")
    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.4)
    one.commit()
    thread.join(60)
    assert holding(ledger) == []
    payloads = [row[4] for row in ledger.rows()]
    assert len(payloads) == 2
    assert payloads.count('{"walstream_erased": true}') == (2 if first == "append" else 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reason": "  "}, "needs a reason"),
        ({"reason": None}, "needs a reason"),
        ({"mode": "burn"}, "redact or remove, not burn"),
        ({"forks": "some"}, "erase or keep, not some"),
    ],
)
def test_what_it_refuses(ledger: Ledger, arguments: dict[str, Any], said: str) -> None:
    on = ledger.database.connect()
    error = refused(on, lambda: ledger.call(on, "erase_session", **{"session_id": A, "reason": "x", **arguments}))
    assert (error.pgcode, said in str(error)) == ("22023", True), error


def test_an_older_snapshot_of_the_database_would_not_see_all_rows(ledger: Ledger) -> None:
    on = ledger.database.connect()
    on.set_session(isolation_level=ISOLATION_LEVEL_REPEATABLE_READ)
    error = refused(on, lambda: ledger.call(on, "erase_session", session_id=A, reason="x"))
    assert "erased under READ COMMITTED" in str(error)


def test_rows_that_a_trigger_keeps_make_all_of_it_fail(ledger: Ledger) -> None:
    fill(ledger)
    ledger.database.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER keep BEFORE UPDATE ON agent_events FOR EACH ROW EXECUTE FUNCTION keep()"
    )
    on = ledger.database.connect()
    error = refused(on, lambda: ledger.call(on, "erase_session", session_id=A, reason="x"))
    assert "3 rows of session" in str(error)
    assert len(holding(ledger)) >= 7
    assert ledger.database.execute("SELECT * FROM walstream.erasures") == []


def test_a_rebuild_of_the_snapshots_is_in_the_way(ledger: Ledger) -> None:
    """It would put back what was erased."""
    fill(ledger)
    ledger.database.execute('CREATE SCHEMA "walstream_rebuild_snapshot-writer"')
    ledger.database.execute('CREATE TABLE "walstream_rebuild_snapshot-writer".agent_snapshots (LIKE agent_snapshots)')
    on = ledger.database.connect()
    error = refused(on, lambda: ledger.call(on, "erase_session", session_id=A, reason="x"))
    assert (error.pgcode, "is a copy of the snapshots" in str(error)) == ("WS006", True)
    ledger.database.execute('DROP SCHEMA "walstream_rebuild_snapshot-writer" CASCADE')
    assert erase(ledger, on)["events"] == 3


def test_nobody_may_until_it_is_granted(ledger: Ledger) -> None:
    found = ledger.database.execute(
        "SELECT p.proname::text FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
        " WHERE n.nspname = %s AND has_function_privilege('public', p.oid, 'EXECUTE')",
        "walstream",
    )
    assert found == []
