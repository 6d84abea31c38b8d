"""Every event on record, in order, in files that anyone can verify; heads of the chain are signed.

from walstream import Stream
from walstream.projectors.audit_sink import AuditSink

stream = Stream("postgresql:///app")
stream.add(AuditSink("/var/lib/app/audit", key="/etc/app/audit.key", heads_to="table:audit_heads"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from walstream import AuditTrail, ConfigError, Context, Event, Projector


class AuditSink(Projector):
    """Records every event in ``directory`` (docs/audit.md), exactly once: the files' own end is its place.

    A full disk, a directory that is not there, or a second place for heads that is away stop this projector alone,
    visibly, and it goes on by itself. What is wrong with the files themselves (another event stands under an offset,
    offsets are missing, records were changed) halts it: going on would hide it.

    Args:
        directory: made for a new chain if its parent is there.
        options: of :class:`walstream.AuditTrail`: ``key``, ``heads_to``, ``head_every``, ``roll_bytes``, …
    """

    name = "audit-sink"
    on_poison = "halt"  # parking would leave a hole in the record
    batch = 5_000  # one flush of the disk a batch
    # A full disk is looked at again every few seconds.
    retry_cap = 10.0
    tick_seconds = 1.0

    def __init__(self, directory: str | Path, **options: Any) -> None:
        self.trail = AuditTrail(directory, **options)

    def setup(self, ctx: Context) -> None:
        configured = ctx.settings.projectors.get(ctx.projector)
        lanes = configured.lanes if configured and configured.lanes is not None else self.lanes
        if lanes != 1:
            raise ConfigError(
                f"{self.name} has {lanes} lanes: a chain has one order", hint="leave `lanes` of this projector at 1"
            )
        if self.events:
            raise ConfigError(
                f"{self.name} takes all events: a record with gaps proves nothing about what is missing",
                hint="remove `events`; `walstream audit show --type …` filters when it is read",
            )
        self.trail.check(ctx.settings)

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        if ctx.lane:
            raise ConfigError(f"{self.name} has one lane, and this is lane {ctx.lane}")
        self.trail.record(events, ctx.settings, first=self._first(ctx))

    def tick(self, ctx: Context) -> None:
        self.trail.tick(ctx.settings)

    def close(self) -> None:
        self.trail.close()

    def _first(self, ctx: Context) -> int | None:
        """The offset that a new chain begins with; ``None`` if it is whatever comes."""
        configured = ctx.settings.projectors.get(ctx.projector)
        start = configured.start if configured and configured.start is not None else self.start
        return 1 if start == "earliest" else None if start == "latest" else start
