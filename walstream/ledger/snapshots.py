"""The table of snapshots: finding one that can be used, saving one, and putting away what is found to be wrong.

What a row says: ``context`` is the fold of a *set* of the session's events, in the order of seq. ``upto_seq`` is the
highest of them, and every event of the session with an offset up to ``upto_offset`` is among them. No event with a seq
up to ``settled_seq`` can appear any more (:mod:`walstream.ledger.settling`), and ``unsettled`` is how many of the set
have a higher one. So a reader who counts as many rows in (``settled_seq``, ``upto_seq``] knows that the set is all that
there is up to ``upto_seq``; who counts more knows that a lower seq came later (docs/adr/0010).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import execute_values

from walstream.config import Settings, quote
from walstream.errors import ConfigError, PayloadError
from walstream.event import parse_payload

from .canonical import digest
from .fold import Context, FoldEvent
from .schema import fill, parameter_names
from .stored_rows import HIGHEST, ROW, event_of, streamed

log = logging.getLogger("walstream.snapshots")

_USABLE: Final = """
SELECT upto_seq, coalesce(upto_offset, 0), coalesce(settled_seq, 0), coalesce(unsettled, -1), digest, context::text
  FROM $snapshots
 WHERE session_id = %(session)s AND fold_version = %(version)s AND quarantined_at IS NULL AND upto_seq <= %(upto)s
 ORDER BY upto_seq DESC LIMIT 1"""

# One statement, so that both halves see the same rows. The count comes first: no seq is that low.
_ROWS_AFTER: Final = f"""
SELECT '-9223372036854775808'::bigint AS place, NULL::bigint, NULL::text, NULL::text, NULL::text, count(*)::text
  FROM $table WHERE $session_id = %(session)s AND $seq > %(settled)s AND $seq <= %(covered)s
 UNION ALL
SELECT $seq, {ROW} FROM $table WHERE $session_id = %(session)s AND $seq > %(covered)s AND $seq <= %(upto)s
 ORDER BY 1"""

_SAVE: Final = """
INSERT INTO $snapshots AS held
       (session_id, upto_seq, context, upto_offset, settled_seq, unsettled, fold_version, digest)
SELECT v.* FROM (VALUES %s)
    AS v (session_id, upto_seq, context, upto_offset, settled_seq, unsettled, fold_version, digest)
 WHERE NOT EXISTS (SELECT FROM $snapshots AS s WHERE s.session_id = v.session_id AND s.fold_version = v.fold_version
                      AND s.quarantined_at IS NULL AND s.upto_offset >= v.upto_offset)
    ON CONFLICT (session_id, upto_seq) DO UPDATE
   SET context = excluded.context, upto_offset = excluded.upto_offset, settled_seq = excluded.settled_seq,
       unsettled = excluded.unsettled, fold_version = excluded.fold_version, digest = excluded.digest,
       created_at = excluded.created_at
 WHERE held.quarantined_at IS NULL
   AND (held.fold_version IS DISTINCT FROM excluded.fold_version OR held.upto_offset < excluded.upto_offset)
RETURNING session_id::text"""

_TRIM: Final = """
DELETE FROM $snapshots AS s USING unnest(%(sessions)s::$type[]) AS u (session_id)
 WHERE s.session_id = u.session_id AND s.fold_version IS NOT NULL AND s.quarantined_at IS NULL
   AND s.upto_seq < (SELECT k.upto_seq FROM $snapshots AS k
                      WHERE k.session_id = u.session_id AND k.fold_version = %(version)s AND k.quarantined_at IS NULL
                      ORDER BY k.upto_seq DESC OFFSET %(keep)s - 1 LIMIT 1)"""

_DROP: Final = """
DELETE FROM $snapshots WHERE session_id = %(session)s AND upto_seq >= %(seq)s
   AND fold_version IS NOT NULL AND quarantined_at IS NULL"""

_OTHERS: Final = """
WITH RECURSIVE line AS (
    SELECT f.session_id, f.at_seq FROM $namespace.forks AS f WHERE f.parent_id = %(session)s
     UNION
    SELECT f.session_id, line.at_seq FROM line JOIN $namespace.forks AS f ON f.parent_id = line.session_id
)
SELECT max(x.reach), min(x.upto_offset) FROM (
    SELECT s.settled_seq AS reach, coalesce(s.upto_offset, 0) AS upto_offset FROM $snapshots AS s
     WHERE s.session_id = %(session)s AND s.fold_version <> %(version)s AND s.quarantined_at IS NULL
     UNION ALL
    SELECT line.at_seq, coalesce(s.upto_offset, 0) FROM line JOIN $snapshots AS s ON s.session_id = line.session_id
     WHERE s.fold_version IS NOT NULL AND s.quarantined_at IS NULL
) AS x"""

# Every session that goes on from this one at that seq or later, and those that go on from them.
_FORKS: Final = """
WITH RECURSIVE line AS (
    SELECT f.session_id FROM $namespace.forks AS f WHERE f.parent_id = %(session)s AND f.at_seq >= %(seq)s
     UNION
    SELECT f.session_id FROM line JOIN $namespace.forks AS f ON f.parent_id = line.session_id
)
SELECT session_id::text FROM line ORDER BY 1"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One row; see the head of this module for what it says.

    Attributes:
        context: parsed; the caller's to change.
        size: bytes of its text.
    """

    upto_seq: int
    upto_offset: int
    settled_seq: int
    unsettled: int
    context: Context
    size: int


@dataclass(frozen=True, slots=True)
class NewSnapshot:
    """A row to be saved; ``context`` is its canonical text."""

    session_id: str
    upto_seq: int
    context: str
    upto_offset: int
    settled_seq: int
    unsettled: int
    digest: bytes


class SnapshotTable:
    """The snapshots of one ledger, for one version of the fold.

    Args:
        settings: where it stands.
        version: of the fold; rows of another one are as good as not there.
        qualified: whether the table is named with its schema. During a rebuild of the writer it is not, so that the
            copy is found.
    """

    def __init__(self, settings: Settings, version: str, *, qualified: bool = True) -> None:
        self.version = version
        self._names = parameter_names(settings)
        if not qualified:
            self._names = {**self._names, "snapshots": quote(settings.ledger.snapshots).replace("%", "%%")}
        self._ledger = settings.ledger
        self._type: str | None = None

    def sql(self, template: str, **parts: str) -> str:
        """A statement with parameters under the names of the configuration."""
        return fill(template, {**self._names, **parts})

    def usable(self, cur: Cursor, session_id: str, upto_seq: int | None = None) -> Iterator[Snapshot]:
        """A session's snapshots up to a seq that are what they were when they were written, newest first.

        Raises:
            ConfigError: the table is not there, or may not be read.
        """
        upto = HIGHEST if upto_seq is None else upto_seq
        while True:
            with reading_snapshots():
                cur.execute(self.sql(_USABLE), {"session": session_id, "version": self.version, "upto": upto})
            row: Any = cur.fetchone()
            if row is None:
                return
            found, offset, settled, unsettled, written, text = row
            context = _intact(text, written)
            if context is None or unsettled < 0:
                log.warning("the snapshot of session %s at seq %s is damaged and not used", session_id, found)
            else:
                yield Snapshot(int(found), int(offset), int(settled), int(unsettled), context, len(text))
            upto = found - 1

    @contextlib.contextmanager
    def rows_after(
        self, conn: Connection, session_id: str, snapshot: Snapshot, upto_seq: int | None
    ) -> Iterator[Iterator[FoldEvent] | None]:
        """The events that come after a snapshot, in the order of seq; ``None`` if it lacks one that is there by now."""
        values = {
            "session": session_id,
            "settled": snapshot.settled_seq,
            "covered": snapshot.upto_seq,
            "upto": HIGHEST if upto_seq is None else upto_seq,
        }
        with streamed(conn, self.sql(_ROWS_AFTER), values) as rows:
            counted = int(next(rows)[5])
            yield (event_of(row[1:]) for row in rows) if counted == snapshot.unsettled else None

    def check(self, cur: Cursor) -> None:
        """Look whether the table is there with all of its columns.

        Raises:
            ConfigError: it is not, or may not be read.
        """
        with reading_snapshots():
            cur.execute(self.sql(_USABLE), {"session": None, "version": self.version, "upto": 0})

    # -- what only the writer does -----------------------------------------------------------------------------------

    def save(self, cur: Cursor, snapshots: Sequence[NewSnapshot]) -> set[str]:
        """Save snapshots, one a session; return the sessions of those that were saved.

        One is not saved where a newer one stands: one that reaches as far in the order of commits, or further. Nor in
        the place of one that was put away.

        Raises:
            psycopg2.Error: of the statement; the transaction is then only good for a rollback (to a savepoint).
        """
        casts = f"%s::{self.session_type(cur)}, %s::bigint, %s::jsonb, %s::bigint, %s::bigint, %s::integer, %s, %s"
        saved = execute_values(
            cur,
            self.sql(_SAVE),
            [
                (
                    each.session_id,
                    each.upto_seq,
                    each.context,
                    each.upto_offset,
                    each.settled_seq,
                    each.unsettled,
                    self.version,
                    each.digest,
                )
                for each in snapshots
            ],
            template=f"({casts})",
            page_size=len(snapshots),
            fetch=True,
        )
        return {row[0] for row in saved}

    def trim(self, cur: Cursor, session_ids: Collection[str], keep: int) -> None:
        """Keep a session's newest ``keep`` snapshots. Rows that walstream did not make, or that were put away, stay."""
        cur.execute(
            self.sql(_TRIM, type=self.session_type(cur)),
            {"sessions": sorted(session_ids), "version": self.version, "keep": keep},
        )

    def drop(self, cur: Cursor, session_id: str, from_seq: int) -> int:
        """Drop a session's snapshots from a seq on, of all versions of the fold; return how many there were."""
        cur.execute(self.sql(_DROP), {"session": session_id, "seq": from_seq})
        return cur.rowcount

    def others(self, cur: Cursor, session_id: str) -> tuple[int, int] | None:
        """Up to which seq other snapshots rely on the session's events, and the lowest of their offsets; ``None`` if
        there are none. They are those of other versions of the fold (a release that is rolled back, or comes again,
        will use them) and those of its forks."""
        cur.execute(self.sql(_OTHERS), {"session": session_id, "version": self.version})
        row: Any = cur.fetchone()
        return None if row[0] is None else (int(row[0]), int(row[1]))

    def forks(self, cur: Cursor, session_id: str, from_seq: int) -> list[str]:
        """The sessions that go on from this one at ``from_seq`` or later, and those that go on from them."""
        cur.execute(self.sql(_FORKS), {"session": session_id, "seq": from_seq})
        return [row[0] for row in cur.fetchall()]

    def session_type(self, cur: Cursor) -> str:
        """The type of a session's id, for a cast inside a statement with parameters."""
        if self._type is None:
            cur.execute(
                "SELECT pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_attribute a"
                " JOIN pg_catalog.pg_class c ON c.oid = a.attrelid"
                " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
                " WHERE n.nspname = %s AND c.relname = %s AND a.attname = %s",
                (self._ledger.namespace, self._ledger.table, self._ledger.columns.session_id),
            )
            row: Any = cur.fetchone()
            self._type = str(row[0]).replace("%", "%%")
        return self._type


@contextlib.contextmanager
def reading_snapshots() -> Iterator[None]:
    """Says what is missing where the table of snapshots cannot be read."""
    try:
        yield
    except (psycopg2.errors.UndefinedTable, psycopg2.errors.UndefinedColumn) as error:
        raise ConfigError(
            f"the table of snapshots is not as this release needs it: {str(error).splitlines()[0]}",
            hint="run `walstream migrate`; without snapshots: rebuild_context(…, snapshots=False)",
        ) from error
    except psycopg2.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"this role may not read snapshots: {str(error).splitlines()[0]}",
            hint="as their owner: `walstream init --worker ROLE`; without them: rebuild_context(…, snapshots=False)",
        ) from error


def _intact(text: str, written: bytes | memoryview | None) -> Context | None:
    """The context of a row, if its digest is that of the text."""
    try:
        context = parse_payload(text.encode())
        if isinstance(context, dict) and written is not None and digest(context) == bytes(written):
            return context
    except PayloadError:
        pass
    return None
