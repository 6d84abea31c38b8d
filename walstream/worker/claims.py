"""Claiming: a job, the lease on it, and the event that says so, in one transaction."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import psycopg2

from walstream.config import Settings
from walstream.ledger.fold import FoldEvent
from walstream.ledger.job import Job
from walstream.ledger.jobs import Jobs
from walstream.ledger.stored_rows import ROW, event_of, statement

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

log = logging.getLogger("walstream.worker")

_REFUSED_IN_A_ROW: Final = 100  # then it is time to see whether the worker is to stop
_EVENT: Final = f"SELECT {ROW} FROM $table WHERE $seq = %s"
_OURS: Final = """
SELECT j.job_id FROM $jobs AS j
 WHERE j.agent_id = %s AND j.status IN ('DELIVERED', 'IN_PROGRESS') AND j.lease_owner = %s
 ORDER BY j.job_id LIMIT 1"""


@dataclass(frozen=True, slots=True)
class ClaimedJob(Job):
    """The job that a handler works on: a :class:`walstream.Job` with the handoff that it came from.

    Attributes:
        handoff: the event (``seq``, ``session_id``, ``agent_id``, ``event_type``, ``payload``). ``None`` if the job
            came from no event, or the event is no longer in the ledger.
    """

    handoff: FoldEvent | None = None


class Claims:
    """Claims the jobs of one agent.

    Args:
        settings: of the stream.
        agent: whose jobs.
        owner: who claims. Has to be nobody else's name: by it a claim is found again whose commit was not heard of.
        lease_seconds, per_session, concurrency: as for :meth:`walstream.Jobs.claim`.

    Attributes:
        more: when the last job was taken, others of the agent waited.
    """

    def __init__(
        self,
        settings: Settings,
        agent: str,
        owner: str,
        *,
        lease_seconds: float,
        per_session: bool,
        concurrency: int | None,
    ) -> None:
        self._settings = settings
        self._agent = agent
        self._name = owner
        self._taken = 0
        self._lease_seconds = lease_seconds
        self._per_session = per_session
        self._concurrency = concurrency
        self._jobs = Jobs(settings)
        self.more = False

    def next(self, conn: Connection, pause: float) -> ClaimedJob | None:
        """Take the next job; ``None`` if there is none to be had.

        Args:
            conn: in autocommit: it is one statement.
            pause: seconds until a job is tried again that could not be begun.

        Raises:
            WalstreamError, psycopg2.Error: nothing was claimed, or (the connection was lost) it is not known.
        """
        for _ in range(_REFUSED_IN_A_ROW):
            taken = self._jobs.take(
                self._agent,
                self._owner,
                lease_seconds=self._lease_seconds,
                per_session=self._per_session,
                concurrency=self._concurrency,
                retry_after=pause,
                on=conn,
            )
            if taken is None:
                return None
            self.more = taken.more
            if taken.refused is None:
                return _with(taken.job, taken.handoff)
            log.error(
                "job %d (session %s) cannot be begun, next try in %.0f s: %s",
                *(taken.job.job_id, taken.job.session_id, pause, taken.refused),
            )
        return None

    def begin(self) -> None:
        """The turn of the job begins: it is not :meth:`left` any more, because two turns of one token must not be."""
        self._taken += 1

    @property
    def _owner(self) -> str:
        return f"{self._name}/{self._taken}"

    def left(self, conn: Connection) -> ClaimedJob | None:
        """The job that this owner took before its connection was lost, so that it did not hear of it."""
        with transaction(conn) as cur:
            cur.execute(statement(self._settings, _OURS), (self._agent, self._owner))
            row = cur.fetchone()
            if row is None:
                return None
            job = self._jobs.get(int(row[0]), on=conn)
            if not self._jobs.renew(job, lease_seconds=self._lease_seconds, on=conn):
                return None
            return _with(job, self._handoff(cur, job))

    def _handoff(self, cur: Cursor, job: Job) -> FoldEvent | None:
        if job.event_seq is None:
            return None
        cur.execute(statement(self._settings, _EVENT), (job.event_seq,))
        row = cur.fetchone()
        return None if row is None else event_of(row)


def _with(job: Job, handoff: FoldEvent | None) -> ClaimedJob:
    copied: dict[str, Any] = {field.name: getattr(job, field.name) for field in fields(Job)}
    return ClaimedJob(**copied, handoff=handoff)


@contextlib.contextmanager
def transaction(conn: Connection, *, one_statement: bool = False) -> Iterator[Cursor]:
    """One transaction on a connection in autocommit: committed at the end, rolled back if anything is raised.

    Args:
        one_statement: no more than that is to come, which is a transaction by itself and saves two round trips.
    """
    try:
        with conn.cursor() as cur:
            if not one_statement:
                cur.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            yield cur
            if not one_statement:
                cur.execute("COMMIT")
    except BaseException:
        try:
            with conn.cursor() as cur:
                cur.execute("ROLLBACK")
        except psycopg2.Error:
            conn.close()  # a connection that cannot roll back is gone
        raise
