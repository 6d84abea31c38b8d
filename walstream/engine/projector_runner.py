"""One projector in this process: whether it is our turn, and its lanes while it is.

Somebody else (the group's keeper) holds the lease and reads what the operator wants; it tells this runner through
:meth:`ProjectorRunner.appoint`, :meth:`ProjectorRunner.give_up` and the like. A lane looks at all of that between two
batches, in :meth:`Duty.check`.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Sequence

from walstream.errors import Fenced, WalstreamError

from .delivery import name_of
from .duty import Duty, LaneThread
from .event_loop import LoopThread
from .projector import Options, Projector
from .retry import Backoff, Fault, describe, judge
from .runner import Halted
from .supply import Supply
from .trouble import Trouble

log = logging.getLogger("walstream.runner")

_AGAIN = Backoff(0.2, 30.0)


class ProjectorRunner:
    """Runs one projector whenever it is this process's turn.

    Args:
        projector, options: what to run, and how.
        supply: connections and the like, shared by all runners of the process.
        on_exit: called when the projector wants the process to end (SystemExit and the like), or cannot go on at all.
    """

    def __init__(
        self, projector: Projector, options: Options, supply: Supply, on_exit: Callable[[WalstreamError], None]
    ) -> None:
        self.projector = projector
        self.options = options
        self.supply = supply
        self.on_exit = on_exit
        self.loop = LoopThread(f"walstream-{options.name}-loop")
        self._changed = threading.Condition()
        self._generation = 0
        self._term = 0
        self._lease_ends = 0.0
        self._paused = False
        self._stopping = False
        self._aborting = False
        self._set_up = False
        self._duty: Duty | None = None
        self._working = False
        self._halted: Halted | None = None
        self._trouble: str | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=f"walstream-{options.name}", daemon=True)

    # -- for the keeper and the group ------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def generation(self) -> int:
        """Under which this process runs it; 0 while it is not this process's turn."""
        return self._generation

    def appoint(self, generation: int, ends: float) -> None:
        """The lease was taken; it ends at ``ends`` on the monotonic clock. A new term begins, whatever the generation:
        the rows of a projector that was removed and registered again count theirs from the start."""
        with self._changed:
            self._term += 1
            self._generation = generation
            self._lease_ends = ends
            self._changed.notify_all()

    def prolong(self, ends: float) -> None:
        """The lease was renewed."""
        with self._changed:
            self._lease_ends = ends

    def give_up(self) -> None:
        """The lease is lost."""
        with self._changed:
            self._generation = 0
            self._changed.notify_all()

    def want(self, *, paused: bool) -> None:
        """What the operator wants."""
        with self._changed:
            if paused != self._paused:
                log.info("projector %r is %s", self.options.name, "paused" if paused else "running again")
            self._paused = paused
            self._changed.notify_all()

    def resume(self) -> None:
        """Run again after a halt."""
        with self._changed:
            self._halted = None
            self._changed.notify_all()

    def request_stop(self) -> None:
        """Stop after the batch that is being delivered."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def abort(self) -> None:
        """It has had its time: cancel what is async, end the transactions of what is not."""
        self._aborting = True
        for lane in range(max(self.options.lanes, len(self._lanes))):
            self.supply.watchdog.end_now(name_of(self.options.name, lane))

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end; ``False`` if they did not."""
        if self._thread.ident is None:
            return True
        until = time.monotonic() + timeout
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive() and all(
            lane.join(max(0.0, until - time.monotonic())) for lane in self._lanes
        )

    @property
    def halted(self) -> Halted | None:
        """Why it halted."""
        return self._halted

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def aborting(self) -> bool:
        return self._aborting

    @property
    def state(self) -> tuple[str, Trouble | None]:
        """State and error, as the table ``projectors`` has them."""
        lanes = self._lanes
        hung = next((lane for lane in lanes if lane.runner.overdue), None)
        if self._halted is not None:
            return "halted", Trouble(self._halted.reason, self._halted.offset, None)
        if hung is not None:
            late = f"{hung.runner.name} has run past its deadline of {self.options.deadline:g} s"
            return "hung", Trouble(late, None, ())
        if not self._thread.is_alive():
            return "stopped", None
        if not self._generation:
            return "standby", None
        if self._paused and not self._working:
            return "paused", None
        states = {lane.runner.state for lane in lanes}
        if "retrying" in states:
            trouble = next((lane.runner.trouble for lane in lanes if lane.runner.state == "retrying"), None)
            return "retrying", trouble
        if self._trouble is not None:
            return "retrying", Trouble(self._trouble, None, None)
        for state in ("starting", "cold"):
            if state in states or not states:
                return state, None
        return "hot", None

    @property
    def _lanes(self) -> Sequence[LaneThread]:
        duty = self._duty
        return () if duty is None else duty.lanes

    # -- the projector's thread, which is also lane 0's ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._may_work())
                    if self._stopping:
                        return
                    duty = self._duty = Duty(self, self._generation, self._term)
                    self._trouble = None
                    self._working = True
                duty.work()
                duty.wait_for_lanes()
                self._working = False
                self._conclude(duty)
        finally:
            self._close()

    def _may_work(self) -> bool:
        return bool(self._generation) and not self._paused and self._halted is None

    def is_current(self, term: int) -> bool:
        """Whether lanes of this term may go on."""
        return (
            self._term == term
            and self._generation != 0
            and not (self._stopping or self._paused)
            and self._halted is None
            and time.monotonic() < self._lease_ends
        )

    def wait_while_current(self, term: int, seconds: float) -> None:
        """Sleep; ends early when lanes of this term must leave."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_current(term), seconds)

    def _conclude(self, duty: Duty) -> None:
        """What the end of the lanes' work means."""
        error = duty.error
        with self._changed:
            lapsed = time.monotonic() >= self._lease_ends
            if self._term == duty.term and (lapsed or isinstance(error, Fenced)):
                self._generation = 0  # wait for the keeper's next word
        if error is None:
            self._failures = 0
        elif isinstance(error, Halted):
            trace = "" if error.__cause__ is None else "\n" + describe(error.__cause__)[1]
            log.error("%s%s%s", error, f" ({error.hint})" if error.hint else "", trace.rstrip())
            self._halted = error
        elif isinstance(error, Fenced):
            log.warning("%s", error)
        elif error.transient:
            self._failures += 1
            pause = _AGAIN.pause(self._failures)
            self._trouble, _ = describe(error)
            log.warning("projector %r starts again in %.1f s: %s", self.options.name, pause, error)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause)
        else:
            self.on_exit(error)
            self.request_stop()

    def set_up(self, duty: Duty) -> None:
        """Call the projector's ``setup`` before its first event in this process."""
        attempt = 0
        while not self._set_up:
            duty.check()
            delivery = duty.open_delivery(0)
            try:
                delivery.setup()
                self._set_up, self._trouble = True, None
            except Exception as raised:
                duty.check()
                if judge(raised, connection_lost=delivery.broken) is Fault.EVENT:
                    reason, _ = describe(raised)
                    name = self.options.name
                    raise Halted(
                        f"the setup of projector {name!r} failed: {reason}", hint="correct it and start again"
                    ) from raised
                attempt += 1
                self._trouble, _ = describe(raised)
                log.warning("the setup of projector %r is tried again: %s", self.options.name, self._trouble)
                duty.sleep(_AGAIN.pause(attempt))
            finally:
                delivery.close()

    def _close(self) -> None:
        if self._set_up:
            try:
                closing = self.projector.close()
                if inspect.isawaitable(closing):
                    self.loop.run(closing, abandoned=lambda: self._aborting)
            except Exception:
                log.exception("projector %r could not be closed", self.options.name)
        self.loop.stop()
