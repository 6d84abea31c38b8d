"""A projector that stalls, and one that hangs in mid-transaction, beside a healthy one (cases C31, C51).

The slot goes on, and so does everybody else; afterwards the slow ones have every event once.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.conftest import Database
from tests.integration.streams import Installed, eventually
from walstream import Context, Event
from walstream.testing import FaultyProjector


class Keeping(FaultyProjector):
    """Notes when it got each event."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.at: dict[int, float] = {}

    def effect(self, event: Event, ctx: Context) -> None:
        del ctx
        self.at[event.seq] = time.monotonic()


class Hanging(FaultyProjector):
    """Writes, and then hangs in Python the first time."""

    transactional = True

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute("CREATE TABLE IF NOT EXISTS hanging (seq bigint)")

    def effect(self, event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO hanging VALUES (%s)", (event.seq,))
        if not self.stuck.is_set():
            self.stuck.set()
            self.release.wait(120)

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.stuck = threading.Event()
        self.release = threading.Event()


def insert(stream: Installed, count: int) -> list[int]:
    """Single events, a little apart; return their seqs."""
    seqs = []
    for _ in range(count):
        rows = stream.place.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " VALUES (gen_random_uuid(), 'a', 'x', '{}') RETURNING seq"
        )
        seqs.append(int(rows[0][0]))
    return seqs


def restart_lsn(stream: Installed) -> int:
    rows = stream.place.execute(
        "SELECT restart_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s", stream.settings.slot
    )
    return int(rows[0][0])


def test_a_stalled_and_a_hung_projector_hold_up_nothing(database: Database) -> None:
    # A walsender that hears nothing for this long ends the stream (C51); the projectors below stall for longer.
    stream = Installed(database)
    sender = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    healthy, stalled = Keeping("healthy"), Keeping("stalled")
    hanging = Hanging("hanging", deadline=1.5)
    stalled.open.clear()
    dsn = f"{database.dsn} options='-c wal_sender_timeout=1500ms'"
    with stream.host(healthy, stalled, hanging, replication_dsn=dsn):
        first = insert(stream, 5)
        eventually(lambda: len(healthy.at) == 5 and stalled.batches and hanging.stuck.is_set(), "all three are at work")
        pid = database.execute(sender, stream.settings.slot)
        confirmed, restart = stream.confirmed(), restart_lsn(stream)

        until = time.monotonic() + 4.0
        seqs: list[int] = []
        while time.monotonic() < until:
            seqs += insert(stream, 5)
            database.execute("SELECT pg_switch_wal()")
            database.execute("CHECKPOINT")  # a running-xacts record, from which restart_lsn can move on
        eventually(lambda: len(healthy.at) == len(first) + len(seqs), "the healthy one has all of them")
        assert stalled.done == []
        eventually(lambda: stream.confirmed() > confirmed, "the acknowledgement moves on")

        def moved() -> bool:
            insert(stream, 1)
            database.execute("CHECKPOINT")
            return restart_lsn(stream) > restart

        eventually(moved, "what the hung transaction pinned is free")
        assert database.execute(sender, stream.settings.slot) == pid, "the stream was never interrupted"

        stalled.open.set()
        hanging.release.set()
        everything = stream.wait_ordered()
        eventually(lambda: len(stalled.done) == len(everything), "the stalled one catches up")
        count = "SELECT count(*), count(DISTINCT seq) FROM hanging"
        expected = [(len(everything), len(everything))]
        eventually(lambda: database.execute(count) == expected, "and so does the other")
        assert stalled.done == list(range(1, len(everything) + 1))
