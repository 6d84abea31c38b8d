"""``walstream init`` widens the publication for the audit sink, and the application is refused nothing by that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import Called, call, ok
from tests.conftest import Database
from tests.integration.births import INSERT, insert_rows
from tests.integration.streams import Installed, Recorder, eventually
from walstream.audit.trail import AuditTrail
from walstream.config import Settings
from walstream.errors import ExitCode

NARROW, WIDE = (True, False, False, True), (True, True, True, True)


@pytest.fixture
def slot(database: Database) -> str:
    return f"w_{database.name[-8:]}"


@pytest.fixture
def with_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that has the sink."""
    file = tmp_path / "walstream.toml"
    file.write_text(f"[projectors.audit-sink.options]\ndirectory = '{tmp_path}/audit'\n")
    monkeypatch.chdir(tmp_path)
    return file


def published(database: Database) -> Any:
    return database.execute("SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication")[0]


def refused(called: Called) -> str:
    assert called.exit_code == ExitCode.CONFIG
    return called.stderr


def test_a_new_stream_is_wide_if_somebody_says_so(database: Database, slot: str) -> None:
    said = ok("init", "--audit", "--slot", slot, dsn=database.dsn).stdout
    assert "so that the audit sink sees who changes the ledger" in said
    assert published(database) == WIDE
    insert_rows(database, 2)
    database.execute("UPDATE agent_events SET agent_id = 'b'; DELETE FROM agent_events WHERE seq = 1")


def test_an_existing_one_is_widened_once_the_sink_is_configured(
    database: Database, slot: str, tmp_path: Path, with_sink: Path
) -> None:
    with_sink.rename(tmp_path / "later.toml")
    ok("init", "--slot", slot, dsn=database.dsn)
    assert published(database) == NARROW
    (tmp_path / "later.toml").rename(with_sink)
    warned = call("doctor", "--slot", slot, "--json", dsn=database.dsn).json
    (finding,) = [each for each in warned["checks"] if each["check"] == "tamper alarm"]
    assert finding["state"] == "warning"
    assert "does not publish update, delete" in finding["found"]
    would = ok("init", "--slot", slot, "--dry-run", dsn=database.dsn).stdout
    assert "ALTER PUBLICATION \"walstream\" SET (publish = 'insert, update, delete, truncate')" in would
    assert published(database) == NARROW
    done = ok("init", "--slot", slot, "--json", dsn=database.dsn).json
    assert [step.partition(" publishes ")[2].partition(" as well")[0] for step in done["done"]] == ["update and delete"]
    assert done["slot"] is None, "the slot goes on"
    assert published(database) == WIDE
    assert ok("init", "--slot", slot, "--json", dsn=database.dsn).json["done"] == []
    judged = call("doctor", "--slot", slot, "--json", dsn=database.dsn).json
    states = {each["check"]: each["state"] for each in judged["checks"]}
    assert (states["tamper alarm"], states["replica identity"]) == ("ok", "ok")


def test_a_script_without_a_database_is_wide(with_sink: Path) -> None:
    del with_sink
    assert "publish = 'insert, update, delete, truncate'" in ok("init", "--sql", dsn="").stdout


@pytest.mark.parametrize(
    ("identity", "accepted"),
    [
        ("PRIMARY KEY (seq)", True),
        ("UNIQUE (seq)", False),
        ("PRIMARY KEY (seq) DEFERRABLE, UNIQUE (seq)", False),
    ],
)
def test_the_ledger_needs_a_replica_identity(database: Database, slot: str, identity: str, accepted: bool) -> None:
    database.execute(
        "CREATE TABLE agent_events (seq bigserial NOT NULL, session_id text NOT NULL, agent_id text NOT NULL,"
        f" event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz, {identity})"
    )
    called = call("init", "--audit", "--slot", slot, dsn=database.dsn)
    if not accepted:
        said = refused(called)
        assert "public.agent_events has neither a primary key nor another replica identity" in said
        assert "ALTER TABLE public.agent_events REPLICA IDENTITY FULL" in said
        assert database.execute("SELECT count(*) FROM pg_publication") == [(0,)], "nothing was made"
        database.execute("ALTER TABLE agent_events REPLICA IDENTITY FULL")
        ok("init", "--audit", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 2)
    database.execute("UPDATE agent_events SET agent_id = 'b'; DELETE FROM agent_events WHERE seq = 1")


def test_an_index_is_an_identity_until_it_is_dropped(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute(
        "ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey, ADD CONSTRAINT one UNIQUE (seq),"
        " ADD CONSTRAINT other UNIQUE (session_id, seq), REPLICA IDENTITY USING INDEX other"
    )
    ok("init", "--audit", "--slot", slot, dsn=database.dsn)
    database.execute(INSERT)
    database.execute("UPDATE agent_events SET agent_id = 'b'")
    database.execute("ALTER TABLE agent_events DROP CONSTRAINT other")
    judged = call("doctor", "--slot", slot, "--json", dsn=database.dsn).json
    assert {each["check"]: each["state"] for each in judged["checks"]}["replica identity"] == "failed"


def test_one_partition_without_an_identity_is_named(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, "--partition-by", "hash:2", dsn=database.dsn)
    ((leaf,),) = database.execute("SELECT min(relid::text) FROM pg_partition_tree('agent_events') WHERE isleaf")
    database.execute(f"ALTER TABLE {leaf} REPLICA IDENTITY NOTHING")
    said = refused(call("init", "--audit", "--slot", slot, dsn=database.dsn))
    assert f"public.{leaf} has neither" in said
    assert published(database) == NARROW
    database.execute(f"ALTER TABLE {leaf} REPLICA IDENTITY DEFAULT")
    ok("init", "--audit", "--slot", slot, dsn=database.dsn)
    insert_rows(database, 9)
    database.execute("UPDATE agent_events SET agent_id = 'b'; DELETE FROM agent_events")


def test_other_tables_of_the_publication_count(database: Database, slot: str) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    database.execute('CREATE TABLE "Bare one" (a int); ALTER PUBLICATION walstream ADD TABLE "Bare one"')
    assert 'public."Bare one" has neither' in refused(call("init", "--audit", "--slot", slot, dsn=database.dsn))
    database.execute('DROP TABLE "Bare one"')
    ok("init", "--audit", "--slot", slot, dsn=database.dsn)


def test_a_publication_of_all_tables_is_not_widened(database: Database, slot: str) -> None:
    database.execute("CREATE PUBLICATION walstream FOR ALL TABLES WITH (publish = 'insert, truncate')")
    said = refused(call("init", "--audit", "--slot", slot, dsn=database.dsn))
    assert "is FOR ALL TABLES" in said
    assert "DROP PUBLICATION" in said


def test_a_sink_on_a_narrow_publication_warns(
    database: Database, slot: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ok("init", "--slot", slot, dsn=database.dsn)
    trail = AuditTrail(tmp_path / "audit")
    with caplog.at_level(logging.WARNING, "walstream.audit"):
        trail.check(Settings(dsn=database.dsn))
    assert "does not publish update, delete: who changes the ledger is not noticed" in caplog.text
    caplog.clear()
    ok("init", "--audit", "--slot", slot, dsn=database.dsn)
    trail.check(Settings(dsn=database.dsn))
    assert caplog.text == ""


def test_a_publication_that_is_made_again_by_run_is_as_wide_as_it_was(database: Database, tmp_path: Path) -> None:
    """Who drops it does not switch the alarm off, and is on record."""
    stream = Installed(database, "--audit", projectors={"audit-sink": {"options": {"directory": str(tmp_path / "a")}}})
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("a")
        eventually(lambda: database.execute("SELECT 1 FROM walstream.ledger_catalogue"), "the first look")
    database.execute("DROP PUBLICATION walstream")
    with stream.host(recorder):
        eventually(lambda: database.execute("SELECT 1 FROM pg_publication"), "it is made again")
        assert published(database) == WIDE
        stream.insert("b")
        eventually(lambda: recorder.types == ["a", "b"], "it goes on")
        database.execute("DELETE FROM agent_events WHERE seq = 1")
        eventually(lambda: database.execute("SELECT 1 FROM walstream.violations WHERE kind = 'delete'"), "it is seen")
