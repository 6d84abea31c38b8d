"""Folds the stream's events session by session, for whoever writes snapshots: incrementally, in bounded memory.

What is held of a session is the fold of a set of its events in the order of seq, together with what a snapshot has to
say about that set. Everything can be made again: a session that is not held is read from its newest usable snapshot and
the rows after it, up to the event that is at hand. Such a read also sees rows whose events are yet to come; they are
recognised by their seq when they do. An event with a lower seq than the highest folded one, and not among those, came
late: the session's snapshots from that seq on are dropped, and it is folded again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final, Protocol

from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings
from walstream.event import Event

from .erased import Erasures
from .fold import Fold, Foldable, load_fold
from .folded_session import LOWEST, FoldedSession
from .session_rows import expand
from .settling import Settling
from .snapshot_saving import SnapshotSaving
from .snapshots import Snapshot, SnapshotTable
from .stored_rows import Messages, Parent, event_of, streamed

log = logging.getLogger("walstream.snapshots")

_EXPANDED: Final = frozenset({b"context.loaded", b"session.forked"})

_FRESH: Final = """
SELECT u.session::text FROM unnest(%(sessions)s::$type[], %(seqs)s::bigint[]) AS u (session, seq)
 WHERE NOT EXISTS (SELECT FROM $snapshots AS s WHERE s.session_id = u.session)
   AND NOT EXISTS (SELECT FROM $namespace.forks AS f WHERE f.parent_id = u.session)
   AND NOT EXISTS (SELECT FROM $table AS e WHERE e.$session_id = u.session AND e.$seq < u.seq)"""

_ROWS: Final = """
SELECT $seq, $session_id::text,
       CASE WHEN $seq > %(covered)s THEN $agent_id::text END, CASE WHEN $seq > %(covered)s THEN $event_type::text END,
       CASE WHEN $seq > %(covered)s THEN $payload::text END
  FROM $table WHERE $session_id = %(session)s AND $seq > %(settled)s AND $seq <= %(upto)s ORDER BY $seq"""


class Lane(Protocol):
    """What is needed of a projector's context."""

    lane: int
    settings: Settings
    rebuilding: bool


class SessionFolds:
    """What the lanes of one projector have in common.

    Args:
        memory_bytes: about how much all sessions that are held may take together.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.lock = threading.Lock()
        self.held_bytes = 0
        self.epoch = 0
        """Raised when a session got a late event that its forks have from it, or one was erased: nothing held from
        before is good."""
        self.newest_erasure: int | None = None
        self._lanes: dict[int, tuple[Lane, LaneFolds]] = {}

    def lane(self, ctx: Lane) -> LaneFolds:
        """The folds of a lane; new ones whenever its context is: memory does not outlive a connection."""
        with self.lock:
            known = self._lanes.get(ctx.lane)
            if known is not None and known[0] is ctx:
                return known[1]
            if known is not None:
                self.held_bytes -= known[1].held_bytes
            made = LaneFolds(self, ctx)
            self._lanes[ctx.lane] = (ctx, made)
            return made

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self._lanes.clear()
            self.held_bytes = 0


class LaneFolds:
    """The sessions of one lane, over one connection."""

    def __init__(self, shared: SessionFolds, ctx: Lane) -> None:
        self.shared = shared
        self.settings = ctx.settings
        self.fold: Fold = load_fold(ctx.settings)
        self.table = SnapshotTable(ctx.settings, self.fold.version, qualified=not ctx.rebuilding)
        self.held_bytes = 0
        self._held: OrderedDict[str, FoldedSession] = OrderedDict()
        self._messages = Messages(ctx.settings)
        self._settling = Settling(ctx.settings)
        self._erasures = Erasures(ctx.settings)
        self._saving = SnapshotSaving(self)
        self._ends: frozenset[str] = frozenset()
        self.waiting: set[str] = set()
        """Sessions whose snapshot is due, and has to wait for their parent to settle."""
        self._mark = 0
        self._asked = False

    def take(
        self,
        cur: Cursor,
        events: Sequence[Event],
        *,
        due: Callable[[FoldedSession], bool],
        ends: Collection[str],
        keep: int,
    ) -> None:
        """Fold a batch of events and save the snapshots that are due after it, in the transaction of ``cur``.

        Args:
            due: asked about each session of the batch.
            ends: the event types that end a task.
            keep: how many snapshots a session keeps.

        Raises:
            PayloadError, LedgerError: an event cannot be folded.
        """
        self._ends = frozenset(ends)
        touched: dict[str, FoldedSession] = {}
        try:
            self._asked = False
            fresh = self._fresh(cur, events)
            for event in events:
                session_id = event.session_id
                session = self._current(cur, event, session_id, fresh)
                touched[session_id] = session
                self._account(session)
                if self.shared.held_bytes > self.shared.memory_bytes:
                    self._saving.save(cur, [each for each in touched.values() if due(each)], keep)
                    for gone in self._make_room(session_id):
                        touched.pop(gone, None)
            for name in self.waiting & self._held.keys() - touched.keys():
                touched[name] = self._held[name]
            self.waiting.clear()
            self._saving.save(cur, [each for each in touched.values() if due(each)], keep)
        except BaseException:
            # The transaction will be rolled back, and one of them may have been folded halfway.
            for session_id in touched:
                self.forget(session_id)
            for event in events:
                self.forget(event.session_id)
            raise

    def mark(self, cur: Cursor) -> int:
        """Up to which seq all is settled, for statements that begin after this call. Looked up once a batch, and only
        when it is needed: it is a look at all locks of the server."""
        if not self._asked:
            self._asked = True
            self._mark = self._settling.advance(cur)
        return self._mark

    def check(self, cur: Cursor) -> None:
        """Look whether the table of snapshots can be used.

        Raises:
            ConfigError: it cannot; the hint says what to run.
        """
        self.table.check(cur)
        self.notice_erasures(cur)

    def notice_erasures(self, cur: Cursor) -> None:
        """What was folded before a session was erased holds what is gone. To be called with the lock of whoever saves,
        which an erasure takes alone."""
        newest = self._erasures.newest(cur)
        with self.shared.lock:
            if self.shared.newest_erasure != newest:
                self.shared.newest_erasure = newest
                self.shared.epoch += 1

    def forget(self, session_id: str) -> None:
        """Let go of a session."""
        gone = self._held.pop(session_id, None)
        if gone is not None:
            self._charge(-gone.memory)

    # -- one event ---------------------------------------------------------------------------------------------------

    def _current(self, cur: Cursor, event: Event, session_id: str, fresh: set[str]) -> FoldedSession:
        """The event's session with the event in it."""
        session: FoldedSession | None = self._held.get(session_id)
        if session is not None and (
            session.epoch != self.shared.epoch or session.base_offset < event.offset <= session.upto_offset
        ):
            # Held from before something was taken back, or with events whose transaction did not commit.
            self.forget(session_id)
            session = None
        if session is None:
            if session_id in fresh:
                fresh.discard(session_id)
                session = FoldedSession(session_id, self.fold.empty(), self.shared.epoch)
            else:
                session = self._load(cur, session_id, event)
        if session.others is not None and event.seq <= session.others[0] and event.offset > session.others[1]:
            # It came late for snapshots that nobody would look at otherwise.
            self._drop(cur, event)
            session.others = self.table.others(cur, session_id)
        if event.offset > session.base_offset:
            if event.seq > session.upto_seq:
                self._apply(cur, session, event, event.row[3] in _EXPANDED, len(event.row[4]))
            elif not session.holds(event.seq):
                session = self._fold_again(cur, session, event)
        session.upto_offset = max(session.upto_offset, event.offset)
        if self._held.get(session_id) is session:
            self._held.move_to_end(session_id)
        else:
            self.forget(session_id)
            self._held[session_id] = session
        return session

    def _apply(self, cur: Cursor, session: FoldedSession, event: Foldable, refers: bool, size: int) -> None:
        event_type = event.event_type
        if refers:
            parents: list[Parent] = []
            mark = self.mark(cur) if event_type == "session.forked" else 0
            event = expand(
                cur,
                self.settings,
                self.fold,
                event,
                messages=self._messages,
                snapshots=self.table,
                parents=parents,
            )
            highest = max((parent.at_seq for parent in parents), default=LOWEST)
            if highest > mark:
                session.pending_fork = highest
        self.fold.apply(session.context, event)
        session.note(event.seq, event_type, size, ends=event_type in self._ends)

    def _fold_again(self, cur: Cursor, session: FoldedSession, event: Event) -> FoldedSession:
        """The event came late: fold the session again with it."""
        self._drop(cur, event)
        made = self._load(cur, event.session_id, event, session.upto_seq)
        made.upto_offset = session.upto_offset
        return made

    def _drop(self, cur: Cursor, event: Event) -> None:
        """Drop the snapshots that lack a late event: the session's own, and those of what goes on from it."""
        dropped = self.table.drop(cur, event.session_id, event.seq)
        forks = self.table.forks(cur, event.session_id, event.seq)
        if forks:
            with self.shared.lock:
                self.shared.epoch += 1
            # Lanes that are saving a fork right now are waited for; those that come later see the epoch.
            self._saving.lock(cur, exclusive=True)
            dropped += sum(self.table.drop(cur, fork, LOWEST) for fork in forks)
        log.info(
            "seq %d of session %s came late, at offset %d: %d snapshots without it are dropped",
            event.seq,
            event.session_id,
            event.offset,
            dropped,
        )

    # -- sessions that are not held ----------------------------------------------------------------------------------

    def _fresh(self, cur: Cursor, events: Sequence[Event]) -> set[str]:
        """Those sessions that begin with their first event of this batch: there is nothing to be read of them."""
        first: dict[str, int] = {}
        for event in events:
            session_id = event.session_id
            if session_id not in first and session_id not in self._held:
                first[session_id] = event.seq
        if not first:
            return set()
        sql = self.table.sql(_FRESH, type=self.table.session_type(cur))
        cur.execute(sql, {"sessions": list(first), "seqs": list(first.values())})
        return {row[0] for row in cur.fetchall()}

    def _load(self, cur: Cursor, session_id: str, event: Event, reach: int = LOWEST) -> FoldedSession:
        """A session as the ledger has it up to ``event``, and at least up to the seq ``reach``."""
        late = False
        reach = max(reach, event.seq)
        session: FoldedSession | None = None
        for snapshot in self.table.usable(cur, session_id):
            covered = event.offset <= snapshot.upto_offset
            if covered or event.seq > snapshot.settled_seq:
                upto = snapshot.upto_seq if covered else max(reach, snapshot.upto_seq)
                session = self.read(cur, session_id, upto, snapshot)
                if session is not None:
                    break
            late = late or (not covered and event.seq <= snapshot.upto_seq)
            reach = max(reach, snapshot.upto_seq)
        if late:
            self._drop(cur, event)
        if session is None:
            session = self.read(cur, session_id, reach, None)
        assert session is not None
        session.others = self.table.others(cur, session_id)
        return session

    def load_again(self, cur: Cursor, session: FoldedSession) -> None:
        """Replace what is held of a session by what the ledger has up to the same seq by now."""
        made: FoldedSession | None = None
        for snapshot in self.table.usable(cur, session.session_id, session.upto_seq):
            made = self.read(cur, session.session_id, session.upto_seq, snapshot)
            if made is not None:
                break
        made = made or self.read(cur, session.session_id, session.upto_seq, None)
        assert made is not None
        made.upto_offset, made.memory, made.others = session.upto_offset, session.memory, session.others
        for each in fields(session):
            setattr(session, each.name, getattr(made, each.name))
        self._account(session)

    def read(self, cur: Cursor, session_id: str, upto_seq: int, snapshot: Snapshot | None) -> FoldedSession | None:
        """A session up to a seq, on top of a snapshot or from zero; ``None`` if the snapshot lacks a row."""
        session = FoldedSession(session_id, self.fold.empty(), self.shared.epoch)
        if snapshot is not None:
            session.context = snapshot.context
            session.upto_seq, session.settled_seq = snapshot.upto_seq, snapshot.settled_seq
            session.upto_offset = session.base_offset = snapshot.upto_offset
            session.text_bytes = snapshot.size
        values = {
            "session": session_id,
            "covered": session.upto_seq,
            "settled": session.settled_seq,
            "upto": upto_seq,
        }
        with streamed(cur.connection, self.table.sql(_ROWS), values) as rows:
            for row in self._covered(rows, session):
                if snapshot is not None and not session.events and len(session.young) != snapshot.unsettled:
                    return None
                self._apply(cur, session, event_of(row), row[3].encode() in _EXPANDED, len(row[4]))
        if snapshot is not None and not session.events and len(session.young) != snapshot.unsettled:
            return None
        return session

    def _covered(self, rows: Iterable[tuple[Any, ...]], session: FoldedSession) -> Iterator[tuple[Any, ...]]:
        """Note the seqs of what a snapshot covers; yield the rows after it."""
        covered = session.upto_seq
        for row in rows:
            if row[0] <= covered:
                session.young.append(row[0])
            else:
                yield row

    # -- memory ------------------------------------------------------------------------------------------------------

    def _account(self, session: FoldedSession) -> None:
        now = session.measure()
        self._charge(now - session.memory)
        session.memory = now

    def _charge(self, more: int) -> None:
        self.held_bytes += more
        with self.shared.lock:
            self.shared.held_bytes += more

    def _make_room(self, keep: str) -> list[str]:
        """Let go of the sessions that had no event for longest; return which."""
        limit = self.shared.memory_bytes * 3 // 4
        gone = []
        while self.shared.held_bytes > limit and len(self._held) > 1:
            oldest = next(iter(self._held))
            if oldest == keep:
                self._held.move_to_end(oldest)
            else:
                self.forget(oldest)
                gone.append(oldest)
        return gone
