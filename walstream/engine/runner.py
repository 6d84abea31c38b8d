"""One lane of a projector: reads its events, delivers them, and decides what a failure means.

A lane holds nothing that counts. Its place is the cursor in the database; whenever its connection is lost, its cursor
is not where it should be, or ingest began anew, it forgets everything and starts over from there (rule 4).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol

import psycopg2

from walstream.errors import ConnectionLost, Fenced, LedgerError, ProjectorHalted, RetryLater, WalstreamError
from walstream.event import Event
from walstream.metrics import Metrics
from walstream.source.failures import classify

from .cursors import Cursors, StaleCursor
from .delivery import Delivery, name_of
from .lanes import BatchSize, Selection, cut
from .parking import Parking
from .projector import Options
from .retry import CONFLICTS_FOR_FREE, Backoff, Fault, describe, judge, narrow
from .source import EventSource, Reset
from .ticking import Ticking
from .trouble import Trouble
from .unparking import Unparking

log = logging.getLogger("walstream.runner")

READ_LIMIT = 2000  # events looked at in one read, most of which may be passed over
PATIENCE = 0.25  # seconds that a read waits for news before the lane looks at everything else
FLUSH_SECONDS = 1.0  # a cursor that only passed over events is written this often
_RECONNECT = Backoff(0.1, 30.0)
_POSTGRES_EPOCH_UNIX = 946_684_800  # 2000-01-01 UTC


class Interrupted(Exception):
    """The process stops, the projector is paused, or it is no longer this process's to run."""


class Halted(ProjectorHalted):
    """The projector halted.

    Attributes:
        reason: the error, in one line.
        offset: of the event; ``None`` if it was none.
        recorded: the halt is written down in the database already.
    """

    def __init__(self, message: str, *, hint: str = "", offset: int | None = None, recorded: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.reason = message
        self.offset = offset
        self.recorded = recorded


class Desk(Protocol):
    """What a lane needs from the projector's runner in this process."""

    options: Options
    cursors: Cursors
    parking: Parking
    metrics: Metrics

    def check(self) -> None:
        """Raise :class:`Interrupted` if the lane shall leave its work."""

    def sleep(self, seconds: float) -> None:
        """Wait, and :meth:`check` meanwhile."""

    def open_source(self) -> EventSource: ...
    def open_delivery(self, lane: int) -> Delivery: ...


class LaneRunner:
    """Runs one lane until it is interrupted, halts, or has reached a given offset.

    Args:
        desk: the projector's runner.
        lane, lanes: which one of how many.
        until: stop at this offset (to bring all lanes to the same one before their number changes).

    Attributes:
        state: ``starting``, ``hot``, ``cold`` or ``retrying``.
        trouble: what it is retrying because of.
    """

    def __init__(self, desk: Desk, lane: int, lanes: int, until: int | None = None) -> None:
        self._desk = desk
        self._lane = lane
        self._lanes = lanes
        self._until = until
        self._selection = Selection(desk.options.events, lane, lanes)
        self._delivery: Delivery | None = None
        self._unparking: Unparking | None = None
        self._ticking = Ticking(desk, self, lane)
        self._size = BatchSize(desk.options.batch)
        self._blocked: set[str] = set()
        self._progress = 0
        self.name = name_of(desk.options.name, lane)
        self.state = "starting"
        self.trouble: Trouble | None = None

    @property
    def overdue(self) -> bool:
        """Whether a delivery has run past its deadline and has not come back."""
        delivery = self._delivery
        return delivery is not None and delivery.overdue

    def run(self) -> None:
        """Run the lane.

        Raises:
            Interrupted: it was told to leave.
            Fenced: another process runs the projector now.
            Halted: the projector halted; the cursor stands before the event.
            WalstreamError: what no retry can help.
            BaseException: SystemExit and the like out of the projector. The event is not acknowledged.
        """
        attempt = 0
        while True:
            progress = self._progress
            try:
                self._desk.check()
                self._session()
                return
            except (Interrupted, Fenced, Halted):
                raise
            except (WalstreamError, psycopg2.Error) as raised:
                error = classify(raised, doing=self.name)
            if not (error.transient or isinstance(error, LedgerError)):
                raise error
            attempt = attempt + 1 if self._progress == progress else 1
            pause = _RECONNECT.pause(attempt)
            # A row that is gone and not declared is an alarm, and is never passed over; it may be declared any time.
            level = logging.ERROR if isinstance(error, LedgerError) else logging.WARNING
            log.log(level, "%s starts over from its cursor in %.1f s: %s", self.name, pause, error)
            self._retrying(error)
            self._desk.sleep(pause)

    # -- one session: as long as its connection lives ---------------------------------------------------------------

    def _session(self) -> None:
        source = self._desk.open_source()  # before the cursor is read: what is reset after that is noticed
        try:
            self._delivery = self._desk.open_delivery(self._lane)
            while True:
                try:
                    self._read_and_deliver(source)
                    return
                except Reset as reset:
                    log.info("%s: %s", self.name, reset)
                    self._the_delivery.close()
                    self._delivery = self._desk.open_delivery(self._lane)
        finally:
            source.close()
            if self._delivery is not None:
                self._delivery.close()
                self._delivery = None

    def _read_and_deliver(self, source: EventSource) -> None:
        unparking = self._unparking = Unparking(self._desk, self, source, self._lane, self._lanes)
        read_to, limit = self._the_delivery.position, max(self._desk.options.batch, READ_LIMIT)
        self._show_position()
        flush_at = time.monotonic() + FLUSH_SECONDS
        try:
            while self._until is None or read_to < self._until:
                self._desk.check()
                unparking.turn()
                self._ticking.turn()
                batch = source.read(read_to, limit=limit, timeout=PATIENCE)
                self._well(source.path)
                events, through = self._bounded(batch.events, batch.through)
                if through == read_to and read_to == self._the_delivery.position:
                    continue
                kept = self._selection.keep(events)
                if kept:
                    self._blocked = unparking.blocked(kept)
                    self._deliver_all(kept, through)
                read_to = through
                if time.monotonic() >= flush_at:
                    self._pass_over(read_to)
                    flush_at = time.monotonic() + FLUSH_SECONDS
        except Interrupted:
            if not self.broken:
                self._pass_over(read_to)
            raise
        self._pass_over(read_to)

    def _bounded(self, events: Sequence[Event], through: int) -> tuple[Sequence[Event], int]:
        if self._until is None or through <= self._until:
            return events, through
        return [event for event in events if event.offset <= self._until], self._until

    def _pass_over(self, through: int) -> None:
        """Write down that everything up to ``through`` is done; nothing in between was this lane's."""
        if through > self._the_delivery.position:
            self._the_delivery.deliver((), (), through)
            self._progress += 1
            self._show_position()

    def _show_position(self) -> None:
        position, name = self._the_delivery.position, self._desk.options.name
        self._desk.metrics.set("projector_position", position, projector=name, lane=str(self._lane))

    def _deliver_all(self, kept: Sequence[Event], through: int) -> None:
        batches = list(cut(kept, self._size.limit))
        for batch in batches:
            metrics, name, began = self._desk.metrics, self._desk.options.name, time.monotonic()
            self._handle(batch, through if batch is batches[-1] else batch[-1].offset)
            self._size.took(len(batch), time.monotonic() - began)
            self._ticking.turn()
            metrics.add("projector_events_total", len(batch), projector=name)
            self._show_position()
            if committed := batch[-1].commit.time_us:
                lag = time.time() - (committed / 1e6 + _POSTGRES_EPOCH_UNIX)
                metrics.set("projector_lag_seconds", max(0.0, lag), projector=name, lane=str(self._lane))

    # -- one batch, whatever it takes ---------------------------------------------------------------------------------

    def _handle(self, events: Sequence[Event], through: int) -> None:
        """Deliver ``events`` and move the cursor to ``through``: projected, parked or lined up, but never dropped."""
        options = self._desk.options
        failures = conflicts = later = 0
        while True:
            self._desk.check()
            flowing, waiting = self._sort(events)
            try:
                self._the_delivery.deliver(flowing, waiting, through)
                self._progress += 1
                return
            except Exception as raised:
                self._desk.check()  # what a shutdown cancelled did not fail
                error, fault = raised, judge(raised, connection_lost=self.broken)
            if fault is Fault.CONNECTION:
                self.start_over(error)
            if fault is Fault.FENCED or not flowing:
                raise error
            self.delivery()
            if fault is Fault.CONFLICT:
                conflicts += 1
                if conflicts <= CONFLICTS_FOR_FREE:
                    self.wait(error, flowing, options.retry.pause(conflicts))
                    continue
            elif fault is Fault.LATER:
                later += 1
                delay = error.delay if isinstance(error, RetryLater) else None
                self.wait(error, flowing, options.retry.pause(later) if delay is None else delay)
                continue
            if isinstance(error, ProjectorHalted):
                self.halt(flowing, error)
            if self._all_done(flowing):
                # It said that it had finished the last one, and failed after that: nothing is left to be tried again.
                log.warning("%s failed after all of its batch was done: %s", self.name, describe(error)[0])
                self._the_delivery.deliver((), waiting, through)
                return
            if len(flowing) > 1:
                self._narrow(events, flowing, through)
                return
            failures += 1
            if failures >= options.max_attempts:
                self._give_up(flowing[0], failures, error, waiting, through)
                return
            self.wait(error, flowing, options.retry.pause(failures))

    def _sort(self, events: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event]]:
        """Those that may be projected, and those that wait behind a parked one of their session."""
        if not (blocked := self._blocked):
            return events, ()
        flowing = [event for event in events if event.session_id not in blocked]
        return flowing, [event for event in events if event.session_id in blocked]

    def _all_done(self, flowing: Sequence[Event]) -> bool:
        finished = self._the_delivery.done
        return not self._desk.options.transactional and finished is not None and finished.offset >= flowing[-1].offset

    def _narrow(self, events: Sequence[Event], flowing: Sequence[Event], through: int) -> None:
        """Find the bad event: deliver the batch again in parts."""
        repeatable = self._desk.options.transactional
        finished = self._the_delivery.done
        done = 0 if finished is None else sum(event.offset <= finished.offset for event in flowing)
        if done and not repeatable:
            # Done is done: the cursor moves up to there, and only the rest comes again.
            reached = flowing[done - 1].offset
            _, waiting = self._sort([event for event in events if event.offset <= reached])
            self._the_delivery.deliver((), waiting, reached)
        for part in narrow(flowing, done=done, repeatable=repeatable):
            reached = through if part[-1] is flowing[-1] else part[-1].offset
            start = self._the_delivery.position
            self._handle([event for event in events if start < event.offset <= reached], reached)

    def _give_up(
        self,
        event: Event,
        attempts: int,
        error: Exception,
        waiting: Sequence[Event],
        through: int,
    ) -> None:
        if self._desk.options.on_poison == "halt":
            self.halt([event], error)
        line, trace = describe(error)
        pause = self._desk.options.park.pause(1)
        parking = self._desk.parking

        def write(cur: psycopg2.extensions.cursor) -> None:
            parking.park(cur, event, attempts=attempts, error=line, trace=trace, pause=pause)
            parking.wait(cur, waiting)

        self._the_delivery.write(write, through)
        self._progress += 1
        self._blocked.add(event.session_id)
        self._the_unparking.expect()
        self._desk.metrics.add("projector_parked_total", 1, projector=self._desk.options.name)
        log.error(
            "%s parked session %s at offset %d (seq %d, %s) after %d attempts; next try in %.0f s: %s\n%s",
            self.name,
            event.session_id,
            event.offset,
            event.seq,
            event.event_type,
            attempts,
            pause,
            line,
            trace.rstrip(),
        )

    def halt(self, events: Sequence[Event], error: Exception) -> NoReturn:
        """Halt the projector at the first of these events, or in a tick: written down, and raised."""
        trouble, where = Trouble.of(error, events), "in its tick"
        if events:
            event = events[0]
            where = f"at offset {event.offset} (seq {event.seq}, {event.event_type}, session {event.session_id})"
        self.delivery().write(lambda cur: self._desk.cursors.halt(cur, trouble))
        raise Halted(
            f"projector {self._desk.options.name!r} halted {where}: {trouble.text}",
            hint="correct it and start again (or `walstream projectors resume`): it goes on there",
            offset=trouble.offset,
            recorded=True,
        ) from error

    # -- small parts -----------------------------------------------------------------------------------------------

    @property
    def _the_delivery(self) -> Delivery:
        assert self._delivery is not None
        return self._delivery

    @property
    def broken(self) -> bool:
        """Whether the lane's connection is lost."""
        return self._the_delivery.broken

    @property
    def _the_unparking(self) -> Unparking:
        assert self._unparking is not None
        return self._unparking

    def delivery(self) -> Delivery:
        """The present delivery, on a new connection if the last one broke.

        Raises:
            StaleCursor: the stored cursor is not where the lane is at work.
        """
        delivery = self._the_delivery
        if delivery.broken:
            self._delivery = self._desk.open_delivery(self._lane)
            if self._delivery.position != delivery.position:
                raise StaleCursor(
                    f"{self.name}: its connection was lost at offset {delivery.position}, and the cursor stands at"
                    f" {self._delivery.position} now"
                )
        return self._the_delivery

    def start_over(self, error: Exception) -> NoReturn:
        """Raise the loss of the lane's connection, whatever the projector made of it."""
        failure = classify(error, doing=self.name)
        if not failure.transient:
            failure = ConnectionLost(f"{self.name}: {describe(error)[0]}")
        raise failure from (None if failure is error else error)

    def wait(self, error: Exception, events: Sequence[Event], pause: float) -> None:
        """Show that it is retrying these events, or its tick, and wait."""
        self._retrying(error, events)
        what = f"offset {events[0].offset}" if events else "its tick"
        log.warning("%s tries %s again in %.1f s: %s", self.name, what, pause, describe(error)[0])
        self._desk.sleep(pause)

    def _retrying(self, error: Exception, events: Sequence[Event] = ()) -> None:
        self.state, self.trouble = "retrying", Trouble.of(error, events)

    def _well(self, state: str) -> None:
        self.state, self.trouble = state, None
