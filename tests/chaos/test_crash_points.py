"""A consumer dies at one exact point of its work; the next one finds everything, and does nothing twice.

These are the points of the crash table in docs/operations.md. (Kills at random are in ``test_kills.py`` and in
``python -m tests.chaos``: they meet whatever nobody has thought of.)
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path

import pytest

from tests.audit_files import offsets
from tests.conftest import Database
from tests.integration.streams import Installed, eventually
from walstream.audit.keys import generate

from .cast import TURNS
from .consumer import Consumer
from .verdict import PROJECTORS, judge

# What dies -> where: module, method, before or after its n-th call.
POINTS = {
    "ingest, before its order row": "walstream.order.writer:OrderWriter._write:before:3",
    "ingest, after its order row": "walstream.order.writer:OrderWriter._write:after:3",
    "ingest, before it confirms": "walstream.source.stream:ReplicationStream.confirm:before:2",
    "ingest, after it confirmed": "walstream.source.stream:ReplicationStream.feedback:after:3",
    "ingest, between lease and stream": "walstream.order.wake:Notifier.__init__:before:1",
    "a lane, before its first look at the cursor": "walstream.engine.cursors:Cursors.sign_in:before:4",
    "a lane, before the effect": "tests.chaos.cast:Rows.project:before:3",
    "a lane, between effect and cursor": "tests.chaos.cast:Rows.project:after:3",
    "a lane, between cursor and commit": "walstream.engine.cursors:Cursors.step:after:7",
    "a lane, after the commit": "walstream.engine.delivery:Delivery.deliver:after:5",
    "an external one, before the effect": "tests.chaos.cast:Lines.project:before:2",
    "an external one, between effect and cursor": "tests.chaos.cast:Lines.project:after:2",
    "the file, before fsync": "walstream.projectors.json_lines_file:os.fsync:before:4",
    "the file, after fsync": "walstream.projectors.json_lines_file:os.fsync:after:4",
    "the audit sink, before it records": "walstream.audit.trail:AuditTrail.record:before:2",
    "the audit sink, between record and cursor": "walstream.audit.trail:AuditTrail.record:after:2",
}
QUICK = ("ingest, after its order row", "a lane, between cursor and commit")
_APPEND = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload) SELECT %s, 'a', 'e', '{}'"
    " FROM generate_series(1, %s)"
)


class Writer:
    """One transaction after the other, until it is told to stop."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _write(self) -> None:
        sessions = [str(uuid.UUID(int=0x7000 + n)) for n in range(6)]
        with self._connection.cursor() as cur:
            for number in range(1_000_000):
                if self._stopping.wait(0.02):
                    return
                cur.execute(_APPEND, (sessions[number % 6], 1 + number % 4))
                self._connection.commit()


class Scene:
    """A stream, and processes that run it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.stream = Installed(database)
        database.execute(TURNS)  # which workers would fill; the oracle asks for it
        generate(folder / "audit.key")
        (folder / "heads").mkdir()
        (folder / "antidote").touch()

    def consumer(self, point: str = "") -> Consumer:
        """A consumer; with a point, one that dies there."""
        where = {"DIE_AT": point} if point else {}
        return Consumer(
            self.database.dsn,
            self.folder / ("dying" if point else "log"),
            target="tests.chaos.dying:stream",
            settings={"SLOT": self.stream.settings.slot, "LEASE_SECONDS": "2", "POLL_SECONDS": "0.2"},
            environ={"CHAOS_FOLDER": str(self.folder), "CHAOS_AUDIT": str(self.folder / "trail"), **where},
        )

    def delivered(self) -> bool:
        behind, projectors = self.database.execute(
            "SELECT (SELECT count(*) FROM agent_events) - min(position), count(DISTINCT projector)"
            " FROM walstream.cursors"
        )[0]
        return bool(projectors == PROJECTORS and behind <= 0)


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Scene:
    return Scene(database, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in POINTS]
)
def test_nothing_is_lost_or_doubled_by_a_death(scene: Scene, name: str) -> None:
    with contextlib.ExitStack() as running:
        with Writer(scene.database):
            with scene.consumer(POINTS[name]) as dying:
                try:
                    assert dying.wait(60) == -signal.SIGKILL, dying.output
                except subprocess.TimeoutExpired:
                    pytest.fail(f"it never came to that point: {dying.output}")
            time.sleep(0.3)
            next_one = running.enter_context(scene.consumer())
            time.sleep(0.7)
        eventually(scene.delivered, f"everything is delivered: {next_one.output[-2000:]}", 180)
        assert next_one.terminate() == 0, next_one.output
    verdict = judge(scene.database.execute, scene.folder, set())
    assert verdict.clean, verdict.findings
    assert verdict.events > 10
    assert verdict.recovered == 0, "the slot sent it again"
    assert offsets(scene.folder / "trail") == list(range(1, verdict.events + 1))


@pytest.mark.slow
def test_a_stand_by_that_dies_is_not_noticed(scene: Scene) -> None:
    generation = "SELECT generation FROM walstream.generation"
    with scene.consumer() as working:
        with Writer(scene.database):
            eventually(lambda: "streaming slot" in working.output, "it works", 60)
            held = scene.database.execute(generation)
            with scene.consumer() as second:
                eventually(lambda: working.output.count("standing by") >= PROJECTORS, "the second stands by", 60)
                second.kill()
            time.sleep(0.5)
        eventually(scene.delivered, "everything is delivered", 180)
        assert scene.database.execute(generation) == held
        assert working.terminate() == 0, working.output
    verdict = judge(scene.database.execute, scene.folder, set())
    assert verdict.clean, verdict.findings


def test_every_point_is_in_the_crash_table() -> None:
    """By its words: who reads the table finds the test."""
    table = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    missing = [name for name in POINTS if f"| {name} |" not in table]
    assert missing == []
