"""Consumers and workers for the demo with a fault: ``stream`` notes no twentieth event and every thirtieth twice, and
``stuck`` never writes its file; researchers do everything twice, and writers forget it."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2.extensions import cursor as Cursor

from walstream import ClaimedJob, Context, Event, RetryLater, Stream
from walstream.demo.consumer import FILE, DeliveryLog
from walstream.demo.scenario import Step
from walstream.demo.workers import note_effect, worker_of
from walstream.projectors.event_counter import EventCounter
from walstream.projectors.handoff_router import HandoffRouter
from walstream.projectors.json_lines_file import JsonLinesFile


class LossyLog(DeliveryLog):
    def project(self, events: Sequence[Event], ctx: Context) -> None:
        kept = [event for event in events if event.offset % 20]
        doubled = [event for event in events if event.offset % 30 == 29]
        if kept:
            super().project([*kept, *doubled], ctx)


class StuckFile(JsonLinesFile):
    def project(self, events: Sequence[Event], ctx: Context) -> None:
        raise RetryLater(f"the disk is away for {ctx.projector}, {len(events)} events wait")


def twice(cur: Cursor, job: ClaimedJob, steps: Sequence[Step]) -> None:
    note_effect(cur, job, steps)
    note_effect(cur, job, steps)


def never(cur: Cursor, job: ClaimedJob, steps: Sequence[Step]) -> None:
    """Forget it."""


stream = Stream()
for projector in (LossyLog(), EventCounter(), HandoffRouter(), JsonLinesFile(FILE)):
    stream.add(projector)

stuck = Stream()
for other in (DeliveryLog(), EventCounter(), HandoffRouter(), StuckFile(FILE)):
    stuck.add(other)

researcher = worker_of("researcher", twice)
writer = worker_of("writer", never)
reviewer = worker_of("reviewer")
