"""What the database says besides events, and the sink takes over into the chain: violations of the ledger, erasures.

Each row has an id, and ids are committed in their order; the records carry it, so the chain itself says up to where it
has them. A connection is kept for these questions, because they are asked every second.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream.config import Settings
from walstream.errors import WalstreamError
from walstream.event import Event
from walstream.order.erasures import COVERS
from walstream.order.table import own_table, query, segments_with_seqs_between

from .findings import Finding, report
from .order_facts import open_database
from .record import VIOLATION, Pen

log = logging.getLogger("walstream.audit")

_Answer = TypeVar("_Answer")

MOST: Final = 1_000
"""Rows of one answer."""

_ERASURES_SINCE: Final = 6  # versions of the schema
_VIOLATIONS_SINCE: Final = 7
_FINDINGS_SINCE: Final = 9

_VIOLATION: Final = """
    SELECT id, jsonb_strip_nulls(jsonb_build_object(
               'what', kind, 'origin', origin, 'changes', NULLIF(changes, 1), 'seq', seq, 'seqs', seqs,
               'detail', NULLIF(detail, ''), 'xid', NULLIF(xid, 0),
               'lsn', commit_lsn, 'committed_at', committed_at, 'noticed_at', noticed_at))
           || CASE WHEN keys IS NULL THEN '{{}}' ELSE jsonb_build_object('keys', keys) END      -- in these a null says
           || CASE WHEN old_keys IS NULL THEN '{{}}' ELSE jsonb_build_object('old_keys', old_keys) END   -- something
      FROM {table} WHERE id > %s{more} ORDER BY id LIMIT %s"""

# What the publication has to publish, and may not.
_DEAF: Final = """
    SELECT array_remove(ARRAY[CASE WHEN NOT pubupdate THEN 'update' END, CASE WHEN NOT pubdelete THEN 'delete' END,
                              CASE WHEN NOT pubtruncate THEN 'truncate' END], NULL)
      FROM pg_catalog.pg_publication WHERE pubname = %s"""

# What one transaction declared of one session, up to where another one begins.
_ERASED: Final = """
    WITH newer AS MATERIALIZED (SELECT * FROM {table} WHERE id > %s),
         next AS (SELECT xid, session_id FROM newer ORDER BY id LIMIT 1),
         other AS (SELECT min(o.id) AS id FROM newer AS o, next AS n
                    WHERE o.xid IS DISTINCT FROM n.xid OR o.session_id IS DISTINCT FROM n.session_id)
    SELECT e.id, e.first_seq, e.last_seq, e.session_id, e.reason, e.mode, e.erased_by, e.erased_at, e.xid
      FROM newer AS e, other AS o WHERE o.id IS NULL OR e.id < o.id
     ORDER BY e.id"""
_ANY: Final = "SELECT EXISTS (SELECT FROM {table} WHERE last_seq >= %s AND session_id IS NOT NULL)"
_COVERED: Final = f"""
    SELECT DISTINCT ON (s) s, e.reason, e.erased_at FROM unnest(%s::bigint[]) AS s
      JOIN {{table}} AS e ON e.session_id IS NOT NULL AND {COVERS}
     ORDER BY s, e.id"""

Declared = tuple[int, Mapping[str, Any]]
"""(id, what a record says of it)"""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What one transaction declared of one session, or of none.

    Attributes:
        id: the highest of its ids.
        session_id: ``None`` if it is of no session, as for a month that was archived: then no payload is blanked.
        offsets: of the events whose payloads are to go.
        document: what a record says of it.
    """

    id: int
    session_id: str | None
    offsets: frozenset[int]
    document: Mapping[str, Any]


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
        self.settings = settings
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
        if not self.settings.dsn:
            return []
        more, values = ("", ()) if upto is None else (" AND id <= %s AND acknowledged_at IS NULL", (upto,))
        table = own_table(self.settings.namespace, "violations")

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

    def unacknowledged(self, after: int, upto: int) -> list[Declared]:
        """Those up to an id that nobody has taken note of yet; errors as above."""
        return self.violations(after, upto=upto)

    def report(self, found: Sequence[Finding]) -> bool:
        """Write down what the sink found by itself, for everything that follows a violation; ``False`` if that has no
        place: there is no database, its schema is older, or violations are to be ignored.

        Raises:
            WalstreamError: of the connection.
        """
        if not self.settings.dsn or self.settings.violations == "ignore":
            return False

        def ask(connection: Connection) -> bool:
            if not self._is_new_enough(connection, _FINDINGS_SINCE):
                return False
            report(connection, self.settings.namespace, found)
            return True

        return self._asked(ask)

    def erasure(self, after: int) -> Erasure | None:
        """The first erasure with an id above ``after``; ``None`` if there is none.

        Raises:
            WalstreamError: of the connection, or a damaged segment of the order.
        """
        table = own_table(self.settings.namespace, "erasures")

        def ask(connection: Connection) -> Erasure | None:
            if not self._is_new_enough(connection, _ERASURES_SINCE):
                return None
            rows = query(connection, _ERASED.format(table=table), (after,), doing="reading declared erasures")
            if not rows:
                return None
            seqs = [(int(row[1]), int(row[2])) for row in rows]
            session, reason, mode, by, at, xid = rows[0][3:]
            document = {"session_id": session, "reason": reason, "mode": mode, "by": by, "at": at, "xid": xid}
            offsets = frozenset() if session is None else _offsets(connection, self.settings.namespace, seqs)
            return Erasure(int(rows[-1][0]), session, offsets, {**document, "seqs": seqs})

        return self._asked(ask) if self.settings.dsn else None

    def covered(self, events: Sequence[Event]) -> dict[int, tuple[str, str]]:
        """Those events, by seq, whose session was erased since they were committed: why, and when.

        Raises:
            WalstreamError: of the connection.
        """
        if not events or not self.settings.dsn:
            return {}
        table = own_table(self.settings.namespace, "erasures")
        seqs = [event.seq for event in events]

        def ask(connection: Connection) -> dict[int, tuple[str, str]]:
            doing = "reading declared erasures"
            if not self._is_new_enough(connection, _ERASURES_SINCE):
                return {}
            if not query(connection, _ANY.format(table=table), (min(seqs),), doing=doing)[0][0]:
                return {}
            rows = query(connection, _COVERED.format(table=table), (seqs,), doing=doing)
            return {int(seq): (reason, at.isoformat()) for seq, reason, at in rows}

        return self._asked(ask)

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg2.Error):
                connection.close()

    def _asked(self, ask: Callable[[Connection], _Answer]) -> _Answer:
        if self._connection is None or self._connection.closed:
            self._connection = open_database(self.settings)
        try:
            return ask(self._connection)
        except WalstreamError:
            self.close()
            raise

    def _is_new_enough(self, connection: Connection, version: int) -> bool:
        """Whether the schema has what is asked for; it can be migrated while this runs."""
        if self._version < version:
            table = own_table(self.settings.namespace, "migrations")
            rows = query(connection, f"SELECT max(version) FROM {table}", doing="reading the schema's version")
            self._version = int(rows[0][0] or 0)
        return self._version >= version


def _offsets(connection: Connection, namespace: str, ranges: Sequence[tuple[int, int]]) -> frozenset[int]:
    """The offsets of these seqs, as far as they have one."""
    wanted = {seq for first, last in ranges for seq in range(first, last + 1)}
    lowest, highest = min(first for first, _ in ranges), max(last for _, last in ranges)
    return frozenset(
        offset
        for segment in segments_with_seqs_between(connection, namespace, lowest, highest)
        for offset, seq in enumerate(segment.seqs, segment.first_offset)
        if seq in wanted
    )
