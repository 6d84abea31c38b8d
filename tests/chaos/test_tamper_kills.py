"""Somebody changes the ledger while the consumer is killed again and again: each change is on record, once."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import offsets, records, verified
from tests.conftest import Database
from walstream.audit.segments import segments_in

from .load import Load
from .test_audit_kills import Scene


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(database, tmp_path)
    database.execute("ALTER PUBLICATION walstream SET (publish = 'insert, update, delete, truncate')")
    yield made
    made.close()


def found(scene: Scene) -> list[dict[str, Any]]:
    """What the violations on record say."""
    if not scene.directory.exists():
        return []
    return [json.loads(each.payload or b"") for each in records(scene.directory) if each.kind == "violation"]


def tamper_while_it_is_killed(scene: Scene, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    consumer = scene.consumer().start()
    load = Load(scene.place.dsn, writers=1, seed=seed, pause=0.02).start()
    stop = threading.Event()
    done = 0

    def tamper() -> None:
        nonlocal done
        while not stop.is_set():
            scene.place.execute(
                "UPDATE agent_events SET agent_id = %s WHERE seq = (SELECT min(seq) FROM agent_events)", f"t{done}"
            )
            done += 1
            time.sleep(0.02)

    tampering = threading.Thread(target=tamper)
    try:
        scene.wait_for_records()
        tampering.start()
        for _ in range(kills):
            scene.wait_for_records()
            time.sleep(chance.random() * 0.8)
            consumer.kill()
            consumer.start()
    finally:
        stop.set()
        tampering.join()
        load.stop()
    deadline = time.monotonic() + 180
    while len(found(scene)) < done:
        assert time.monotonic() < deadline, consumer.output[-3000:]
        time.sleep(0.2)
    time.sleep(2.5)  # two ticks: nothing comes twice
    assert consumer.terminate() == 0, consumer.output[-2000:]
    assert len(found(scene)) == done > kills
    every = found(scene)
    assert len({each["xid"] for each in every}) == done
    assert {each["what"] for each in every} == {"update"}
    ids = [each.fields()["id"] for each in records(scene.directory) if each.kind == "violation"]
    assert ids == sorted(set(ids))
    assert len(segments_in(scene.directory)) > 1, "segments were closed meanwhile"
    assert offsets(scene.directory) == list(range(1, scene.recorded() + 1))
    verified(scene.directory)


def test_changes_while_the_consumer_is_killed(scene: Scene) -> None:
    tamper_while_it_is_killed(scene, kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_changes_while_it_is_killed_many_times(scene: Scene, seed: int) -> None:
    tamper_while_it_is_killed(scene, kills=12, seed=seed)
