"""A very large payload, fetched in pieces.

The driver holds a result several times over while it is read: in libpq's buffer, in the result, and as the value that
is handed out. For an ordinary row nobody notices; for 50 MB it is what a process is killed for. So the server keeps the
text, and hands it over a megabyte at a time.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream.config import LedgerTable, quote
from walstream.order.table import spelled
from walstream.source.failures import classify

LARGE_CODE: Final = 23
"""Rows from this size code on (4 MiB and more, see ``walstream.order.segment.size_codes``) are fetched so."""

_PIECE: Final = 1024 * 1024

# Bytes and not characters: the n-th byte is found at once, the n-th character only by counting.
_DECLARE: Final = """DECLARE large NO SCROLL CURSOR FOR
 WITH one AS MATERIALIZED (SELECT convert_to({payload}::text, 'UTF8') AS text FROM {table} WHERE {seq} = %s LIMIT 1)
 SELECT substr(one.text, at, {piece}) FROM one, generate_series(1, octet_length(one.text), {piece}) AS at"""


def payload_in_pieces(connection: Connection, ledger: LedgerTable, seq: int) -> bytes:
    """Return the payload of the row ``seq`` as text in UTF-8; empty if there is no such row.

    Args:
        connection: inside a transaction, so that the row is the one that the caller saw.

    Raises:
        WalstreamError: of the connection.
    """
    declare = _DECLARE.format(
        payload=spelled(quote(ledger.columns.payload)),
        table=spelled(ledger.qualified),
        seq=spelled(quote(ledger.columns.seq)),
        piece=_PIECE,
    )
    text = BytesIO()
    try:
        with connection.cursor() as cursor:
            cursor.execute(declare, (seq,))
            while True:
                cursor.execute("FETCH 1 FROM large")
                row = cursor.fetchone()
                if row is None:
                    break
                text.write(row[0])
            cursor.execute("CLOSE large")
    except psycopg2.Error as error:
        raise classify(error, doing=f"reading the payload of {ledger.qualified} with seq {seq} in pieces") from error
    return text.getvalue()
