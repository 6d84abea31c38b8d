"""The demo's consumer with a fault: every twentieth event is not noted, and every thirtieth is noted twice."""

from __future__ import annotations

from collections.abc import Sequence

from walstream import Context, Event, Stream
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


stream = Stream()
for projector in (LossyLog(), EventCounter(), HandoffInbox(), JsonLinesFile(FILE)):
    stream.add(projector)
