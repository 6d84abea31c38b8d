"""``walstream erase``, as a person and as a script call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli_calls import Called, call, ok
from tests.conftest import Server
from tests.integration.test_erased_sessions import CHILD, ONE, talk
from tests.runner_world import World, eventually, world_on


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        talk(made)
        yield made


def erase(world: World, *more: str, session: str = ONE) -> Called:
    return call("erase", session, "--reason", "asked for", *more, dsn=world.database.dsn)


def payloads(world: World) -> set[str]:
    return {text for (text,) in world.execute("SELECT payload::text FROM agent_events")}


def test_it_says_what_it_would_do_and_what_it_cannot_reach(world: World) -> None:
    world.execute(
        "INSERT INTO walstream.projectors (name, kind) VALUES ('audit-sink', 'external'), ('mine', 'external')"
    )
    before = payloads(world)
    found = erase(world, "--dry-run", "--json").json
    assert (found["done"], found["mode"], found["touched"]["events"], found["touched"]["messages"]) == (
        False,
        "redact",
        4,
        1,
    )
    said = " ".join(found["not_reached"])
    for word in ("backups", "VACUUM", "memory", "audit-sink: copies of its segments", "mine: what it made"):
        assert word in said
    assert payloads(world) == before
    assert "would be erased (redacted)" in erase(world, "--dry-run").stdout


def test_it_asks_and_then_does_it(world: World) -> None:
    called = erase(world)
    assert (called.exit_code, "--yes" in called.stderr) == (3, True)
    called = erase(world, "--yes")
    assert called.exit_code == 0, called
    assert "  events: 4" in called.stdout
    assert "not reached:" in called.stdout
    assert payloads(world) == {'{"walstream_erased": true}'}
    assert world.execute("SELECT reason, mode FROM walstream.erasures") == [("asked for", "redacted")]
    again = erase(world, "--yes", "--json").json
    assert (again["touched"]["events"], again["done"], again["left"]) == (0, True, 0)
    assert erase(world, "--mode", "remove", "--yes", "--json").json["touched"]["events"] == 4
    assert payloads(world) == set()
    assert erase(world, "--mode", "remove", "--yes").exit_code == 0  # it is known, and nothing is left


def test_readers_say_that_it_was_erased(world: World) -> None:
    dsn = world.database.dsn
    erase(world, "--yes")
    for command in (["context", ONE], ["events", ONE], ["inflight", ONE], ["diff", ONE, ONE], ["sessions"]):
        assert ok(*command, dsn=dsn).stdout is not None
    assert ok("context", ONE, "--json", dsn=dsn).json["messages"] == []
    assert ok("verify", "--snapshots", dsn=dsn).exit_code == 0
    erase(world, "--mode", "remove", "--yes")
    called = call("context", ONE, dsn=dsn)
    assert called.exit_code == 3
    assert f"session {ONE} was erased at" in called.stderr
    assert "asked for" in called.stderr


def test_forks_and_jobs_have_to_be_decided(world: World) -> None:
    world.execute("SELECT * FROM walstream.fork(%s, 99, 'a', %s)", ONE, CHILD)
    called = erase(world, "--yes")
    assert (called.exit_code, CHILD in called.stderr, "--forks keep" in called.stderr) == (3, True, True)
    world.execute("SELECT walstream.submit_job(%s, 'a')", ONE)
    world.execute("SELECT walstream.claim_job('a', 'somebody')")
    called = erase(world, "--yes", "--forks", "erase")
    assert (called.exit_code, "is at work: somebody has its lease" in called.stderr) == (3, True)
    found = erase(world, "--yes", "--forks", "erase", "--force", "--json").json
    assert (found["touched"]["sessions"], found["touched"]["open jobs"], found["forks"]) == (2, 1, [CHILD])


def test_an_import_does_not_bring_it_back(world: World, tmp_path: Path) -> None:
    lines = [{"session_id": each, "agent_id": "a", "event_type": "note", "payload": {"n": 1}} for each in (CHILD, ONE)]
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    erase(world, "--yes")
    called = call("import", str(file), dsn=world.database.dsn)
    assert (called.exit_code, f"session {ONE} was erased" in called.stderr) == (3, True)
    assert world.execute("SELECT count(*) FROM agent_events WHERE session_id = %s", CHILD) == [(0,)]
    assert ok("import", str(file), "--copies", "1", "--json", dsn=world.database.dsn).json["events"] == 2


def test_words_that_are_off(world: World) -> None:
    assert erase(world, "--mode", "burn").exit_code == 2
    assert call("erase", ONE, "--reason", " ", dsn=world.database.dsn).exit_code == 2
    called = erase(world, "--yes", session="11111111-0000-4000-8000-000000000000")
    assert (called.exit_code, "holds no event of session" in called.stderr) == (3, True)
    assert erase(world, "--yes", session="no id").exit_code == 3


def test_a_login_without_the_grant_is_told(world: World) -> None:
    world.execute("DROP ROLE IF EXISTS curious")
    world.execute("CREATE ROLE curious LOGIN; GRANT USAGE ON SCHEMA walstream TO curious")
    world.execute("GRANT SELECT ON ALL TABLES IN SCHEMA walstream, public TO curious")
    try:
        called = call(
            "erase", ONE, "--reason", "x", "--yes", dsn=world.database.server.dsn(world.database.name, "curious")
        )
        assert (called.exit_code, "GRANT EXECUTE ON FUNCTION" in called.stderr) == (3, True)
    finally:
        world.execute("DROP OWNED BY curious; DROP ROLE curious")


def test_killed_in_the_middle_it_has_done_nothing(world: World) -> None:
    """One transaction: whoever dies before its end has erased nothing, in any of the places."""
    world.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT %s, 'a', 'x', '{}' FROM generate_series(1, 500)",
        ONE,
    )
    world.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END';"
        "CREATE TRIGGER slow BEFORE UPDATE ON agent_events FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    before = payloads(world), world.execute("SELECT count(*) FROM walstream.messages")
    words = ["erase", ONE, "--reason", "x", "--yes", "--dsn", world.database.dsn]
    process = subprocess.Popen([sys.executable, "-m", "walstream", *words], stdout=subprocess.DEVNULL)
    working = (
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'walstream:erase' AND query LIKE '%erase_session%'"
    )
    try:
        ((backend,),) = eventually(lambda: world.execute(working.replace("%", "%%")), what="it erases")
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        world.execute("SELECT pg_terminate_backend(%s)", backend)  # it would notice by itself, at its end
        eventually(lambda: not world.execute(working.replace("%", "%%")), what="its backend is gone")
        assert (payloads(world), world.execute("SELECT count(*) FROM walstream.messages")) == before
        assert world.execute("SELECT * FROM walstream.erasures") == []
    finally:
        process.kill()
        process.wait()
        world.execute("DROP FUNCTION slow() CASCADE")
    assert erase(world, "--yes", "--json").json["touched"]["events"] == 504
