"""The audit sink is killed at each step of taking payloads out of its segments: whoever takes the trail up ends it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from tests.audit_files import records, settle, verified
from tests.conftest import Server
from tests.integration.test_audit_erasing import holding, put_on_record, talk, tick
from tests.integration.test_audit_ledger import findings, verify
from tests.integration.test_erased_sessions import erase
from tests.runner_world import World, world_on
from walstream.audit.record import ERASURE
from walstream.audit.segments import read_lines, segments_in
from walstream.audit.trail import AuditTrail

_STEPS: Final = frozenset(
    {*("open", "write", "pwrite", "flush", "close"), *("fchmod", "fsync", "fdatasync", "rename", "unlink", "truncate")}
)
"""What is asked of the disk: the names of the functions in C that do it. A process dies before or after one of them."""


class Steps:
    """Counts what a process asks of the disk, and can end it there."""

    def __init__(self, deadly: int) -> None:
        self.taken = 0
        self._deadly = deadly

    def watch(self, _frame: FrameType, event: str, function: Any) -> None:
        if event in ("c_call", "c_return") and getattr(function, "__name__", "") in _STEPS:
            self.taken += 1
            if self.taken == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)


def tick_and_die(world: World, directory: Path, step: int) -> bool:
    """A tick of the sink in a process that kills itself at this step; whether it came that far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the parent has: the child needs none
        child = os.fork()
    if child == 0:
        outcome = 1
        try:
            trail = AuditTrail(directory)
            steps = Steps(step)
            sys.setprofile(steps.watch)
            trail.tick(world.settings)
            sys.setprofile(None)
            outcome = 0
        finally:
            os._exit(outcome)  # nothing of the parent's is closed or reported by the child
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the sink failed by itself"
    return os.WIFSIGNALED(status)


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


def kill_at(world: World, folder: Path, every: int) -> None:
    """Kill it at each ``every``-th step; closed segments, one that is there twice, and the one that is written to."""
    whole = folder / "whole"
    events = talk(world, 24)
    put_on_record(world, whole, events, roll_bytes=3_000)
    settle(whole, events[-1])
    first = segments_in(whole)[0]
    twice = segments_in(whole)[1]  # as after a crash between compressing it and removing the plain file
    twice.path.with_suffix("").write_bytes(b"".join(line + b"\n" for some in read_lines(twice.path) for line in some))
    assert segments_in(whole)[1].plain is not None
    lines = [(each.hash, each.header) for each in records(whole)]
    erase(world)
    assert len(segments_in(whole)) >= 3
    assert first.path.suffix == ".zst"
    step, kills, half_done = 1, 0, 0
    while True:
        directory = folder / f"at-{step}"
        shutil.copytree(whole, directory)
        died = tick_and_die(world, directory, step)
        left = len(holding(directory))
        half_done += 0 < left < len(holding(whole))
        tick(world, directory)
        assert holding(directory) == [], f"killed at step {step}"
        assert not any(path.name.startswith(".") for path in directory.iterdir()), f"killed at step {step}"
        assert verified(directory).blanked == 12
        assert [each.kind for each in records(directory)].count(ERASURE) == 1
        assert [(each.hash, each.header) for each in records(directory)][: len(lines)] == lines
        if not died:
            break
        kills += 1
        step += every
        shutil.rmtree(directory)
    print(f"{kills} kills, {half_done} of them with some of the payloads gone")
    assert kills * every > 200
    assert half_done > 0, "some died in the middle"
    assert findings(verify(world, directory)) == []


def test_killed_at_some_steps_of_the_blanking(world: World, tmp_path: Path) -> None:
    kill_at(world, tmp_path, every=23)


@pytest.mark.slow
def test_killed_at_each_step_of_the_blanking(world: World, tmp_path: Path) -> None:
    kill_at(world, tmp_path, every=1)
