"""The consumer is killed, the server crashes, a process is stopped past its replacement: the ledger is the oracle."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest

from tests.conftest import Database
from tests.integration.streams import Installed, Place
from walstream.postgres import PostgresServer

from .consumer import Consumer, eventually
from .load import Load
from .oracle import settle


class Scene:
    """A stream under load, and consumers of it."""

    def __init__(self, place: Place, folder: Path, **settings: str) -> None:
        self.place = place
        self.keys = folder / "keys"
        self._folder = folder
        self.settings = settings
        self.stream = Installed(place)
        self.consumers: list[Consumer] = []

    def consumer(self) -> Consumer:
        """Another consumer process, not started yet."""
        made = Consumer(
            self.place.dsn,
            self._folder / f"log{len(self.consumers)}",
            settings={"SLOT": self.stream.settings.slot, **self.settings},
            environ={"CHAOS_KEY_FILE": str(self.keys)},
        )
        self.consumers.append(made)
        return made

    def delivered(self) -> int:
        if self.place.execute("SELECT to_regclass('seen')") == [(None,)]:
            return 0
        return int(self.place.execute("SELECT count(*) FROM seen")[0][0])

    def wait_for_delivery(self) -> None:
        """Until something more is delivered."""
        before = self.delivered()
        eventually(lambda: self.delivered() > before, 60, what="a delivery")

    def assert_clean(self) -> None:
        """Lost 0, doubled 0, in order, dense; every key was sent."""
        verdict = settle(self.place.execute, key_file=self.keys, timeout=180)
        logs = "\n".join(consumer.output[-3000:] for consumer in self.consumers)
        assert verdict.clean, f"{verdict}\n{logs}"
        assert verdict.events > 0

    def close(self) -> None:
        for consumer in self.consumers:
            if consumer.running:
                consumer.kill()


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(database, tmp_path)
    yield made
    made.close()


@pytest.fixture
def crashing(own_server: Callable[..., PostgresServer], tmp_path: Path) -> Iterator[tuple[Scene, PostgresServer]]:
    server = own_server(wal_writer_delay="2s")
    made = Scene(WholeServer(server), tmp_path)
    yield made, server
    made.close()


class WholeServer:
    """The database ``postgres`` of a server of one's own."""

    name = "scene"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    @property
    def dsn(self) -> str:
        return self._server.dsn()

    def execute(self, sql: str, *args: object) -> list[tuple[object, ...]]:
        return self._server.execute(sql, *args)


def kill_again_and_again(scene: Scene, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    consumer = scene.consumer()
    consumer.start()
    scene.wait_for_delivery()
    load = Load(scene.place.dsn, seed=seed, pause=0.004 if kills > 2 else 0.02).start()
    try:
        for _ in range(kills):
            if chance.random() < 0.8:
                scene.wait_for_delivery()
                time.sleep(chance.random() * 0.5)
            else:
                time.sleep(chance.random() * 2)  # somewhere in the start
            consumer.kill()
            consumer.start()
    finally:
        load.stop()
    scene.assert_clean()
    assert consumer.terminate() == 0, consumer.output[-2000:]


def test_a_consumer_that_is_killed_loses_and_doubles_nothing(scene: Scene) -> None:
    scene.place.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " VALUES (gen_random_uuid(), 'a', 'first', '{}')"
    )
    kill_again_and_again(scene, kills=2, seed=1)


@pytest.mark.slow
def test_fifty_kills(scene: Scene) -> None:
    scene.place.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " VALUES (gen_random_uuid(), 'a', 'first', '{}')"
    )
    kill_again_and_again(scene, kills=50, seed=2)


_BACKLOG = """DO $$ BEGIN
  PERFORM set_config('synchronous_commit', 'off', false);
  FOR n IN 1..60000 LOOP
    INSERT INTO agent_events (session_id, agent_id, event_type, payload)
    VALUES ('00000000-0000-4000-8000-000000000001', 'a', 'single', '{}');
    COMMIT;
  END LOOP;
  FOR n IN 1..400 LOOP
    INSERT INTO agent_events (session_id, agent_id, event_type, payload)
    SELECT '00000000-0000-4000-8000-000000000002', 'b', 'batch', '{}' FROM generate_series(1, 500);
    COMMIT;
  END LOOP;
END $$"""


@pytest.mark.slow
def test_kills_in_a_drain_at_full_speed(scene: Scene) -> None:
    """Transactions gather there, segments are large, and what was read is laid out far ahead of what is ordered."""
    scene.place.execute(_BACKLOG)
    total = scene.place.execute("SELECT count(*) FROM agent_events")[0][0]
    chance = random.Random(7)
    consumer = scene.consumer()
    amid = 0
    for _ in range(5):
        consumer.start()
        scene.wait_for_delivery()
        time.sleep(chance.random() * 0.3)
        consumer.kill()
        ordered = scene.place.execute("SELECT sum(events) FROM walstream.commit_order")[0][0]
        amid += 0 < int(str(ordered)) < int(str(total))
    assert amid > 1, "killed while it drained"
    consumer.start()
    scene.assert_clean()
    assert consumer.terminate() == 0, consumer.output[-2000:]


def crash_again_and_again(scene: Scene, server: PostgresServer, crashes: int, seed: int) -> None:
    """``pg_ctl stop -m immediate`` while the consumer lives."""
    chance = random.Random(seed)
    consumer = scene.consumer().start()
    load = Load(scene.place.dsn, seed=seed, pause=0.004 if crashes > 2 else 0.02).start()
    try:
        for _ in range(crashes):
            scene.wait_for_delivery()
            time.sleep(chance.random())
            server.restart("immediate")
    finally:
        load.stop()
    scene.assert_clean()
    assert consumer.running, consumer.output[-2000:]
    assert consumer.terminate() == 0, consumer.output[-2000:]


def test_a_server_that_crashes_under_a_living_consumer(crashing: tuple[Scene, PostgresServer]) -> None:
    crash_again_and_again(*crashing, crashes=2, seed=3)


@pytest.mark.slow
def test_twenty_crashes_of_the_server(crashing: tuple[Scene, PostgresServer]) -> None:
    crash_again_and_again(*crashing, crashes=20, seed=4)


def test_a_consumer_that_is_stopped_past_a_takeover_writes_nothing_more(scene: Scene) -> None:
    """SIGSTOP the first for longer than its lease: the second takes over, and the first is refused when it wakes."""
    scene.settings["LEASE_SECONDS"] = "1.5"
    first = scene.consumer().start()
    load = Load(scene.place.dsn, seed=5, pause=0.02).start()
    try:
        scene.wait_for_delivery()
        second = scene.consumer().start()
        eventually(lambda: "standing by" in second.output, 30, what="the stand-by")
        for stopped, other in ((first, second), (second, first)):
            stopped.signal(signal.SIGSTOP)
            generation = scene.place.execute("SELECT generation FROM walstream.generation")[0][0]
            eventually(
                lambda generation=generation: (
                    scene.place.execute("SELECT generation FROM walstream.generation")[0][0] > generation
                ),
                30,
                what="a take-over",
            )
            scene.wait_for_delivery()
            stopped.signal(signal.SIGCONT)
            eventually(lambda stopped=stopped: "standing by" in stopped.output[-2000:], 30, what="standing by again")
            scene.wait_for_delivery()
            assert other.running
            assert stopped.running
    finally:
        load.stop()
    scene.assert_clean()
    assert {first.terminate(), second.terminate()} == {0}


@pytest.mark.parametrize("rows", [30_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_large_transaction_is_resumed_where_its_order_ends(scene: Scene, rows: int) -> None:
    """Rule 5, with kills inside of a transaction that is ordered in many pieces."""
    scene.consumers.clear()
    consumer = Consumer(
        scene.place.dsn,
        scene.keys.with_name("log"),
        settings={"SLOT": scene.stream.settings.slot, "CHUNK_BYTES": "65536", "PENDING_BYTES": "1048576"},
        environ={"CHAOS_KEY_FILE": str(scene.keys)},
    )
    scene.consumers.append(consumer)
    consumer.start()
    scene.place.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT gen_random_uuid(), 'a', 'big', jsonb_build_object('n', n) FROM generate_series(1, %s) n",
        rows,
    )
    for _ in range(2):
        with contextlib.closing(psycopg2.connect(scene.place.dsn)) as holder, holder.cursor() as cur:
            done = _ordered(cur)
            eventually(lambda cur=cur, done=done: _ordered(cur) > done, 60, pause=0, what="another piece")
            # Ingest cannot write the next piece now, so the kill is sure to meet the transaction half ordered.
            cur.execute("LOCK TABLE walstream.commit_order IN SHARE MODE")
            ordered = _ordered(cur)
            consumer.kill()
            assert 0 < ordered < rows, "it was not killed inside the transaction"
        consumer.start()
    scene.assert_clean()


def _ordered(cur: psycopg2.extensions.cursor) -> int:
    cur.execute("SELECT coalesce(sum(events), 0)::int FROM walstream.commit_order")
    row = cur.fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_external_deliveries_repeat_with_the_same_key(scene: Scene, kills: int) -> None:
    """C23, C55: whatever was sent before a kill is sent again under the key that it had."""
    consumer = scene.consumer().start()
    load = Load(scene.place.dsn, seed=7, pause=0.02).start()
    try:
        for _ in range(kills):
            scene.wait_for_delivery()
            consumer.kill()
            consumer.start()
    finally:
        load.stop()
    scene.assert_clean()
    keys: dict[str, str] = {}
    for line in scene.keys.read_text().splitlines():
        offset, key = line.split()
        assert keys.setdefault(offset, key) == key
    assert os.stat(scene.keys).st_size > 0
