"""Reading of the facts that the policy judges: one look at a server, and rates from the looks before it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from walstream.source.facts import (
    UNBOUNDED,
    Blocker,
    ServerFacts,
    SlotFacts,
    absent_standbys,
    blockers,
    logical_slots,
    server_facts,
    slot_facts,
)

from .policy import OpenTransaction, SlotReading

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

WINDOW: Final = 60.0
"""Seconds over which rates are taken: long enough not to see each burst, short enough to see a change."""

SHORTEST: Final = 0.2
"""Two samples closer together than this say nothing about a rate."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found.

    Attributes:
        slots: by name; one that was asked for and is not there has ``exists = False``.
        wal_end: end of the WAL.
        wal_rate: bytes a second; ``None`` before there are two samples.
    """

    slots: tuple[SlotReading, ...]
    wal_end: int
    wal_rate: float | None


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    wal_end: int
    behind: Mapping[str, int]


class SlotReader:
    """Looks at slots again and again.

    Args:
        name: the slot to look at.
        every: all logical ones of the server instead.
        also: another one, if it is there.
        watching: it looks again and again. A transaction whose start this role may not see is then as old as the looks
            that saw it; else its age is not known.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        name: str,
        *,
        every: bool = False,
        also: str | None = None,
        watching: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._every = every
        self._also = also
        self._watching = watching
        self._oldest: tuple[str, float] = ("", 0.0)
        self._clock = clock
        self._samples: deque[_Sample] = deque()
        self._read_at: dict[str, float] = {}

    def look(self, connection: Connection) -> Look:
        """Read everything on a connection in autocommit."""
        server = server_facts(connection)
        found = self._slots(connection)
        open_now = blockers(connection)
        oldest = self._transaction(open_now[0]) if open_now else None
        sample = _Sample(
            self._clock(),
            server.wal_end,
            {slot.name: server.wal_end - slot.confirmed_flush_lsn for slot in found if slot.confirmed_flush_lsn},
        )
        before = self._before(sample)
        disk = free_disk(connection, server)
        absent = absent_standbys(connection, server) if any(slot.failover for slot in found) else ()
        rate = None if before is None else _rate(before.wal_end, sample.wal_end, sample.at - before.at)
        readings = [
            replace(
                _reading(slot, server),
                free_disk=disk,
                inactive_seconds=self._alone(slot, sample.at),
                wal_rate=rate,
                growth=_growth(before, sample, slot.name),
                transaction=oldest,
                ours=slot.name == self._name,
                awaited=absent if slot.failover else (),
            )
            for slot in found
        ]
        if not self._every and all(slot.name != self._name for slot in found):
            readings.insert(0, SlotReading(self._name, exists=False))
        return Look(tuple(readings), server.wal_end, rate)

    def _slots(self, connection: Connection) -> Sequence[SlotFacts]:
        if self._every:
            return logical_slots(connection)
        names = dict.fromkeys((self._name, self._also or self._name))
        return [slot for slot in (slot_facts(connection, name) for name in names) if slot is not None]

    def _transaction(self, blocker: Blocker) -> OpenTransaction:
        now = self._clock()
        if self._oldest[0] != blocker.xid:
            self._oldest = (blocker.xid, now)
        seconds = now - self._oldest[1] if blocker.seconds is None and self._watching else blocker.seconds
        return OpenTransaction(str(blocker), blocker.remedy, seconds, prepared=blocker.pid is None)

    def _alone(self, slot: SlotFacts, now: float) -> float | None:
        """Seconds without a reader: as the server says, or since a look that saw one (before 17 it does not say)."""
        if slot.active:
            self._read_at[slot.name] = now
            return None
        if slot.inactive_seconds is not None:
            return max(0.0, slot.inactive_seconds)
        seen = self._read_at.get(slot.name)
        return None if seen is None else now - seen

    def _before(self, sample: _Sample) -> _Sample | None:
        """The sample to compare with, which is the oldest one within the window."""
        samples = self._samples
        if samples and samples[-1].wal_end > sample.wal_end:
            samples.clear()  # the WAL does not shrink: it is another server's, or another timeline
        while len(samples) > 1 and sample.at - samples[1].at >= WINDOW:
            samples.popleft()
        before = samples[0] if samples and sample.at - samples[0].at >= SHORTEST else None
        samples.append(sample)
        return before


def free_disk(connection: Connection, server: ServerFacts) -> int | None:
    """Bytes that are free on the disk of the WAL; ``None`` where this process cannot see it.

    No function of the server tells. Over a Unix socket it is this machine's disk, if this account may enter the data
    directory, and the name of that has to be known (members of ``pg_read_all_settings``).
    """
    host = connection.info.host
    directory = server.settings.get("data_directory")
    if not directory or (host and not host.startswith(("/", "@"))):
        return None
    try:
        found = os.statvfs(os.path.join(directory, "pg_wal"))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _reading(slot: SlotFacts, server: ServerFacts) -> SlotReading:
    """What one look says about a slot by itself."""
    bound = server.slot_keep_bytes
    confirmed = slot.confirmed_flush_lsn
    return SlotReading(
        name=slot.name,
        database=slot.database,
        active=slot.active,
        holder=str(slot.holder) if slot.holder else "",
        wal_status=slot.wal_status,
        invalidation=slot.invalidation_reason or ("conflicting with recovery" if slot.conflicting else ""),
        retained=slot.retained_bytes(server.wal_end),
        behind=max(0, server.wal_end - confirmed) if confirmed else None,
        safe=slot.safe_wal_size,
        bound=None if bound == UNBOUNDED else bound,
        idle_timeout=float(server.settings.get("idle_replication_slot_timeout", "0")),
    )


def _rate(before: int, after: int, seconds: float) -> float:
    return max(0, after - before) / seconds


def _growth(before: _Sample | None, now: _Sample, slot: str) -> float | None:
    if before is None or slot not in before.behind or slot not in now.behind:
        return None
    return (now.behind[slot] - before.behind[slot]) / (now.at - before.at)
