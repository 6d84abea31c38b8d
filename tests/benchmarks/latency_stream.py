"""The stream of the benchmark of latency: its handler notes when it was entered."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.benchmarks.noted import Notes
from walstream import Context, Event, Projector, Stream


class Noting(Projector):
    """Notes every event that it receives."""

    name = "noting"

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        moment = time.time_ns() // 1000
        payloads = [event.payload for event in events]
        self._notes.add([(each["run"], each["client"], each["n"]) for each in payloads], moment)


stream = Stream()
stream.add(Noting(Notes()))
