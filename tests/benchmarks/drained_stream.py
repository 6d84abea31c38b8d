"""The stream of the benchmarks: `walstream run tests.benchmarks.drained_stream:stream`.

Its projectors do nothing but count, or parse every payload as well. When all of them have had so many events, how long
that took and what it cost is left in a file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.drained_receipt import EVENTS, PARSING, PROJECTORS, RECEIPT, Receipt
from walstream import Context, Event, Projector, Stream


class Counting(Projector):
    """Counts."""

    def __init__(self, name: str, receipt: Receipt) -> None:
        self.name = name
        self._receipt = receipt
        self._left = receipt.events

    def setup(self, ctx: Context) -> None:
        del ctx
        self._receipt.begin()

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        self._left -= len(events)
        if self._left == 0:
            self._receipt.finish()


class Parsing(Counting):
    """Looks into every payload."""

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            if "n" not in event.payload:
                raise ValueError(f"the payload of {event!r} is not what was written")
        super().project(events, ctx)


def _stream() -> Stream:
    made = Stream()
    projectors, parsing = int(os.environ.get(PROJECTORS, "1")), int(os.environ.get(PARSING, "0"))
    receipt = Receipt(int(os.environ[EVENTS]), projectors, Path(os.environ[RECEIPT]))
    for number in range(projectors):
        kind = Parsing if number < parsing else Counting
        made.add(kind(f"bench-{number}", receipt))
    return made


stream = _stream()
