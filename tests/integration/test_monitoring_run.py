"""Metrics, health and logs of real processes: ``walstream run`` and ``walstream guard --watch``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Database
from tests.integration.streams import INSERT, Installed, eventually
from tests.unit.test_monitoring import get
from walstream.monitoring.catalogue import BY_NAME, PREFIX
from walstream.worker.standing import OUTCOMES

PROGRAM = """
from walstream import Stream

stream = Stream()


@stream.on(name="good")
def good(event):
    pass


@stream.on("bad", name="strict", on_poison="halt", max_attempts=1)
def strict(event):
    raise ValueError("this one cannot be projected")


@stream.on("odd", name="lenient", max_attempts=1)
def lenient(event):
    raise ValueError("nor can this one")
"""

WORKER = """
from walstream import RetryLater, Worker

worker = Worker(agent="researcher", concurrency=2, retry_first=60, lease_seconds=1)


@worker.handle
def research(context, job, ledger):
    if job.event_seq == 2:
        raise ValueError("it cannot be done")
    if job.event_seq == 3:
        raise RetryLater("the provider is away", delay=60)
"""


class Process:
    """A command that serves metrics on a free port and logs JSON."""

    def __init__(self, stream: Installed, *words: str, cwd: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "walstream", *words, "--metrics-listen", "127.0.0.1:0", "--log-format", "json"],
            env={
                **os.environ,
                "WALSTREAM_DSN": stream.settings.dsn,
                "WALSTREAM_SLOT": stream.settings.slot,
                "WALSTREAM_GUARD__INTERVAL_SECONDS": "0.2",
                "WALSTREAM_LEASE_SECONDS": "2",
                "PYTHONPATH": f"{cwd}:{Path(__file__).resolve().parents[2]}",
            },
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self.records = [json.loads(self._process.stderr.readline())]
        assert self.records[0]["message"].startswith("metrics and health on http://127.0.0.1:")
        self.port = int(self.records[0]["message"].rpartition(":")[2])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.records += [json.loads(line) for line in self._process.stderr]  # each has to be an object

    def answer(self, path: str) -> tuple[int, Any]:
        status, _, body = get(self.port, path)
        return status, json.loads(body)

    def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Name to labels to value, of those that are walstream's own; with their kinds and labels compared."""
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(get(self.port, "/metrics")[2]):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    name = sample.name.removeprefix(PREFIX)
                    described = BY_NAME[name]
                    assert (family.type, set(sample.labels)) == (described.kind, set(described.labels)), name
                    assert family.documentation == described.meaning
                    found.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics().get(name, {}).get(tuple(sorted(labels.items())))

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._reader.join(60)
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(60)
        if self._process.stderr is not None:
            self._process.stderr.close()


@contextlib.contextmanager
def running(stream: Installed, *words: str, cwd: Path) -> Iterator[Process]:
    process = Process(stream, *words, cwd=cwd)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def stream(database: Database) -> Installed:
    return Installed(database)


def test_a_consumer_with_one_halted_projector(stream: Installed, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM)
    with running(stream, "run", "app:stream", cwd=tmp_path) as process, contextlib.ExitStack() as hanging:
        eventually(lambda: process.answer("/readyz")[0] == 200, "everything is ready")
        # Scrapers that hang hold up neither ingest nor the others.
        for _ in range(4):
            hanging.enter_context(socket.create_connection(("127.0.0.1", process.port)))
        stream.place.execute("; ".join([INSERT % f"'x{number}'" for number in range(40)]))
        stream.insert("odd", "bad", "last")
        eventually(lambda: process.answer("/readyz")[0] == 503, "one has halted")
        _, body = process.answer("/readyz")
        assert {name: part["ready"] for name, part in body["parts"].items()} == {
            "ingest": True,
            "projector:good": True,
            "projector:strict": False,
            "projector:lenient": True,
        }
        assert body["parts"]["projector:strict"]["state"] == "halted"
        assert "this one cannot be projected" in body["parts"]["projector:strict"]["error"]
        assert process.answer("/healthz")[0] == 200  # a restart would halt it again
        assert process.answer("/readyz/projector:good")[0] == 200
        assert process.answer("/readyz/projector:strict")[0] == 503

        eventually(lambda: process.value("projector_events_total", projector="good") == 43, "the other has them all")
        eventually(lambda: process.value("ingest_events_total") == 43, "the heartbeat counted them")
        eventually(lambda: process.value("slot_active", slot=stream.settings.slot) == 1, "the guard has looked")
        eventually(lambda: process.value("projector_parked_total", projector="lenient") == 1, "one is parked")
        eventually(lambda: process.value("projector_position", projector="lenient", lane="0") == 43, "it went on")
        found = process.metrics()
        assert found["projector_state"][("projector", "strict"), ("state", "halted")] == 1
        assert found["projector_state"][("projector", "good"), ("state", "hot")] == 1
        assert found["ingest_state"][(("state", "streaming"),)] == 1
        assert found["order_head"][()] == 43
        assert found["slot_state"][("slot", stream.settings.slot), ("state", "ok")] == 1
        assert found["slot_retained_bytes"][(("slot", stream.settings.slot),)] > 0
        assert BY_NAME.keys() - found.keys() <= {
            "storm_ratio",  # which there is only in a storm
            *(name for name in BY_NAME if name.startswith("worker_")),
        }
        hanging.close()
        assert process.stop() == 7
    halted = [record for record in process.records if record["level"] == "error"]
    assert any("strict" in record["message"] for record in halted)
    assert all(record["time"].endswith("+00:00") for record in process.records)


def test_a_worker(stream: Installed, database: Database, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKER)
    submit = "SELECT walstream.submit_job(gen_random_uuid()::text, 'researcher', %s)"
    with running(stream, "worker", "app:worker", cwd=tmp_path) as process:
        eventually(lambda: process.answer("/readyz/worker:researcher")[0] == 200, "it can claim")
        assert process.metrics()["worker_turns_total"] == {
            (("agent", "researcher"), ("outcome", outcome)): 0 for outcome in OUTCOMES
        }
        for seq in range(3):
            database.execute(submit, seq + 1)

        def turns(outcome: str) -> float | None:
            return process.value("worker_turns_total", agent="researcher", outcome=outcome)

        eventually(lambda: (turns("completed"), turns("failed"), turns("later")) == (1, 1, 1), "all were done once")
        eventually(lambda: process.value("worker_hands", agent="researcher", state="waiting") == 2, "they wait again")
        assert (process.value("worker_turn_seconds_total", agent="researcher") or 0) > 0
        in_the_way = database.connect()
        with in_the_way.cursor() as cur:
            cur.execute("LOCK TABLE agent_jobs")
        eventually(lambda: process.value("worker_hands", agent="researcher", state="away") == 2, "they cannot claim")
        status, part = process.answer("/readyz/worker:researcher")
        assert (status, part["state"], part["hands"]) == (503, "away", 2)
        assert "lock timeout" in part["error"]
        assert process.answer("/healthz")[0] == 200  # a restart would change nothing
        in_the_way.rollback()
        eventually(lambda: process.answer("/readyz")[0] == 200, "they can again")
        assert process.stop() == 0


def test_a_guard_without_a_consumer(stream: Installed, database: Database, tmp_path: Path) -> None:
    slot = stream.settings.slot
    with running(stream, "guard", "--watch", "--all", cwd=tmp_path) as process:
        eventually(lambda: process.answer("/readyz")[0] == 200, "it has looked")
        assert process.value("guard_up") == 1
        assert process.value("slot_active", slot=slot) == 0
        database.execute("SELECT pg_drop_replication_slot(%s)", slot)
        eventually(lambda: process.value("slot_active", slot=slot) is None, "a slot that is gone is not exported")
        assert process.answer("/healthz")[0] == 200
        assert process.stop() == 0


def test_an_address_that_is_taken_ends_it_at_once(stream: Installed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = subprocess.run(
            [sys.executable, "-m", "walstream", "run", "--metrics-listen", f"127.0.0.1:{taken.getsockname()[1]}"],
            env={**os.environ, "WALSTREAM_DSN": stream.settings.dsn, "WALSTREAM_SLOT": stream.settings.slot},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 3, ended.stderr
    assert "metrics_listen" in ended.stderr
