"""The leases of a worker's turns, renewed from a thread and a connection of their own.

A handler may keep its thread busy, or the event loop, for as long as it likes: its lease is renewed all the same. What
a lease is worth is decided by the server alone (the fencing token in each write). That it was lost is only noticed
here, so that an async handler can be cancelled and nobody works for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import psycopg2

from walstream.ledger.job import Job
from walstream.ledger.jobs import Jobs
from walstream.source.failures import classify

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.worker")

_PARTS: Final = 3  # a lease is renewed so often while it lasts
_LONGEST_PAUSE: Final = 20.0


class Lease:
    """One turn's lease.

    Args:
        job: as claimed.
        seconds: how long the turn may take; ``None`` for as long as it likes.
    """

    def __init__(self, job: Job, seconds: float | None) -> None:
        self.job = job
        self._until = None if seconds is None else time.monotonic() + seconds
        self._lost: str | None = None

    @property
    def overdue(self) -> bool:
        """Whether the turn has taken longer than it may."""
        return self._until is not None and time.monotonic() > self._until

    @property
    def lost(self) -> str | None:
        """Why the turn should end: its lease is gone, or its time is up. ``None`` while all is well."""
        if self._lost is None and self.overdue:
            return "it ran past the worker's timeout"
        return self._lost

    def lose(self, why: str) -> None:
        """Say that it is lost. The first reason stays."""
        if self._lost is None:
            self._lost = why


class Leases:
    """Renews the leases that it is told about.

    Args:
        connect: makes a connection (in autocommit) whenever one is needed.
        jobs: of the ledger.
        seconds: how long a lease lasts.
    """

    def __init__(self, connect: Callable[[], Connection], jobs: Jobs, seconds: float) -> None:
        self._connect = connect
        self._jobs = jobs
        self._seconds = seconds
        self._pause = min(seconds / _PARTS, _LONGEST_PAUSE)
        self._changed = threading.Condition()
        self._held: set[Lease] = set()
        self._stopping = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="walstream-leases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. What is still held runs out by itself."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(2.0)

    def hold(self, job: Job, seconds: float | None) -> Lease:
        """Renew the lease of ``job`` from now on."""
        lease = Lease(job, seconds)
        with self._changed:
            self._held.add(lease)
        return lease

    def let_go(self, lease: Lease) -> None:
        """Renew it no more."""
        with self._changed:
            self._held.discard(lease)

    def held(self) -> list[Lease]:
        """Those that are renewed at present."""
        with self._changed:
            return list(self._held)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, self._pause)
                if self._stopping:
                    break
            for lease in self.held():
                if lease.lost is None:
                    self._renew(lease)
        self._drop()

    def _renew(self, lease: Lease) -> None:
        used = self._connection is not None
        if not self._tried(lease) and used:
            # A connection that was cut while it lay idle says so only now; on a new one the lease may still be renewed.
            self._tried(lease)

    def _tried(self, lease: Lease) -> bool:
        """Renew it; ``False`` if that could not be asked of the server."""
        job = lease.job
        try:
            if self._connection is None:
                self._connection = self._connect()
            renewed = self._jobs.renew(job, lease_seconds=self._seconds, on=self._connection)
        except psycopg2.errors.LockNotAvailable:
            return True  # a transaction that writes in the job's name is open: nobody can claim it meanwhile
        except Exception as raised:  # whatever it is: should this thread end, no lease would be renewed any more
            log.warning("the lease of job %d was not renewed: %s", job.job_id, classify(raised, doing="renewing"))
            self._drop()
            return False
        if not renewed and lease in self.held():  # or the turn has just ended
            lease.lose("its lease is lost: another worker has the job, or it was canceled")
            log.warning("job %d (session %s): %s", job.job_id, job.session_id, lease.lost)
        return True

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None
