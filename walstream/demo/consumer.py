"""The demo's consumer, as a user would write one: ``walstream run walstream.demo.consumer:stream``.

It runs in a process of its own, because it is killed again and again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from psycopg2.extras import execute_values

from walstream import Context, Event, Projector, Stream
from walstream.projectors.event_counter import EventCounter
from walstream.projectors.handoff_router import HandoffRouter
from walstream.projectors.json_lines_file import JsonLinesFile

from .orphans import end_with_the_demo

FILE: Final = "events.jsonl"  # in the folder that it is started in

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class DeliveryLog(Projector):
    """Notes every delivery, with no key that could hide a second one, and how long after its commit it came."""

    name = "delivery-log"
    transactional = True

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute(
            "CREATE TABLE IF NOT EXISTS demo_deliveries ("
            " delivery bigserial PRIMARY KEY,"
            " event_offset bigint NOT NULL,"
            " seq bigint NOT NULL,"
            " committed_us bigint,"
            " handled_us bigint NOT NULL)"
        )

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        handled = time.time_ns() // 1000
        rows = [(event.offset, event.seq, _microseconds(event.committed_at), handled) for event in events]
        execute_values(
            ctx.cursor,
            "INSERT INTO demo_deliveries (event_offset, seq, committed_us, handled_us) VALUES %s",
            rows,
            page_size=1000,
        )


def _microseconds(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    since = moment - _EPOCH
    return (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds


end_with_the_demo()

stream = Stream()
for projector in (DeliveryLog(), EventCounter(), HandoffRouter(), JsonLinesFile(FILE)):
    stream.add(projector)
