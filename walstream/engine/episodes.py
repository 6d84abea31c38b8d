"""Episodes of recovery, written down: what the slot did not deliver, why, and what became of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from walstream.config import Settings, quote
from walstream.lsn import format_lsn
from walstream.order.segment import Segment
from walstream.order.table import own_table, query

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

Kind = Literal["birth", "rebirth", "reconciler", "skip"]

_WORDS: Final = 2_000  # of a cause


@dataclass(frozen=True)
class Filled:
    """Which events were taken from the ledger; all 0 if none were."""

    events: int = 0
    first_offset: int = 0
    last_offset: int = 0
    min_seq: int = 0
    max_seq: int = 0

    def plus(self, segment: Segment) -> Filled:
        """With one more segment, which continues it."""
        seqs = segment.seqs
        if not self.events:
            return Filled(len(seqs), segment.first_offset, segment.next_offset - 1, min(seqs), max(seqs))
        lowest, highest = min(self.min_seq, *seqs), max(self.max_seq, *seqs)
        return Filled(self.events + len(seqs), self.first_offset, segment.next_offset - 1, lowest, highest)

    def __str__(self) -> str:
        if not self.events:
            return "no event"
        where = f", offsets {self.first_offset} to {self.last_offset}" if self.first_offset else ""
        return f"{self.events:,} event{'' if self.events == 1 else 's'} (seq {self.min_seq} to {self.max_seq}{where})"


@dataclass(frozen=True)
class Episode:
    """One row of ``recoveries``."""

    kind: str
    cause: str
    ended_at: datetime
    filled: Filled
    unreadable: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "cause": self.cause,
            "ended_at": self.ended_at.isoformat(),
            **asdict(self.filled),
            "unreadable": list(self.unreadable),
        }


def record(
    connection: Connection,
    settings: Settings,
    kind: Kind,
    cause: str,
    filled: Filled,
    *,
    began_at: str,
    generation: int,
    slot_lsn: int | None = None,
    unreadable: tuple[int, ...] = (),
) -> None:
    """Write an episode down. Where there is no place for it (a schema of the release before, or grants of then), there
    is only the log: a recovery does not fail for that.

    Args:
        began_at: the server's time, as text.
        slot_lsn: from where on the slot sends.
        unreadable: seqs that are given up.

    Raises:
        WalstreamError: of the connection.
    """
    if not _may(connection, settings, "INSERT"):
        return
    some = filled.events > 0
    query(
        connection,
        f"INSERT INTO {own_table(settings.namespace, 'recoveries')} (kind, cause, began_at, events, min_seq, max_seq,"
        " first_offset, last_offset, slot_lsn, unreadable, generation)"
        " VALUES (%s, %s, %s::timestamptz, %s, %s, %s, %s, %s, %s, %s::bigint[], %s) RETURNING id",
        (
            kind,
            cause[:_WORDS],
            began_at,
            filled.events,
            filled.min_seq if some else None,
            filled.max_seq if some else None,
            filled.first_offset or None,
            filled.last_offset or None,
            None if slot_lsn is None else format_lsn(slot_lsn),
            list(unreadable),
            generation,
        ),
        doing="writing down what was recovered",
    )


def now(connection: Connection) -> str:
    """The server's time, as text."""
    return str(query(connection, "SELECT clock_timestamp()::text", doing="asking for the time")[0][0])


def given_up(connection: Connection, settings: Settings) -> frozenset[int]:
    """The seqs of rows that nobody can read and that `walstream slot skip` has given up: they get no offset."""
    if not _may(connection, settings, "SELECT"):
        return frozenset()
    rows = query(
        connection,
        f"SELECT unnest(unreadable) FROM {own_table(settings.namespace, 'recoveries')} WHERE unreadable <> '{{}}'",
        doing="reading what was given up",
    )
    return frozenset(seq for (seq,) in rows)


def latest(connection: Connection, settings: Settings, most: int = 5) -> list[Episode]:
    """The newest episodes, the newest first."""
    if not _may(connection, settings, "SELECT"):
        return []
    rows = query(
        connection,
        "SELECT kind, cause, ended_at, events, coalesce(first_offset, 0), coalesce(last_offset, 0),"
        f" coalesce(min_seq, 0), coalesce(max_seq, 0), unreadable FROM {own_table(settings.namespace, 'recoveries')}"
        " ORDER BY id DESC LIMIT %s",
        (most,),
        doing="reading what was recovered",
    )
    return [Episode(row[0], row[1], row[2], Filled(*row[3:8]), tuple(row[8])) for row in rows]


def _may(connection: Connection, settings: Settings, privilege: str) -> bool:
    return query(
        connection,
        "SELECT coalesce(pg_catalog.has_table_privilege(pg_catalog.to_regclass(%s)::oid, %s), false)",
        (f"{quote(settings.namespace)}.recoveries", privilege),
        doing="looking for the table of recoveries",
    ) == [(True,)]
