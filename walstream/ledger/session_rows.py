"""A session's events as a fold needs them: what they refer to is put in.

Two kinds of events refer to something. A ``context.loaded`` may name its messages by digest, and gets them back; a
``session.forked`` names a parent, and gets the parent's context at that point, which may come from a fork as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings

from .fold import Fold, Foldable, load_fold
from .rebuild import context_at, with_parent
from .snapshots import SnapshotTable
from .stored_rows import Messages, Parent, parent_of, plain_cursor, stored_rows


def read_session(
    conn: Connection,
    settings: Settings,
    session_id: str,
    *,
    after: int | None = None,
    upto_seq: int | None = None,
    fold: Fold | None = None,
) -> Iterator[Foldable]:
    """A session's events in the order of seq, ready to be folded.

    They come from one snapshot of the database, and never more than some hundred are held here.

    Args:
        conn: a psycopg2 connection. Outside of autocommit it is in a transaction afterwards, like after any SELECT.
        after, upto_seq: only events with a higher seq, and with no higher one.
        fold: makes the context of a parent; the one that the settings name if not given.

    Raises:
        UnknownSession: the id is none that the ledger's column could hold.
        LedgerError: what an event refers to is gone, or a column that an event needs is NULL.
        PayloadError: a parent cannot be folded.
    """
    fold = fold or load_fold(settings)
    messages, snapshots = Messages(settings), SnapshotTable(settings, fold.version)
    with plain_cursor(conn) as cur:
        for event in stored_rows(conn, settings, session_id, after=after, upto_seq=upto_seq):
            yield expand(cur, settings, fold, event, messages=messages, snapshots=snapshots)


def expand(
    cur: Cursor,
    settings: Settings,
    fold: Fold,
    event: Foldable,
    *,
    messages: Messages | None = None,
    snapshots: SnapshotTable | None = None,
    parents: list[Parent] | None = None,
) -> Foldable:
    """One event with what it refers to; most are returned as they are.

    Args:
        messages: keeps stored messages from one event to the next.
        snapshots: where a parent may begin from; from its first event if not given.
        parents: takes the parents that were read: the event's own, and whatever that goes on from.

    Raises:
        LedgerError: what it refers to is gone.
        PayloadError: the parent cannot be folded.
    """
    parent = parent_of(event)
    if parent is None:
        return (messages or Messages(settings)).put_back(cur, event)
    parents = [] if parents is None else parents
    parents.append(parent)
    context = context_at(cur.connection, settings, fold, *parent, of=event, snapshots=snapshots, parents=parents)
    return with_parent(event, context)
