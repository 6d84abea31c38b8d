"""A session's rows as they stand in the ledger, and what some of them refer to."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings
from walstream.errors import LedgerError, PayloadError, UnknownSession
from walstream.event import ERASED_PAYLOAD

from .erased import is_erased
from .fold import Foldable, FoldEvent
from .schema import fill, parameter_names

_FETCH: Final = 500  # rows of one round trip
_FEW: Final = 100  # rows that are not worth a cursor on the server
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_CACHED_BYTES: Final = 4 * 1024 * 1024
_numbers = itertools.count(1)

HIGHEST: Final = (1 << 63) - 1
"""No seq is higher."""

ROW: Final = "$seq, $session_id::text, $agent_id::text, $event_type::text, $payload::text"
"""The columns of which :func:`event_of` makes an event."""

_ROWS: Final = f"SELECT {ROW} FROM $table WHERE $session_id = %(session)s"
_MESSAGES: Final = """SELECT encode(digest, 'hex'), message::text FROM $namespace.messages
 WHERE session_id = %(session)s AND digest IN (SELECT decode(d, 'hex') FROM unnest(%(digests)s::text[]) AS d)"""


class Parent(NamedTuple):
    """From where a forked session goes on."""

    session_id: str
    at_seq: int


def statement(settings: Settings, template: str) -> str:
    """Put the names of the configuration into SQL that is executed with parameters (a ``%`` in a name is doubled)."""
    return fill(template, parameter_names(settings))


def plain_cursor(conn: Connection) -> Cursor:
    """A cursor that yields tuples, whatever kind the caller's connection makes."""
    return conn.cursor(cursor_factory=psycopg2.extensions.cursor)


def event_of(row: Sequence[Any]) -> FoldEvent:
    """The event of a row of :data:`ROW`.

    Raises:
        LedgerError: a column that an event needs is NULL.
    """
    seq, session, agent, event_type, payload = row
    if agent is None or event_type is None or payload is None:
        raise LedgerError(
            f"the row with seq {seq} of session {session} has NULL in a column that an event needs",
            hint="give the row a value and set the column NOT NULL, or map another one in walstream.toml",
        )
    return FoldEvent(int(seq), session, agent, event_type, payload.encode())


@contextlib.contextmanager
def streamed(conn: Connection, sql: str, values: dict[str, Any]) -> Iterator[Iterator[tuple[Any, ...]]]:
    """The rows of one statement, of which never more than some hundred are in memory here.

    Args:
        sql: a SELECT that ends with its ORDER BY.
    """
    # Most are few: they come in one round trip, where a cursor on the server takes four.
    with plain_cursor(conn) as first:
        first.execute(f"{sql} LIMIT {_FEW + 1}", values)
        few = first.fetchall()
    if len(few) <= _FEW:
        yield iter(few)
        return
    del few  # all of them from one snapshot of the database: it begins anew
    # Outside of a transaction a portal lives only as long as its statement; WITH HOLD keeps the result, on the server.
    cur = conn.cursor(
        f"walstream_rows_{next(_numbers)}", cursor_factory=psycopg2.extensions.cursor, withhold=bool(conn.autocommit)
    )
    cur.itersize = _FETCH
    cur.execute(sql, values)
    try:
        yield _fetched(cur)
    except BaseException:
        with contextlib.suppress(psycopg2.Error):  # it must not take the place of what went wrong
            cur.close()
        raise
    cur.close()


def _fetched(cur: Cursor) -> Iterator[tuple[Any, ...]]:
    while rows := cur.fetchmany(_FETCH):
        yield from rows


def stored_rows(
    conn: Connection, settings: Settings, session_id: str, *, after: int | None = None, upto_seq: int | None = None
) -> Generator[FoldEvent, None, None]:
    """A session's events in the order of seq, all from one snapshot of the database, as they are stored.

    Raises:
        UnknownSession: the id is none that the ledger's column could hold.
        LedgerError: a column that an event needs is NULL.
    """
    after_seq = "" if after is None else " AND $seq > %(after)s"
    upto = "" if upto_seq is None else " AND $seq <= %(upto)s"
    sql = statement(settings, f"{_ROWS}{after_seq}{upto} ORDER BY $seq")
    with of_session(session_id), streamed(conn, sql, {"session": session_id, "after": after, "upto": upto_seq}) as rows:
        for row in rows:
            yield event_of(row)


@contextlib.contextmanager
def of_session(session_id: str) -> Iterator[None]:
    """Says which session it was whose id the ledger's column cannot hold."""
    try:
        yield
    except psycopg2.errors.InvalidTextRepresentation as error:
        raise UnknownSession(f"{session_id!r} is no session id of this ledger: {str(error).splitlines()[0]}") from error


def parent_of(event: Foldable) -> Parent | None:
    """The parent that a ``session.forked`` names and whose context it needs; ``None`` for every other event."""
    if event.event_type != "session.forked":
        return None
    try:
        payload = event.payload
    except PayloadError:
        return None  # for the fold to say
    if not isinstance(payload, dict) or "context" in payload:
        return None
    parent, at_seq = payload.get("parent_session"), payload.get("at_seq")
    if not isinstance(parent, str) or not isinstance(at_seq, int) or isinstance(at_seq, bool):
        return None
    # Not limited to what is before the fork: where sessions keep numbers in stock, its own seq may be lower.
    return Parent(parent, min(at_seq, HIGHEST))


class Messages:
    """Puts stored messages back into the windows that name them by digest.

    One window has most messages in common with the one before: the last ones (some megabytes) are kept.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sql = statement(settings, _MESSAGES)
        self._kept: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def put_back(self, cur: Cursor, event: Foldable) -> Foldable:
        """The event with its ``messages``, if it is a ``context.loaded`` that has ``message_digests`` in their stead.

        Raises:
            LedgerError: a message is not stored; names session and seq.
        """
        digests = _digests_of(event)
        if digests is None:
            return event
        try:
            found = self._fetch(cur, event, digests)
        except LedgerError:
            if is_erased(cur, self._settings, event.seq):  # after it was read, or it comes from a buffer
                return FoldEvent(event.seq, event.session_id, event.agent_id, event.event_type, ERASED_PAYLOAD)
            raise
        payload = {name: value for name, value in event.payload.items() if name != "message_digests"}
        payload["messages"] = [found[digest] for digest in digests]
        return FoldEvent.of(event.seq, event.session_id, event.agent_id, event.event_type, payload)

    def _fetch(self, cur: Cursor, event: Foldable, digests: Sequence[str]) -> dict[str, Any]:
        session = event.session_id
        found: dict[str, Any] = {}
        for digest in digests:
            kept = self._kept.get((session, digest))
            if kept is not None:
                self._kept.move_to_end((session, digest))
                found[digest] = kept[0]
        wanted = sorted({digest for digest in digests if digest not in found})
        if wanted:
            cur.execute(self._sql, {"session": session, "digests": wanted})
            for digest, text in cur.fetchall():
                # Through an event, so that it is parsed like every payload.
                message = FoldEvent(event.seq, session, "", "", text.encode()).payload
                found[digest] = message
                self._keep((session, digest), message, len(text))
        lacking = [digest for digest in wanted if digest not in found]
        if lacking:
            raise LedgerError(
                f"the {event.event_type} with seq {event.seq} of session {session} names {len(lacking)} messages that"
                f" are not stored, the first with the digest {lacking[0]}",
                hint="were rows of walstream's table `messages` deleted? Restore them: their digests say which",
            )
        return found

    def _keep(self, key: tuple[str, str], message: Any, size: int) -> None:
        self._kept[key] = (message, size)
        self._bytes += size
        while self._bytes > _CACHED_BYTES and len(self._kept) > 1:
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= gone


def _digests_of(event: Foldable) -> list[str] | None:
    if event.event_type != "context.loaded":
        return None
    try:
        payload = event.payload
    except PayloadError:
        return None  # for the fold to say
    if not isinstance(payload, dict) or "messages" in payload:
        return None
    digests = payload.get("message_digests")
    if not isinstance(digests, list) or not _all_digests(digests):
        return None
    return digests


def _all_digests(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in values)
