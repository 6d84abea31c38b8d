"""What the database says besides events, and the sink takes over into the chain: violations of the ledger.

Each row has an id, and ids are committed in their order; the records carry it, so the chain itself says up to where it
has them. A connection is kept for these questions, because they are asked every second.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream.config import Settings
from walstream.errors import WalstreamError
from walstream.order.table import own_table, query

from .order_facts import open_database
from .record import VIOLATION, Pen

log = logging.getLogger("walstream.audit")

MOST: Final = 1_000
"""Rows of one answer."""

_VIOLATIONS_SINCE: Final = 7  # version of the schema

_VIOLATION: Final = """
    SELECT id, jsonb_strip_nulls(jsonb_build_object(
               'what', kind, 'origin', origin, 'changes', NULLIF(changes, 1), 'seq', seq, 'seqs', seqs,
               'keys', keys, 'old_keys', old_keys, 'detail', NULLIF(detail, ''), 'xid', NULLIF(xid, 0),
               'lsn', commit_lsn, 'committed_at', committed_at, 'noticed_at', noticed_at))
      FROM {table} WHERE id > %s{more} ORDER BY id LIMIT %s"""

# What the publication has to publish, and may not.
_DEAF: Final = """
    SELECT array_remove(ARRAY[CASE WHEN NOT pubupdate THEN 'update' END, CASE WHEN NOT pubdelete THEN 'delete' END,
                              CASE WHEN NOT pubtruncate THEN 'truncate' END], NULL)
      FROM pg_catalog.pg_publication WHERE pubname = %s"""

Declared = tuple[int, Mapping[str, Any]]
"""(id, what a record says of it)"""


def warn_if_deaf(settings: Settings) -> None:
    """Say in the log that changes of the ledger are not streamed, if that is so.

    Raises:
        WalstreamError: of the connection.
    """
    if not settings.dsn:
        return
    connection = open_database(settings)
    try:
        rows = query(connection, _DEAF, (settings.publication,), doing="looking at the publication")
    finally:
        connection.close()
    if rows and rows[0][0]:
        log.warning(
            "publication %r does not publish %s: who changes the ledger is not noticed before `walstream audit verify"
            " --ledger` is run. `walstream init --audit` widens it",
            settings.publication,
            ", ".join(rows[0][0]),
        )


class Declarations:
    """Asks the database, on a connection that is made when it is needed.

    Args:
        settings: of the stream.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: Connection | None = None
        self._version = 0

    def lines(self, pen: Pen, ids: dict[str, int], now: bytes) -> list[bytes]:
        """The lines of what is not in the chain yet, or of some of it. Nothing, if nothing is left.

        Args:
            pen: writes them.
            ids: up to where the chain has each kind; moved on.
            now: when they are recorded, a JSON string.

        Raises:
            WalstreamError: of the connection.
        """
        found = self.violations(ids.get(VIOLATION, 0))
        if not found:
            return []
        ids[VIOLATION] = found[-1][0]
        log.error(
            "%d changes of the ledger that nobody declared are put on record; see `walstream status`",
            sum(int(document.get("changes", 1)) for _, document in found),
        )
        return [pen.other(VIOLATION, document, now, id=id_) for id_, document in found]

    def violations(self, after: int, *, upto: int | None = None) -> list[Declared]:
        """Violations with an id above ``after``, by id.

        Args:
            upto: only up to this one, and only those that nobody has acknowledged yet.

        Raises:
            WalstreamError: of the connection.
        """
        if not self._settings.dsn:
            return []
        more, values = ("", ()) if upto is None else (" AND id <= %s AND acknowledged_at IS NULL", (upto,))
        table = own_table(self._settings.namespace, "violations")

        def ask(connection: Connection) -> list[Declared]:
            if not self._is_new_enough(connection, _VIOLATIONS_SINCE):
                return []
            rows = query(
                connection,
                _VIOLATION.format(table=table, more=more),
                (after, *values, MOST),
                doing="reading violations of the ledger",
            )
            return [(int(id_), document) for id_, document in rows]

        return self._asked(ask)

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg2.Error):
                connection.close()

    def _asked(self, ask: Callable[[Connection], list[Declared]]) -> list[Declared]:
        if self._connection is None or self._connection.closed:
            self._connection = open_database(self._settings)
        try:
            return ask(self._connection)
        except WalstreamError:
            self.close()
            raise

    def _is_new_enough(self, connection: Connection, version: int) -> bool:
        """Whether the schema has what is asked for; it can be migrated while this runs."""
        if self._version < version:
            table = own_table(self._settings.namespace, "migrations")
            rows = query(connection, f"SELECT max(version) FROM {table}", doing="reading the schema's version")
            self._version = int(rows[0][0] or 0)
        return self._version >= version
