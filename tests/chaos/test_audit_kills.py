"""The audit sink is killed, stopped, starved of disk under `walstream run`; `audit verify --ledger` is the judge."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import offsets, records
from tests.cli_calls import call
from tests.conftest import Database
from tests.integration.streams import Installed, Place
from walstream.audit.heads import read_heads
from walstream.audit.keys import generate
from walstream.audit.segments import segments_in
from walstream.postgres import PostgresServer

from .consumer import Consumer, eventually
from .load import Load

INSERT = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
    " SELECT gen_random_uuid(), 'a', 'filler', jsonb_build_object('n', n, 'text', repeat('x', %s))"
    " FROM generate_series(1, %s) AS n"
)


class Scene:
    """A stream, and consumers of it that keep an audit trail."""

    def __init__(self, place: Place, folder: Path, directory: Path | None = None) -> None:
        self.place = place
        self.folder = folder
        self.directory = folder / "audit" if directory is None else directory
        self.heads = folder / "heads"
        self.heads.mkdir()
        self.key = folder / "key"
        self.public, _ = generate(self.key)
        self.stream = Installed(place)
        self.consumers: list[Consumer] = []

    def consumer(self, **settings: str) -> Consumer:
        made = Consumer(
            self.place.dsn,
            self.folder / f"log{len(self.consumers)}",
            target="tests.chaos.audited:stream",
            settings={"SLOT": self.stream.settings.slot, **settings},
            environ={
                "AUDIT_DIRECTORY": str(self.directory),
                "AUDIT_KEY": str(self.key),
                "AUDIT_HEADS": str(self.heads),
            },
        )
        self.consumers.append(made)
        return made

    def recorded(self) -> int:
        """The position of the sink's cursor."""
        found = self.place.execute("SELECT position FROM walstream.cursors WHERE projector = 'audit-sink'")
        return int(found[0][0]) if found else 0

    def wait_for_records(self, more: int = 1) -> None:
        goal = self.recorded() + more
        eventually(lambda: self.recorded() >= goal, 60, what="a record")

    def state(self) -> tuple[str, str]:
        found = self.place.execute("SELECT state, error FROM walstream.projectors WHERE name = 'audit-sink'")
        return (str(found[0][0]), str(found[0][1])) if found else ("", "")

    def total(self) -> int:
        return int(self.place.execute("SELECT count(*) FROM agent_events")[0][0])

    def assert_complete(self) -> dict[str, Any]:
        """Everything is on record, once, in order; and verify finds nothing, against the ledger too."""
        output = "\n".join(consumer.output[-3000:] for consumer in self.consumers)
        eventually(lambda: self.recorded() >= self.total(), 180, what=f"the end of the ledger: {output}")
        called = call(
            "audit",
            "verify",
            str(self.directory),
            "--ledger",
            "--key",
            str(self.public),
            "--heads",
            str(self.heads),
            "--json",
            dsn=self.place.dsn,
        )
        assert called.exit_code == 0, f"{called.stdout}\n{output}"
        document: dict[str, Any] = called.json
        total = self.total()
        assert document["events"] == document["ledger"]["same"] == total
        assert offsets(self.directory) == list(range(1, total + 1))
        assert {each.kind for each in records(self.directory)} == {"chain", "event"}
        return document

    def close(self) -> None:
        for consumer in self.consumers:
            if consumer.running:
                with contextlib.suppress(ProcessLookupError):
                    consumer.kill()


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(database, tmp_path)
    yield made
    made.close()


def kill_again_and_again(scene: Scene, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    consumer = scene.consumer().start()
    load = Load(scene.place.dsn, writers=2, seed=seed, pause=0.02).start()
    try:
        scene.wait_for_records()
        for _ in range(kills):
            if chance.random() < 0.8:
                scene.wait_for_records()
                time.sleep(chance.random() * 0.4)
            else:
                time.sleep(chance.random() * 2)  # somewhere in the start
            consumer.kill()
            consumer.start()
    finally:
        load.stop()
    scene.assert_complete()
    assert consumer.terminate() == 0, consumer.output[-2000:]
    assert len(segments_in(scene.directory)) > 1, "segments were closed meanwhile"
    document = scene.assert_complete()
    assert document["vouched_n"] == document["last_n"], "a clean stop vouches for the last record"


def test_a_sink_that_is_killed_loses_and_doubles_nothing(scene: Scene) -> None:
    kill_again_and_again(scene, kills=2, seed=1)


@pytest.mark.slow
def test_forty_kills(scene: Scene) -> None:
    kill_again_and_again(scene, kills=40, seed=2)


def test_a_sink_that_is_stopped_past_a_takeover_doubles_nothing(scene: Scene) -> None:
    """SIGSTOP one for longer than its lease; the other takes over; SIGCONT."""
    first = scene.consumer(LEASE_SECONDS="1.5").start()
    load = Load(scene.place.dsn, writers=2, seed=5, pause=0.02).start()
    try:
        scene.wait_for_records()
        second = scene.consumer(LEASE_SECONDS="1.5").start()
        eventually(lambda: "standing by" in second.output, 30, what="the stand-by")
        first.signal(signal.SIGSTOP)
        before = scene.recorded()
        # If it was stopped with the directory in its hands, the other one waits, and says so.
        eventually(lambda: scene.recorded() > before or "is writing" in scene.state()[1], 30, what="a take-over")
        first.signal(signal.SIGCONT)
        scene.wait_for_records()
        assert first.running
    finally:
        load.stop()
    scene.assert_complete()
    assert {first.terminate(), second.terminate()} == {0}


@pytest.mark.slow
def test_stopped_again_and_again(scene: Scene) -> None:
    """The same in both directions, several times, under more load."""
    consumers = [scene.consumer(LEASE_SECONDS="1.5").start() for _ in range(2)]
    load = Load(scene.place.dsn, seed=6).start()
    try:
        scene.wait_for_records()
        for turn in range(6):
            stopped = consumers[turn % 2]
            stopped.signal(signal.SIGSTOP)
            before = scene.recorded()
            eventually(
                lambda before=before: scene.recorded() > before or "is writing" in scene.state()[1],
                30,
                what="a take-over",
            )
            stopped.signal(signal.SIGCONT)
            scene.wait_for_records()
    finally:
        load.stop()
    scene.assert_complete()
    assert {consumer.terminate() for consumer in consumers} == {0}


def test_a_server_that_crashes_under_a_living_sink(own_server: Callable[..., PostgresServer], tmp_path: Path) -> None:
    """Rule 4: the order's asynchronous end vanishes, and the trail is ahead of it until it has grown back."""
    server = own_server(wal_writer_delay="2s")
    scene = Scene(_Whole(server), tmp_path)
    consumer = scene.consumer().start()
    load = Load(server.dsn(), writers=2, seed=3, pause=0.02).start()
    try:
        scene.wait_for_records()
        time.sleep(0.5)
        server.restart("immediate")
        scene.wait_for_records()
    finally:
        load.stop()
    try:
        scene.assert_complete()
        assert consumer.running, consumer.output[-2000:]
        assert consumer.terminate() == 0
    finally:
        scene.close()


class _Whole:
    """The database ``postgres`` of a server of one's own."""

    name = "scene"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    @property
    def dsn(self) -> str:
        return self._server.dsn()

    def execute(self, sql: str, *args: object) -> list[tuple[object, ...]]:
        return self._server.execute(sql, *args)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB; skips, saying so, where this user may not mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)]
    try:
        made = subprocess.run(options, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount(8)")
    if made.returncode:
        pytest.skip(f"needs to mount a tmpfs: {made.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False)


def test_a_full_disk_stops_the_sink_alone_and_it_goes_on_by_itself(
    database: Database, tmp_path: Path, small_disk: Path
) -> None:
    scene = Scene(database, tmp_path, small_disk / "audit")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 100_000)
    consumer = scene.consumer().start()
    try:
        scene.place.execute(INSERT, 200, 20)
        scene.wait_for_records(20)
        scene.place.execute(INSERT, 500, 200)
        eventually(lambda: scene.state()[0] == "retrying", 30, what="a state that says so")
        assert "No space left on device" in scene.state()[1]
        status = call("status", "--json", dsn=database.dsn).json
        (sink,) = status["projectors"]
        assert "No space left on device" in sink["error"]
        head = status["order"]["head"]
        scene.place.execute(INSERT, 1, 5)
        eventually(lambda: call("status", "--json", dsn=database.dsn).json["order"]["head"] == head + 5, 60)
        assert consumer.running
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        scene.assert_complete()
        assert consumer.terminate() == 0
        scene.assert_complete()
    finally:
        scene.close()


@pytest.mark.slow
def test_a_disk_that_is_read_only_is_waited_for(database: Database, tmp_path: Path, small_disk: Path) -> None:
    scene = Scene(database, tmp_path, small_disk / "audit")
    consumer = scene.consumer().start()
    try:
        scene.place.execute(INSERT, 20, 20)
        scene.wait_for_records(20)
        assert consumer.terminate() == 0
        subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk)], check=True)
        consumer.start()
        scene.place.execute(INSERT, 20, 20)
        eventually(lambda: "Read-only file system" in scene.state()[1], 30, what="a state that says so")
        assert scene.state()[0] == "retrying"
        subprocess.run(["umount", "-l", str(small_disk)], check=True)
        scene.assert_complete()
        assert consumer.terminate() == 0
    finally:
        scene.close()


def test_heads_reach_the_second_place_and_payloads_the_record_byte_for_byte(scene: Scene) -> None:
    consumer = scene.consumer().start()
    payloads = ['{"n": 1.10, "big": 123456789012345678901234567890, "e": 1E+2}', '{"t": "\\u0001 \\ud83d\\ude00 é"}']
    for payload in payloads:
        scene.place.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " VALUES (gen_random_uuid(), 'a', 't', %s)",
            payload,
        )
    scene.assert_complete()
    assert consumer.terminate() == 0
    rendered = [str(text) for (text,) in scene.place.execute("SELECT payload::text FROM agent_events ORDER BY seq")]
    on_record = [each for each in records(scene.directory) if each.kind == "event"]
    assert [(each.payload or b"").decode() for each in on_record] == rendered
    assert '"n": 1.10' in rendered[0]
    fields = on_record[0].fields()
    assert fields["committed_at"]
    assert fields["lsn"]
    assert [head.n for head in read_heads(scene.heads)] == [
        head.n for head in read_heads(scene.directory / "heads.jsonl")
    ]
    assert json.loads(on_record[0].header)["key"].endswith(f":{on_record[0].seq}")
    assert os.stat(scene.key).st_mode & 0o077 == 0
