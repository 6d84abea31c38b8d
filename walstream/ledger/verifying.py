"""Folds sessions from zero again, and puts away the snapshots that say something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings
from walstream.errors import LedgerError, PayloadError, WalstreamError
from walstream.event import parse_payload

from .canonical import canonical, digest
from .fold import Context, Fold
from .session_rows import expand
from .snapshots import reading_snapshots
from .stored_rows import Messages, of_session, plain_cursor, statement, stored_rows, streamed

_SESSIONS: Final = """
SELECT session_id::text FROM $snapshots WHERE fold_version IS NOT NULL AND quarantined_at IS NULL$where
 GROUP BY session_id ORDER BY 1"""
_ROWS: Final = """
SELECT upto_seq, coalesce(settled_seq, 0), coalesce(unsettled, -1), fold_version, digest FROM $snapshots
 WHERE session_id = %(session)s AND fold_version IS NOT NULL AND quarantined_at IS NULL ORDER BY upto_seq"""
_CONTEXT: Final = """
SELECT context::text FROM $snapshots
 WHERE session_id = %(session)s AND upto_seq = %(seq)s AND digest IS NOT DISTINCT FROM %(digest)s
   AND fold_version = %(version)s AND settled_seq IS NOT DISTINCT FROM %(settled)s AND quarantined_at IS NULL"""
_QUARANTINE: Final = """
UPDATE $snapshots SET quarantined_at = now(), quarantine_note = %(why)s
 WHERE session_id = %(session)s AND upto_seq = %(seq)s AND digest IS NOT DISTINCT FROM %(digest)s
   AND fold_version = %(version)s AND quarantined_at IS NULL"""
# Who erases a session drops what was made of it. Other removals, as of a month that was archived, leave snapshots.
_ERASED: Final = """
SELECT 1 FROM $namespace.erasures AS e
 WHERE e.first_seq <= %(seq)s AND pg_catalog.to_jsonb(e) ->> 'session_id' IS NULL LIMIT 1"""
_REPLACE: Final = """
UPDATE $snapshots
   SET context = %(context)s::jsonb, digest = %(new)s, fold_version = %(fold)s, unsettled = %(unsettled)s,
       created_at = now()
 WHERE session_id = %(session)s AND upto_seq = %(seq)s AND digest IS NOT DISTINCT FROM %(digest)s
   AND fold_version = %(version)s AND quarantined_at IS NULL"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A snapshot that was put away, or a session that could not be verified.

    Attributes:
        seq: the snapshot's; ``None`` where the whole session is meant.
        why: in a sentence.
    """

    session_id: str
    seq: int | None
    why: str


@dataclass(slots=True)
class Verified:
    """What came of it.

    Attributes:
        sessions: that have snapshots.
        right: snapshots that say what the fold from zero says.
        rebuilt: of another version of the fold, and made again.
        superseded: that lack an event with a lower seq which came later; the writer drops them, and no rebuild uses
            them.
        erased: that say something else, where rows up to there are declared gone (archived, erased): which is right
            cannot be told any more, and they stay.
        quarantined: that said something else, and were put away.
        failed: what could not be verified.
    """

    sessions: int = 0
    right: int = 0
    rebuilt: int = 0
    superseded: int = 0
    erased: int = 0
    quarantined: list[Finding] = field(default_factory=list)
    failed: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    session_id: str
    seq: int
    settled: int
    unsettled: int
    version: str
    digest: bytes | None

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "session": self.session_id,
            "seq": self.seq,
            "settled": self.settled,
            "version": self.version,
            "digest": self.digest,
        }


class Verification:
    """Verifies snapshots.

    Args:
        conn: in autocommit: what is put away stays so, whatever comes after.
        fold: the one that the snapshots should be of.
    """

    def __init__(self, conn: Connection, settings: Settings, fold: Fold) -> None:
        self._conn = conn
        self._settings = settings
        self._fold = fold
        self._found = Verified()

    def sessions(self) -> int:
        """How many sessions there are to verify.

        Raises:
            ConfigError: the table of snapshots is not there.
        """
        with plain_cursor(self._conn) as cur, reading_snapshots():
            cur.execute(f"SELECT count(*) FROM ({self._sql(_SESSIONS.replace('$where', ''))}) AS s", {})
            row: Any = cur.fetchone()
        return int(row[0])

    def run(self, session_id: str | None = None, *, on_progress: Callable[[int], None] = lambda _n: None) -> Verified:
        """Verify the snapshots of one session, or of all.

        Args:
            on_progress: called with the number of sessions that are done.

        Raises:
            UnknownSession: the id is none that the ledger's column could hold.
        """
        where = "" if session_id is None else " AND session_id = %(session)s"
        sql = self._sql(_SESSIONS.replace("$where", where))
        with (
            plain_cursor(self._conn) as cur,
            of_session(str(session_id)),
            streamed(self._conn, sql, {"session": session_id}) as rows,
        ):
            for (each,) in rows:
                self._found.sessions += 1
                self._session(cur, each)
                on_progress(self._found.sessions)
        return self._found

    def _sql(self, template: str) -> str:
        return statement(self._settings, template)

    def _session(self, cur: Cursor, session_id: str) -> None:
        cur.execute(self._sql(_ROWS), {"session": session_id})
        snapshots = [
            _Row(session_id, seq, settled, unsettled, version, None if written is None else bytes(written))
            for seq, settled, unsettled, version, written in cur.fetchall()
        ]
        waiting = list(snapshots)
        try:
            for context, young in self._contexts(cur, session_id, [(each.seq, each.settled) for each in snapshots]):
                snapshot = waiting.pop(0)
                if snapshot.version == self._fold.version:
                    self._compare(cur, snapshot, context, young)
                else:
                    self._replace(cur, snapshot, context, young)
        except PayloadError as error:
            for snapshot in waiting:
                if snapshot.version == self._fold.version:
                    self._quarantine(cur, snapshot, f"the session cannot be folded up to there: {error}")
        except LedgerError as error:
            self._found.failed.append(Finding(session_id, None, str(error)))

    def _contexts(self, cur: Cursor, session_id: str, places: list[tuple[int, int]]) -> Iterator[tuple[Context, int]]:
        """The session's context at each of these seqs, from zero, and how many rows there are up to it whose seq is
        above the settled one."""
        context, messages = self._fold.empty(), Messages(self._settings)
        counts = [0] * len(places)
        at = 0
        upto = places[-1][0] if places else 0
        for event in stored_rows(self._conn, self._settings, session_id, upto_seq=upto):
            while event.seq > places[at][0]:
                yield context, counts[at]
                at += 1
            self._fold.apply(context, expand(cur, self._settings, self._fold, event, messages=messages))
            for place in range(at, len(places)):
                counts[place] += event.seq > places[place][1]
        for place in range(at, len(places)):
            yield context, counts[place]

    def _compare(self, cur: Cursor, snapshot: _Row, context: Context, young: int) -> None:
        cur.execute(self._sql(_CONTEXT), snapshot.identity)
        row: Any = cur.fetchone()
        if row is None:
            return  # the writer replaced or dropped it meanwhile
        why = _changed(row[0], snapshot.digest)
        if why is None and young != snapshot.unsettled:
            self._found.superseded += 1
            return
        if why is None and digest(context) != snapshot.digest:
            cur.execute(self._sql(_ERASED), {"seq": snapshot.seq})
            if cur.fetchone() is not None:
                self._found.erased += 1
                return
            why = "the fold from zero comes to something else"
        if why is None:
            self._found.right += 1
        else:
            self._quarantine(cur, snapshot, why)

    def _replace(self, cur: Cursor, snapshot: _Row, context: Context, young: int) -> None:
        text = canonical(context)
        values = {
            **snapshot.identity,
            "context": text.decode(),
            "new": digest(context),
            "fold": self._fold.version,
            "unsettled": young,
        }
        try:
            cur.execute(self._sql(_REPLACE), values)
        except psycopg2.Error as error:
            if error.pgcode is None or error.pgcode[:2] not in ("22", "54"):
                raise
            why = f"jsonb does not take the context: {str(error).splitlines()[0]}"
            self._found.failed.append(Finding(snapshot.session_id, snapshot.seq, why))
        else:
            self._found.rebuilt += cur.rowcount

    def _quarantine(self, cur: Cursor, snapshot: _Row, why: str) -> None:
        cur.execute(self._sql(_QUARANTINE), {**snapshot.identity, "why": why[:1000].replace("\0", "\\0")})
        if cur.rowcount:
            self._found.quarantined.append(Finding(snapshot.session_id, snapshot.seq, why))


def _changed(text: str, written: bytes | None) -> str | None:
    """Why a context is not the one that was written, if it is not."""
    try:
        if written is not None and digest(parse_payload(text.encode())) == written:
            return None
    except WalstreamError as error:
        return f"its context cannot be read: {error}"
    return "its context was changed after it was written (the digest is another one)"
