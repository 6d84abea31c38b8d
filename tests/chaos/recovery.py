"""How long the stream takes to recover from a fault: until everybody who can has delivered what is written after it."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import psycopg2

from .cast import MARK

STUCK_SECONDS: Final = 120.0
"""Whoever has not recovered by then hangs."""

_LONG: Final = 8.0
_LOOK: Final = 0.05
_INSERT: Final = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, 'chaos', %s, '{}') RETURNING seq"
)
# `slow` is behind by nature.
_REACHED: Final = """\
SELECT (SELECT event_offset FROM plain WHERE seq = %s LIMIT 1),
       (SELECT min(position) FROM walstream.cursors WHERE projector <> 'slow'),
       (SELECT count(DISTINCT projector) FROM walstream.cursors)"""

_BEHIND: Final = """\
SELECT projector || ' ' || lane, %s - position FROM walstream.cursors WHERE position < %s AND projector <> 'slow'"""


@dataclass(slots=True)
class Outage:
    """From a fault to the recovery from it.

    Attributes:
        since: when its cause was gone; where it is not for us to remove it, when it was made (``time.monotonic``).
        seconds: until the recovery; ``None`` before.
        stuck: it did not recover in time.
        behind: who was behind when it had lasted for long.
    """

    kind: str
    number: int
    since: float
    seconds: float | None = None
    stuck: bool = False
    behind: str = ""

    @property
    def over(self) -> bool:
        return self.stuck or self.seconds is not None


class Recoveries:
    """Watches outages from threads of its own.

    Args:
        execute: runs SQL past the faults, and may raise ``psycopg2.Error`` while the server is away.
        projectors: how many the stream has.
    """

    def __init__(self, execute: Callable[..., list[tuple[Any, ...]]], projectors: int) -> None:
        self._execute = execute
        self._projectors = projectors
        self.outages: list[Outage] = []

    def watch(self, kind: str, since: float, patience: float = STUCK_SECONDS) -> Outage:
        """An outage begins; it is watched until it is over."""
        outage = Outage(kind, len(self.outages) + 1, since)
        self.outages.append(outage)
        threading.Thread(target=self._follow, args=(outage, patience), daemon=True).start()
        return outage

    def wait(self, outages: Iterable[Outage], timeout: float = STUCK_SECONDS + 30) -> None:
        """Until these are over."""
        deadline = time.monotonic() + timeout
        for outage in outages:
            while not outage.over and time.monotonic() < deadline:
                time.sleep(_LOOK)

    @property
    def open(self) -> list[Outage]:
        """Those that are not over."""
        return [outage for outage in self.outages if not outage.over]

    def figures(self) -> dict[str, Any]:
        """Seconds to recovery: ``p50``, ``max``, and the same by kind."""
        kinds: dict[str, list[float]] = defaultdict(list)
        for outage in self.outages:
            if outage.seconds is not None:
                kinds[outage.kind].append(outage.seconds)
        everything = [seconds for each in kinds.values() for seconds in each]
        return {**_figures(everything), "by_kind": {kind: _figures(kinds[kind]) for kind in sorted(kinds)}}

    def _follow(self, outage: Outage, patience: float) -> None:
        session = str(uuid.uuid4())
        seq: int | None = None
        while time.monotonic() - outage.since < patience:
            try:
                if seq is None:
                    seq = int(self._execute(_INSERT, session, MARK)[0][0])
                offset, reached, projectors = self._execute(_REACHED, seq)[0]
            except psycopg2.Error:
                time.sleep(_LOOK)
                continue
            if offset is not None and projectors >= self._projectors and reached >= offset:
                outage.seconds = time.monotonic() - outage.since
                return
            if not outage.behind and time.monotonic() - outage.since > _LONG:
                outage.behind = self._behind(offset)
            time.sleep(_LOOK)
        outage.stuck = True

    def _behind(self, offset: int | None) -> str:
        if offset is None:
            return "the order, or `plain`"
        try:
            rows = self._execute(_BEHIND, offset, offset)
        except psycopg2.Error as error:
            return str(error)
        return ", ".join(f"{projector} by {events}" for projector, events in rows)


def _figures(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"n": 0, "p50": None, "max": None}
    return {"n": len(seconds), "p50": round(statistics.median(seconds), 2), "max": round(max(seconds), 2)}
