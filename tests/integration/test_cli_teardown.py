"""``walstream teardown``: everything of ours goes, nothing of anybody else's."""

from __future__ import annotations

import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import call, hold, ok
from tests.conftest import Database, Server
from tests.integration.births import insert_rows
from walstream.errors import ExitCode


@pytest.fixture
def slot(database: Database) -> str:
    return f"x_{database.name[-8:]}"


@pytest.fixture
def ledger(database: Database, slot: str) -> Database:
    ok("init", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 3)
    return database


def _remains(database: Database, slot: str) -> tuple[int, int, int, int]:
    """Slots, publications, schemas, and rows of the ledger."""
    ((slots, publications, schemas, rows),) = database.execute(
        "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s),"
        " (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM pg_namespace WHERE nspname = 'walstream'),"
        " (SELECT count(*) FROM agent_events)",
        slot,
    )
    return slots, publications, schemas, rows


def test_all_of_ours_goes_and_the_ledger_stays(ledger: Database, slot: str) -> None:
    assert _remains(ledger, slot) == (1, 1, 1, 3)
    done = ok("teardown", "--slot", slot, "--yes", "--json", dsn=ledger.dsn).json
    assert done == {
        "slot": slot,
        "publication": "walstream",
        "publication_kept": None,
        "schema": "walstream",
        "snapshots": '"public"."agent_snapshots"',
        "kept": [],
    }
    assert _remains(ledger, slot) == (0, 0, 0, 3)
    # Again: nothing is there, and that is fine.
    assert "nothing" in ok("teardown", "--slot", slot, "--yes", dsn=ledger.dsn).stdout
    # And it can be set up anew.
    assert ok("init", "--slot", slot, "--json", dsn=ledger.dsn).json["slot"]["filled"] == 3


def test_nothing_happens_unasked(ledger: Database, slot: str) -> None:
    called = call("teardown", "--slot", slot, dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "--yes" in called.stderr
    assert "agent_events" in called.stdout  # what would go and what would stay is shown
    assert _remains(ledger, slot) == (1, 1, 1, 3)


def test_the_role_of_run_cannot_take_half_of_it_away(ledger: Database, server: Server, slot: str) -> None:
    role = f"runner_{ledger.name[-8:]}"
    server.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'irrelevant'")
    try:
        ok("init", "--slot", slot, "--grants", role, dsn=ledger.dsn)
        dsn = str(make_dsn(ledger.dsn, user=role, password="irrelevant"))
        called = call("teardown", "--slot", slot, "--yes", dsn=dsn)
        assert called.exit_code == ExitCode.CONFIG
        assert "run this as" in called.stderr
        assert _remains(ledger, slot) == (1, 1, 1, 3)
    finally:
        ledger.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_a_publication_of_others_stays(ledger: Database, slot: str) -> None:
    ledger.execute("CREATE TABLE other (id int)")
    ledger.execute("ALTER PUBLICATION walstream ADD TABLE other")
    done = ok("teardown", "--slot", slot, "--yes", "--json", dsn=ledger.dsn).json
    assert "public.other" in done["publication_kept"]
    assert _remains(ledger, slot) == (0, 1, 0, 3)


def test_refused_while_a_consumer_works(ledger: Database, slot: str) -> None:
    holder = hold(ledger, "ingest")
    called = call("teardown", "--slot", slot, "--yes", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "host:1" in called.stderr
    assert _remains(ledger, slot) == (1, 1, 1, 3)
    holder.close()
    ok("teardown", "--slot", slot, "--yes", dsn=ledger.dsn)


def test_a_slot_that_is_not_of_this_stream_stays(ledger: Database, slot: str) -> None:
    ledger.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"{slot}_b")
    called = call("teardown", "--slot", f"{slot}_b", "--yes", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    # Without walstream's schema nothing says that a slot is ours.
    ok("teardown", "--slot", slot, "--yes", dsn=ledger.dsn)
    ok("teardown", "--slot", f"{slot}_b", "--yes", dsn=ledger.dsn)
    assert ledger.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", f"{slot}_b") == [(1,)]


def test_what_was_cut_short_goes_on(ledger: Database, slot: str) -> None:
    ledger.execute("SELECT pg_drop_replication_slot(%s)", slot)
    ledger.execute("DROP PUBLICATION walstream")
    ok("teardown", "--slot", slot, "--yes", dsn=ledger.dsn)
    assert _remains(ledger, slot) == (0, 0, 0, 3)


def test_snapshots_go_and_what_belongs_to_the_ledger_stays(ledger: Database, slot: str) -> None:
    """Messages that events refer to by digest stand nowhere else, and a forgotten key is an event that comes twice."""
    window = '{"messages": [{"role": "user", "content": "hello"}]}'
    append = (
        "SELECT seq, appended FROM walstream.append('11111111-1111-1111-1111-111111111111', 'a', 'context.loaded', %s,"
        " key => 'k', store_messages => true)"
    )
    ((seq, appended),) = ledger.execute(append, window)
    assert appended
    ledger.execute("INSERT INTO agent_jobs (session_id) VALUES (gen_random_uuid())")
    shown = call("teardown", "--slot", slot, dsn=ledger.dsn).stdout
    assert "agent_snapshots" in shown
    assert "made again from the ledger" in shown
    done = ok("teardown", "--slot", slot, "--yes", "--json", dsn=ledger.dsn).json
    assert done["kept"] == ["append_keys", "messages"]
    tables = (
        "SELECT c.oid::regclass::text FROM pg_class c WHERE relkind = 'r' AND relnamespace::regnamespace::text = %s"
    )
    assert sorted(ledger.execute(tables, "public")) == [("agent_events",), ("agent_jobs",)]
    assert sorted(ledger.execute(tables, "walstream")) == [("walstream.append_keys",), ("walstream.messages",)]
    assert "nothing" in ok("teardown", "--slot", slot, "--yes", dsn=ledger.dsn).stdout

    ok("init", "--slot", slot, dsn=ledger.dsn)
    assert ledger.execute(append, window) == [(seq, False)]
    assert ledger.execute("SELECT count(*) FROM walstream.messages") == [(1,)]
    assert ledger.execute("SELECT count(*) FROM agent_jobs") == [(1,)]
    assert [each["state"] for each in _checks(ledger, slot, "append functions")] == ["ok"]


def test_a_job_that_waits_for_a_person_still_does_after_another_set_up(ledger: Database, slot: str) -> None:
    ledger.execute("SELECT walstream.submit_job('11111111-1111-1111-1111-111111111111', 'a')")
    ledger.execute("SELECT job_id FROM walstream.claim_job('a', 'me')")
    ledger.execute("SELECT walstream.begin_job(1, 1)")
    ((request,),) = ledger.execute("SELECT walstream.request_approval(1, 1, '{}')")
    assert ok("teardown", "--slot", slot, "--yes", "--json", dsn=ledger.dsn).json["kept"] == ["approvals"]
    ok("init", "--slot", slot, dsn=ledger.dsn)
    ledger.execute("SELECT walstream.decide_approval(%s, 'granted', 'alice')", request)
    assert ledger.execute("SELECT status FROM agent_jobs") == [("SUBMITTED",)]


def test_an_event_whose_job_is_forgotten_has_none_after_another_set_up_either(ledger: Database, slot: str) -> None:
    ledger.execute("SELECT walstream.submit_job('11111111-1111-1111-1111-111111111111', 'a', 10)")
    ledger.execute("SELECT walstream.cancel_job(1)")
    ledger.execute("SELECT walstream.prune_jobs('0', '{CANCELED}')")
    assert ok("teardown", "--slot", slot, "--yes", "--json", dsn=ledger.dsn).json["kept"] == ["pruned_jobs"]
    ok("init", "--slot", slot, dsn=ledger.dsn)
    answer = ledger.execute("SELECT * FROM walstream.submit_job('11111111-1111-1111-1111-111111111111', 'a', 10)")
    assert answer == [(1, False)]


def _checks(ledger: Database, slot: str, name: str) -> list[dict[str, str]]:
    found = call("doctor", "--slot", slot, "--json", dsn=ledger.dsn).json["checks"]
    return [each for each in found if each["check"] == name]


def test_what_was_left_of_another_ledger_is_not_taken_over(ledger: Database, slot: str) -> None:
    ledger.execute("SELECT walstream.append(gen_random_uuid()::text, 'a', 'x', '{}', key => 'k')")
    ok("teardown", "--slot", slot, "--yes", dsn=ledger.dsn)
    ledger.execute("DROP TABLE agent_jobs; ALTER TABLE agent_events ALTER session_id TYPE text")
    called = call("init", "--slot", slot, dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "append_keys" in called.stderr
    assert "--namespace" in called.stderr


def test_snapshots_that_another_stream_uses_stay(ledger: Database, slot: str) -> None:
    other = ["--slot", f"{slot}_o", "--namespace", "other", "--publication", "other"]
    ok("init", *other, dsn=ledger.dsn)
    assert ok("teardown", "--slot", slot, "--yes", "--json", dsn=ledger.dsn).json["snapshots"] is None
    assert ok("teardown", *other, "--yes", "--json", dsn=ledger.dsn).json["snapshots"] is not None


def test_something_built_on_the_snapshots_is_named_before_anything_goes(ledger: Database, slot: str) -> None:
    ledger.execute("CREATE VIEW latest AS SELECT session_id, max(upto_seq) FROM agent_snapshots GROUP BY 1")
    called = call("teardown", "--slot", slot, "--yes", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "view public.latest" in called.stderr
    assert _remains(ledger, slot) == (1, 1, 1, 3)
