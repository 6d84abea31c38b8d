"""C61: the snapshot writer is killed with SIGKILL at random points; what its snapshots say stays right."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Server
from tests.ledger_oracle import check
from tests.runner_world import SESSIONS, World, eventually, world_on

CONFIG = """
dsn = "{dsn}"
lease_seconds = 1
poll_seconds = 0.05

[projectors.snapshot-writer]
batch = 20
lanes = 2
options = {{ every_events = 7, memory_bytes = 30000 }}
"""


def consumer(config: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "walstream.cli", "run", "--no-ingest", "--config", str(config)]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=config.parent)


def feed(world: World, dice: random.Random) -> int:
    """One transaction of one or five events, which commits after one that drew its seqs later now and then."""
    kinds = ["handoff.emitted"] * dice.choice([1, 5])
    session = dice.choice(SESSIONS)
    first = world.insert(*kinds, session=session)
    if dice.random() < 0.2:
        second = world.insert("handoff.emitted", session=session)
        world.order(second)
    return world.order(first)


def run(server: Server, folder: Path, kills: int) -> None:
    dice = random.Random(kills)
    with world_on(server) as world:
        config, log = folder / "walstream.toml", folder / "log"
        config.write_text(CONFIG.format(dsn=world.database.dsn))
        last = 0
        for _ in range(kills):
            process = consumer(config, log)
            try:
                before = world.positions("snapshot-writer")
                until = None
                while until is None or time.monotonic() < until:
                    last = feed(world, dice)
                    if until is None and world.positions("snapshot-writer") != before:
                        until = time.monotonic() + dice.uniform(0, 0.3)  # it is at work: from here, any moment
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.002)
            finally:
                process.kill()
                process.wait()
            check(world.connection, world.settings, every=1000)
        process = consumer(config, log)
        try:
            eventually(lambda: world.reached("snapshot-writer", last), 60, "all is folded")
        finally:
            process.kill()
            process.wait()
        assert check(world.connection, world.settings, every=50) >= len(SESSIONS)
        # The newest snapshot of each session counts every handoff up to it, and none twice.
        wrong = world.execute(
            "SELECT s.session_id, s.upto_seq FROM agent_snapshots s"
            " WHERE s.settled_seq >= s.upto_seq AND jsonb_array_length(s.context -> 'handoffs') <>"
            " (SELECT count(*) FROM agent_events e WHERE e.session_id = s.session_id AND e.seq <= s.upto_seq)"
        )
        assert wrong == []


def test_killed_once(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, 1)


@pytest.mark.slow
def test_killed_twenty_times(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, 20)
