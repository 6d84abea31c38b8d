"""Saves what is folded as snapshots, after a last look at whether it is all that there is."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import psycopg2
from psycopg2.extensions import cursor as Cursor

from walstream.errors import PayloadError

from .canonical import canonical
from .folded_session import LOWEST
from .snapshots import NewSnapshot

if TYPE_CHECKING:
    from .folded_session import FoldedSession
    from .session_folds import LaneFolds

log = logging.getLogger("walstream.snapshots")

_COUNT: Final = """
SELECT u.place, c.rows FROM unnest(%(sessions)s::$type[], %(after)s::bigint[], %(upto)s::bigint[])
       WITH ORDINALITY AS u (session, after, upto, place)
 CROSS JOIN LATERAL (SELECT count(*) AS rows FROM $table AS e
                      WHERE e.$session_id = u.session AND e.$seq > u.after AND e.$seq <= u.upto) AS c"""

# U+0000 and lone surrogates, escaped: an odd number of backslashes before the `u`. Pairs of surrogates stand in the
# canonical text as the character that they mean.
_NOT_FOR_JSONB: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u(?:0000|d[89a-f])")
_SAID: Final = 1000  # sessions of which it is remembered that it was said


class SnapshotSaving:
    """Saves for one lane.

    Args:
        lane: whose sessions they are.
    """

    def __init__(self, lane: LaneFolds) -> None:
        self._lane = lane
        self._said: OrderedDict[str, None] = OrderedDict()

    def lock(self, cur: Cursor, *, exclusive: bool = False) -> None:
        """Held until the transaction ends: by everybody who saves, and alone by who drops the snapshots of forks."""
        function = "pg_advisory_xact_lock" if exclusive else "pg_advisory_xact_lock_shared"
        cur.execute(
            f"SELECT pg_catalog.{function}(pg_catalog.hashtextextended(%s, 0))",
            (f"walstream:{self._lane.settings.namespace}:snapshots",),
        )

    def save(self, cur: Cursor, sessions: Sequence[FoldedSession], keep: int) -> None:
        """Save these sessions' snapshots and drop what is older than the newest ``keep`` of each."""
        lane = self._lane
        if not sessions:
            return
        mark = lane.mark(cur)
        self.lock(cur)
        lane.notice_erasures(cur)
        ready = []
        for session in sessions:
            if session.pending_fork is not None and session.pending_fork > mark:
                lane.waiting.add(session.session_id)  # what the parent gives may still change
                continue
            if session.pending_fork is not None or session.epoch != lane.shared.epoch:
                lane.load_again(cur, session)
            ready.append(session)
        self._complete(cur, ready, mark)
        ready = [session for session in ready if session.upto_seq > LOWEST]  # of the others every event is erased
        made = [snapshot for session in ready if (snapshot := self._snapshot(session)) is not None]
        saved = self._store(cur, made)
        for snapshot in made:
            if snapshot.session_id not in saved:
                log.info(
                    "the snapshot of session %s at seq %d (offset %d) is not saved: a newer one stands",
                    snapshot.session_id,
                    snapshot.upto_seq,
                    snapshot.upto_offset,
                )
        if saved:
            lane.table.trim(cur, saved, keep)

    def _complete(self, cur: Cursor, sessions: Sequence[FoldedSession], mark: int) -> None:
        """Fold sessions again that lack rows which are there by now, and note what has settled."""
        if not sessions:
            return
        table = self._lane.table
        cur.execute(
            table.sql(_COUNT, type=table.session_type(cur)),
            {
                "sessions": [session.session_id for session in sessions],
                "after": [session.settled_seq for session in sessions],
                "upto": [session.upto_seq for session in sessions],
            },
        )
        counted = dict(cur.fetchall())
        for place, session in enumerate(sessions, start=1):
            if counted[place] != len(session.young):
                self._lane.load_again(cur, session)
            # The mark was there before the statement that counted (or read): up to it, nothing else can appear.
            session.settle(mark)

    def _snapshot(self, session: FoldedSession) -> NewSnapshot | None:
        session.events = session.bytes = 0
        session.ended = False
        try:
            text = canonical(session.context)
        except PayloadError as error:
            self._say(session.session_id, str(error))
            return None
        session.text_bytes = len(text)
        session.rest_bytes = min(session.rest_bytes, len(text))
        if _NOT_FOR_JSONB.search(text) is not None:
            self._say(session.session_id, "it holds U+0000 or a lone surrogate, which the type jsonb does not take")
            return None
        return NewSnapshot(
            session_id=session.session_id,
            upto_seq=session.upto_seq,
            context=text.decode(),
            upto_offset=session.upto_offset,
            settled_seq=session.settled_seq,
            unsettled=len(session.young),
            digest=hashlib.sha256(text).digest(),
        )

    def _store(self, cur: Cursor, snapshots: Sequence[NewSnapshot]) -> set[str]:
        """Save what can be saved; return the sessions that were, and those that cannot be."""
        if not snapshots:
            return set()
        cur.execute("SAVEPOINT walstream_snapshots")
        try:
            saved = self._lane.table.save(cur, snapshots)
        except (psycopg2.DataError, psycopg2.OperationalError, psycopg2.InternalError) as error:
            # What the server refuses as a value (22…) or as beyond a limit (54…: a size, a depth). The rest is none of
            # a context's fault.
            if error.pgcode is None or error.pgcode[:2] not in ("22", "54"):
                raise
            cur.execute("ROLLBACK TO SAVEPOINT walstream_snapshots")
            if len(snapshots) == 1:
                self._say(snapshots[0].session_id, str(error).splitlines()[0])
                saved = {snapshots[0].session_id}
            else:
                half = len(snapshots) // 2
                saved = self._store(cur, snapshots[:half]) | self._store(cur, snapshots[half:])
        cur.execute("RELEASE SAVEPOINT walstream_snapshots")
        return saved

    def _say(self, session_id: str, why: str) -> None:
        if session_id not in self._said:
            log.warning("session %s gets no snapshots: %s. It is rebuilt from its events", session_id, why)
            self._said[session_id] = None
            if len(self._said) > _SAID:
                self._said.popitem(last=False)
