"""The consumer's memory is bounded, whatever a transaction holds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Database
from tests.integration.streams import Installed

from .consumer import Consumer, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory from /proc"),
]

MiB = 1024 * 1024


def peak(consumer: Consumer) -> int:
    """Highest resident size so far (VmHWM), in bytes."""
    status = Path(f"/proc/{consumer.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.fixture
def started(database: Database, tmp_path: Path) -> Iterator[Callable[[], tuple[Installed, Consumer]]]:
    running: list[Consumer] = []

    def start() -> tuple[Installed, Consumer]:
        stream = Installed(database)
        consumer = Consumer(
            database.dsn,
            tmp_path / "log",
            target="tests.chaos.projectors:lengths",
            settings={"SLOT": stream.settings.slot},
        ).start()
        running.append(consumer)
        return stream, consumer

    yield start
    for consumer in running:
        if consumer.running:
            consumer.kill()


def delivered(database: Database) -> int:
    rows = database.execute("SELECT max(position) FROM walstream.cursors WHERE projector = 'lengths'")
    return int(rows[0][0] or 0)


def fill(database: Database, count: int, size: int) -> None:
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT gen_random_uuid(), 'a', 'x', jsonb_build_object('t', repeat('x', %s)) FROM generate_series(1, %s)",
        size,
        count,
    )


def test_a_transaction_of_a_million_rows(database: Database, started: Callable[[], tuple[Installed, Consumer]]) -> None:
    _, consumer = started()
    fill(database, 1_000_000, 200)
    eventually(lambda: delivered(database) == 1_000_000, 300, what="delivery")
    assert peak(consumer) < 200 * MiB


def test_payloads_of_fifty_megabytes(database: Database, started: Callable[[], tuple[Installed, Consumer]]) -> None:
    _, consumer = started()
    fill(database, 200_000, 200)
    eventually(lambda: delivered(database) == 200_000, 120, what="delivery")
    baseline = peak(consumer)
    largest = 50 * MiB
    writers = [threading.Thread(target=fill, args=(database, 3, largest)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    fill(database, 1000, 200)
    eventually(lambda: delivered(database) == 201_006, 300, what="delivery")
    assert peak(consumer) < baseline + 4 * largest
