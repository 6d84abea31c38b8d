"""walstream beside a Postgres in a container, and the whole of ``compose.yaml``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import containers
from walstream.postgres.server import execute

ROOT = Path(__file__).resolve().parents[2]
LOAD = ROOT / "deploy" / "compose" / "load.jsonl"
IMAGE = os.environ.get("WALSTREAM_TEST_IMAGE") or "postgres:17"

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _engine() -> None:
    containers.require_engine()


def eventually(look: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def test_from_init_to_a_projector_on_the_server_of_an_image(tmp_path: Path) -> None:
    with containers.postgres(IMAGE) as dsn:
        environ = {**os.environ, "WALSTREAM_DSN": dsn}
        command = [sys.executable, "-m", "walstream"]
        (tmp_path / "walstream.toml").write_text("[projectors.event-counter]\n")
        subprocess.run([*command, "init"], env=environ, cwd=tmp_path, check=True)
        consumer = subprocess.Popen([*command, "run"], env=environ, cwd=tmp_path)
        try:
            subprocess.run([*command, "import", LOAD], env=environ, cwd=tmp_path, check=True)
            written = execute(dsn, "SELECT count(*) FROM agent_events")
            assert eventually(lambda: _counted(dsn) == written, 60)
        finally:
            consumer.send_signal(signal.SIGTERM)
            assert consumer.wait(60) == 0


def _counted(dsn: str) -> list[tuple[Any, ...]]:
    [(there,)] = execute(dsn, "SELECT to_regclass('event_counts')")
    return execute(dsn, "SELECT sum(events)::bigint FROM event_counts") if there else []


class Compose:
    """``docker compose`` on the repository's file, under a project name of its own."""

    def __init__(self) -> None:
        self._project = f"walstream-test-{secrets.token_hex(4)}"

    def __call__(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "compose", "--project-name", self._project, *words],
            cwd=ROOT,
            env={**os.environ, "POSTGRES_PORT": "0", "LOAD_RATE": "100", "LOAD_COPIES": "20"},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert not check or done.returncode == 0, f"docker compose {words}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def sql(self, statement: str) -> str:
        words = ("psql", "--username=postgres", "--dbname=app", "--tuples-only", "--no-align", "--command", statement)
        return self("exec", "-T", "postgres", *words).strip()


@pytest.fixture
def compose() -> Iterator[Compose]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the docker command has no `compose`")
    made = Compose()
    try:
        yield made
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            made("down", "--volumes", "--timeout", "20", check=False)


def test_compose_brings_up_everything_and_loses_nothing(compose: Compose) -> None:
    compose("up", "--build", "--detach")
    lines = len(LOAD.read_text().splitlines())

    def ended() -> bool:
        return '"load"' in compose("ps", "--all", "--status", "exited", "--format", "json", "load")

    assert eventually(ended, 300), compose("logs", "--tail", "50")
    written = compose.sql("SELECT count(*) FROM agent_events")
    assert int(written) == lines * 20
    assert eventually(lambda: compose.sql("SELECT sum(events) FROM projections.event_counts") == written, 60)
    status = json.loads(compose("exec", "-T", "walstream", "walstream", "status", "--json"))
    assert status["problems"] == []
    assert status["order"]["head"] == int(written)
    assert compose.sql("SELECT rolsuper FROM pg_roles WHERE rolname = 'walstream'") == "f"
    healthy = compose("ps", "--format", "json", "walstream", "postgres")
    assert healthy.count('"healthy"') == 2
    # A drain: everything is given back, and the process ends by itself well before Docker would kill it.
    compose("stop", "walstream")
    assert '"ExitCode":0' in compose("ps", "--all", "--format", "json", "walstream").replace(" ", "")
