"""The keeper: one thread and one connection for the leases, wishes and states of all projectors of this process.

It takes and renews the leases, reads what operators want (``desired``), and writes down what each projector is doing.
It never touches a cursor, and no projector's code runs in it, so a projector that hangs keeps its lease and shows as
hung.

A lease belongs to the connection it was taken on. When that is lost, all are taken again under new generations, and the
runners start over from their stored cursors.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import psycopg2
import psycopg2.errors

from walstream.config import quote
from walstream.errors import WalstreamError
from walstream.source.failures import classify

from .cursors import Cursors
from .leadership import Lease, end_backend
from .projector_runner import ProjectorRunner
from .retry import Backoff
from .trouble import Trouble

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

log = logging.getLogger("walstream.keeper")

_STATE_SECONDS = 0.25  # between two looks at what the runners are doing
_AGAIN = Backoff(0.1, 30.0)

State = tuple[str, Trouble | None]


class _Charge:
    """One runner, its lease, and what was last written about it."""

    def __init__(self, runner: ProjectorRunner, lease: Lease) -> None:
        self.runner = runner
        self.lease = lease
        self.name = runner.options.name
        self.registered = False
        self.held = False
        self.renew_at = 0.0
        self.written: State | None = None
        self.stood_by = False


class Keeper:
    """Keeps the leases of runners.

    Args:
        namespace: walstream's schema.
        runners: whose.
        owner: this process's name.
        lease_seconds: how long a lease lasts.
        poll_seconds: how often operators' wishes are read and leases of others are tried.
        connect: makes the connection.
        on_error: called when nothing can be kept any more.
    """

    def __init__(
        self,
        namespace: str,
        runners: Sequence[ProjectorRunner],
        *,
        owner: str,
        lease_seconds: float,
        poll_seconds: float,
        connect: Callable[[], Connection],
        on_error: Callable[[WalstreamError], None],
    ) -> None:
        self._namespace = namespace
        self._schema = quote(namespace)
        self._charges = [
            _Charge(runner, Lease.for_projector(namespace, runner.options.name, owner=owner, seconds=lease_seconds))
            for runner in runners
        ]
        self._lease_seconds = lease_seconds
        self._poll_seconds = min(poll_seconds, lease_seconds / 3)
        self._connect = connect
        self._on_error = on_error
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="walstream-keeper", daemon=True)
        self.connected = False
        """Whether the last word with the database was a good one."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the last states and give the leases back. The runners must have stopped before."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        attempt = 0
        while True:
            connection: Connection | None = None
            try:
                connection = self._connect()
                self._lost_leases()
                self._keep(connection)
                self._say_goodbye(connection)
                return
            except (WalstreamError, psycopg2.Error) as raised:
                error = classify(raised, doing="keeping the projectors' leases")
                if self.connected:
                    attempt = 0
                self.connected = False
                if not error.transient:
                    self._on_error(error)
                    return
                attempt += 1
                pause = _AGAIN.pause(attempt)
                log.warning("leases are taken again in %.1f s: %s", pause, error)
                if self._stopping.wait(pause):
                    return
            except Exception as raised:
                log.exception("the keeper ended by a defect of walstream")
                self._on_error(WalstreamError(f"the keeper of the leases failed: {raised!r}", hint="please report it"))
                return
            finally:
                if connection is not None:
                    with contextlib.suppress(psycopg2.Error):
                        connection.close()

    def _lost_leases(self) -> None:
        # The runners go on under their old generations until new ones are taken: only that can fence them.
        for charge in self._charges:
            charge.held = False
            charge.written = None

    def _keep(self, connection: Connection) -> None:
        poll_at = 0.0
        while not self._stopping.is_set():
            with connection.cursor() as cur:
                now = time.monotonic()
                if now >= poll_at:
                    poll_at = now + self._poll_seconds
                    self._register(cur)
                    self._read_wishes(cur)  # before the lease: one that is to be paused must not begin
                    self._take_and_renew(cur)
                self._write_states(cur)
            self.connected = True
            self._stopping.wait(min(_STATE_SECONDS, self._poll_seconds))

    def _register(self, cur: Cursor) -> None:
        for charge in self._charges:
            if not charge.registered:
                cur.execute("BEGIN")
                try:
                    new = Cursors(self._namespace, charge.name).register(cur, charge.runner.options)
                    cur.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(psycopg2.Error):
                        cur.execute("ROLLBACK")
                    raise
                charge.registered = True
                if new:
                    log.info("projector %r is new; it starts at %s", charge.name, charge.runner.options.start)

    def _take_and_renew(self, cur: Cursor) -> None:
        for charge in self._charges:
            with _unless_locked(charge):
                self._take_or_renew(cur, charge)

    def _take_or_renew(self, cur: Cursor, charge: _Charge) -> None:
        runner, lease = charge.runner, charge.lease
        now = time.monotonic()
        if charge.held and runner.generation == lease.generation:
            if now < charge.renew_at:
                return
            if lease.renew(cur):
                charge.renew_at = now + self._lease_seconds / 3
                runner.prolong(now + self._lease_seconds)
                return
            log.warning("%s", lease.fenced())
        charge.held = False
        generation = None if runner.stopping else lease.acquire(cur)
        if generation is None:
            runner.give_up()
            if not charge.stood_by:
                log.info("another process runs projector %r; standing by", charge.name)
            charge.stood_by = True
            return
        charge.held = True
        charge.stood_by = False
        charge.written = ("starting", None)
        # Before the runner hears of it: what its lanes write down after this is newer.
        cursors = Cursors(self._namespace, charge.name, generation)
        cursors.set_state(cur, "starting", force=True)
        for backend in cursors.backends(cur):
            if end_backend(cur, backend):
                log.warning("ended server process %d of the runner of %r before", backend.pid, charge.name)
        charge.renew_at = now + self._lease_seconds / 3
        log.debug("projector %r: generation %d is ours", charge.name, generation)
        runner.appoint(generation, now + self._lease_seconds)

    def _read_wishes(self, cur: Cursor) -> None:
        cur.execute(f"SELECT name, desired, state FROM {self._schema}.projectors")
        rows = {str(name): (str(desired), str(state)) for name, desired, state in cur.fetchall()}
        for charge in self._charges:
            row = rows.get(charge.name)
            if row is None:
                charge.registered = charge.held = False  # removed while it ran (`projectors reset`): it is new again
                charge.runner.give_up()
                continue
            desired, state = row
            charge.runner.want(paused=desired == "paused")
            halted = charge.runner.halted is not None and charge.written is not None and charge.written[0] == "halted"
            if halted and state != "halted":
                log.info("projector %r was told to go on after its halt", charge.name)
                charge.written = None
                charge.runner.resume()

    def _write_states(self, cur: Cursor) -> None:
        for charge in self._charges:
            state = charge.runner.state
            if not charge.held or state == charge.written or state[0] == "standby":
                continue
            halted = charge.runner.halted
            with _unless_locked(charge):
                if halted is None or not halted.recorded:  # else it stands there, or an operator has lifted it already
                    Cursors(self._namespace, charge.name, charge.lease.generation).set_state(cur, *state)
                charge.written = state

    def _say_goodbye(self, connection: Connection) -> None:
        with connection.cursor() as cur:
            self._write_states(cur)
            for charge in self._charges:
                if charge.held:
                    charge.lease.release(cur)


@contextlib.contextmanager
def _unless_locked(charge: _Charge) -> Iterator[None]:
    """One projector's row that somebody holds locked must not cost the others their leases: it is tried again."""
    try:
        yield
    except psycopg2.errors.LockNotAvailable:
        log.warning("the row of projector %r is locked by somebody; tried again", charge.name)
