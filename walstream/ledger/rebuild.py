"""An agent's context, made again from the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings, load
from walstream.errors import LedgerError

from .erased import is_erased
from .fold import Context, Fold, Foldable, FoldEvent, load_fold
from .snapshots import SnapshotTable
from .stored_rows import Messages, Parent, of_session, parent_of, plain_cursor, stored_rows


def rebuild_context(
    conn: Connection,
    session_id: str,
    upto_seq: int | None = None,
    *,
    settings: Settings | None = None,
    fold: Fold | None = None,
    snapshots: bool = True,
) -> Context:
    """What a session's events make of an agent's context: ``messages``, ``pending_tools``, ``handoffs``, ``outcome``.

    The same whether snapshots are there or not, also for events that no consumer has seen yet. A session without events
    has an empty context.

    Args:
        conn: a psycopg2 connection. Outside of autocommit it is in a transaction afterwards, like after any SELECT.
        session_id: as the ledger has it.
        upto_seq: leave later events out.
        settings: those of ``walstream.toml`` and the environment if not given.
        fold: the one that the settings name if not given.
        snapshots: whether to begin from the newest usable snapshot; otherwise from the first event.

    Raises:
        UnknownSession: the id is none that the ledger's column could hold.
        LedgerError: what an event refers to is gone.
        PayloadError: an event cannot be folded; names its seq. Up to the seq before it, the session can be rebuilt.
    """
    settings = settings or load()
    fold = fold or load_fold(settings)
    table = SnapshotTable(settings, fold.version) if snapshots else None
    return context_at(conn, settings, fold, str(session_id), upto_seq, snapshots=table)


def context_at(
    conn: Connection,
    settings: Settings,
    fold: Fold,
    session_id: str,
    upto_seq: int | None,
    *,
    of: Foldable | None = None,
    snapshots: SnapshotTable | None = None,
    parents: list[Parent] | None = None,
) -> Context:
    """As :func:`rebuild_context`. The line of parents may be of any length.

    Args:
        snapshots: where to begin from; from the first event if not given.
        parents: takes the parents whose rows were read.
        of: the ``session.forked`` whose parent this is; a parent without any event is then an error.
    """
    with of_session(session_id), contextlib.ExitStack() as opened, plain_cursor(conn) as cur:
        messages = Messages(settings)

        def begin(session_id: str, upto_seq: int | None, of: Foldable | None) -> _Session:
            if snapshots is not None:
                for snapshot in snapshots.usable(cur, session_id, upto_seq):
                    with contextlib.ExitStack() as reading:
                        rows = reading.enter_context(snapshots.rows_after(conn, session_id, snapshot, upto_seq))
                        if rows is not None:
                            opened.push(reading.pop_all())
                            return _Session(of, snapshot.context, rows, anything=True)
            stored = stored_rows(conn, settings, session_id, upto_seq=upto_seq)
            opened.callback(stored.close)
            return _Session(of, fold.empty(), stored)

        line = [begin(session_id, upto_seq, of)]  # each waits for the context of the next
        while True:
            session = line[-1]
            for event in session.rows:
                session.anything = True
                parent = parent_of(event)
                if parent is not None:
                    if any(each.of is not None and each.of.seq == event.seq for each in line):
                        raise _ring(event)
                    if parents is not None:
                        parents.append(parent)
                    line.append(begin(*parent, event))
                    break
                fold.apply(session.context, messages.put_back(cur, event))
            else:
                session.require_events(cur, settings)
                line.pop()
                if not line:
                    return session.context
                assert session.of is not None
                fold.apply(line[-1].context, with_parent(session.of, session.context))


@dataclass(slots=True)
class _Session:
    """One of a line of sessions that go on from each other, while it is folded."""

    of: Foldable | None
    context: Context
    rows: Iterator[FoldEvent]
    anything: bool = False

    def require_events(self, cur: Cursor, settings: Settings) -> None:
        """A fork needs its parent, unless that was erased: then it goes on from nothing."""
        if self.of is not None and not self.anything and not is_erased(cur, settings, self.of.payload["at_seq"]):
            raise parent_gone(self.of)


def with_parent(event: Foldable, context: Context) -> FoldEvent:
    """The ``session.forked`` with its parent's context."""
    payload = {**event.payload, "context": context}
    return FoldEvent.of(event.seq, event.session_id, event.agent_id, event.event_type, payload)


def parent_gone(event: Foldable) -> LedgerError:
    """The error for a fork whose parent has no events."""
    payload = event.payload
    return LedgerError(
        f"session {event.session_id} goes on from session {payload['parent_session']} at seq {payload['at_seq']}"
        f" (its event with seq {event.seq} says so), and the ledger has no event of that session up to there",
        hint="a fork cannot be rebuilt without its parent: restore the parent's events",
    )


def _ring(event: Foldable) -> LedgerError:
    return LedgerError(
        f"session {event.session_id} goes on from itself: its session.forked with seq {event.seq} names a parent whose"
        " events, up to there, come back to it",
        hint="only rows that were not written by walstream's fork can say so; such a session has no context",
    )
