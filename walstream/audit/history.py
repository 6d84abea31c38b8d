"""Whether a trail and a database are of one history: a fail-over to a standby that was behind, or a restore to an
earlier point, takes events back that are on record, and perhaps gives their numbers to others.

A trail that is longer than the order proves nothing: the order's last rows may be gone in a crash, and grow back. The
ledger's rows do not: an event comes only after its commit was flushed. So what is on record behind the order's end has
to have its row, or the database has lost it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from psycopg2.extensions import connection as Connection

from walstream.config import Settings, quote
from walstream.order.erasures import erased_among
from walstream.order.table import order_table, query

from . import order_facts
from .known import Known, another_event
from .loading import TrailBroken
from .record import EVENT, Record

_CHUNK: Final = 5_000


@dataclass
class Lost:
    """Events on record that the ledger does not have."""

    events: int = 0
    first: Record | None = None
    last: Record | None = None

    def add(self, record: Record) -> None:
        """One more, behind the others."""
        self.events += 1
        self.first = self.first or record
        self.last = record


def check_end(directory: Path, records: Known, last: int, settings: Settings) -> bool:
    """Compare the end of a trail with the order, and what the order does not reach with the ledger.

    Args:
        records: of the trail.
        last: the offset that it ends with.

    Returns:
        Whether the order reaches the end of the trail.

    Raises:
        TrailBroken: another event stands under an offset, or the ledger has lost events.
        WalstreamError: of the database.
        OSError: of the trail.
    """
    first = records.begins
    connection = order_facts.open_database(settings)
    try:
        head = min(last, _head(connection, settings))
        if head >= first and not _same(connection, settings, records, head):
            _raise_first_difference(connection, settings, directory, records, first, head)
        if head == last:
            return True
        lost = _lost(connection, settings, records, max(first, head + 1))
    finally:
        connection.close()
    if lost.first is not None and lost.last is not None:
        raise TrailBroken(
            f"{directory} holds {lost.events:,} event{'' if lost.events == 1 else 's'} that this ledger does not have"
            f" any more: offset{_span(lost.first.offset, lost.last.offset)}, seq{_span(lost.first.seq, lost.last.seq)}."
            " The database went back behind them (a fail-over to a standby that was behind, a restore)",
            hint=f"whoever got them outside of the database still has them: `walstream audit show --from"
            f" {lost.first.offset}` lists them. `walstream adopt --new-epoch`, if that was not done yet. Keep the trail"
            f" as it is, and begin another one in a new directory at offset {lost.first.offset} (docs/audit.md, Another"
            " history)",
        )
    return False


def _head(connection: Connection, settings: Settings) -> int:
    rows = query(
        connection,
        f"SELECT max(first_offset) FROM {order_table(settings.namespace)}",
        doing="looking for the end of the order",
    )
    begin = rows[0][0]
    if begin is None:
        return 0
    return max((offset for offset, _ in order_facts.seqs_between(connection, settings.namespace, begin, 2**63 - 1)))


def _same(connection: Connection, settings: Settings, records: Known, offset: int) -> bool:
    return records.find(offset).seq == _seq_at(connection, settings, offset)


def _seq_at(connection: Connection, settings: Settings, offset: int) -> int | None:
    return dict(order_facts.seqs_between(connection, settings.namespace, offset, offset)).get(offset)


def _raise_first_difference(
    connection: Connection, settings: Settings, directory: Path, records: Known, same: int, other: int
) -> None:
    """Histories part once: what lies between an offset that is the same and one that is not is halved."""
    if _same(connection, settings, records, same):
        while other - same > 1:
            middle = (same + other) // 2
            if _same(connection, settings, records, middle):
                same = middle
            else:
                other = middle
    else:
        other = same
    raise another_event(directory, other, records.find(other).seq, _seq_at(connection, settings, other))


def _lost(connection: Connection, settings: Settings, records: Known, first: int) -> Lost:
    """What of the records from an offset on has no row, and is not declared to be gone."""
    found = Lost()
    coming: Iterator[Record] = (record for record in records.behind(first) if record.kind == EVENT)
    while chunk := list(islice(coming, _CHUNK)):
        seqs = [record.seq for record in chunk if record.seq is not None]
        there = _rows_of(connection, settings, seqs)
        there.update(erased_among(connection, settings.namespace, [seq for seq in seqs if seq not in there]))
        for record in chunk:
            if record.seq not in there:
                found.add(record)
    return found


def _rows_of(connection: Connection, settings: Settings, seqs: list[int]) -> set[int]:
    ledger = settings.ledger
    seq, table = (text.replace("%", "%%") for text in (quote(ledger.columns.seq), ledger.qualified))
    rows = query(
        connection,
        f"SELECT {seq} FROM {table} WHERE {seq} = ANY(%s::bigint[])",
        (seqs,),
        doing="looking for the rows of what is on record",
    )
    return {int(found) for (found,) in rows}


def _span(first: int | None, last: int | None) -> str:
    return f" {first}" if first == last else f"s {first} to {last}"
