"""Is the table still the ledger? Asked at each relation message that looks odd, and on a timer.

A migration that swaps or recreates the table leaves the consumer connected, healthy and deaf: the publication follows
the old table's OID. So the name, the remembered OID and the publication are compared, and a difference is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from walstream.config import Settings, quote
from walstream.errors import LedgerError, PublicationGone
from walstream.protocol.messages import Relation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.ingest")


class LedgerWatch:
    """Knows which relations are the ledger.

    Args:
        settings: name the table and the publication.
        table_oid: the table's OID as remembered when the ledger was set up.
        connect: makes a short-lived SQL connection; used rarely, never by the orderer's thread.
    """

    def __init__(self, settings: Settings, table_oid: int, connect: Callable[[], Connection]) -> None:
        self._settings = settings
        self._table_oid = table_oid
        self._connect = connect

    def resolve(self, relation: Relation) -> bool:
        """Whether a relation of the stream is the ledger or one of its partitions.

        Raises:
            LedgerError: it carries the ledger's name and is another table, or the ledger has another name now.
        """
        ledger = self._settings.ledger
        named = (relation.namespace, relation.name) == (ledger.namespace, ledger.table)
        if relation.oid == self._table_oid:
            if not named:
                self.check()  # an old name in a backlog is fine as long as the table has the configured name now
            return True
        if self._is_partition(relation.oid):
            return True  # also under the ledger's own name: a table that was converted is a partition of it now
        if named:
            raise LedgerError(
                f"the stream brings rows of a table called {relation.qualified} with OID {relation.oid}, but the ledger"
                f" is the one with OID {self._table_oid}: the table was swapped or recreated",
                hint="see `walstream doctor`; if the new table is the ledger now: `walstream adopt`",
            )
        return False

    def check(self) -> None:
        """Compare name, OID and publication.

        Raises:
            LedgerError: what is called like the ledger is not the ledger.
            PublicationGone: it is not published any more.
        """
        settings, ledger = self._settings, self._settings.ledger
        connection = self._connect()
        try:
            with connection.cursor() as cur:
                cur.execute(
                    """SELECT c.oid, EXISTS (
                           SELECT 1 FROM pg_publication p WHERE p.pubname = %s AND p.pubinsert
                              AND (p.puballtables OR EXISTS (
                                   SELECT 1 FROM pg_publication_tables t
                                     JOIN pg_namespace tn ON tn.nspname = t.schemaname
                                     JOIN pg_class tc ON tc.relnamespace = tn.oid AND tc.relname = t.tablename
                                    WHERE t.pubname = p.pubname
                                      AND (tc.oid = c.oid
                                           OR c.oid = ANY (ARRAY(SELECT relid FROM pg_partition_ancestors(tc.oid)))))))
                         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                        WHERE n.nspname = %s AND c.relname = %s""",
                    (settings.publication, ledger.namespace, ledger.table),
                )
                row = cur.fetchone()
        finally:
            connection.close()
        if row is None or int(row[0]) != self._table_oid:
            found = "no such table" if row is None else f"another table (OID {row[0]})"
            raise LedgerError(
                f"{ledger.qualified} is {found} now; the ledger is the table with OID {self._table_oid}. Rows written"
                " since then are not in the stream",
                hint="rename it back or correct [ledger] in walstream.toml; if a new table took its place knowingly:"
                " `walstream adopt`",
            )
        if not row[1]:
            statement = f"ALTER PUBLICATION {quote(settings.publication)} ADD TABLE {ledger.qualified}"
            raise PublicationGone(
                f"inserts into {ledger.qualified} are not published by {settings.publication!r} any more",
                statement=statement,
                hint=f"{statement}; rows written meanwhile are found in the ledger at the next start",
            )

    def mapped(self) -> bool:
        """Whether the table now has all the columns that it is mapped to. Asked about rows that lack one."""
        names = list(self._settings.ledger.columns.names())
        connection = self._connect()
        try:
            with connection.cursor() as cur:
                cur.execute(
                    "SELECT count(*) = cardinality(%s) FROM pg_attribute"
                    " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attname = ANY (%s)",
                    (names, self._table_oid, names),
                )
                row = cur.fetchone()
        finally:
            connection.close()
        if not row or not row[0]:
            return False
        log.warning(
            "the stream brings rows of %s as it was before it got the columns that it is mapped to: they get their"
            " offsets, and projectors read them from the table",
            self._settings.ledger.qualified,
        )
        return True

    def _is_partition(self, oid: int) -> bool:
        connection = self._connect()
        try:
            with connection.cursor() as cur:
                cur.execute(
                    "SELECT %s::oid = ANY (ARRAY(SELECT relid FROM pg_partition_ancestors(%s::oid)))",
                    (self._table_oid, oid),
                )
                row = cur.fetchone()
                return bool(row and row[0])
        finally:
            connection.close()
