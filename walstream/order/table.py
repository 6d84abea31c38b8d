"""The table ``commit_order``: what its columns are, and how a row becomes a segment.

Readers, compaction and reconciler all read it through here. Whoever reads several rows at once must do so in one
statement: compaction replaces many rows by one, and only within one snapshot are they all there. Whoever reads on in
a second statement asks for the offsets that are still wanted, and not for rows that begin after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream.config import quote
from walstream.lsn import parse_lsn
from walstream.order.segment import Segment, decode_body
from walstream.source.failures import classify

COLUMNS: Final = "first_offset, events, last_lsn::text, partial_inserts, recovered, generation, body"
"""What :func:`segment_of` takes."""

_PAGE: Final = 100  # segments fetched at once: a full one is about 30 KB


def spelled(identifier: str) -> str:
    """A quoted identifier (or several, with a point) as the driver wants it inside a statement with parameters."""
    return identifier.replace("%", "%%")


def own_table(namespace: str, name: str) -> str:
    """The name of one of walstream's tables inside a statement with parameters."""
    return spelled(f"{quote(namespace)}.{name}")


def order_table(namespace: str) -> str:
    """The order's name inside a statement with parameters."""
    return own_table(namespace, "commit_order")


def array_literal(numbers: Iterable[int]) -> str:
    """An array of integers as Postgres reads it from text (documentation, 8.15.2). To be passed as one value: of a list
    the driver adapts each element by itself, which takes longer than to read the rows."""
    return f"{{{','.join(map(str, numbers))}}}"


def query(connection: Connection, sql: str, values: Sequence[Any] = (), *, doing: str) -> list[tuple[Any, ...]]:
    """Run one statement, in which a literal ``%`` is written twice, and return its rows.

    Raises:
        WalstreamError: whatever the driver raised, classified.
    """
    try:
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall()
    except psycopg2.Error as error:
        raise classify(error, doing=doing) from error


def segment_of(row: tuple[Any, ...]) -> Segment:
    """Return the segment that a row of :data:`COLUMNS` holds.

    Raises:
        LedgerError: its body is damaged.
    """
    first_offset, events, last_lsn, partial_inserts, recovered, generation, body = row
    return decode_body(
        body,
        first_offset=first_offset,
        events=events,
        last_lsn=parse_lsn(last_lsn),
        partial_inserts=partial_inserts,
        recovered=recovered,
        generation=generation,
    )


def segments_with_seqs_between(connection: Connection, namespace: str, low: int, high: int) -> Iterator[Segment]:
    """Yield, in the order of offsets, every segment whose range of seqs touches ``low`` to ``high``.

    Between two pages compaction may merge what was read with what was not; the whole is then yielded (again).

    Raises:
        LedgerError: a body is damaged.
        WalstreamError: of the connection.
    """
    following = 1  # the first offset that no page has covered
    while True:
        # `+ 0` keeps the planner from walking the primary key from its start for the sake of LIMIT.
        rows = query(
            connection,
            f"SELECT {COLUMNS} FROM {order_table(namespace)}"
            " WHERE min_seq <= CAST(%s AS bigint) AND max_seq >= CAST(%s AS bigint) AND first_offset + events > %s"
            " ORDER BY first_offset + 0 LIMIT %s",
            (high, low, following, _PAGE),
            doing=f"reading the order of seqs {low} to {high}",
        )
        for row in rows:
            yield segment_of(row)
        if len(rows) < _PAGE:
            return
        following = rows[-1][0] + rows[-1][1]


def ordered_seqs(connection: Connection, namespace: str, seqs: Sequence[int]) -> set[int]:
    """Return those of ``seqs`` that have an offset.

    Raises:
        LedgerError: a body is damaged.
        WalstreamError: of the connection.
    """
    found: set[int] = set()
    for group in neighbours(sorted(seqs)):
        wanted = set(group)
        for segment in segments_with_seqs_between(connection, namespace, group[0], group[-1]):
            found |= wanted.intersection(segment.seqs)
    return found


def neighbours(ordered: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut ascending seqs where they jump: one range over both sides of a jump would touch every segment between."""
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] - ordered[index - 1] > _JUMP:
            yield ordered[start:index]
            start = index


_JUMP: Final = 20_000  # about two full segments
