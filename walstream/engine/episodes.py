"""Episodes of recovery, written down: what the slot did not deliver, why, and what became of it.

What was taken from the ledger stands in the order, flagged, before anybody writes an episode; so an episode is read off
the order. Whoever dies in between leaves flagged places that no episode names, and the next one finds them there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from walstream.config import Settings, quote
from walstream.lsn import format_lsn
from walstream.order.segment import Segment
from walstream.order.table import COLUMNS, own_table, query, segment_of

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
        """With one more segment, which comes later."""
        return self.from_offset(segment, segment.first_offset)

    def from_offset(self, segment: Segment, offset: int) -> Filled:
        """With the places of a segment from an offset on."""
        skipped = max(0, offset - segment.first_offset)
        seqs = segment.seqs[skipped:]
        if not seqs:
            return self
        first, last = segment.first_offset + skipped, segment.next_offset - 1
        if not self.events:
            return Filled(len(seqs), first, last, min(seqs), max(seqs))
        lowest, highest = min(self.min_seq, *seqs), max(self.max_seq, *seqs)
        return Filled(self.events + len(seqs), self.first_offset, last, lowest, highest)

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


def record_from_order(
    connection: Connection,
    settings: Settings,
    kind: Kind,
    cause: str,
    *,
    began_at: str,
    generation: int,
    behind: int = 0,
) -> int:
    """Write down what stands in the order as taken from the ledger, and in no episode.

    Args:
        behind: the offset up to which that is known to be in one; everything is looked through without it.

    Returns:
        The offset up to which it is known now.

    Raises:
        WalstreamError: of the connection.
    """
    if not (_may(connection, settings, "INSERT") and _may(connection, settings, "SELECT")):
        return behind
    order = own_table(settings.namespace, "commit_order")
    ((named, head),) = query(
        connection,
        f"SELECT (SELECT coalesce(max(last_offset), 0) FROM {own_table(settings.namespace, 'recoveries')}),"
        f" (SELECT coalesce(max(first_offset + events - 1), 0) FROM {order}"
        f" WHERE first_offset >= coalesce((SELECT max(first_offset) FROM {order}), 0))",
        doing="looking for what no episode names",
    )
    behind = max(behind, int(named))
    filled, after = Filled(), behind
    while True:
        rows = query(
            connection,
            f"SELECT {COLUMNS} FROM {order} WHERE recovered AND first_offset + events - 1 > %s AND first_offset >="
            f" coalesce((SELECT max(first_offset) FROM {order} WHERE first_offset <= %s), 0)"
            " ORDER BY first_offset LIMIT 100",
            (after, after),
            doing="looking for what no episode names",
        )
        for row in rows:
            segment = segment_of(row)
            filled = filled.from_offset(segment, behind + 1)
            after = segment.next_offset - 1
        if not rows:
            break
    if filled.events:
        record(connection, settings, kind, cause, filled, began_at=began_at, generation=generation)
    return max(int(head), after)


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
    # The comparison writes a row for each part that it has ordered, so that what it has done shows while it goes on.
    rows = query(
        connection,
        "SELECT kind, cause, max(ended_at), sum(events)::bigint, coalesce(min(first_offset), 0),"
        " coalesce(max(last_offset), 0), coalesce(min(min_seq), 0), coalesce(max(max_seq), 0), unreadable"
        f" FROM {own_table(settings.namespace, 'recoveries')}"
        " GROUP BY kind, cause, began_at, generation, unreadable ORDER BY max(id) DESC LIMIT %s",
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
