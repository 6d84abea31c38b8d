"""``walstream demo``: it holds, it can fail, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.recorded import FOLDER, run_files
from walstream.cli import app
from walstream.errors import ConfigError
from walstream.postgres.binaries import find_binaries

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    try:
        find_binaries()
    except ConfigError as error:
        pytest.skip(f"needs Postgres programs: {error}")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temp directory for the demo alone, as open to the server's account as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def started(temporary: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "walstream.cli", "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "WALSTREAM_SLOT": "not_for_the_demo"},
    )


def shown(temporary: Path, *words: str) -> dict[str, Any]:
    process = started(temporary, *words, "--json")
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, (stdout, stderr)
    assert stderr == ""
    found: dict[str, Any] = json.loads(stdout)
    return found


def nothing_is_left(temporary: Path, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while True:
        processes = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in processes.splitlines() if str(temporary) in line]
        folders = [str(path) for path in temporary.glob("walstream-pg-*")]
        if not left and not folders:
            return
        assert time.monotonic() < deadline, (left, folders)
        time.sleep(0.1)


def test_nothing_is_lost_or_doubled_although_consumer_and_workers_are_killed(temporary: Path) -> None:
    words = ["--events", "300", "--kills", "1", "--worker-kills", "1", "--agents", "5", "--seed", "1"]
    found = shown(temporary, *words)
    assert (found["written"], found["offsets"], found["delivered"]) == (300, 300, 300)
    assert (found["lost"], found["duplicated"], found["kills"], found["worker_kills"]) == (0, 0, 1, 1)
    assert (found["gaps"], found["out_of_order"], found["altered"], found["foreign"]) == (0, 0, 0, 0)
    assert found["holds"] is True
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["rolled_back_events"] > 0
    assert found["handoffs"] > 5
    numbers = {found[name] for name in ("handoffs", "jobs", "jobs_completed", "effects", "handoffs_received")}
    assert len(numbers) == 1
    assert found["turns_begun"] >= found["handoffs"]
    assert 0 < found["handoff_p50_ms"] <= found["handoff_p99_ms"] <= found["handoff_max_ms"]
    assert len(found["outages_s"]) == len(found["worker_outages_s"]) == 1
    assert {"handoff router", "completed jobs", "effects of turns", "received events"} <= set(found["projectors"])
    nothing_is_left(temporary)


def test_consumers_and_workers_that_lose_and_double_are_caught(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walstream.demo.supervisor.STREAM", "tests.demo_lossy:stream")
    monkeypatch.setattr("walstream.demo.supervisor.WORKERS", "tests.demo_lossy")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    words = ["demo", "--events", "120", "--kills", "0", "--worker-kills", "0", "--rate", "0", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["written"], found["offsets"], found["delivered"], found["holds"]) == (120, 120, 114, False)
    wrong = {name: each for name, each in found["projectors"].items() if any(each.values())}
    assert set(wrong) == {"delivery log", "effects of turns"}
    assert wrong["delivery log"] == {"lost": 6, "duplicated": 4, "foreign": 0}
    effects = wrong["effects of turns"]
    assert effects["lost"] > 0  # the writers'
    assert effects["duplicated"] > 0  # the researchers'
    assert found["effects"] == found["handoffs"] - effects["lost"] + effects["duplicated"]
    assert (found["lost"], found["duplicated"]) == (6 + effects["lost"], 4 + effects["duplicated"])


@pytest.mark.slow
def test_kills_that_never_come_due_are_not_waited_for_for_ever(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walstream.demo.supervisor.WORKERS", "tests.demo_silent")
    monkeypatch.setattr("walstream.demo.driving._STUCK_SECONDS", 8.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    words = ["--events", "300", "--kills", "0", "--worker-kills", "3", "--rate", "0", "--agents", "20", "--json"]
    result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["holds"], found["gave_up"], found["effects"]) == (False, True, 0)
    assert found["worker_kills"] < 3
    assert found["projectors"]["effects of turns"]["lost"] == found["handoffs"] > 0


@pytest.mark.slow
def test_a_replay_needs_no_workers_and_its_faults_are_caught_too(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{{"session_id": "s-{}", "agent_id": "a", "event_type": "t", "payload": {}.50}}\n'
    (tmp_path / "runs.jsonl").write_text("".join(line.format(n % 3, n) for n in range(60)))
    monkeypatch.setattr("walstream.demo.supervisor.STREAM", "tests.demo_lossy:stream")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    words = ["demo", "--replay", str(tmp_path), "--copies", "2", "--kills", "0", "--rate", "0", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["written"], found["offsets"], found["delivered"]) == (120, 120, 114)
    assert (found["lost"], found["duplicated"], found["holds"]) == (6, 4, False)
    wrong = {name for name, each in found["projectors"].items() if each["lost"] or each["duplicated"]}
    assert wrong == {"delivery log"}
    shown_to_a_person = CliRunner().invoke(app, ["demo", "--copies", "2"])
    assert shown_to_a_person.exit_code == 2  # copies of what?


@pytest.mark.slow
def test_a_projector_that_is_stuck_is_not_waited_for_for_ever(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walstream.demo.supervisor.STREAM", "tests.demo_lossy:stuck")
    monkeypatch.setattr("walstream.demo.driving._STUCK_SECONDS", 8.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    result = CliRunner().invoke(app, ["demo", "--events", "50", "--kills", "0", "--rate", "0"])
    assert result.exit_code == 1, result.output
    assert "gave up waiting" in result.stderr
    assert "the disk is away" in result.stderr
    assert "file 50" in result.stdout


def test_a_signal_stops_a_replay(temporary: Path, tmp_path: Path) -> None:
    line = '{"session_id": "s", "agent_id": "a", "event_type": "t", "payload": {}}\n'
    (tmp_path / "runs.jsonl").write_text(line * 10_000)
    stop(started(temporary, "--replay", str(tmp_path), "--rate", "50", "--kills", "0"), signal.SIGINT)
    nothing_is_left(temporary)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(temporary: Path, number: signal.Signals) -> None:
    stop(started(temporary, "--events", "100000", "--rate", "50"), number)
    nothing_is_left(temporary)


def stop(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a demo that is at work."""
    try:
        assert process.stderr is not None
        for said in process.stderr:
            if "agents at work" in said:
                break
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_nothing_survives_the_demo_being_killed(temporary: Path) -> None:
    process = started(temporary, "--events", "100000", "--rate", "50", "--kills", "0")
    assert process.stderr is not None
    for said in process.stderr:
        if "agents at work" in said:
            break
    process.kill()
    process.communicate()
    nothing_is_left(temporary, 30)


@pytest.mark.recorded
@pytest.mark.slow
def test_fifty_copies_of_the_recorded_runs(temporary: Path) -> None:
    files = run_files()
    found = shown(temporary, "--replay", str(FOLDER), "--copies", "50", "--kills", "5")
    written = 50 * sum(len(file.read_bytes().splitlines()) for file in files)
    assert (found["written"], found["delivered"], found["kills"]) == (written, written, 5)
    assert (found["lost"], found["duplicated"], found["holds"]) == (0, 0, True)
