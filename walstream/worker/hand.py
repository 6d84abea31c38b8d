"""One of a worker's hands: a thread and a connection that carry out one turn at a time.

Nothing is held in memory that counts: the job and its lease stand in the database. Whenever a connection is lost the
hand makes another one and asks there what became of its last transaction, claims as well as completions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg2

from walstream.config import Settings
from walstream.engine.event_loop import LoopThread
from walstream.engine.retry import CONFLICTS_FOR_FREE, Backoff, Fault, describe, judge
from walstream.errors import (
    ConfigError,
    Fenced,
    GiveUp,
    JobRefused,
    RetryLater,
    Unavailable,
    WalstreamError,
)
from walstream.ledger.approvals import Approvals
from walstream.ledger.fold import Context, Fold
from walstream.ledger.jobs import Jobs
from walstream.ledger.rebuild import rebuild_context
from walstream.metrics import METRICS
from walstream.source.failures import classify

from .claims import ClaimedJob, Claims, transaction
from .knocks import Knocks
from .leases import Lease, Leases
from .turn import TurnLedger

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor
    from pydantic import BaseModel

log = logging.getLogger("walstream.worker")

T = TypeVar("T")
Handler = Callable[[Context, ClaimedJob, TurnLedger], Any]

_RECONNECT: Final = Backoff(0.1, 30.0)
_BREAKS: Final = 5  # transactions of a turn that end without an answer, one after the other, before it has failed
_REFUSED_SECONDS: Final = 1.0  # the shortest pause before a job is looked at again that could not be begun


class Lost(Exception):
    """The turn is over: somebody else has the job, the worker stops, or there is nobody to write for."""


@dataclass(frozen=True)
class Workplace:
    """What all hands of a worker share.

    Attributes:
        settings: of the stream.
        agent: whose jobs are done.
        handler: what does them.
        connect: makes a hand's connection (in autocommit).
        leases: renews those of the turns.
        knocks: where hands wait for work.
        loop: runs what is async.
        fold: makes contexts.
        types: models of payloads.
        retry: pauses between attempts.
        timeout: seconds that a turn may take; ``None`` for as long as it likes.
        stopping: set once no more jobs are to be claimed.
        wake: tells workers elsewhere that an agent's job waits; those of all agents if it is given an empty name.
        end: called with what ends the worker.
    """

    settings: Settings
    agent: str
    handler: Handler
    connect: Callable[[], Connection]
    leases: Leases
    knocks: Knocks
    loop: LoopThread
    fold: Fold
    types: Mapping[str, type[BaseModel]]
    retry: Backoff
    timeout: float | None
    stopping: threading.Event
    wake: Callable[[str], None]
    end: Callable[[BaseException], None]


class Hand:
    """A thread that claims and works.

    Args:
        place: what it shares with the others.
        claims: claims in the name of this hand alone.
        name: of the thread.
    """

    def __init__(self, place: Workplace, claims: Claims, name: str) -> None:
        self._place = place
        self._claims = claims
        self._jobs = Jobs(place.settings)
        self._approvals = Approvals(place.settings)
        self._expire_at = 0.0
        self._connection: Connection | None = None
        self._lock = threading.RLock()  # a handler's own threads may append at the same time
        self._inside = False
        self._turn: Lease | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.busy = False
        self.trouble: str | None = None
        """Why it claims nothing at present; ``None`` if it could."""

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for it to end; whether it has."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        try:
            while not self._place.stopping.is_set():
                try:
                    job = self._next()
                    attempt, self.trouble = 0, None
                except (Unavailable, ConfigError) as error:
                    self.trouble = str(error)
                    if not isinstance(error, Unavailable):
                        self._place.end(error)  # a person has to change something
                        return
                    attempt += 1
                    self._rest(error, attempt)
                    continue
                if job is None:
                    self._place.knocks.wait()
                    continue
                if self._claims.more:
                    self._place.knocks.knock()  # another hand looks, while this one works
                self._work(job)
        except BaseException as error:
            self._place.end(error)
        finally:
            self._drop()

    def _next(self) -> ClaimedJob | None:
        """The next job.

        Raises:
            Unavailable: the server does not answer, or something in it fails at present.
            ConfigError: it cannot work.
        """
        pause = max(self._place.retry.pause(1), _REFUSED_SECONDS)
        try:
            if self._connection is None:
                self._connection = self._place.connect()
                left = self._claims.left(self._connection)
                if left is not None:
                    return left
            job = self._claims.next(self._connection, pause)
            if job is None and self._expire(self._connection):
                job = self._claims.next(self._connection, pause)
            return job
        except (WalstreamError, psycopg2.Error, OSError) as raised:
            error = classify(raised, doing="claiming a job")
            if self._connection is not None and (self._connection.closed or isinstance(error, Unavailable)):
                self._drop()
            if isinstance(error, ConfigError | Unavailable):
                raise error from (None if error is raised else raised)
            raise Unavailable(f"no job can be claimed at present: {error}", hint=error.hint) from raised

    def _expire(self, conn: Connection) -> bool:
        """Reject, now and then, what nobody decided in time; whether a job goes on because of that."""
        now = time.monotonic()
        if now < self._expire_at:
            return False
        self._expire_at = now + self._place.settings.poll_seconds
        return bool(self._approvals.expire(self._place.agent, on=conn))

    def _rest(self, error: Unavailable, attempt: int) -> None:
        pause = min(_RECONNECT.pause(attempt), self._place.settings.retry_cap_seconds)
        log.warning("%s; next try in %.1f s", error, pause)
        self._place.stopping.wait(pause)

    def _work(self, job: ClaimedJob) -> None:
        place = self._place
        lease = place.leases.hold(job, place.timeout)
        self.busy = True
        self._turn = lease
        self._claims.begin()
        began = time.monotonic()
        ledger = TurnLedger(place.settings, job, place.agent, lease, _Transactions(self, lease), place.types)
        outcome = "completed"
        try:
            self._call(job, ledger, lease)
            woken = self._end(lease, ledger)
        except Lost as error:
            outcome = "lost"
            _gone(lease, error)
        except Exception as error:
            outcome = "later" if isinstance(error, RetryLater) else "failed"
            self._failed(job, lease, error)
        except BaseException as error:  # SystemExit: an attempt as well, or the job would end one worker after another
            outcome = "failed"
            self._failed(job, lease, error)
            place.end(error)
        else:
            if woken is not None:
                place.wake(woken)
            log.debug("job %d (session %s) completed in %.3f s", job.job_id, job.session_id, time.monotonic() - began)
        finally:
            with self._lock:  # whatever a handler has left running does not get between the statements of the next turn
                self._turn = None
            self.busy = False
            place.leases.let_go(lease)
            METRICS.add("worker_turns_total", agent=place.agent, outcome=outcome)
            METRICS.add("worker_turn_seconds_total", time.monotonic() - began, agent=place.agent)

    def _call(self, job: ClaimedJob, ledger: TurnLedger, lease: Lease) -> None:
        place = self._place
        # It only reads, and each of its statements says by itself what it has to be consistent with.
        context = self.run(lease, lambda cur: self._context(cur.connection, job), one_statement=True)
        try:
            outcome = place.handler(context, job, ledger)
            if inspect.isawaitable(outcome):
                place.loop.run(outcome, abandoned=lambda: lease.lost is not None)
        except (concurrent.futures.CancelledError, asyncio.CancelledError) as error:
            if lease.lost is None:
                raise RuntimeError("the handler let a cancellation escape") from error  # a failure like others
            if lease.overdue:
                raise TimeoutError(f"it ran past the worker's timeout of {place.timeout:g} s") from None
            raise Lost from None
        finally:
            ledger.close()

    def _context(self, conn: Connection, job: ClaimedJob) -> Context:
        return rebuild_context(conn, job.session_id, settings=self._place.settings, fold=self._place.fold)

    def _end(self, lease: Lease, ledger: TurnLedger) -> str | None:
        tried = False

        def complete(cur: Cursor) -> str | None:
            nonlocal tried
            if tried and ledger.ended(cur.connection):
                return None
            tried = True
            return ledger.complete(cur)

        return self.run(lease, complete, one_statement=ledger.one_statement)

    def _failed(self, job: ClaimedJob, lease: Lease, error: BaseException) -> None:
        line, trace = describe(error)
        place = self._place
        later = isinstance(error, RetryLater)
        pause: float | None = place.retry.pause(job.attempts)
        if isinstance(error, RetryLater) and error.delay is not None:
            pause = error.delay
        elif isinstance(error, GiveUp):
            pause = None

        def note(cur: Cursor) -> str:
            if later:
                self._jobs.release(job, retry_after=pause, error=line, on=cur.connection)
                return "SUBMITTED"
            return self._jobs.fail(job, line, retry_after=pause, on=cur.connection)

        try:
            status = self.run(lease, note)
        except (Lost, Fenced, JobRefused) as gone:
            if isinstance(error, Fenced | JobRefused):
                _gone(lease, error)
            else:
                log.warning("job %d (session %s) failed, and is no longer this worker's: %s (%s)",
                            job.job_id, job.session_id, line, gone)  # fmt: skip
            return
        except Exception as unsaid:
            # The lease runs out, and the job is tried again: nothing is lost, it only takes longer.
            log.error("job %d (session %s) failed: %s; that could not be written down: %s",
                      job.job_id, job.session_id, line, unsaid)  # fmt: skip
            return
        if status == "SUBMITTED" and pause is not None:
            place.knocks.knock_at(time.monotonic() + pause)
        elif status == "FAILED":
            place.wake("")  # its session goes on, whoever's turn it is there
        what = f"next try in {pause:.1f} s" if status == "SUBMITTED" and pause is not None else "for good"
        log.warning("job %d (session %s), attempt %d of %d, failed, %s: %s\n%s",
                    job.job_id, job.session_id, job.attempts, job.max_delivery_attempts, what, line, trace)  # fmt: skip

    # -- transactions --------------------------------------------------------------------------------------------------

    def run(self, lease: Lease, work: Callable[[Cursor], T], *, one_statement: bool = False) -> T:
        """Run ``work`` in a transaction; again after a conflict, or on another connection if that was lost.

        Args:
            one_statement: what it writes is a single one.

        Raises:
            Lost: the lease was lost before it went through.
            Fenced: the turn is over.
            Exception: of ``work``.
        """
        attempt = conflicts = breaks = 0
        with self._lock:
            if lease is not self._turn:
                raise Fenced(
                    f"job {lease.job.job_id}: the turn is over, and this was not written",
                    hint="wait for the threads and tasks that a handler starts before it returns",
                )
            if self._inside:
                raise ConfigError(
                    "append_now was called from within the transaction that completes the job",
                    hint="there it is ledger.fenced.append(..., on=cursor), or append before the handler returns",
                )
            while True:
                try:
                    if self._connection is None:
                        self._connection = self._place.connect()
                    self._inside = True
                    with transaction(self._connection, one_statement=one_statement) as cur:
                        return work(cur)
                except Exception as raised:
                    broken = self._connection is None or bool(self._connection.closed)
                    fault = judge(raised, connection_lost=broken)
                    if fault is Fault.CONFLICT and conflicts < CONFLICTS_FOR_FREE:
                        conflicts += 1
                        continue
                    known = classify(raised, doing="writing a turn") if isinstance(raised, psycopg2.Error) else raised
                    if not (broken or isinstance(known, Unavailable)) or isinstance(known, ConfigError):
                        raise
                    self._drop()
                    breaks += self._inside
                    if breaks == _BREAKS:
                        raise  # it is not the server that is away: something in it ends the transaction each time
                    attempt += 1
                    pause = min(_RECONNECT.pause(attempt), self._place.settings.retry_cap_seconds)
                    log.warning("job %d: %s; next try in %.1f s", lease.job.job_id, known, pause)
                    self._pause_or_lose(lease, pause)
                finally:
                    self._inside = False

    def _pause_or_lose(self, lease: Lease, pause: float) -> None:
        until = time.monotonic() + pause
        while time.monotonic() < until:
            if lease.lost is not None:
                raise Lost
            time.sleep(min(0.1, pause))

    def _drop(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except psycopg2.Error:
                log.debug("closing a connection failed", exc_info=True)
            self._connection = None


def _gone(lease: Lease, error: Exception) -> None:
    log.warning("job %d (session %s) is no longer this worker's, and nothing was written: %s",
                lease.job.job_id, lease.job.session_id, lease.lost or error)  # fmt: skip


class _Transactions:
    """The transactions of one turn, on the connection of the hand that carries it out."""

    def __init__(self, hand: Hand, lease: Lease) -> None:
        self._hand = hand
        self._lease = lease

    def run(self, work: Callable[[Cursor], T]) -> T:
        return self._hand.run(self._lease, work)
