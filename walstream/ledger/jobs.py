"""Jobs: whose turn it is, in which session, and by which token.

This is a thin layer over SQL functions that any language can call (``sql/jobs.sql``, docs/handoffs.md): the state
machine is theirs. Like an append, each call works in the transaction that the caller has open, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from walstream.config import Settings, channel, load
from walstream.errors import LedgerError

from .adapters import Rows, Statement
from .fold import FoldEvent
from .function_calls import call, statement
from .job import LEASE_SECONDS, ROW, STATUSES, Job, Taken, job_of, job_of_text, lease_of, name_of


class Jobs:
    """The jobs of one ledger. Holds no connection and may be shared by threads.

    ``on`` is, in every call, what :meth:`walstream.Ledger.append` takes: a psycopg2 or psycopg connection or cursor, a
    SQLAlchemy ``Session`` or ``Connection``, a Django connection.

    Every call may raise ``ConfigError`` (walstream is not installed there, or this login may not call it),
    ``TypeError`` (``on`` is none of these), and whatever else the driver raises. Those of a worker raise ``Fenced`` if
    their token is stale, ``JobRefused`` if the job is not in a state that allows it, and ``LedgerError`` if there is no
    such job. After any of them the transaction has to be rolled back.

    Args:
        settings: where the ledger is; from environment and ``walstream.toml`` if not given.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or load()

    def submit(
        self,
        session_id: str | UUID,
        agent_id: str,
        *,
        event_seq: int | None = None,
        priority: int = 0,
        hops: int = 0,
        max_delivery_attempts: int = 5,
        not_before: datetime | None = None,
        on: Any,
    ) -> tuple[int, bool]:
        """Submit a job; return its number, and whether it was made now.

        An event has one job at the most: the second time, the first one's number comes back.

        Args:
            not_before: an aware time before which nobody claims it.

        Raises:
            ValueError: ``not_before`` has no offset.
            LedgerError: the session's id is none that the ledger takes.
        """
        if not_before is not None and not_before.utcoffset() is None:
            raise ValueError("not_before needs an offset: datetime.now(UTC) has one")
        due = None if not_before is None else not_before.isoformat()
        values = (str(session_id), agent_id, event_seq, priority, hops, max_delivery_attempts, due)
        ((job_id, created),) = self._call(_SUBMIT, values, on, "submit_job", f"session {session_id}")
        return int(job_id), bool(created)

    def claim(
        self,
        agent_id: str,
        owner: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        per_session: bool = True,
        concurrency: int | None = None,
        on: Any,
    ) -> Job | None:
        """Claim the next job of an agent; ``None`` if there is none to be had now. Commit, and the lease is yours.

        Args:
            owner: who claims, for people to read: host and process.
            per_session: leave a job alone while another one of its session is at work, awaits a person, or is older
                and waits.
            concurrency: at most so many leases of the agent may be alive; any number if not given.
        """
        values = (agent_id, owner, lease_seconds, per_session, concurrency)
        rows = self._call(_CLAIM, values, on, "claim_job", f"agent {agent_id}")
        return job_of(rows[0]) if rows else None

    def take(
        self,
        agent_id: str,
        owner: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        per_session: bool = True,
        concurrency: int | None = None,
        retry_after: float = 1.0,
        on: Any,
    ) -> Taken | None:
        """:meth:`claim`, :meth:`begin`, and the ``handoff.received`` that says so in the session, in one call: what a
        worker begins with.

        Args:
            retry_after: seconds until a job comes again that cannot be begun: a partition is missing, for instance. It
                is given back, and does not keep others waiting.
        """
        values = (agent_id, owner, lease_seconds, per_session, concurrency, retry_after)
        rows = self._call(_TAKE, values, on, "take_job", f"agent {agent_id}")
        if not rows:
            return None
        text, session, agent, event_type, payload, refused, more = rows[0]
        taken = job_of_text(text)
        handoff = None
        if payload is not None and taken.event_seq is not None:
            handoff = FoldEvent(taken.event_seq, session, agent, event_type, payload.encode())
        return Taken(taken, handoff, refused, more)

    def begin(self, job: Job | int, token: int | None = None, *, on: Any) -> None:
        """Say that work on a claimed job has begun.

        Args:
            job: as claimed, or its number.
            token: the fencing token of the claim; that of ``job`` if not given. (The same for the calls below.)
        """
        self._held("begin_job", job, token, on)

    def renew(self, job: Job | int, token: int | None = None, *, lease_seconds: float = LEASE_SECONDS, on: Any) -> bool:
        """Renew the lease; ``False`` if it is lost, and the worker should stop.

        From a connection of its own: while a transaction that appends in the job's name is open, this waits for it, and
        nobody can claim the job.
        """
        ((renewed,),) = self._call(_RENEW, (*lease_of(job, token), lease_seconds), on, "renew_job", name_of(job))
        return bool(renewed)

    def complete(self, job: Job | int, token: int | None = None, *, on: Any) -> str | None:
        """Say that the job is done, in the transaction that holds what was done.

        Returns:
            The agent whose turn it is now in the session, for :meth:`wake` after the commit; ``None`` if nobody waits.
        """
        ((following,),) = self._call(_COMPLETE, lease_of(job, token), on, "complete_job", name_of(job))
        return None if following is None else str(following)

    def finish(self, job: Job | int, events: str | None = None, token: int | None = None, *, on: Any) -> str | None:
        """:meth:`complete`, together with the events of the turn, in one call.

        Args:
            events: as :meth:`walstream.Ledger.batch_text` makes it.

        Returns:
            As :meth:`complete`.
        """
        values = (*lease_of(job, token), events)
        ((following,),) = self._call(_FINISH, values, on, "finish_job", name_of(job))
        return None if following is None else str(following)

    def fail(
        self, job: Job | int, error: str, token: int | None = None, *, retry_after: float | None = None, on: Any
    ) -> str:
        """Say that it did not work; return the status: ``SUBMITTED``, or ``FAILED`` if no attempt is left.

        Args:
            retry_after: seconds until the next try; without it the job fails for good.
        """
        ((status,),) = self._call(_FAIL, (*lease_of(job, token), error, retry_after), on, "fail_job", name_of(job))
        return str(status)

    def release(
        self,
        job: Job | int,
        token: int | None = None,
        *,
        retry_after: float | None = None,
        error: str | None = None,
        on: Any,
    ) -> None:
        """Give the job back without counting the attempt: for another worker, or because what it needs is away.

        Args:
            retry_after: seconds until the next try; it may be claimed at once if not given.
            error: why, for people to read.
        """
        values = (*lease_of(job, token), retry_after, error)
        self._call(_RELEASE, values, on, "release_job", name_of(job))

    def await_human(self, job: Job | int, token: int | None = None, *, on: Any) -> None:
        """Leave the job until a person has decided. No lease runs meanwhile."""
        self._held("await_human", job, token, on)

    def resume(self, job_id: int, *, on: Any) -> None:
        """A person has decided: any worker may have the job again."""
        self._moved("resume_job", job_id, on)

    def cancel(self, job_id: int, reason: str | None = None, *, on: Any) -> None:
        """Cancel an unfinished job. Who is at work on it can write nothing in its name from then on."""
        self._call(_CANCEL, (job_id, reason), on, "cancel_job", name_of(job_id))

    def retry(self, job_id: int, *, on: Any) -> None:
        """Submit a job again that failed for good or was canceled."""
        self._moved("retry_job", job_id, on)

    @property
    def channel(self) -> str:
        """The channel of NOTIFY on which workers hear that a job waits; what is said there is the agent's name."""
        return channel(self._settings.namespace, "jobs")

    def wake(self, agent_id: str | None = None, *, on: Any) -> None:
        """Wake the workers of an agent (of all agents if none is named), who otherwise look about once a second.

        To be called after the transaction that submitted the job has committed, in another one that does nothing else:
        while it commits, nobody else in the cluster can notify.
        """
        self._call(_WAKE, (agent_id,), on, "wake_workers", f"agent {agent_id}")

    def get(self, job_id: int, *, on: Any) -> Job:
        """How a job stands.

        Raises:
            LedgerError: there is no such job.
        """
        rows = self._call(_GET, (job_id,), on, "claim_job", name_of(job_id))
        if not rows:
            raise LedgerError(f"there is no job {job_id}", hint="`walstream jobs list` lists them")
        return job_of(rows[0])

    def find(
        self,
        *,
        statuses: Sequence[str] | None = None,
        agent_id: str | None = None,
        session_id: str | UUID | None = None,
        limit: int = 100,
        on: Any,
    ) -> list[Job]:
        """The newest jobs first, all or those with one of these statuses, of this agent, in this session.

        Raises:
            ValueError: there is no such status.
        """
        for status in statuses or ():
            if status not in STATUSES:
                raise ValueError(f"a job has no status {status!r}: they are {', '.join(STATUSES)}")
        wanted = None if statuses is None else "{" + ",".join(statuses) + "}"
        session = None if session_id is None else str(session_id)
        values = (wanted, wanted, agent_id, agent_id, session, session, limit)
        return [job_of(row) for row in self._call(_FIND, values, on, "claim_job", "jobs")]

    def _held(self, function: str, job: Job | int, token: int | None, on: Any) -> None:
        self._call(_HELD[function], lease_of(job, token), on, function, name_of(job))

    def _moved(self, function: str, job_id: int, on: Any) -> None:
        self._call(_MOVED[function], (job_id,), on, function, name_of(job_id))

    def _call(self, sql: Statement, values: tuple[Any, ...], on: Any, function: str, what: str) -> Rows:
        return call(self._settings, sql, values, on, function=function, what=what, doing="work on jobs")


_SUBMIT: Final = statement(
    "SELECT s.job_id, s.created FROM $namespace.submit_job("
    "session_id => ?text, agent_id => ?text, event_seq => ?int8, priority => ?int4, hops => ?int4,"
    " max_delivery_attempts => ?int4, not_before => ?timestamptz) AS s"
)
_CLAIM: Final = statement(f"SELECT {ROW} FROM $namespace.claim_job(?text, ?text, ?float8, ?bool, ?int4) AS j")
_TAKE: Final = statement(
    # The job as one text: this is called often, and 17 columns take longer to plan than to read.
    "SELECT CAST(pg_catalog.to_jsonb(t.job) AS pg_catalog.text), t.from_session, t.from_agent, t.event_type, t.payload,"
    " t.refused, t.more FROM $namespace.take_job(?text, ?text, ?float8, ?bool, ?int4, ?float8) AS t"
)
_RENEW: Final = statement("SELECT $namespace.renew_job(?int8, ?int8, ?float8)")
_FAIL: Final = statement("SELECT $namespace.fail_job(?int8, ?int8, ?text, ?float8)")
_COMPLETE: Final = statement("SELECT $namespace.complete_job(?int8, ?int8)")
_FINISH: Final = statement("SELECT $namespace.finish_job(?int8, ?int8, ?jsonb)")
_RELEASE: Final = statement("SELECT $namespace.release_job(?int8, ?int8, ?float8, ?text)")
_WAKE: Final = statement("SELECT $namespace.wake_workers(?text)")
_CANCEL: Final = statement("SELECT $namespace.cancel_job(?int8, ?text)")
_HELD: Final = {name: statement(f"SELECT $namespace.{name}(?int8, ?int8)") for name in ("begin_job", "await_human")}
_MOVED: Final = {name: statement(f"SELECT $namespace.{name}(?int8)") for name in ("resume_job", "retry_job")}
_GET: Final = statement(f"SELECT {ROW} FROM $jobs AS j WHERE j.job_id = ?int8")
_FIND: Final = statement(
    f"SELECT {ROW} FROM $jobs AS j WHERE (?text[] IS NULL OR j.status = ANY (?text[]))"
    " AND (?text IS NULL OR j.agent_id = ?text) AND (?text IS NULL OR CAST(j.session_id AS pg_catalog.text) = ?text)"
    " ORDER BY j.job_id DESC LIMIT ?int8"
)
