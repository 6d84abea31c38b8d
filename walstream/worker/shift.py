"""Everything of a worker that runs between its start and its stop: hands, leases, and who wakes whom."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2
from pydantic import BaseModel

from walstream.config import Settings
from walstream.engine.event_loop import LoopThread
from walstream.engine.leadership import owner_name
from walstream.engine.retry import Backoff
from walstream.errors import Fenced, JobRefused, LedgerError, WalstreamError
from walstream.ledger.fold import load_fold
from walstream.ledger.jobs import Jobs
from walstream.order.wake import Listener, Notifier
from walstream.source.connection import connect, watch_answers
from walstream.source.failures import classify

from .claims import Claims
from .hand import Hand, Handler, Workplace
from .knocks import Knocks
from .leases import Leases

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.worker")


@dataclass(frozen=True)
class Options:
    """What a worker was made with. See :class:`walstream.Worker` for their meaning."""

    agent: str
    concurrency: int
    agent_concurrency: int | None
    per_session: bool
    lease_seconds: float
    timeout: float | None
    retry: Backoff
    types: Mapping[str, type[BaseModel]]


class Shift:
    """One run of a worker.

    Args:
        options: of the worker.
        settings: of the stream.
        handler: what does the jobs.
        end: called with what ends the worker.

    Raises:
        ConfigError: the configuration's fold cannot be loaded.
    """

    def __init__(
        self, options: Options, settings: Settings, handler: Handler, end: Callable[[BaseException], None]
    ) -> None:
        self._options = options
        self._settings = settings
        self._stopping = threading.Event()
        self._jobs = Jobs(settings)
        lease = options.lease_seconds
        self._leases = Leases(
            # It waits neither for a turn's own transaction nor for a server that hangs: others' leases are due as well.
            lambda: connect_plainly(
                settings, "leases", lock_timeout="500ms", statement_timeout=_milliseconds(lease / 3)
            ),
            self._jobs,
            lease,
        )
        self._knocks = Knocks(
            Listener(
                lambda: connect_plainly(settings, "wake"),
                settings.namespace,
                settings.poll_seconds,
                channel=self._jobs.channel,
                payloads=(options.agent, ""),
            )
        )
        self._loop = LoopThread(f"walstream-{options.agent}-loop")
        self._notifier = Notifier(lambda: connect_plainly(settings, "announce"), settings.namespace)
        place = Workplace(
            settings=settings,
            agent=options.agent,
            handler=handler,
            connect=lambda: _connect_hand(settings, lease),
            leases=self._leases,
            knocks=self._knocks,
            loop=self._loop,
            fold=load_fold(settings),
            types=options.types,
            retry=options.retry,
            timeout=options.timeout,
            stopping=self._stopping,
            wake=lambda agent: self._notifier.notify(self._jobs.channel, agent),
            end=end,
        )
        self._owner = owner_name()
        self._hands = [
            Hand(place, self._claims(f"{self._owner}/{number}"), f"walstream-{options.agent}-{number}")
            for number in range(options.concurrency)
        ]

    @property
    def hands(self) -> Sequence[Hand]:
        """Who works here."""
        return self._hands

    def start(self) -> None:
        """Start all threads."""
        watch_answers()
        log.info(
            "working for agent %r as %s, with %d hands and leases of %g s",
            *(self._options.agent, self._owner, self._options.concurrency, self._options.lease_seconds),
        )
        self._leases.start()
        self._knocks.start()
        for hand in self._hands:
            hand.start()

    def stop(self) -> None:
        """Let turns end within ``drain_seconds``, give back what is left, and end all threads."""
        self._stopping.set()
        self._knocks.stop()
        until = time.monotonic() + self._settings.drain_seconds
        busy = [hand for hand in self._hands if not hand.join(until - time.monotonic())]
        if busy:
            self._give_back()
            until = time.monotonic() + 3.0
            hung = sum(not hand.join(until - time.monotonic()) for hand in busy)
            if hung:
                log.error("%d turns go on and are left behind; what they still write is refused", hung)
        self._leases.stop()
        self._notifier.close()
        self._loop.stop()

    def _claims(self, owner: str) -> Claims:
        options = self._options
        return Claims(
            self._settings,
            options.agent,
            owner,
            lease_seconds=options.lease_seconds,
            per_session=options.per_session,
            concurrency=options.agent_concurrency,
        )

    def _give_back(self) -> None:
        """Give the jobs of turns that did not end in time to whoever comes next."""
        held = self._leases.held()
        log.warning(
            "%d turns did not end within %g s; their jobs are given back", len(held), self._settings.drain_seconds
        )
        try:
            with contextlib.closing(connect_plainly(self._settings, "stop", lock_timeout="500ms")) as conn:
                for lease in held:
                    # Before the turn is told: what it still writes after that is refused.
                    try:
                        self._jobs.release(lease.job, on=conn)
                    except psycopg2.errors.LockNotAvailable:
                        log.warning("job %d waits until its lease runs out: it is locked", lease.job.job_id)
                    except (Fenced, JobRefused, LedgerError):
                        pass  # it has just ended after all
                    lease.lose("the worker stops")
                self._jobs.wake(self._options.agent, on=conn)
        except (WalstreamError, psycopg2.Error) as error:
            log.warning("they wait until their leases run out: %s", classify(error, doing="giving jobs back"))
        for lease in held:
            lease.lose("the worker stops")


def connect_plainly(settings: Settings, role: str, **options: str) -> Connection:
    """A connection in autocommit for whatever is not a turn.

    Raises:
        WalstreamError: see :func:`walstream.source.connection.connect`.
    """
    return connect(
        settings.require_dsn(),
        application_name=f"walstream:{settings.namespace}:{role}",
        connect_timeout=settings.connect_timeout,
        options=options,
    )


def _connect_hand(settings: Settings, lease_seconds: float) -> Connection:
    """The connection of a hand: its ``search_path`` is the server's, for what handlers do in the completion."""
    patience = _milliseconds(max(lease_seconds, 1.0))
    return connect(
        settings.require_dsn(),
        application_name=f"walstream:{settings.namespace}:worker",
        connect_timeout=settings.connect_timeout,
        options={
            # Should this process be stopped in mid-transaction, the server ends it: it holds a job and a session.
            "idle_in_transaction_session_timeout": patience,
            "lock_timeout": patience,
            "default_transaction_isolation": "read committed",  # a claim is made in no other
        },
        search_path=None,
    )


def _milliseconds(seconds: float) -> str:
    return str(max(100, round(seconds * 1000)))
