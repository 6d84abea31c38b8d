"""Consumers for the demo with a fault: ``stream`` notes no twentieth event and every thirtieth twice, ``stuck`` never
writes its file."""

from __future__ import annotations

from collections.abc import Sequence

from walstream import Context, Event, RetryLater, Stream
from walstream.demo.consumer import FILE, DeliveryLog
from walstream.projectors.event_counter import EventCounter
from walstream.projectors.handoff_inbox import HandoffInbox
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


stream = Stream()
for projector in (LossyLog(), EventCounter(), HandoffInbox(), JsonLinesFile(FILE)):
    stream.add(projector)

stuck = Stream()
for other in (DeliveryLog(), EventCounter(), HandoffInbox(), StuckFile(FILE)):
    stuck.add(other)
