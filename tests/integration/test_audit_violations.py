"""Violations of the ledger become records of the chain: each once, whatever happens to the sink."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import newest, offsets, records, settle, verified
from tests.cli_calls import call, ok
from tests.conftest import Server
from tests.runner_world import World, eventually, world_on
from walstream import RetryLater
from walstream.audit.heads import read_heads
from walstream.audit.loading import TrailBroken
from walstream.audit.manifest import Manifest
from walstream.audit.segments import segments_in
from walstream.audit.trail import AuditTrail
from walstream.projectors.audit_sink import AuditSink


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def tamper(world: World, first: int, last: int) -> None:
    """What ingest writes down when it sees DELETEs of these seqs."""
    world.execute(
        "INSERT INTO walstream.violations (kind, commit_lsn, ordinal, seq, xid, detail, committed_at, old_keys)"
        " SELECT 'delete', '0/500', s, s, 77, 'DELETE public.agent_events', '2026-01-02 03:04:05+00',"
        " jsonb_build_object('seq', s::text) FROM generate_series(%s, %s) AS s ORDER BY s",
        first,
        last,
    )


def violations(directory: Path) -> list[int]:
    """The seqs of the violations on record, in its order."""
    return [json.loads(each.payload or b"")["seq"] for each in records(directory) if each.kind == "violation"]


def tick(world: World, directory: Path, events: bool = False, **options: Any) -> None:
    """One tick of a sink that is made for it, as after a restart."""
    trail = AuditTrail(directory, **options)
    try:
        if events:
            trail.record(world.events(), world.settings)
        trail.tick(world.settings)
    finally:
        trail.close()


def test_each_is_on_record_once_over_restarts(world: World, directory: Path) -> None:
    world.add_many(3)
    tamper(world, 1, 2)
    tick(world, directory, events=True)
    tick(world, directory)
    tamper(world, 3, 2_503)
    tick(world, directory)
    world.add_many(2)
    tick(world, directory, events=True)
    assert violations(directory) == list(range(1, 2_504))
    assert offsets(directory) == [1, 2, 3, 4, 5]
    verified(directory)


def test_a_record_says_what_is_known(world: World, directory: Path) -> None:
    world.add_many(1)
    tamper(world, 1, 1)
    tick(world, directory, events=True)
    record = records(directory)[-1]
    ((id_,),) = world.execute("SELECT id FROM walstream.violations")
    assert record.fields()["id"] == id_
    document = json.loads(record.payload or b"")
    assert document.pop("noticed_at")
    assert document == {
        "what": "delete",
        "origin": "stream",
        "seq": 1,
        "old_keys": {"seq": "1"},
        "detail": "DELETE public.agent_events",
        "xid": 77,
        "lsn": "0/500",
        "committed_at": "2026-01-02T03:04:05+00:00",
    }


def test_those_of_closed_segments_are_known_by_the_manifest_and_without_it(world: World, directory: Path) -> None:
    world.add_many(3)
    tamper(world, 1, 3)
    tick(world, directory, events=True, roll_bytes=1)
    world.add_many(3)
    tick(world, directory, events=True, roll_bytes=1)
    settle(directory, world.events()[-1], roll_bytes=1)
    assert len(segments_in(directory)) == 4
    manifest = Manifest.read(directory)
    assert manifest is not None
    assert [bool(each.ids) for each in manifest.segments] == [False, False, True]
    tick(world, directory)
    (directory / "manifest.json").unlink()
    tick(world, directory)
    assert violations(directory) == [1, 2, 3]


def test_a_manifest_cannot_keep_violations_from_the_record(world: World, directory: Path) -> None:
    """An id that was raised in it would make the sink pass over what comes."""
    world.add_many(2)
    tamper(world, 1, 1)
    tick(world, directory, events=True, roll_bytes=1)
    world.add_many(1)
    tick(world, directory, events=True, roll_bytes=1)
    settle(directory, world.events()[-1], roll_bytes=1)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    manifest["segments"][-1]["ids"] = {"violation": 1_000_000}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TrailBroken, match="holds the violation 1000000, and it does not"):
        tick(world, directory)


def test_a_violation_that_was_half_written_comes_again(world: World, directory: Path) -> None:
    world.add_many(2)
    tick(world, directory, events=True)
    tamper(world, 1, 2)
    trail = AuditTrail(directory, head_seconds=3600, head_every=1_000_000)
    trail._voucher._last = float("inf")  # as if it was killed before it could vouch
    trail.tick(world.settings)
    trail._forget()
    trail._directory.close()
    segment = newest(directory)
    segment.write_bytes(segment.read_bytes()[:-40])
    tick(world, directory)
    assert violations(directory) == [1, 2]
    verified(directory)


def test_what_cannot_be_written_is_taken_back_and_comes_again(
    world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add_many(2)
    trail = AuditTrail(directory)
    trail.record(world.events(), world.settings)
    tamper(world, 1, 5)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:30], at) if at == 0 else _full())
    with pytest.raises(RetryLater):
        trail.tick(world.settings)
    monkeypatch.undo()
    trail.tick(world.settings)
    trail.close()
    assert violations(directory) == [1, 2, 3, 4, 5]
    verified(directory)


def _full() -> int:
    raise OSError(28, "No space left on device")


def test_time_alone_closes_a_segment_and_writes_a_head(world: World, directory: Path) -> None:
    world.add_many(2)
    trail = AuditTrail(directory, roll_seconds=0.2, head_seconds=0.2)
    trail.record(world.events(), world.settings)
    tamper(world, 1, 1)
    trail.tick(world.settings)
    assert len(segments_in(directory)) == 1
    time.sleep(0.25)
    trail.tick(world.settings)
    assert [segment.first_n for segment in segments_in(directory)] == [1, 5]
    assert read_heads(directory / "heads.jsonl")[-1].n == 4
    time.sleep(0.25)
    trail.tick(world.settings)
    assert len(segments_in(directory)) == 2, "an empty one is not closed"
    trail.close()
    verified(directory)


def test_nothing_is_begun_before_the_first_event(world: World, directory: Path) -> None:
    tamper(world, 1, 1)
    tick(world, directory)
    assert not directory.exists()


def test_a_directory_that_vanished_is_seen_without_any_event(world: World, directory: Path) -> None:
    world.add_many(1)
    trail = AuditTrail(directory)
    trail.record(world.events(), world.settings)
    directory.rename(directory.with_name("elsewhere"))
    with pytest.raises(RetryLater):
        trail.tick(world.settings)
    directory.with_name("elsewhere").rename(directory)
    trail.tick(world.settings)
    trail.close()


def test_the_sink_does_it_by_itself(world: World, directory: Path) -> None:
    last = world.add_many(3)
    world.start(AuditSink(directory))
    eventually(lambda: world.reached("audit-sink", last))
    tamper(world, 1, 2)
    eventually(lambda: violations(directory) == [1, 2])
    assert world.state("audit-sink") == "cold"


def test_they_are_shown_by_kind(world: World, directory: Path) -> None:
    world.add_many(3)
    tamper(world, 1, 2)
    tick(world, directory, events=True)
    shown = ok("audit", "show", str(directory), "--kind", "violation", "--json", dsn=world.settings.dsn or "").stdout
    assert [json.loads(line)["payload"]["seq"] for line in shown.splitlines()] == [1, 2]
    words = ok("audit", "show", str(directory), "--kind", "violation", dsn=world.settings.dsn or "").stdout
    assert words.count(" violation {") == 2


def test_somebody_is_told_after_it_is_on_record(world: World, directory: Path) -> None:
    told: list[tuple[int, bool]] = []

    def hook(found: Any) -> None:
        told.extend((each["seq"], each["seq"] in violations(directory)) for each in found)

    last = world.add_many(3)
    world.start(AuditSink(directory, on_violation=hook))
    eventually(lambda: world.reached("audit-sink", last))
    tamper(world, 1, 2)
    eventually(lambda: told == [(1, True), (2, True)])


def test_a_hook_that_hangs_does_not_stop_the_sink(world: World, directory: Path) -> None:
    release = threading.Event()
    world.start(AuditSink(directory, on_violation=lambda _found: release.wait(300)))
    last = world.add_many(3)
    eventually(lambda: world.reached("audit-sink", last))
    tamper(world, 1, 1)
    eventually(lambda: violations(directory) == [1])
    tamper(world, 2, 2)
    last = world.add_many(3)
    eventually(lambda: world.reached("audit-sink", last) and violations(directory) == [1, 2])
    release.set()


def test_on_the_schema_of_the_last_release_nothing_is_taken_over(world: World, directory: Path) -> None:
    world.add_many(1)
    with world.at_version(6):
        tick(world, directory, events=True)
    assert violations(directory) == []


CHANGED = "UPDATE agent_events SET agent_id = %s, payload = payload || %s::jsonb WHERE seq = 2"
FOUND = "SELECT kind, origin, seq, keys, old_keys, acknowledged_at IS NULL FROM walstream.violations ORDER BY id"


def test_a_row_that_is_found_changed_when_it_comes_again_is_a_violation_like_others_once(
    world: World, directory: Path
) -> None:
    told: list[Any] = []
    world.add_many(3)
    tick(world, directory, events=True)
    was = {each.offset: each.sha256.decode() for each in records(directory)}
    agent = world.events()[1].agent_id
    world.execute(CHANGED, "somebody else", "{}")
    world.execute("UPDATE agent_events SET agent_id = repeat('x', 300) WHERE seq = 3")
    for _ in range(3):  # as after a kill in front of the cursor's step, again and again
        tick(world, directory, events=True)
    trail = AuditTrail(directory, on_violation=told.extend)
    trail.tick(world.settings)
    eventually(lambda: told, what="somebody is told")
    trail.close()
    assert world.execute(FOUND) == [
        ("changed", "sink", 2, {"offset": "2", "agent_id": "somebody else"}, {"agent_id": agent}, True),
        ("changed", "sink", 3, {"offset": "3", "agent_id": "x" * 200 + "…"}, {"agent_id": agent}, True),
    ]
    on_record = [json.loads(each.payload or b"") for each in records(directory) if each.kind == "violation"]
    assert [(each["what"], each["origin"], each["seq"]) for each in on_record] == [
        ("changed", "sink", 2),
        ("changed", "sink", 3),
    ]
    assert [each["seq"] for each in told] == [2, 3]
    line = next(
        each for each in call("status", "--json", dsn=world.settings.dsn or "").json["problems"] if "TAMPER" in each
    )
    assert "2 changes of the ledger" in line
    assert "not what is on record, found when it was delivered again: agent_id (seq 3)" in line
    # What is changed further is another finding; and the digests of a payload say which it was.
    world.execute(CHANGED, agent, '{"more": 1}')
    tick(world, directory, events=True)
    ((_, _, _, keys, old_keys, _),) = world.execute(FOUND)[2:]
    assert old_keys == {"payload": was[2]}
    assert set(keys) == {"offset", "payload"}
    assert keys["payload"] != was[2]
    assert violations(directory) == [2, 3, 2]
    assert offsets(directory) == [1, 2, 3]
    verified(directory)


@pytest.mark.parametrize("why", ["an older schema", "to be ignored"])
def test_what_has_no_place_beside_the_others_is_in_the_chain_all_the_same(
    world: World, directory: Path, why: str
) -> None:
    world.add_many(3)
    tick(world, directory, events=True)
    world.execute(CHANGED, "somebody else", "{}")
    if why == "to be ignored":
        world.settings = world.settings.model_copy(update={"violations": "ignore"})
        tick(world, directory, events=True)
    else:
        with world.at_version(8):
            tick(world, directory, events=True)
    (found,) = [json.loads(each.payload or b"") for each in records(directory) if each.kind == "violation"]
    assert found == {"what": "changed", "offset": 2, "seq": 2, "columns": ["agent_id"]}
    assert world.execute(FOUND) == []


def test_ids_are_committed_in_their_order(world: World, directory: Path) -> None:
    """The sink reads on from an id: what was drawn before it and committed after it would never be on record."""
    world.add_many(3)
    tick(world, directory, events=True)
    world.execute(CHANGED, "somebody else", "{}")
    first = world.connect()
    with first.cursor() as cur:
        cur.execute("SET session_replication_role = replica")  # triggers are skipped, but for this one
        cur.execute(
            "INSERT INTO walstream.violations (kind, commit_lsn, ordinal, seq, detail)"
            " VALUES ('delete', '0/1', 1, 1, '')"
        )
    second = threading.Thread(target=tick, args=(world, directory, True))
    second.start()
    second.join(0.5)
    assert second.is_alive()
    assert world.execute(FOUND) == []
    first.commit()
    second.join(60)
    assert [seq for _, _, seq, *_ in world.execute(FOUND)] == [1, 2]
    assert violations(directory) == [1, 2]


def test_what_comes_just_before_the_end_is_on_record(world: World, directory: Path) -> None:
    """A table that was swapped ends ingest, and with it the process: no tick comes any more."""
    world.add_many(3)
    trail = AuditTrail(directory)
    trail.record(world.events(), world.settings)
    tamper(world, 2, 2)
    trail.close()
    assert violations(directory) == [2]
    assert verified(directory).vouched_n == len(records(directory))


def test_a_database_that_is_away_at_the_end_costs_no_head(world: World, directory: Path) -> None:
    world.add_many(3)
    trail = AuditTrail(directory)
    trail.record(world.events(), world.settings)
    world.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s", "%:audit")
    trail._settings = world.settings.model_copy(update={"dsn": "host=127.0.0.1 port=1 connect_timeout=2"})
    tamper(world, 2, 2)
    trail.close()
    assert violations(directory) == []
    assert verified(directory).vouched_n == len(records(directory))
    tick(world, directory)
    assert violations(directory) == [2]


def test_verification_counts_what_is_on_record_and_what_nobody_has_acknowledged(world: World, directory: Path) -> None:
    dsn = world.settings.dsn or ""
    world.add_many(4, sessions=2)
    tamper(world, 1, 3)
    world.execute("UPDATE walstream.violations SET changes = 500 WHERE seq = 3")
    tick(world, directory, events=True)
    world.execute("UPDATE walstream.violations SET acknowledged_at = now() WHERE seq = 1")
    world.execute("SELECT walstream.erase_session(session_id::text, 'asked for') FROM agent_events WHERE seq = 1")
    tick(world, directory)
    for words in ([], ["--ledger"]):
        found = ok("audit", "verify", str(directory), *words, "--json", dsn=dsn).json
        assert (found["violations"], found["changes"], found["erasures"], found["unacknowledged"]) == (3, 502, 1, 2)
    said = ok("audit", "verify", str(directory), dsn=dsn).stdout
    assert (
        "on record: violations: 3 (502 changes of the ledger); in the database 2 are not acknowledged;"
        " declared erasures: 1 (2 payloads)\n" in said
    )
    # The files alone, and a database that is away: it is no difference, and says so.
    assert ok("audit", "verify", str(directory), "--json", dsn="").json["unacknowledged"] is None
    away = ok("audit", "verify", str(directory), "--json", dsn="host=127.0.0.1 port=1 connect_timeout=2").json
    assert (away["violations"], away["unacknowledged"]) == (3, None)
    assert any("could not be counted" in note for note in away["notes"])
