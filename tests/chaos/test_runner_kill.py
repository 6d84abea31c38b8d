"""Projectors whose process is killed or stopped at random moments (cases C23, C55, C61)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Server
from tests.runner_world import World, eventually, world_on

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


@contextlib.contextmanager
def process(world: World, file: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of :mod:`tests.chaos.runner_process`; killed afterwards."""
    made = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.runner_process", world.settings.dsn, str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert made.stdout is not None
        assert made.stdout.readline() == "started\n"
        yield made
    finally:
        made.kill()
        made.wait(60)
        assert made.stdout is not None
        made.stdout.close()


def check(world: World, file: Path) -> None:
    """Counts equal SQL over the ledger; no key is missing from the file."""
    events = world.events()
    expected: dict[str, tuple[int, int]] = {}
    for event in events:
        count, total = expected.get(event.session_id, (0, 0))
        expected[event.session_id] = (count + 1, total + event.offset)
    counted = {session: (int(n), int(total)) for session, n, total in world.execute("SELECT * FROM public.counter")}
    assert counted == expected
    lines = file.read_text().splitlines()
    assert set(lines) == {event.key for event in events}
    first_seen = list(dict.fromkeys(lines))
    assert first_seen == [event.key for event in events]  # in order, whatever was repeated


def _kill_while_it_works(world: World, file: Path, kills: int) -> None:
    random.seed(61)
    last = 0
    for _ in range(kills):
        with process(world, file) as running:
            until = time.monotonic() + random.uniform(0.05, 0.6)
            while time.monotonic() < until:
                last = world.add_many(random.randrange(1, 40), transaction=random.choice((1, 5)))
            running.kill()
    with process(world, file):
        eventually(lambda: world.reached("counter", last) and world.reached("keys", last), timeout=180)
    check(world, file)


def test_kill_9_neither_loses_nor_doubles(world: World, tmp_path: Path) -> None:
    _kill_while_it_works(world, tmp_path / "keys", 2)


@pytest.mark.slow
def test_kill_9_twenty_times(world: World, tmp_path: Path) -> None:
    _kill_while_it_works(world, tmp_path / "keys", 20)


def test_a_process_that_was_stopped_past_its_lease_writes_nothing_more(world: World, tmp_path: Path) -> None:
    """SIGSTOP in the middle of its work; another takes over; SIGCONT."""
    file, last = tmp_path / "keys", 0
    with process(world, file) as stopped:
        last = world.add_many(2000)
        eventually(lambda: world.reached("counter", 40))
        os.kill(stopped.pid, signal.SIGSTOP)
        held = world.positions("counter")[0]
        assert held < last
        with process(world, file):
            eventually(lambda: world.reached("counter", last) and world.reached("keys", last), timeout=180)
            os.kill(stopped.pid, signal.SIGCONT)
            last = world.add_many(200)
            eventually(lambda: world.reached("counter", last) and world.reached("keys", last))
            time.sleep(0.3)
            check_counts(world)
    # The file is outside of the database: what the stopped one still had in its hands comes twice, with the same key.
    assert set(file.read_text().splitlines()) == {event.key for event in world.events()}


def check_counts(world: World) -> None:
    total = sum(event.offset for event in world.events())
    assert world.execute("SELECT sum(n), sum(total) FROM public.counter") == [(len(world.events()), total)]
