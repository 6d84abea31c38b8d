"""How many events of each type a session has: the smallest transactional projector that is of use.

from walstream import Stream
from walstream.projectors.event_counter import EventCounter

stream = Stream("postgresql:///app")
stream.add(EventCounter())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psycopg2.extras import execute_values

from walstream import Context, Event, Projector


class EventCounter(Projector):
    """Keeps ``event_counts``: a row for each session and event type, with the number of events and the last offset.

    The counts move in the transaction that moves the cursor. So they are right at every moment, whatever was killed:
    the sum over the table is the number of events up to the projector's position.
    """

    name = "event-counter"
    transactional = True
    tables = ("event_counts",)

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute(
            "CREATE TABLE IF NOT EXISTS event_counts ("
            " session_id text NOT NULL,"
            " event_type text NOT NULL,"
            " events bigint NOT NULL,"
            " last_offset bigint NOT NULL,"
            " PRIMARY KEY (session_id, event_type))"
        )

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        counts: Counter[tuple[str, str]] = Counter()
        last: dict[tuple[str, str], int] = {}
        for event in events:
            key = (event.session_id, event.event_type)
            counts[key] += 1
            last[key] = event.offset
        # Sorted, so that two lanes (or a lane and a rebuild) take their row locks in the same order.
        execute_values(
            ctx.cursor,
            "INSERT INTO event_counts AS held (session_id, event_type, events, last_offset) VALUES %s"
            " ON CONFLICT (session_id, event_type) DO UPDATE SET"
            " events = held.events + excluded.events, last_offset = excluded.last_offset",
            [(*key, counts[key], last[key]) for key in sorted(counts)],
        )
