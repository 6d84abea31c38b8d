"""What the commit order in the database says about offsets that the trail does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from psycopg2.extensions import connection as Connection

from walstream.config import Settings
from walstream.order.erasures import COVERS
from walstream.order.table import COLUMNS, order_table, own_table, query, segment_of
from walstream.source.connection import connect


@dataclass(frozen=True, slots=True)
class Place:
    """An offset of the order.

    Attributes:
        reason, erased_at: of the declared erasure that covers its seq; ``None`` if none does.
    """

    offset: int
    seq: int
    reason: str | None
    erased_at: datetime | None


def open_database(settings: Settings) -> Connection:
    """A connection for the questions of this module.

    Raises:
        WalstreamError: see :func:`walstream.source.connection.connect`.
    """
    return connect(
        settings.require_dsn(),
        application_name=f"walstream:{settings.namespace}:audit",
        connect_timeout=settings.connect_timeout,
    )


def seqs_between(connection: Connection, namespace: str, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Offset and seq of each place of the order from ``first`` to ``last``, ascending, as far as they exist.

    Raises:
        WalstreamError: of the connection, or a damaged segment.
    """
    while first <= last:
        rows = query(
            connection,
            f"SELECT {COLUMNS} FROM {order_table(namespace)} WHERE first_offset <= %s AND first_offset >= COALESCE("
            f"(SELECT first_offset FROM {order_table(namespace)} WHERE first_offset <= %s"
            " ORDER BY first_offset DESC LIMIT 1), 0) ORDER BY first_offset LIMIT 100",
            (last, first),
            doing=f"reading the order of offsets {first} to {last}",
        )
        reached = first
        for row in rows:
            segment = segment_of(row)
            for offset, seq in enumerate(segment.seqs, segment.first_offset):
                if first <= offset <= last:
                    yield offset, seq
            reached = max(reached, segment.next_offset)
        if reached == first:
            return
        first = reached


def places_between(connection: Connection, namespace: str, first: int, last: int) -> list[Place]:
    """The places of the order from ``first`` to ``last``, with the erasures that cover them.

    Raises:
        WalstreamError: as for :func:`seqs_between`.
    """
    found = list(seqs_between(connection, namespace, first, last))
    rows = query(
        connection,
        "SELECT s, e.reason, e.erased_at FROM unnest(%s::bigint[]) AS s CROSS JOIN LATERAL"
        f" (SELECT reason, erased_at FROM {own_table(namespace, 'erasures')}"
        f" WHERE {COVERS} ORDER BY erased_at LIMIT 1) AS e",
        ([seq for _, seq in found],),
        doing="reading the declared erasures",
    )
    declared = {seq: (reason, at) for seq, reason, at in rows}
    return [Place(offset, seq, *declared.get(seq, (None, None))) for offset, seq in found]
