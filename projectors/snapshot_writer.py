"""Writes snapshots of sessions, so that the cost of a rebuild does not grow with the session.

from walstream import Stream
from walstream.projectors.snapshot_writer import SnapshotWriter

stream = Stream("postgresql:///app")
stream.add(SnapshotWriter(every_events=50))
"""

from __future__ import annotations

from collections.abc import Sequence

from walstream import ConfigError, Context, Event, FoldedSession, Projector, SessionFolds


class SnapshotWriter(Projector):
    """Fills ``agent_snapshots``: a session's context after every so many events or bytes, and when a task ends.

    It folds each event once, as it comes, and saves what is due at the end of a batch, in the transaction of its
    cursor. The table can be emptied or rebuilt at any time: rebuilds then begin from the first event, or from an older
    snapshot, and come to the same.

    Args:
        every_events, every_bytes: a session is saved after this many events, or bytes of payload, whichever comes
            first.
        keep: how many snapshots of a session stay; at least 1.
        memory_bytes: about how much memory the sessions that are being followed may take. One that is let go of is read
            again from its newest snapshot when it goes on.
        table: the table's name as SQL finds it, for ``walstream projectors rebuild``: needed if the configuration gives
            it another one (``[ledger] snapshots``), or its schema is not in the ``search_path``.

    Raises:
        ConfigError: an option makes no sense.
    """

    name = "snapshot-writer"
    transactional = True
    tables = ("agent_snapshots",)

    def __init__(
        self,
        *,
        every_events: int = 100,
        every_bytes: int = 1024 * 1024,
        keep: int = 3,
        memory_bytes: int = 64 * 1024 * 1024,
        table: str | None = None,
    ) -> None:
        if min(every_events, every_bytes, keep, memory_bytes) < 1:
            raise ConfigError(
                "snapshot-writer: every_events, every_bytes, keep and memory_bytes are at least 1",
                hint="correct [projectors.snapshot-writer.options]",
            )
        self.every_events = every_events
        self.every_bytes = every_bytes
        self.keep = keep
        if table is not None:
            self.tables = (table,)
        self._folds = SessionFolds(memory_bytes)

    def setup(self, ctx: Context) -> None:
        self._folds.clear()
        self._folds.lane(ctx).check(ctx.cursor)

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        self._folds.lane(ctx).take(
            ctx.cursor, events, due=self._is_due, ends=("task.completed", "task.failed"), keep=self.keep
        )

    def close(self) -> None:
        self._folds.clear()

    def _is_due(self, session: FoldedSession) -> bool:
        return session.ended or session.events >= self.every_events or session.bytes >= self.every_bytes
