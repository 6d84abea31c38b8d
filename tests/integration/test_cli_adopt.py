"""``walstream adopt``: another history is accepted knowingly, and only then."""

from __future__ import annotations

import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.ready import make_tables
from walstream.config import Settings
from walstream.errors import ConfigError, ExitCode, SlotError
from walstream.ledger.identity import check_identity, identity_sql


@pytest.fixture
def ledger(database: Database) -> Database:
    settings = Settings(environment="production")
    make_tables(database, settings)
    database.execute(identity_sql(settings))
    database.execute("UPDATE walstream.identity SET slot_state = 'ready'")
    return database


def _check(database: Database, environment: str = "production") -> str:
    conn = database.connect()
    conn.autocommit = True
    return check_identity(conn, Settings(environment=environment)).key_prefix


def test_nothing_to_adopt(ledger: Database) -> None:
    before = ledger.execute("SELECT * FROM walstream.identity, walstream.generation")
    assert ok("adopt", "--environment", "production", "--json", dsn=ledger.dsn).json["changes"] == []
    assert ledger.execute("SELECT * FROM walstream.identity, walstream.generation") == before


def test_a_copy_gets_an_environment_of_its_own(ledger: Database) -> None:
    with pytest.raises(ConfigError):
        _check(ledger, "staging")
    done = ok("adopt", "--environment", "staging", "--yes", "--json", dsn=ledger.dsn).json
    assert done["changes"] == [{"what": "environment", "recorded": "production", "found": "staging"}]
    assert _check(ledger, "staging").endswith(":1")
    with pytest.raises(ConfigError):
        _check(ledger, "production")


def test_names_are_shown_as_they_are(ledger: Database) -> None:
    called = call("adopt", "--environment", "[/copy] [red]", "--yes", dsn=ledger.dsn)
    assert (called.exit_code, called.stderr.count("Traceback")) == (0, 0)
    assert "[/copy] [red]" in called.stdout


def test_without_yes_and_without_a_person_nothing_happens(ledger: Database) -> None:
    called = call("adopt", "--environment", "staging", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "--yes" in called.stderr
    with pytest.raises(ConfigError):
        _check(ledger, "staging")


@pytest.mark.parametrize("column", ["timeline = timeline + 1", "system_identifier = '7000000000000000001'"])
def test_after_another_history_the_epoch_has_to_be_decided(ledger: Database, column: str) -> None:
    ledger.execute(f"UPDATE walstream.identity SET {column}")
    ledger.execute("UPDATE walstream.ingest SET confirmed_lsn = '0/1'")
    called = call("adopt", "--environment", "production", "--yes", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "--new-epoch" in called.stderr
    assert "--same-epoch" in called.stderr
    with pytest.raises(SlotError):
        _check(ledger)

    ok("adopt", "--environment", "production", "--yes", "--same-epoch", dsn=ledger.dsn)
    assert _check(ledger).endswith(":1")
    assert ledger.execute("SELECT confirmed_lsn FROM walstream.ingest") == [(None,)]


def test_a_new_epoch_changes_every_key(ledger: Database) -> None:
    ledger.execute("UPDATE walstream.identity SET timeline = timeline + 1")
    ok("adopt", "--environment", "production", "--yes", "--new-epoch", dsn=ledger.dsn)
    assert _check(ledger).endswith(":2")
    # An epoch may be raised without any other change: the loss may have been noticed later.
    ok("adopt", "--environment", "production", "--yes", "--new-epoch", dsn=ledger.dsn)
    assert _check(ledger).endswith(":3")


def test_who_works_under_the_old_identity_is_fenced_off(ledger: Database) -> None:
    (before,) = ledger.execute("SELECT generation FROM walstream.generation")
    ok("adopt", "--environment", "staging", "--yes", dsn=ledger.dsn)
    (after,) = ledger.execute("SELECT generation FROM walstream.generation")
    assert after > before
    # The next lease goes on from there: it must not be given the number of one that was fenced off.
    assert ledger.execute("SELECT generation FROM walstream.ingest") == [after]


def test_a_position_of_a_longer_wal_is_cleared(ledger: Database) -> None:
    """Otherwise ingest takes every transaction of the new cluster for one that it has ordered already."""
    ledger.execute(
        "INSERT INTO walstream.commit_order (first_offset, events, last_lsn, min_seq, max_seq, generation, body,"
        " partial_inserts) VALUES (1, 1, '0/1', 1, 1, 1, '', NULL), (2, 1, 'FFFF/0', 2, 2, 1, '', 3)"
    )
    ledger.execute("UPDATE walstream.ingest SET confirmed_lsn = 'FFFF/8'")
    ledger.execute("UPDATE walstream.identity SET system_identifier = '7000000000000000001'")
    done = ok("adopt", "--environment", "production", "--yes", "--same-epoch", "--json", dsn=ledger.dsn).json
    assert {"what": "position", "recorded": "FFFF/8", "found": "0/0"} in done["changes"]
    assert ledger.execute(
        "SELECT first_offset, last_lsn::text, partial_inserts FROM walstream.commit_order ORDER BY 1"
    ) == [(1, "0/1", None), (2, "0/0", None)]
    assert ledger.execute("SELECT confirmed_lsn FROM walstream.ingest") == [(None,)]


def test_a_table_that_was_swapped_is_adopted(ledger: Database) -> None:
    ledger.execute(
        "CREATE TABLE other (LIKE agent_events INCLUDING ALL); ALTER TABLE agent_events RENAME TO former;"
        "ALTER TABLE other RENAME TO agent_events"
    )
    done = ok("adopt", "--environment", "production", "--yes", "--json", dsn=ledger.dsn).json
    assert [change["what"] for change in done["changes"]] == ["table_oid"]
    assert ledger.execute("SELECT table_oid = 'agent_events'::regclass FROM walstream.identity") == [(True,)]


def test_refused_while_a_consumer_works(ledger: Database) -> None:
    holder = ledger.connect()
    with holder.cursor() as cur:
        cur.execute(
            "UPDATE walstream.ingest SET owner = 'host:1', control_pid = pg_backend_pid(), control_start ="
            " (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()), lease_until = now() + '1h'"
        )
    holder.commit()
    called = call("adopt", "--environment", "staging", "--yes", dsn=ledger.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "host:1" in called.stderr
    holder.close()
    ok("adopt", "--environment", "staging", "--yes", dsn=ledger.dsn)


def test_not_set_up_names_init(database: Database) -> None:
    called = call("adopt", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "walstream init" in called.stderr


def test_after_a_rename_workers_append_under_the_new_names(ledger: Database) -> None:
    append = "SELECT seq FROM walstream.append('11111111-1111-1111-1111-111111111111', 'a', 'x', '{}')"
    assert ledger.execute(append) == [(1,)]
    ledger.execute("ALTER TABLE agent_events RENAME TO events")
    with pytest.raises(Exception, match="agent_events"):
        ledger.execute(append)
    words = ["--environment", "production", "--table", "events"]
    done = ok("adopt", *words, "--yes", "--json", dsn=ledger.dsn).json
    assert [change["what"] for change in done["changes"]] == ["table", "functions"]
    assert ledger.execute(append) == [(2,)]
    assert ok("adopt", *words, "--json", dsn=ledger.dsn).json["changes"] == []


def test_functions_of_a_newer_release_are_left_alone(ledger: Database) -> None:
    ledger.execute("INSERT INTO walstream.migrations (version, name) VALUES (999, 'of the next release')")
    ledger.execute("ALTER FUNCTION walstream.append RENAME TO append_of_the_next_release")
    assert ok("adopt", "--environment", "production", "--json", dsn=ledger.dsn).json["changes"] == []
