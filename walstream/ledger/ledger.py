"""Appending events to the ledger, inside the caller's own transaction, so that event and side effect commit together.

This is a thin layer over SQL functions that any language can call (``sql/functions.sql``): it checks a payload before
it costs a transaction, and says in our words what the functions refuse. It commits nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from pydantic import BaseModel

from walstream.config import Settings, load
from walstream.errors import PayloadError
from walstream.event import parse_payload

from .adapters import Statement, encoding_named, execute
from .function_calls import named
from .json_values import check_word, json_text
from .refusals import refusal
from .taxonomy import TAXONOMY, payload_value

Durability = Literal["on", "local", "off"]

MAX_KEY_BYTES: Final = 1024
"""Longest idempotency key: what an index can hold, with room to spare."""

MAX_BATCH_BYTES: Final = 40 * 1024 * 1024
"""Longest text of a batch: what it becomes is one ``jsonb`` value, of at most 256 MB and up to six times its text."""

_TIME: Final = "pg_catalog.to_char(pg_catalog.timezone('UTC', a.created_at), 'YYYY-MM-DD HH24:MI:SS.US')"


class Appended(NamedTuple):
    """What became of an event.

    Attributes:
        seq: its number in the ledger.
        appended: it was written now. Otherwise its key was known, and this is the event that the key stands for.
        created_at: when that transaction began, by the server's clock; ``None`` if the event is no longer there.
        stored: if it was not written now, the payload that is in the ledger, to compare with.
    """

    seq: int
    appended: bool
    created_at: datetime | None
    stored: Any = None


class Forked(NamedTuple):
    """A session that goes on from another one.

    Attributes:
        session: the new session's id.
        seq: of its first event, ``session.forked``.
    """

    session: str
    seq: int


@dataclass(frozen=True, slots=True)
class Draft:
    """An event of a batch, before it is in the ledger. The fields are those of :meth:`Ledger.append`."""

    session_id: str | UUID
    agent_id: str
    event_type: str
    payload: Any
    key: str | None = None
    store_messages: bool = False


class Ledger:
    """Appends to one ledger. Holds no connection and may be shared by threads.

    Args:
        settings: where the ledger is; from environment and ``walstream.toml`` if not given.
        types: a model for each event type whose payloads are to be checked. Types without one are plain JSON.
        job, fencing_token: the job that this worker has claimed, and the token that it got with it. Once another worker
            has claimed the job anew, every append is refused (:class:`~walstream.errors.Fenced`).
        replace_invalid: replace what ``jsonb`` cannot hold instead of refusing it, in every payload
            (:func:`~walstream.ledger.json_values.json_text` says by what).

    Raises:
        ConfigError: the settings do not fit.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        types: Mapping[str, type[BaseModel]] = TAXONOMY,
        job: int | None = None,
        fencing_token: int | None = None,
        replace_invalid: bool = False,
    ) -> None:
        self._settings = settings or load()
        self._types = types
        self._job = job
        self._token = fencing_token
        self._replace = replace_invalid

    def append(
        self,
        session_id: str | UUID,
        agent_id: str,
        event_type: str,
        payload: Any,
        *,
        key: str | None = None,
        durability: Durability | None = None,
        store_messages: bool = False,
        replace_invalid: bool = False,
        on: Any,
    ) -> Appended:
        """Append one event in the transaction that is open on ``on``. It is there once the caller has committed.

        The session is locked until then, so that its events become visible in the order of their seqs: others who
        append to it wait. Who appends to several sessions in one transaction should do so with :meth:`append_batch`.

        Args:
            session_id: a UUID, or whatever text the ledger's column takes.
            payload: JSON (see :mod:`walstream.ledger.json_values`), or an instance of a model.
            key: with the same key, a session gets one event only; further appends return the first one.
            durability: ``synchronous_commit`` for the whole transaction: ``"on"`` waits until it is durable (on the
                standbys too, if they are synchronous), ``"local"`` for this server's disk only, ``"off"`` not at all
                (a crash of the server may lose it). Of several appends the most demanding one decides; ``None`` asks
                for what the transaction had.
            store_messages: store each distinct message of a ``context.loaded`` once, and their digests in the event.
            replace_invalid: as in the constructor, for this payload.
            on: a psycopg2 or psycopg connection or cursor, a SQLAlchemy ``Session`` or ``Connection``, a Django
                connection.

        Raises:
            PayloadError: the payload does not fit its type, or ``jsonb`` cannot hold it. Nothing was sent.
            Fenced: the fencing token is stale. Nothing was written; roll back and stop.
            LedgerError: there is no such job, or the session's id is none that the ledger takes.
            ConfigError: walstream is not installed, or this role may not append.
            TypeError, ValueError: an argument is not what it has to be. Nothing was sent.
            Exception: any other error of the driver comes through as it is.
        """
        session = _session(session_id)
        text = self._event(Draft(session_id, agent_id, event_type, payload, key, store_messages), replace_invalid)
        values = (session, agent_id, event_type, text, key, self._job, self._token, _durability(durability))
        (row,) = self._call(_APPEND, (*values, store_messages), on, "append", f"session {session}")
        return _appended(row)

    def append_batch(
        self,
        events: Iterable[Draft],
        *,
        durability: Durability | None = None,
        replace_invalid: bool = False,
        on: Any,
    ) -> list[Appended]:
        """Append several events in one statement, in the order in which they stand; all of them, or none.

        The locks of all their sessions are taken first and in one order: batches never wait for each other in a ring.

        Returns:
            What became of each, in the same order.

        Raises:
            PayloadError: as for :meth:`append`, with the event's place; or the batch is too long.
            Fenced, LedgerError, ConfigError, TypeError, ValueError, Exception: as for :meth:`append`.
        """
        drafts = list(events)
        if not drafts:
            return []
        text = self.batch_text(drafts, replace_invalid=replace_invalid)
        rows = self._call(
            _BATCH, (text, self._job, self._token, _durability(durability)), on, "append_batch", "a batch"
        )
        return [_appended(row) for row in sorted(rows, key=lambda row: int(row[4]))]

    def fork(
        self,
        session_id: str | UUID,
        at_seq: int,
        agent_id: str,
        *,
        new_session: str | UUID | None = None,
        on: Any,
    ) -> Forked:
        """Begin a session that goes on from another one, as that was after ``at_seq``. No event is copied.

        Args:
            session_id: the parent.
            at_seq: its last event that counts; the last one before that if there is none with this number.
            agent_id: who forks.
            new_session: the new session's id; a random UUID if not given.

        Raises:
            LedgerError: the parent has no event so early, or the new session has events already; or no such job.
            Fenced, ConfigError, TypeError, Exception: as for :meth:`append`.
        """
        new = None if new_session is None else _session(new_session)
        values = (_session(session_id), at_seq, check_word(agent_id, "agent_id"), new, self._job, self._token)
        (row,) = self._call(_FORK, values, on, "fork", f"session {values[0]}")
        return Forked(str(row[0]), int(row[1]))

    def find(self, session_id: str | UUID, key: str, *, on: Any) -> Appended | None:
        """The event that a key stands for, without appending anything; ``None`` if it was not used.

        For who does not know whether an append went through. (To append again with the same key does as well.)

        Raises:
            LedgerError, ConfigError, TypeError, Exception: as for :meth:`append`.
        """
        session = _session(session_id)
        rows = self._call(_FIND, (session, _key(key)), on, "appended", f"session {session}")
        return _appended(rows[0]) if rows else None

    def payload_text(self, event_type: str, payload: Any, *, replace_invalid: bool = False) -> str:
        """The JSON text of a payload, checked like that of an append: for who calls the SQL function himself.

        Raises:
            PayloadError: as for :meth:`append`.
        """
        value = payload_value(check_word(event_type, "event_type"), payload, self._types)
        return json_text(value, replace=replace_invalid or self._replace)

    def batch_text(self, events: Iterable[Draft], *, replace_invalid: bool = False) -> str:
        """The text of a batch, checked like that of :meth:`append_batch`: for who calls the SQL function himself.

        Raises:
            PayloadError, TypeError, ValueError: as for :meth:`append_batch`.
        """
        texts = []
        for place, draft in enumerate(events):
            try:
                texts.append(_member(draft, self._event(draft, replace_invalid)))
            except PayloadError as error:
                raise PayloadError(f"event {place + 1} of the batch: {error}", hint=error.hint) from error
        text = f"[{','.join(texts)}]"
        if len(text) > MAX_BATCH_BYTES:
            raise PayloadError(
                f"a batch of {len(texts)} events has {len(text)} characters; the most is {MAX_BATCH_BYTES}",
                hint="append it in several batches, which may share one transaction",
            )
        return text

    def _event(self, draft: Draft, replace_invalid: bool) -> str:
        """Check everything about an event; return its payload's text."""
        _session(draft.session_id)
        check_word(draft.agent_id, "agent_id")
        if draft.key is not None:
            _key(draft.key)
        if draft.store_messages and draft.event_type != "context.loaded":
            raise PayloadError(
                f"messages are stored by digest for context.loaded, not for {draft.event_type}",
                hint="leave store_messages out",
            )
        return self.payload_text(draft.event_type, draft.payload, replace_invalid=replace_invalid)

    def _call(
        self, statement: Statement, values: tuple[Any, ...], on: Any, function: str, what: str
    ) -> list[tuple[Any, ...]]:
        try:
            with encoding_named():
                return execute(on, named(self._settings, statement), values)
        except Exception as error:
            refused = refusal(error, self._settings.namespace, function, what)
            if refused is None:
                raise
            raise refused from error


def _session(value: str | UUID) -> str:
    if isinstance(value, UUID):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(f"a session's id is a str or a UUID, not {type(value).__name__}")
    return check_word(value, "session_id")


def _key(value: str) -> str:
    if not 1 <= len(check_word(value, "key").encode()) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes: walstream.idempotency_key makes one of anything")
    return value


def _durability(value: str | None) -> str | None:
    if value not in (None, "on", "local", "off"):
        raise ValueError(f"durability is 'on', 'local', 'off' or None, not {value!r}")
    return value


def _member(draft: Draft, payload: str) -> str:
    more = {"key": draft.key} if draft.key is not None else {}
    head = json_text(
        {
            "session_id": _session(draft.session_id),
            "agent_id": draft.agent_id,
            "event_type": draft.event_type,
            **more,
            "store_messages": draft.store_messages,
        }
    )
    return f'{head[:-1]},"payload":{payload}}}'


def _appended(row: tuple[Any, ...]) -> Appended:
    seq, appended, created_at, stored = row[:4]
    return Appended(
        int(seq),
        bool(appended),
        _time(created_at),
        None if stored is None else parse_payload(str(stored).encode()),
    )


def _time(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:  # infinity, or a year that Python does not know: set by a trigger
        return None


def _statement(sql: str) -> Statement:
    """``name:type`` becomes a place for a value of that type, passed by name."""
    return Statement(tuple(sql.split("?")))


def _argument(name: str, kind: str) -> str:
    # The type is said because some drivers send one of their own with a value; its schema, because a search_path may
    # hold another type of that name.
    return f"{name} => CAST(? AS pg_catalog.{kind})"


def _arguments(**kinds: str) -> str:
    return ", ".join(_argument(name, kind) for name, kind in kinds.items())


_JOB: Final = {"job_id": "int8", "fencing_token": "int8", "durability": "text"}
_APPEND: Final = _statement(
    f"SELECT a.seq, a.appended, {_TIME}, CAST(a.stored AS pg_catalog.text) FROM $namespace.append("
    + _arguments(session_id="text", agent_id="text", event_type="text", payload="jsonb", key="text", **_JOB)
    + f", {_argument('store_messages', 'bool')}) AS a"
)
_BATCH: Final = _statement(
    f"SELECT a.seq, a.appended, {_TIME}, CAST(a.stored AS pg_catalog.text), a.place FROM $namespace.append_batch("
    + _arguments(events="jsonb", **_JOB)
    + ") AS a"
)
_FORK: Final = _statement(
    "SELECT a.session, a.seq FROM $namespace.fork("
    + _arguments(
        parent_id="text", at_seq="int8", agent_id="text", session_id="text", job_id="int8", fencing_token="int8"
    )
    + ") AS a"
)
_FIND: Final = _statement(
    f"SELECT a.seq, false, {_TIME}, CAST(a.stored AS pg_catalog.text) FROM $namespace.appended("
    + _arguments(session_id="text", key="text")
    + ") AS a"
)
