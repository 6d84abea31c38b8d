"""The work of one projector under one generation: its lanes, what they need, and what became of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg2

from walstream.errors import ExitCode, WalstreamError
from walstream.source.failures import classify

from .cursors import Cursors
from .delivery import Delivery
from .parking import Parking
from .retry import describe
from .runner import Interrupted, LaneRunner
from .source import EventSource

if TYPE_CHECKING:
    from .projector_runner import ProjectorRunner

log = logging.getLogger("walstream.runner")

_LOOK_SECONDS = 0.2


class Duty:
    """Work that begins when this process's turn comes, and ends with it. Lanes see it as their desk
    (:class:`walstream.engine.runner.Desk`).

    Attributes:
        error: why the lanes ended, if not because they were told to.
    """

    def __init__(self, runner: ProjectorRunner, generation: int, term: int) -> None:
        self._runner = runner
        self.term = term
        self.options = runner.options
        self.metrics = runner.supply.metrics
        namespace, name = runner.supply.namespace, runner.options.name
        self.cursors = Cursors(namespace, name, generation)
        self.parking = Parking(namespace, name, generation)
        self.lanes: list[LaneThread] = []
        self.error: WalstreamError | None = None
        self._over = False
        self._lock = threading.Lock()

    # -- what a lane needs -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise :class:`Interrupted` if the lane shall leave its work."""
        # What one lane has seen holds for all: the lease may be good again, and the projector wanted again, before the
        # next one looks, and would go on without those that have left.
        self._over = self._over or not self._runner.is_current(self.term)
        if self._over:
            raise Interrupted

    def sleep(self, seconds: float) -> None:
        """Wait, and :meth:`check` meanwhile."""
        until = time.monotonic() + seconds
        while True:
            self.check()
            left = until - time.monotonic()
            if left <= 0:
                return
            self._runner.wait_while_current(self.term, min(left, _LOOK_SECONDS))

    def open_source(self) -> EventSource:
        return self._runner.supply.open_source()

    def open_delivery(self, lane: int) -> Delivery:
        runner = self._runner
        connection = runner.supply.connect_projector(self.options)
        try:
            return Delivery(
                runner.projector,
                self.options,
                connection,
                self.cursors,
                self.parking,
                runner.supply.watchdog,
                runner.loop,
                lane=lane,
                environment=runner.supply.environment,
                abandoned=lambda: runner.aborting,
                announce=runner.supply.announce,
                settings=runner.supply.settings,
            )
        except BaseException:
            with contextlib.suppress(psycopg2.Error):
                connection.close()
            raise

    # -- the whole of it -------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Set the projector up, bring its lanes to one offset if their number changes, and run them."""

        def all_of_it() -> None:
            self._runner.set_up(self)
            lanes, positions = self._prepare()
            if lanes != self.options.lanes:
                self._level(lanes, max(positions))
            self._run_lanes(self.options.lanes)

        self.guard(all_of_it)

    def _prepare(self) -> tuple[int, list[int]]:
        delivery = self.open_delivery(0)
        try:
            delivery.write(lambda cur: self.cursors.describe(cur, self.options))
            positions = delivery.read(self.cursors.positions)
        finally:
            delivery.close()
        return len(positions), list(positions.values())

    def _level(self, lanes: int, offset: int) -> None:
        """Sessions move between lanes when their number changes, so all lanes must stand at the same offset first."""
        name = self.options.name
        log.info("projector %r goes from %d to %d lanes at offset %d", name, lanes, self.options.lanes, offset)
        self._run_lanes(lanes, until=offset)
        self.wait_for_lanes()
        self.check()

        def rewrite(cur: psycopg2.extensions.cursor) -> None:
            self.cursors.require_level(cur, offset)
            self.cursors.rewrite_lanes(cur, self.options.lanes, offset)

        delivery = self.open_delivery(0)
        try:
            delivery.write(rewrite)
        finally:
            delivery.close()

    def _run_lanes(self, count: int, until: int | None = None) -> None:
        self.lanes = [LaneThread(self, LaneRunner(self, lane, count, until)) for lane in range(count)]
        for lane in self.lanes[1:]:
            lane.start()
        self.lanes[0].runner.run()

    def wait_for_lanes(self) -> None:
        """Wait until the threads of the other lanes have ended."""
        for lane in self.lanes[1:]:
            while not lane.join(_LOOK_SECONDS):
                if self._runner.aborting:
                    return

    def guard(self, work: Callable[[], None]) -> None:
        """Run what a lane does, and note why it ended; one that fails ends the others too."""
        error: WalstreamError
        try:
            work()
            return
        except Interrupted:
            return
        except WalstreamError as raised:
            error = raised
        except psycopg2.Error as raised:
            error = classify(raised, doing=f"running projector {self.options.name!r}")
        except Exception as raised:
            log.exception("projector %r ended by a defect of walstream", self.options.name)
            error = WalstreamError(f"projector {self.options.name!r}: {describe(raised)[0]}", hint="please report it")
        except BaseException as raised:
            log.warning("projector %r ends the process: %s", self.options.name, describe(raised)[0])
            error = exit_requested(raised)
            self._runner.on_exit(error)  # at once: the other lanes may be busy for long
        with self._lock:
            if self.error is None:
                self.error = error
            self._over = True


class LaneThread:
    """One lane and its thread; lane 0 runs in the projector's own."""

    def __init__(self, duty: Duty, runner: LaneRunner) -> None:
        self.runner = runner
        self._thread = threading.Thread(
            target=lambda: duty.guard(runner.run), name=f"walstream-{runner.name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """``True`` once it has ended, or if it never had a thread of its own."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()


class ExitRequested(WalstreamError):
    """A projector raised SystemExit, KeyboardInterrupt or the like: the process ends cleanly."""


def exit_requested(raised: BaseException) -> ExitRequested:
    """The error for what a projector raised, with the exit code that it asked for."""
    error = ExitRequested(
        f"a projector asked the process to end: {describe(raised)[0]}",
        hint="the event it was given is not acknowledged and comes again at the next start",
    )
    if isinstance(raised, SystemExit) and raised.code in (None, 0):
        error.exit_code = ExitCode.OK
    return error
