"""One turn: what a handler may do in the name of its job, and what is committed together with the job's end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel

from walstream.config import Settings
from walstream.errors import ConfigError
from walstream.event import parse_payload
from walstream.ledger.approvals import Approval, Approvals
from walstream.ledger.jobs import Jobs
from walstream.ledger.ledger import MAX_BATCH_BYTES, Appended, Draft, Ledger

from .claims import ClaimedJob
from .leases import Lease

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

T = TypeVar("T")

_LARGEST_BATCH: Final = MAX_BATCH_BYTES // 2  # characters of payloads; what is around them has room
_XID: Final = "SELECT pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text"


class Transactions(Protocol):
    """Where a turn's transactions run: on the connection of whoever carries the turn out."""

    def run(self, work: Callable[[Cursor], T]) -> T:
        """Run ``work`` in a transaction of its own, again if the connection is lost: it has to be repeatable."""


class TurnLedger:
    """The ledger as a handler gets it: bound to its job, and to the lease on it.

    What is appended here is in the name of the worker's agent and in the job's session, unless said otherwise. Once
    another worker has the job, nothing of this turn can be written any more: the server refuses it
    (:class:`~walstream.Fenced`).

    Attributes:
        fenced: a :class:`walstream.Ledger` with the job's token, for appends in transactions of the handler's own, and
            for ``walstream.recover(..., ledger=...)``.
    """

    def __init__(
        self,
        settings: Settings,
        job: ClaimedJob,
        agent: str,
        lease: Lease,
        transactions: Transactions,
        types: Mapping[str, type[BaseModel]],
    ) -> None:
        self.fenced = Ledger(settings, types=types, job=job.job_id, fencing_token=job.fencing_token)
        self._jobs = Jobs(settings)
        self._approvals = Approvals(settings)
        self._job = job
        self._agent = agent
        self._lease = lease
        self._transactions = transactions
        self._drafts: list[tuple[Draft, int]] = []
        self._functions: list[Callable[[Cursor], Any]] = []
        self._request: dict[str, Any] | None = None
        self._written = 0
        self._size = 0
        self._over = False
        self._guard = threading.Lock()  # a handler's own threads may append at the same time

    @property
    def lost(self) -> str | None:
        """Why the handler should stop: its lease is gone, the worker stops, or the turn's time is up; else ``None``.

        A long loop in a plain handler should look here now and then. An async handler is cancelled instead.
        """
        return self._lease.lost

    def append(
        self,
        event_type: str,
        payload: Any,
        *,
        session_id: str | UUID | None = None,
        agent_id: str | None = None,
        key: str | None = None,
        store_messages: bool = False,
        replace_invalid: bool = False,
    ) -> None:
        """Append an event together with the job's completion; if the turn fails, it never was.

        It is checked now, and what happens to ``payload`` afterwards does not matter. The arguments are those of
        :meth:`walstream.Ledger.append`.

        Raises:
            PayloadError: as for :meth:`walstream.Ledger.append`.
            ConfigError: the handler has returned, and it would not be written.
        """
        text = self.fenced.payload_text(event_type, payload, replace_invalid=replace_invalid)
        draft = Draft(
            session_id or self._job.session_id,
            agent_id or self._agent,
            event_type,
            parse_payload(text.encode()),
            key,
            store_messages,
        )
        with self._guard:
            self._check_open("append")
            self._drafts.append((draft, len(text)))
            self._size += len(text)

    def append_now(
        self,
        event_type: str,
        payload: Any,
        *,
        session_id: str | UUID | None = None,
        agent_id: str | None = None,
        key: str | None = None,
        store_messages: bool = False,
        replace_invalid: bool = False,
    ) -> Appended:
        """Append an event and commit it at once: what has to be in the ledger before something is done, such as
        ``tool.invoked``, or what others should see while the turn goes on.

        It stays, whatever becomes of the turn. Should the connection break meanwhile it is tried again, and written
        once. In an async handler it blocks the loop for a round trip: ``await asyncio.to_thread(ledger.append_now, …)``
        does not.

        Raises:
            Fenced: the lease is lost: nothing was written, and the handler should end.
            PayloadError, LedgerError, ConfigError, psycopg2.Error: as for :meth:`walstream.Ledger.append`.
        """
        self._written += 1
        job = self._job
        named = key or f"turn:{job.job_id}:{job.fencing_token}:{self._written}"

        def write(cur: Cursor) -> Appended:
            return self.fenced.append(
                session_id or job.session_id,
                agent_id or self._agent,
                event_type,
                payload,
                key=named,
                store_messages=store_messages,
                replace_invalid=replace_invalid,
                on=cur.connection,
            )

        return self._transactions.run(write)

    def hand_off(
        self,
        to: str,
        message: Any = None,
        *,
        session_id: str | UUID | None = None,
        priority: int | None = None,
        **members: Any,
    ) -> None:
        """Hand a task to another agent when the job is completed: a ``handoff.emitted`` that the router turns into a
        job.

        Args:
            to: the agent.
            message: what it is told.
            session_id: the session that it is to work in; this one if not given.
            priority: of its job.
            members: further members of the payload.
        """
        payload: dict[str, Any] = {**members, "to": to}
        if message is not None:
            payload["message"] = message
        if session_id is not None:
            payload["session_id"] = str(session_id)
        if priority is not None:
            payload["priority"] = priority
        self.append("handoff.emitted", payload)

    def on_completion(self, function: Callable[[Cursor], Any]) -> None:
        """Call ``function`` with a cursor (psycopg2) of the transaction that completes the job: what it writes is
        written exactly once.

        It has to be quick, must not commit, and is called again if the connection is lost before the commit.
        """
        with self._guard:
            self._check_open("on_completion")
            self._functions.append(function)

    @property
    def approval(self) -> Approval | None:
        """What a person decided on the newest request of this job; ``None`` if it never asked.

        It is in the context as well, under ``approvals``; here it is what counts (docs/handoffs.md, "Approvals").
        """
        return self._transactions.run(lambda cur: self._approvals.newest(self._job.job_id, on=cur.connection))

    def request_approval(
        self, action: Any, *, deadline: datetime | timedelta | None = None, reason: str | None = None
    ) -> None:
        """Ask a person, and leave the job to him instead of completing it: ``approval.requested`` with the staged
        action, committed together with what the turn appended. Return from the handler after it.

        Nothing is held meanwhile, however long it takes. Then the job is taken again, by any worker of the agent, and
        the handler finds the decision in :attr:`approval`.

        Args:
            action: what is to be approved: JSON.
            deadline: an aware time, or so much time from now, after which the request is rejected.
            reason: why it is asked.

        Raises:
            ValueError: this turn has asked already, there is no action, or the deadline has no offset.
            PayloadError: ``jsonb`` cannot hold the action.
        """
        if self._request is not None:
            raise ValueError("this turn has asked for an approval already: one at a time")
        if action is None:
            raise ValueError("there has to be an action to be approved")
        if isinstance(deadline, datetime) and deadline.utcoffset() is None:
            raise ValueError("a deadline needs an offset: datetime.now(UTC) has one")
        kept = parse_payload(self.fenced.payload_text("approval.action", action).encode())
        with self._guard:
            self._check_open("request_approval")
            self._request = {"action": kept, "deadline": deadline, "reason": reason}

    def _check_open(self, what: str) -> None:
        if self._over:
            raise ConfigError(
                f"{what} was called when the handler has returned: it would not be written",
                hint="wait for the threads and tasks that a handler starts before it returns; a function given to"
                " on_completion writes with its cursor, events by ledger.fenced.append(..., on=cursor)",
            )

    # -- called by the worker ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """The handler has returned: nothing more is kept for the completion."""
        with self._guard:
            self._over = True

    @property
    def one_statement(self) -> bool:
        """Whether :meth:`complete` is a single statement."""
        return self._request is None and not self._functions and self._size <= _LARGEST_BATCH

    def complete(self, cur: Cursor) -> str | None:
        """Write everything that was kept, and complete the job, or leave it to a person, in the transaction of ``cur``.

        Returns:
            The agent whose turn it is next in the session, if anybody waits there.

        Raises:
            Fenced: the lease is lost. Nothing of it may be committed.
            Exception: of a function or a statement.
        """
        if self.one_statement:
            events = self.fenced.batch_text(draft for draft, _ in self._drafts) if self._drafts else None
            return self._jobs.finish(self._job, events, on=cur.connection)
        self._write_kept(cur)
        if self._request is not None:
            self._approvals.request(self._job, **self._request, on=cur.connection)
            return None
        return self._jobs.complete(self._job, on=cur.connection)

    def ended(self, conn: Connection) -> bool:
        """Whether a completion that was not heard of went through: the token is ours, and the job no longer at work."""
        job = self._jobs.get(self._job.job_id, on=conn)
        return job.fencing_token == self._job.fencing_token and job.status not in ("DELIVERED", "IN_PROGRESS")

    def _write_kept(self, cur: Cursor) -> None:
        for batch in self._batches():
            self.fenced.append_batch(batch, on=cur.connection)
        if not self._functions:
            return
        cur.execute("SET LOCAL row_security = on")  # readers of ours go without; the application's statements do not
        cur.execute("SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text")
        before = cur.fetchone()
        for function in self._functions:
            function(cur)
        cur.execute(_XID)
        if cur.fetchone() != before:
            raise ConfigError(
                "a function given to on_completion has committed, or rolled back, the transaction of the completion",
                hint="leave that to the worker: job, events and effects commit together",
            )

    def _batches(self) -> Iterator[list[Draft]]:
        batch: list[Draft] = []
        size = 0
        for draft, length in self._drafts:
            if batch and size + length > _LARGEST_BATCH:
                yield batch
                batch, size = [], 0
            batch.append(draft)
            size += length
        if batch:
            yield batch
