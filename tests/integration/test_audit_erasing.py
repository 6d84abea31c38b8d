"""Declared erasures in a trail: on record with the old digests, and then no file here holds the payloads any more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.audit_files import newest, records, settle, verified
from tests.conftest import Server
from tests.integration.test_audit_ledger import findings, verify
from tests.integration.test_erased_sessions import erase
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream import RetryLater
from walstream.audit import erasing, segments
from walstream.audit.record import ERASURE, EVENT, GONE, VIOLATION, Record
from walstream.audit.trail import AuditTrail
from walstream.event import Event
from walstream.projectors.audit_sink import AuditSink

ONE, OTHER = SESSIONS[:2]
SECRET = "Ada-Lovelace"
MODES = ["redact", "remove"]


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def talk(world: World, count: int = 40) -> list[Event]:
    """Events of two sessions in turn, each with what is to be erased of one of them."""
    before = len(world.events())
    for n in range(count):
        session = (ONE, OTHER)[n % 2]
        world.add("note", session=session, payload={"n": n, "name": SECRET if session == ONE else "Grace"})
    return world.events()[before:]


def put_on_record(world: World, directory: Path, events: list[Event], **options: Any) -> None:
    trail = AuditTrail(directory, **options)
    try:
        for start in range(0, len(events), 5):
            trail.record(events[start : start + 5], world.settings)
    finally:
        trail.close()


def tick(world: World, directory: Path, **options: Any) -> None:
    trail = AuditTrail(directory, **options)
    try:
        trail.tick(world.settings)
    finally:
        trail.close()


def holding(directory: Path) -> list[str]:
    """The files in which the secret stands."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".zst":
                data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
            if SECRET.encode() in data:
                found.append(path.name)
    return found


def said(record: Record) -> Any:
    assert record.payload is not None
    return json.loads(record.payload)


@pytest.mark.parametrize("mode", MODES)
def test_payloads_go_from_every_segment_and_everything_verifies(world: World, directory: Path, mode: str) -> None:
    events = talk(world)
    put_on_record(world, directory, events, roll_bytes=3_000)
    settle(directory, events[-1])
    before = records(directory)
    assert len(holding(directory)) > 3
    erase(world, mode=mode)
    tick(world, directory)
    assert holding(directory) == []
    after = records(directory)
    assert [(each.hash, each.header) for each in after[: len(before)]] == [(each.hash, each.header) for each in before]
    blanked = [each.n for each in after if each.payload is None]
    assert blanked == [each.n for each in before if each.payload is not None and SECRET.encode() in each.payload]
    (record,) = [each for each in after if each.kind == ERASURE]
    document = said(record)
    assert [n for first, last in document["records"] for n in range(first, last + 1)] == blanked
    assert document["sha256"] == [each.sha256.decode() for each in before if each.n in blanked]
    assert (document["session_id"], document["reason"], document["mode"], document["archived"]) == (
        *(ONE, "asked for"),
        *({"redact": "redacted", "remove": "removed"}[mode], []),
    )
    assert record.fields()["id"] == world.execute("SELECT max(id) FROM walstream.erasures")[0][0]
    assert verified(directory).blanked == 20
    called = verify(world, directory)
    assert findings(called) == []
    assert (called.json["ledger"]["same"], called.json["ledger"]["erased"]) == (20, 20)
    tick(world, directory)
    assert len(records(directory)) == len(after), "once"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["hot", "cold"])
def test_what_is_erased_before_it_came_never_stands_in_a_file(
    world: World, directory: Path, mode: str, way: str
) -> None:
    events = talk(world, 10)
    put_on_record(world, directory, events[:4])
    erase(world, mode=mode)
    late = events[4:] if way == "hot" else [event for event in world.events() if event.offset > 4]
    talk(world, 2)
    put_on_record(world, directory, [*late, *world.events()[-2:]])
    assert [(each.offset, each.kind) for each in records(directory) if each.offset in range(5, 13)] == [
        *[(offset, (GONE, EVENT)[offset % 2 == 0]) for offset in range(5, 11)],
        *((11, EVENT), (12, EVENT)),
    ]
    tick(world, directory)
    (erasure,) = [each for each in records(directory) if each.kind == ERASURE]
    assert len(said(erasure)["sha256"]) == 2
    assert [
        each.offset for each in records(directory) if each.payload is not None and SECRET.encode() in each.payload
    ] == [11]
    assert findings(verify(world, directory)) == []
    erase(world, mode=mode)
    tick(world, directory)
    assert holding(directory) == []
    assert findings(verify(world, directory)) == []


def test_an_event_that_comes_again_is_what_was_recorded(world: World, directory: Path) -> None:
    events = talk(world, 10)
    put_on_record(world, directory, events)
    erase(world)
    tick(world, directory)
    count = len(records(directory))
    put_on_record(world, directory, events)  # from a buffer, with its payload
    put_on_record(world, directory, world.events())
    assert len(records(directory)) == count
    assert VIOLATION not in {each.kind for each in records(directory)}
    assert holding(directory) == []


@pytest.mark.parametrize("packed", [False, True])
def test_killed_between_the_record_and_the_blanking(
    world: World, directory: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    events = talk(world)
    put_on_record(world, directory, events, roll_bytes=3_000)
    if packed:
        settle(directory, events[-1])
    erase(world)

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(erasing, "blank", killed)
        trail = AuditTrail(directory)
        with pytest.raises(Killed):
            trail.tick(world.settings)
        trail._forget()
        trail._directory.close()
    assert [each.kind for each in records(directory)].count(ERASURE) == 1
    assert holding(directory) != []
    later = talk(world, 2)
    put_on_record(world, directory, later)  # whoever takes the trail up makes it good before anything else
    assert len(holding(directory)) == 1
    assert newest(directory).name in holding(directory)
    assert [each.kind for each in records(directory)].count(ERASURE) == 1
    assert verified(directory).blanked == 20
    assert findings(verify(world, directory)) == []


def test_a_full_disk_is_waited_for_and_nothing_is_written_meanwhile(
    world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = talk(world)
    put_on_record(world, directory, events[:-2])
    erase(world)
    trail = AuditTrail(directory)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("walstream.audit.blanking.write_anew", full)
        for _ in range(2):
            with pytest.raises(RetryLater, match="No space left"):
                trail.tick(world.settings)
        count = len(records(directory))
        with pytest.raises(RetryLater, match="No space left"):
            trail.record(events[-2:], world.settings)
        assert len(records(directory)) == count
    trail.record(events[-2:], world.settings)
    trail.close()
    assert holding(directory) == []
    assert [each.kind for each in records(directory)].count(ERASURE) == 1
    assert findings(verify(world, directory)) == []


def test_what_is_declared_by_hand_is_on_record_and_blanks_nothing(world: World, directory: Path) -> None:
    """A month that was archived is what the trail is kept for."""
    events = talk(world, 10)
    put_on_record(world, directory, events)
    world.execute(
        "INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (1, 4, 'archived'), (7, 8, 'archived');"
        "DELETE FROM agent_events WHERE seq <= 4 OR seq IN (7, 8)"
    )
    erase(world, OTHER)
    tick(world, directory)
    by_hand, of_a_session = [said(each) for each in records(directory) if each.kind == ERASURE]
    assert (by_hand["seqs"], by_hand["records"], by_hand["session_id"]) == ([[1, 4], [7, 8]], [], None)
    assert of_a_session["session_id"] == OTHER
    assert len(holding(directory)) == 1
    assert verified(directory).blanked == len(of_a_session["sha256"]) == 2
    assert findings(verify(world, directory)) == []


def test_what_was_put_in_the_place_of_a_redacted_payload_is_altered(world: World, directory: Path) -> None:
    """Whoever may declare could forge what an agent said otherwise: the record has no payload to compare it with."""
    put_on_record(world, directory, talk(world))
    erase(world)
    tick(world, directory)
    assert findings(verify(world, directory)) == []
    world.execute(
        "WITH declared AS (INSERT INTO walstream.erasures (first_seq, last_seq, reason, session_id, mode)"
        " VALUES (1, 1, 'asked for', %s, 'redacted'))"
        " UPDATE agent_events SET payload = '{\"forged\": true}' WHERE seq = 1",
        ONE,
    )
    tick(world, directory)
    assert findings(verify(world, directory)) == [("altered", 1, 1)]


def test_sessions_of_one_transaction_have_a_record_each(world: World, directory: Path) -> None:
    put_on_record(world, directory, talk(world, 10))
    with world.connection.cursor() as cur:
        cur.execute("BEGIN")
        for session in (ONE, OTHER, ONE):
            cur.execute("SELECT * FROM walstream.erase_session(%s, 'x', 'remove')", (session,))
        cur.execute("COMMIT")
    tick(world, directory)
    assert [said(each)["session_id"] for each in records(directory) if each.kind == ERASURE] == [ONE, OTHER]
    assert verified(directory).blanked == 10


def test_a_large_erasure_is_several_records(world: World, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_record(world, directory, talk(world, 20))
    monkeypatch.setattr(erasing, "MOST", 4)
    erase(world)
    tick(world, directory)
    found = [each for each in records(directory) if each.kind == ERASURE]
    assert [len(said(each)["sha256"]) for each in found] == [4, 4, 2]
    assert ["id" in each.fields() for each in found] == [False, False, True]
    assert verified(directory).blanked == 10
    assert holding(directory) == []


def test_half_an_erasure_is_taken_over_again(world: World, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash took the end of its records: what stands of it was declared twice then, and is gone once."""
    put_on_record(world, directory, talk(world, 20))
    monkeypatch.setattr(erasing, "MOST", 4)
    erase(world)
    with monkeypatch.context() as patch:
        patch.setattr(erasing, "blank", lambda *_, **__: False)
        tick(world, directory, head_every=1_000_000, head_seconds=10_000)
    path = newest(directory)
    (directory / "heads.jsonl").unlink()
    path.write_bytes(path.read_bytes()[:-40])
    tick(world, directory)
    assert holding(directory) == []
    assert verified(directory).blanked == 10
    assert findings(verify(world, directory)) == []


def test_copies_that_are_out_of_reach_are_named(world: World, directory: Path, tmp_path: Path) -> None:
    events = talk(world)
    archive = tmp_path / "archive"
    put_on_record(world, directory, events, roll_bytes=3_000, archive=str(archive))
    settle(directory, events[-1], archive=str(archive))
    (directory / "torn").mkdir()
    (directory / "torn" / "piece").write_bytes(f'{{"session_id":"{ONE}"'.encode())
    erase(world)
    tick(world, directory)
    assert holding(directory) == []
    (record,) = [each for each in records(directory) if each.kind == ERASURE]
    named = said(record)["archived"]
    assert len(named) == len(list(archive.rglob("*.zst"))) > 3
    assert said(record)["aside"] == ["piece"]
    assert len(holding(archive)) > 3
    assert verified(directory).blanked == 20


@pytest.mark.parametrize("mode", MODES)
def test_a_running_sink_does_it_by_itself(world: World, directory: Path, mode: str) -> None:
    world.make_hot()
    talk(world, 10)
    world.start(AuditSink(directory))
    eventually(lambda: world.reached("audit-sink", 10), what="all is on record")
    erase(world, mode=mode)
    eventually(lambda: holding(directory) == [], what="it is blanked")
    talk(world, 2)
    eventually(lambda: world.reached("audit-sink", 12), what="it goes on")
    assert findings(verify(world, directory)) == []


def test_a_new_chain_begins_behind_it(world: World, directory: Path) -> None:
    talk(world, 10)
    erase(world, mode="remove")
    put_on_record(world, directory, world.events())
    tick(world, directory)
    assert [each.kind for each in records(directory) if each.offset == 1] == [GONE]
    assert [said(each)["records"] for each in records(directory) if each.kind == ERASURE] == [[]]
    assert findings(verify(world, directory)) == []
    assert segments.segments_in(directory)
