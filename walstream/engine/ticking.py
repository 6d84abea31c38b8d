"""What a projector does by time and not by events: its ``tick``, called by lane 0 between batches and while it is idle.

A tick that fails is retried like a batch, and holds its lane up meanwhile: who cannot close a file cannot write to it
either. There is no session to be parked, so a projector that parks gives the tick up until the next one is due.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from walstream.errors import ProjectorHalted, RetryLater

from .lanes import Lane
from .retry import CONFLICTS_FOR_FREE, Fault, describe, judge

if TYPE_CHECKING:
    from .runner import Desk

log = logging.getLogger("walstream.runner")


class Ticking:
    """The ticks of one lane, the first of which is due at once.

    Args:
        desk: the projector's runner.
        runner: the lane.
        lane: its number; only 0 ticks.
    """

    def __init__(self, desk: Desk, runner: Lane, lane: int) -> None:
        self._desk = desk
        self._runner = runner
        self._seconds = desk.options.tick_seconds if lane == 0 else None
        self._due = 0.0

    def turn(self) -> None:
        """Tick if it is due, whatever it takes.

        Raises:
            Fenced: another process runs the projector now.
            Halted: it failed too often, and the projector halts then.
        """
        if self._seconds is None or time.monotonic() < self._due:
            return
        failures = free = 0
        while True:
            self._desk.check()
            try:
                self._runner.delivery().tick()
                break
            except Exception as raised:
                self._desk.check()  # what a shutdown cancelled did not fail
                error, fault = raised, judge(raised, connection_lost=self._runner.broken)
            if fault is Fault.CONNECTION:
                self._runner.start_over(error)
            if fault is Fault.FENCED:
                raise error
            if isinstance(error, ProjectorHalted):
                self._runner.halt((), error)
            options = self._desk.options
            if fault is Fault.LATER or (fault is Fault.CONFLICT and free < CONFLICTS_FOR_FREE):
                free += 1
                delay = error.delay if isinstance(error, RetryLater) else None
                self._runner.wait(error, (), options.retry.pause(free) if delay is None else delay)
                continue
            failures += 1
            if failures < options.max_attempts:
                self._runner.wait(error, (), options.retry.pause(failures))
                continue
            if options.on_poison == "halt":
                self._runner.halt((), error)
            log.error("%s gives its tick up until the next one, after %d attempts: %s", self._runner.name, failures,
                      describe(error)[0])  # fmt: skip
            break
        self._due = time.monotonic() + self._seconds
