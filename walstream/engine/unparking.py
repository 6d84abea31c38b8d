"""Parked sessions are tried again: their entries in order, each removed in the transaction of its effect.

The lane that owns a session does this between two reads, so nothing of that session can overtake. A session with many
entries is worked off in slices, so that it does not hold up the others; what arrives for it meanwhile lines up behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from walstream.errors import LedgerError, ProjectorHalted, RetryLater
from walstream.event import Event

from .lanes import Lane, lane_of
from .parking import Entry
from .retry import Fault, describe, judge
from .source import EventSource

if TYPE_CHECKING:
    from .runner import Desk

log = logging.getLogger("walstream.parking")

SLICE_SECONDS = 0.5  # of one turn; then the lane reads on
_POLL_SECONDS = 1.0
_SHARE = 20  # a look at the parked sessions takes at most this part of the time, however many there are


class Unparking:
    """The parked sessions of one lane.

    Args:
        desk: the projector's runner.
        lane_runner: delivers.
        source: reads single events.
        lane, lanes: whose sessions these are.
    """

    def __init__(self, desk: Desk, lane_runner: Lane, source: EventSource, lane: int, lanes: int) -> None:
        self._desk = desk
        self._runner = lane_runner
        self._source = source
        self._lane = lane
        self._lanes = lanes
        self._anything = True
        self._look_at = 0.0

    def expect(self) -> None:
        """A session was just parked."""
        self._anything = True

    def blocked(self, events: Sequence[Event]) -> set[str]:
        """The sessions among those of ``events`` that are parked."""
        if not self._anything:
            return set()
        sessions = {event.session_id for event in events}
        return self._runner.delivery().read(lambda cur: self._desk.parking.parked_among(cur, sessions))

    def turn(self) -> None:
        """Try what is due, for a moment."""
        if not self._anything or time.monotonic() < self._look_at:
            return
        began = time.monotonic()
        parking = self._desk.parking
        sessions = self._runner.delivery().read(parking.due)
        self._anything = self._count() or bool(sessions)
        now = time.monotonic()
        self._look_at = now + max(_POLL_SECONDS, (now - began) * _SHARE)
        slice_ends = now + SLICE_SECONDS
        for session in sessions:
            if lane_of(session.encode(), self._lanes) != self._lane:
                continue
            more = True
            while more:
                more = self._try_first(session)
                if time.monotonic() >= slice_ends:
                    self._look_at = 0.0
                    return

    def _count(self) -> bool:
        """Show how much is parked; whether anything is."""
        sessions, events = self._runner.delivery().read(self._desk.parking.count)
        name = self._desk.options.name
        self._desk.metrics.set("projector_parked_sessions", sessions, projector=name)
        self._desk.metrics.set("projector_parked_events", events, projector=name)
        return bool(events)

    def _try_first(self, session: str) -> bool:
        """Try the first entry of a session; ``True`` if it is done with and there may be another."""
        self._desk.check()
        entry = self._runner.delivery().read(lambda cur: self._desk.parking.first(cur, session))
        if entry is None:
            log.info("%s: session %s flows again", self._runner.name, session)
            return False
        try:
            event = self._source.event_at(entry.offset)
        except LedgerError as error:  # gone and not declared, or unreadable: an alarm, and the session goes on waiting
            self._failed(entry, error, counts=False)
            return False
        if event is None:
            log.info("%s: the parked event at offset %d was erased", self._runner.name, entry.offset)
            self._runner.delivery().write(lambda cur: self._desk.parking.remove(cur, entry))
            return True
        try:
            self._runner.delivery().deliver_parked(event, entry)
        except Exception as error:
            self._desk.check()
            fault = judge(error, connection_lost=self._runner.broken)
            if fault is Fault.CONNECTION:
                self._runner.start_over(error)
            if fault is Fault.FENCED:
                raise
            if isinstance(error, ProjectorHalted):
                self._runner.halt([event], error)
            self._failed(entry, error, counts=fault is Fault.EVENT)
            return False
        self._desk.metrics.add("projector_unparked_total", 1, projector=self._desk.options.name)
        return True

    def _failed(self, entry: Entry, error: Exception, *, counts: bool) -> None:
        options = self._desk.options
        attempts = entry.attempts + counts
        pause = options.park.pause(max(1, attempts - options.max_attempts + 1))
        if isinstance(error, RetryLater) and error.delay is not None:
            pause = error.delay
        line, trace = describe(error)
        log.warning(
            "%s: parked session %s fails again at offset %d (attempt %d), next try in %.0f s: %s",
            self._runner.name,
            entry.session_id,
            entry.offset,
            attempts,
            pause,
            line,
        )
        self._runner.delivery().write(
            lambda cur: self._desk.parking.failed_again(
                cur, entry, attempts=attempts, error=line, trace=trace, pause=pause
            )
        )
