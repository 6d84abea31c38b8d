"""The declared removals of ledger rows, as whoever reads by seq asks about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg2.extensions import connection as Connection

from walstream.order.table import array_literal, own_table, query

COVERS: Final = "pg_catalog.int8range(first_seq, nullif(last_seq, 9223372036854775807), '[]') @> s"
"""SQL: whether a row of ``erasures`` declares the seq ``s``. Written as its index has it, since a session among others
is a range an event."""


def erased_among(connection: Connection, namespace: str, seqs: Sequence[int]) -> list[int]:
    """Those of ``seqs`` whose rows, or their payloads, are declared to be removed.

    Raises:
        WalstreamError: of the connection.
    """
    if not seqs:
        return []
    rows = query(
        connection,
        "SELECT s FROM unnest(%s::bigint[]) AS s"
        f" WHERE EXISTS (SELECT FROM {own_table(namespace, 'erasures')} WHERE {COVERS})",
        (array_literal(seqs),),
        doing="reading the declared erasures",
    )
    return [seq for (seq,) in rows]
