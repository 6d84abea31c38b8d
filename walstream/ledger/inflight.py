"""Tool calls that were begun and have no answer: what a crash leaves behind.

A call is in flight from its ``tool.invoked`` until a ``tool.observed`` or a ``tool.abandoned`` with its id and a higher
seq; an id is a string. That is asked of the ledger itself, by SQL over the index of the session, and not of a fold: an
application may fold as it likes, and a payload that cannot be parsed hides no call.

A fork goes on with the calls that its parent had in flight at that point. They keep the parent's idempotency key,
because they are the same call: whoever executes it second meets the first one's effect.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings, load
from walstream.errors import PayloadError, UnknownSession
from walstream.event import POSTGRES_EPOCH, parse_payload

from .erased import session_erased
from .idempotency import idempotency_key
from .stored_rows import HIGHEST, plain_cursor, statement

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

# A column of the type json may hold \u0000, and every JSON operator then refuses the whole payload. It is read as two
# characters that no text has, and put back in what is handed on.
_NUL: Final = r"\ufdd0\ufdef"
_WITHOUT_NUL: Final = (
    r"CASE WHEN e.$payload::text LIKE '%%\\u0000%%' THEN pg_catalog.regexp_replace("
    rf"e.$payload::text, '(?<!\\)((?:\\\\)*)\\u0000', '\1{_NUL.replace(chr(92), chr(92) * 2)}', 'g')::json"
    " ELSE e.$payload END"
)

# A call's id has to be a string and an attempt a positive integer, for the fold as well. No other JSON value has a text
# that looks like theirs.
_CALL_ID: Final = "CASE WHEN (($document) -> 'call_id')::text LIKE '\"%%' THEN (($document) -> 'call_id') #>> '{}' END"
_ATTEMPT: Final = (
    "CASE WHEN (($document) -> 'attempt')::text ~ '^[1-9][0-9]{0,8}$' THEN (($document) -> 'attempt')::text::bigint END"
)

_CALLS: Final = f"""
WITH tools AS (
    SELECT e.$session_id AS session_id, e.$seq AS seq, e.$event_type AS event_type, {_CALL_ID} AS call_id,
           CASE WHEN e.$event_type = 'tool.retried' THEN {_ATTEMPT} END AS attempt
      FROM $table AS e
     WHERE e.$event_type IN ('tool.invoked', 'tool.retried', 'tool.observed', 'tool.abandoned')
       AND $where
), calls AS (
    SELECT t.session_id, t.call_id,
           max(t.seq) FILTER (WHERE t.event_type = 'tool.invoked') AS invoked,
           max(t.seq) FILTER (WHERE t.event_type IN ('tool.observed', 'tool.abandoned')) AS answered,
           array_agg(ARRAY[t.seq, t.attempt] ORDER BY t.seq) FILTER (WHERE t.event_type = 'tool.retried') AS retried
      FROM tools AS t WHERE t.call_id IS NOT NULL GROUP BY t.session_id, t.call_id
)
SELECT c.session_id::text, c.call_id, c.invoked, c.answered, c.retried,
       e.$agent_id, (($document) -> 'name') #>> '{{}}', (($document) -> 'arguments')::text,
       (($document) -> 'idempotency_key') #>> '{{}}',
       CASE WHEN pg_catalog.isfinite(e.$created_at)
            THEN ((extract(epoch FROM e.$created_at) - 946684800) * 1000000)::bigint END
  FROM calls AS c LEFT JOIN $table AS e ON e.$session_id = c.session_id AND e.$seq = c.invoked
 WHERE c.invoked > c.answered OR (c.answered IS NULL AND c.invoked IS NOT NULL) OR c.call_id = ANY (%s)
 ORDER BY c.invoked"""

_KNOWN: Final = "SELECT e.$session_id::text FROM $table AS e WHERE e.$session_id = %s LIMIT 1"

# A fork is born by the last event that says so: a fold begins anew there.
_BIRTH: Final = """
SELECT e.$seq, (($document) -> 'parent_session') #>> '{}', (($document) -> 'at_seq')::text
  FROM $table AS e
 WHERE e.$session_id = %s AND e.$seq <= %s AND e.$event_type = 'session.forked' AND (($document) -> 'context') IS NULL
   AND (($document) -> 'parent_session')::text LIKE '"%%' AND (($document) -> 'at_seq')::text ~ '^-?[0-9]{1,30}$'
 ORDER BY e.$seq DESC LIMIT 1"""

_FORKS: Final = "SELECT DISTINCT e.$session_id::text FROM $table AS e WHERE e.$event_type = %s"

_ANSWER: Final = f"""
SELECT e.$seq, e.$event_type FROM $table AS e
 WHERE e.$session_id = %s AND e.$seq > %s AND e.$seq <> %s AND {_CALL_ID} = %s
   AND (e.$event_type IN ('tool.invoked', 'tool.observed', 'tool.abandoned')
        OR (e.$event_type = 'tool.retried' AND {_ATTEMPT} > %s))
 ORDER BY e.$seq LIMIT 1"""


@dataclass(frozen=True, slots=True)
class InFlightCall:
    """A tool call without an answer.

    Attributes:
        session_id: the session that waits for it.
        agent_id: who invoked it.
        call_id: its id, as the model gave it.
        name: the tool; ``None`` if the event does not say.
        arguments_text: the arguments as JSON text, exactly as they stand in the event; ``None`` if it has none.
        seq: of its ``tool.invoked``.
        attempt: 1, or what the last ``tool.retried`` says.
        idempotency_key: what every attempt has to send along.
        since: when it was invoked, by ``created_at``; ``None`` where Python cannot hold that.
        inherited_from: the session that invoked it, if this one is a fork of it.
    """

    session_id: str
    agent_id: str
    call_id: str
    name: str | None
    arguments_text: str | None
    seq: int
    attempt: int
    idempotency_key: str
    since: datetime | None
    inherited_from: str | None = None

    @property
    def arguments(self) -> Any:
        """The arguments, parsed without changing a number. ``None`` if there are none.

        Raises:
            PayloadError: they are legal JSON that cannot be parsed here; ``arguments_text`` is still good.
        """
        if self.arguments_text is None:
            return None
        try:
            return parse_payload(self.arguments_text.encode())
        except PayloadError as error:
            raise PayloadError(
                f"the arguments of tool call {self.call_id!r} (seq {self.seq} of session {self.session_id}) cannot be "
                f"parsed: {error}",
                hint="take arguments_text, which is exact",
            ) from error


def call_key(session_id: object, call_id: str) -> str:
    """The idempotency key of a tool call whose event carries none: the same wherever and whenever it is derived.

    Args:
        session_id: text or ``uuid.UUID``; a UUID written in capitals is the same session.
        call_id: has to be unique within its session. A model that uses its ids again needs ``idempotency_key`` in the
            payload of ``tool.invoked``.
    """
    text = str(session_id)
    return idempotency_key("tool", text.lower() if _UUID.fullmatch(text) else text, call_id)


def inflight(
    conn: Connection, session_id: object = None, *, settings: Settings | None = None, upto_seq: int | None = None
) -> list[InFlightCall]:
    """The tool calls that are in flight, by the seq of their invocation.

    Nothing is locked, so an answer may come at any time after. Within the caller's transaction, if it is in one;
    otherwise no transaction stays open.

    Args:
        session_id: of this session; of all sessions if not given, which reads the whole ledger.
        settings: :func:`walstream.config.load` if not given.
        upto_seq: as it was with this event; only together with a session.

    Raises:
        UnknownSession: no event has this session id.
        psycopg2.Error: of the connection.
    """
    settings = settings or load()
    with reading(conn) as cur:
        if session_id is not None:
            return calls_of(cur, settings, session_id, upto_seq)
        return _calls_of_all(cur, settings)


def calls_of(cur: Cursor, settings: Settings, session_id: object, upto_seq: int | None = None) -> list[InFlightCall]:
    """As :func:`inflight` for one session, on a cursor."""
    calls: list[InFlightCall] = []
    for part in reversed(lineage(cur, settings, session_id, upto_seq)):
        where = "e.$session_id = %s AND e.$seq <= %s"
        values: list[object] = [part.session_id, part.upto]
        if part.after is not None:
            where += " AND e.$seq > %s"
            values.append(part.after)
        found = _tools(cur, settings, where, values, [call.call_id for call in calls])
        calls = sorted(_continued(part.session_id, calls, found), key=lambda call: call.seq)
    return calls


def answer_to(cur: Cursor, settings: Settings, call: InFlightCall, *, besides: int) -> tuple[int, str] | None:
    """The first event (seq, type), other than ``besides``, by which this call is not in flight as it says any more."""
    after: int | None = call.seq
    if call.inherited_from is not None:  # its seq is of the parent, and says nothing about this session's
        after = lineage(cur, settings, call.session_id)[0].after
    values = (call.session_id, after, besides, call.call_id, call.attempt)
    cur.execute(_readable(cur, settings, _ANSWER), values)
    row = cur.fetchone()
    return None if row is None else (row[0], row[1])


class Part(NamedTuple):
    """What a session, or one that it goes on from, contributes: its events in (``after``, ``upto``].

    Attributes:
        after: of its ``session.forked``, which makes everything before it void; ``None`` if it is no fork.
    """

    session_id: str
    after: int | None
    upto: int


def known_session(cur: Cursor, settings: Settings, session_id: object) -> str:
    """The id as the ledger's column prints it.

    Raises:
        UnknownSession: no event has this session id; it says so if the session was erased.
    """
    found = _known(cur, settings, str(session_id))
    if found is None:
        erased = session_erased(cur, settings, str(session_id))
        if erased is not None:
            raise UnknownSession(
                f"session {session_id} was erased at {erased[0]} UTC: {erased[1]}",
                hint="its events are gone on purpose",
            )
        raise UnknownSession(
            f"{settings.ledger.qualified} holds no event of session {session_id}",
            hint="`walstream sessions` lists them; check `ledger` in the configuration and the database in the DSN",
        )
    return found


def _known(cur: Cursor, settings: Settings, session_id: str) -> str | None:
    try:
        cur.execute(statement(settings, _KNOWN), (session_id,))
    except psycopg2.DataError as error:
        raise UnknownSession(
            f"{session_id!r} cannot be a session id of {settings.ledger.qualified}: "
            f"{error.diag.message_primary or error}",
            hint="`walstream sessions` lists them",
        ) from None
    row = cur.fetchone()
    return None if row is None else str(row[0])


def lineage(cur: Cursor, settings: Settings, session_id: object, upto_seq: int | None = None) -> list[Part]:
    """The session and those that it goes on from, as the fold follows them.

    Raises:
        UnknownSession: no event has this session id.
    """
    session: str | None = known_session(cur, settings, session_id)
    upto = HIGHEST if upto_seq is None else upto_seq
    birth = _readable(cur, settings, _BIRTH)
    line: list[Part] = []
    while session is not None:  # a parent that was erased is declared elsewhere
        cur.execute(birth, (session, upto))
        row = cur.fetchone()
        line.append(Part(session, None if row is None else row[0], upto))
        if row is None or any(each.after == row[0] for each in line[:-1]):
            break  # the oldest; or rows that name each other as parents, of which no context can be made
        upto = min(int(row[2]), HIGHEST)
        session = None
        with contextlib.suppress(UnknownSession), reading(cur.connection) as apart:
            session = _known(apart, settings, row[1])  # rows say what they like: it may be no id at all
    return line


@contextlib.contextmanager
def reading(conn: Connection) -> Iterator[Cursor]:
    """A cursor for reads that leave the connection as they found it: an error does not abort the caller's transaction,
    and where there was none, none is left open."""
    nested = conn.info.transaction_status != TRANSACTION_STATUS_IDLE
    with plain_cursor(conn) as cur:
        if nested:
            cur.execute("SAVEPOINT walstream_reading")
        try:
            yield cur
        except BaseException:
            if nested and not conn.closed:
                cur.execute("ROLLBACK TO SAVEPOINT walstream_reading; RELEASE SAVEPOINT walstream_reading")
            raise
        else:
            if nested:
                cur.execute("RELEASE SAVEPOINT walstream_reading")
        finally:
            if not nested and not conn.closed:
                conn.rollback()


@dataclass(frozen=True, slots=True)
class _Tool:
    """What the ledger says about one call id of one session. If it was not invoked there, ``call`` is None, and
    ``retried`` has the attempts of a call that came from elsewhere."""

    call_id: str
    answered: bool
    retried: list[int | None]
    call: InFlightCall | None


def _tools(
    cur: Cursor, settings: Settings, where: str, values: Sequence[object], also: Iterable[str] = ()
) -> list[_Tool]:
    """The calls that are in flight by the rows of ``where``, and whatever these say about the ids in ``also``."""
    cur.execute(_readable(cur, settings, _CALLS.replace("$where", where)), (*values, list(also)))
    return [_tool(row) for row in cur]


def _readable(cur: Cursor, settings: Settings, template: str) -> str:
    """The statement, with payloads that JSON operators can read whatever the column's type."""
    ledger = settings.ledger
    cur.execute(
        "SELECT atttypid = 'json'::regtype FROM pg_catalog.pg_attribute WHERE attrelid = %s::regclass AND attname = %s",
        (ledger.qualified, ledger.columns.payload),
    )
    row = cur.fetchone()
    return statement(settings, template.replace("$document", _WITHOUT_NUL if row and row[0] else "e.$payload"))


def _tool(row: tuple[Any, ...]) -> _Tool:
    session, call_id, invoked, answered, retried, agent, name, arguments, key, since_us = row
    if invoked is None:
        return _Tool(call_id, answered is not None, [attempt for _, attempt in retried or ()], None)
    tries = _attempt(1, [attempt for seq, attempt in retried or () if seq > invoked])
    since = None
    if since_us is not None:
        with contextlib.suppress(OverflowError):
            since = POSTGRES_EPOCH + timedelta(microseconds=since_us)
    arguments = None if arguments is None else arguments.replace(_NUL, r"\u0000")
    found = InFlightCall(
        session, agent, call_id, name, arguments, invoked, tries, key or call_key(session, call_id), since
    )
    return _Tool(call_id, answered is not None and answered > invoked, [], found)


def _attempt(before: int, retried: Sequence[int | None]) -> int:
    """The number of the last attempt. A retry without a number is the next one."""
    for attempt in retried:
        before = before + 1 if attempt is None else attempt
    return before


def _continued(session: str, inherited: Sequence[InFlightCall], found: Sequence[_Tool]) -> list[InFlightCall]:
    """The calls in flight of a session that began with those of its parent."""
    own = {each.call_id: each for each in found}
    calls = [each.call for each in found if each.call is not None and not each.answered]
    for call in inherited:
        here = own.get(call.call_id)
        if here is None or (here.call is None and not here.answered):
            calls.append(
                replace(
                    call,
                    session_id=session,
                    attempt=_attempt(call.attempt, [] if here is None else here.retried),
                    inherited_from=call.inherited_from or call.session_id,
                )
            )
    return calls


def _calls_of_all(cur: Cursor, settings: Settings) -> list[InFlightCall]:
    found = _tools(cur, settings, "true", ())
    cur.execute(statement(settings, _FORKS), ("session.forked",))
    forks = {session for (session,) in cur}
    calls = [each.call for each in found if each.call is not None and each.call.session_id not in forks]
    for fork in sorted(forks):
        with contextlib.suppress(UnknownSession):  # its events were erased
            calls += calls_of(cur, settings, fork)
    return sorted(calls, key=lambda call: (call.seq, call.session_id))
