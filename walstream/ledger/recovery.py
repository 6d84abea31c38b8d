"""Recovery: what becomes of the tool calls that were in flight when a worker died.

Who recovers a session holds its lock, a session-level advisory lock on his own connection: a second worker is told who
has it, and the server frees it with the connection, so nothing has to expire after ``kill -9``. It is another lock than
the one that appends take, so a late result can be written while somebody recovers.

The lock says who may work; it proves nothing about what was written before it was lost. So every attempt is an event
with a key of its own (call and attempt number), written at most once, and written under the lock that all appends to
the session take: whoever comes second learns it before he executes anything (docs/adr/0011).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings, load
from walstream.errors import CallSettled, ConfigError, RecoveryBusy

from .fold import Context, Fold
from .idempotency import idempotency_key
from .inflight import InFlightCall, answer_to, calls_of, known_session, reading
from .ledger import Ledger
from .rebuild import rebuild_context
from .stored_rows import plain_cursor

_PAUSE: Final = 0.05  # seconds between two tries to get the lock

# A bigint as advisory lock shows in pg_locks as its two halves and objsubid 1 (documentation, 54.12).
_HOLDERS: Final = """
SELECT l.pid, a.application_name, a.usename::text, l.pid = pg_catalog.pg_backend_pid()
  FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
   AND l.classid::bigint = (%(key)s::bigint >> 32) & 4294967295 AND l.objid::bigint = %(key)s::bigint & 4294967295"""

# The server counts: a connection that holds the lock already would get it again, and let a second recovery begin.
_TAKE: Final = f"""
SELECT CASE WHEN EXISTS (SELECT FROM ({_HOLDERS}) AS h WHERE h.pid = pg_catalog.pg_backend_pid()) THEN false
            ELSE pg_catalog.pg_try_advisory_lock(%(key)s::bigint) END"""


class Recovery:
    """The recovery of one session, as :func:`recover` makes it. Use it as a context manager."""

    def __init__(
        self,
        conn: Connection,
        session_id: object,
        *,
        settings: Settings,
        agent_id: str | None,
        ledger: Ledger | None,
        fold: Fold | None,
        wait: float,
    ) -> None:
        self._conn = conn
        self._asked = session_id
        self._settings = settings
        self._agent = agent_id
        self._ledger = ledger or Ledger(settings)
        self._fold = fold
        self._wait = wait
        self._key: int | None = None
        self._calls: tuple[InFlightCall, ...] = ()
        self.session_id = str(session_id)

    def __enter__(self) -> Recovery:
        with reading(self._conn) as cur:
            self.session_id = known_session(cur, self._settings, self._asked)
            self._lock(cur)
        try:
            # Listed anew, by a transaction that began after the lock was taken: the one before may have done it all.
            with reading(self._conn) as cur:
                self._calls = tuple(calls_of(cur, self._settings, self.session_id))
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    @property
    def calls(self) -> tuple[InFlightCall, ...]:
        """The calls that were in flight when the lock was taken, by the seq of their invocation."""
        return self._calls

    @property
    def context(self) -> Context:
        """The session's context, rebuilt each time it is asked for.

        Raises:
            PayloadError: an event that the fold reads cannot be parsed.
        """
        with reading(self._conn):  # or the connection would sit in a transaction while a model thinks
            return rebuild_context(self._conn, self.session_id, settings=self._settings, fold=self._fold)

    def retry(self, call: InFlightCall) -> InFlightCall:
        """Record that the call is tried again, as ``tool.retried``; return it with the number of this attempt.

        Commit before you execute it: what is executed has to be in the ledger first. Outside of a transaction, in
        autocommit, it is committed when this returns.

        Raises:
            CallSettled: it was answered or abandoned since it was listed, or somebody recorded this attempt before.
                Nothing was written; do not execute it.
            Fenced: the ledger that ``recover`` was given has a stale fencing token.
            ConfigError: the caller's transaction is not READ COMMITTED.
        """
        again = replace(call, attempt=call.attempt + 1)
        payload: dict[str, Any] = {
            "call_id": call.call_id,
            "attempt": again.attempt,
            "idempotency_key": call.idempotency_key,
        }
        if call.name is not None:
            payload["name"] = call.name
        self._record(
            call, "tool.retried", payload, idempotency_key("tool.retried", call.seq, again.attempt, call.call_id)
        )
        return again

    def abandon(self, call: InFlightCall, reason: str) -> None:
        """Record that the call is given up, as ``tool.abandoned``: the context answers it with ``reason``.

        Raises:
            CallSettled: it was answered or abandoned since it was listed, or somebody tried it again. Nothing was
                written.
            Fenced, ConfigError: as for :meth:`retry`.
        """
        payload = {"call_id": call.call_id, "reason": reason}
        self._record(
            call, "tool.abandoned", payload, idempotency_key("tool.abandoned", call.seq, call.attempt, call.call_id)
        )

    def _record(self, call: InFlightCall, event_type: str, payload: dict[str, Any], key: str) -> None:
        if self._key is None:
            raise RuntimeError("a recovery works inside of its `with` block only")
        with _writing(self._conn) as cur:
            cur.execute("SELECT pg_catalog.current_setting('transaction_isolation')")
            ((isolation,),) = cur.fetchall()
            if isolation not in ("read committed", "read uncommitted"):
                raise ConfigError(
                    f"session {self.session_id} cannot be recovered in a transaction that is {isolation.upper()}: it"
                    " would not see a result that came meanwhile",
                    hint="recover in READ COMMITTED, or on a connection in autocommit",
                )
            # First the append, which takes the lock that every append to the session takes, and then the look: what
            # came between a look and an append would not be seen. If it was in vain, the savepoint takes it back.
            done = self._ledger.append(
                self.session_id, self._agent or call.agent_id, event_type, payload, key=key, on=cur
            )
            if not done.appended:
                raise CallSettled(
                    f"tool call {call.call_id!r} of session {self.session_id}: {event_type} is in the ledger already, "
                    f"as seq {done.seq}",
                    hint="do not execute it; recover the session anew to see how its calls stand",
                )
            settled_by = answer_to(cur, self._settings, call, besides=done.seq)
            if settled_by is not None:
                raise CallSettled(
                    f"tool call {call.call_id!r} of session {self.session_id} is not in flight any more as attempt "
                    f"{call.attempt}: seq {settled_by[0]} is {settled_by[1]}",
                    hint="do not execute it; recover the session anew to see how its calls stand",
                )

    def _lock(self, cur: Cursor) -> None:
        cur.execute(
            "SELECT pg_catalog.hashtextextended(%s, pg_catalog.hashtextextended(%s, 0))",
            (self.session_id, f"walstream recovery: {self._settings.namespace}"),
        )
        ((key,),) = cur.fetchall()
        until = time.monotonic() + self._wait
        while True:
            cur.execute(_TAKE, {"key": key})
            ((taken,),) = cur.fetchall()
            if taken:
                self._key = int(key)
                return
            cur.execute("SELECT pg_catalog.pg_stat_clear_snapshot()")
            cur.execute(_HOLDERS, {"key": key})
            holders = cur.fetchall()
            if holders and time.monotonic() >= until:
                raise _busy(self.session_id, holders)
            time.sleep(_PAUSE if holders else 0)  # without one it has just been given back

    def _unlock(self) -> None:
        key, self._key = self._key, None
        if key is None or self._conn.closed:
            return  # the server let go of the lock when the connection ended
        if self._conn.info.transaction_status == TRANSACTION_STATUS_INERROR:
            self._conn.rollback()  # in an aborted transaction the lock could not be given back
        with reading(self._conn) as cur:
            cur.execute("SELECT pg_catalog.pg_advisory_unlock(%s)", (key,))


def recover(
    conn: Connection,
    session_id: object,
    *,
    settings: Settings | None = None,
    agent_id: str | None = None,
    ledger: Ledger | None = None,
    fold: Fold | None = None,
    wait: float = 0,
) -> Recovery:
    """Recover a session: ``with recover(conn, session_id) as recovery: ...``.

    Inside of the block nobody else recovers this session, so a worker that stays inside while it works has it to
    itself. The lock belongs to the connection (of its own, or from a pooler in session mode): it ends with the block or
    with the connection, whichever is first. Nothing is committed behind the caller's back; a transaction that is
    aborted when the block ends is rolled back.

    Args:
        conn: a psycopg2 connection, in autocommit or not.
        settings: :func:`walstream.config.load` if not given.
        agent_id: in whose name retries are recorded; that of the call if not given.
        ledger: appends through this one, which may carry a fencing token.
        fold: for ``recovery.context``; the configuration's if not given.
        wait: seconds to wait for somebody else who has the session.

    Raises (when the block is entered):
        UnknownSession: no event has this session id.
        RecoveryBusy: somebody else has it; the message says who.
        psycopg2.Error: of the connection.
    """
    return Recovery(
        conn, session_id, settings=settings or load(), agent_id=agent_id, ledger=ledger, fold=fold, wait=wait
    )


def _busy(session_id: str, holders: list[tuple[Any, ...]]) -> RecoveryBusy:
    pid, application, role, ours = holders[0]
    if ours:
        return RecoveryBusy(
            f"session {session_id} is being recovered on this very connection",
            hint="leave the other `with recover(...)` block first, or use a connection of its own",
        )
    return RecoveryBusy(
        f"session {session_id} is being recovered by process {pid} of the server"
        f" ({application or 'without application_name'}{f', role {role}' if role else ''})",
        hint="try again later; the lock is free as soon as that connection ends",
    )


@contextlib.contextmanager
def _writing(conn: Connection) -> Iterator[Cursor]:
    """A cursor whose writes are all there or not at all: within the caller's transaction by a savepoint, in autocommit
    by a transaction of their own."""
    alone = conn.autocommit and conn.info.transaction_status == TRANSACTION_STATUS_IDLE
    with plain_cursor(conn) as cur:
        # Whatever the role's default is: the look has to see what was committed while the append waited for its lock.
        cur.execute("BEGIN ISOLATION LEVEL READ COMMITTED" if alone else "SAVEPOINT walstream_recovery")
        try:
            yield cur
        except BaseException:
            if not conn.closed:
                undo = "ROLLBACK TO SAVEPOINT walstream_recovery; RELEASE SAVEPOINT walstream_recovery"
                cur.execute("ROLLBACK" if alone else undo)
            raise
        cur.execute("COMMIT" if alone else "RELEASE SAVEPOINT walstream_recovery")
