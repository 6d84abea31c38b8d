"""The host: one ingest and any number of projectors in one process, kept running.

It makes sessions one after the other (see :mod:`walstream.engine.ingest`), stands by while another process has the
lease, reconnects with capped and jittered backoff after what may heal, and ends with what cannot.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from walstream.config import Settings, quote
from walstream.errors import ExitCode, Fenced, Unavailable, WalstreamError
from walstream.ledger.identity import Identity, check_identity
from walstream.ledger.schema import require_schema
from walstream.lsn import format_lsn
from walstream.order.buffer import HotBuffer
from walstream.order.compaction import Compactor
from walstream.order.seen import SeenSeqs
from walstream.order.wake import Notifier
from walstream.order.writer import OrderWriter
from walstream.source.connection import connect
from walstream.source.failures import classify

from .caretaker import Caretaker, Chore
from .ingest import IngestSession, MessageStream
from .intake import Intake, Resume
from .leadership import Backend, Lease, end_backend, owner_name
from .ledger_watch import LedgerWatch
from .order_store import FencedStore
from .orderer import Orderer
from .projector import Projector
from .runner_group import RunnerGroup

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.host")

_STANDBY_POLL = 0.5
_WATCH_SECONDS = 5.0
_COMPACT_SECONDS = 30.0
_HEALTHY_AFTER = 10.0  # a session that lived this long starts the backoff again from its shortest pause


@dataclass(frozen=True)
class Ports:
    """What the host gets from outside, so that the engine knows no driver's replication classes (walstream.wiring).

    Attributes:
        preflight: checks slot, publication and table before anything is read; raises what is wrong, and returns
            whether somebody else moved the slot, so that the whole ledger has to be compared.
        open_stream: opens the slot's stream (``settings, start_lsn=…, generation=…``).
    """

    preflight: Callable[[Settings, Connection], bool]
    open_stream: Callable[..., MessageStream]


@dataclass(frozen=True, slots=True)
class IngestState:
    """What ingest is doing, for `status`, logs and health checks."""

    state: str  # starting, standby, streaming, reconnecting, stopped, failed
    since: float
    error: WalstreamError | None = None
    generation: int = 0


class Host:
    """Runs ingest and projectors until it is stopped or something ends it.

    Args:
        settings: of the stream.
        projectors: to run here.
        ports: connections and stream.
        ingest: ``False`` for a process that only runs projectors (it reads cold, woken by the ingest elsewhere).
    """

    def __init__(
        self, settings: Settings, projectors: Sequence[Projector], ports: Ports, *, ingest: bool = True
    ) -> None:
        self._settings = settings
        self._projectors = tuple(projectors)
        self._ports = ports
        self._with_ingest = ingest
        self._owner = owner_name()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._session: IngestSession | None = None
        self._buffer = HotBuffer(settings.buffer_bytes) if ingest else None
        self._thread: threading.Thread | None = None
        self.runners: RunnerGroup | None = None
        self.ingest_state = IngestState("starting", time.monotonic())
        self.error: WalstreamError | None = None

    def start(self) -> None:
        """Check that the stream is set up, then start everything; waits for a server that is away.

        Raises:
            WalstreamError: configuration, identity or set-up that a retry cannot help.
        """
        identity = self._retry(self._read_identity)
        if identity is None:
            return
        self.runners = RunnerGroup(self._settings, self._projectors, hot=self._buffer, key_prefix=identity.key_prefix)
        self.runners.start()
        if self._with_ingest:
            self._thread = threading.Thread(target=self._supervise, name="walstream-ingest", daemon=True)
            self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the host ends by itself or is told to stop; ``True`` if so."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self._ended.is_set() or self._stopping.is_set()):
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                return False
            self._ended.wait(left)
            self._look_at_runners()
        return True

    def stop(self) -> None:
        """Stop within ``drain_seconds`` or so: ingest orders what it has, projectors finish their batch. Idempotent."""
        self._stopping.set()
        session = self._session
        if session is not None:
            session.stop()
        if self._thread is not None:
            self._thread.join(self._settings.drain_seconds + 10.0)
        if self.runners is not None:
            self.runners.stop(self._settings.drain_seconds)
        if self._buffer is not None:
            self._buffer.close(None)

    @property
    def exit_code(self) -> ExitCode:
        """What the process should end with."""
        if self.error is not None:
            return self.error.exit_code
        if self.runners is not None and self.runners.halted:
            return ExitCode.HALTED
        return ExitCode.OK

    # -- ingest ----------------------------------------------------------------------------------------------------

    def _look_at_runners(self) -> None:
        """Without ingest the process has nothing left to do once every projector here has halted."""
        runners = self.runners
        if runners is None or not self._projectors:
            return
        if runners.error is not None and self.error is None:
            self.error = runners.error
            self._ended.set()
        elif not self._with_ingest and len(runners.halted) == len(self._projectors):
            self._ended.set()

    def _supervise(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._run_session()
                if self._stopping.is_set():
                    break
                continue
            except BaseException as raised:
                error = raised if isinstance(raised, WalstreamError) else classify(raised, doing="ingest")
            if isinstance(error, Fenced):
                log.warning("%s", error)
                attempt = 0
                continue
            if not error.transient:
                log.error("ingest ends: %s%s", error, f" ({error.hint})" if error.hint else "")
                self.error = error
                self._become("failed", error)
                self._record_failure(error)
                self._ended.set()
                return
            if time.monotonic() - began > _HEALTHY_AFTER:
                attempt = 0
            attempt += 1
            pause = min(self._settings.retry_cap_seconds, 0.1 * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
            log.warning("ingest reconnects in %.1f s (attempt %d): %s", pause, attempt, error)
            self._become("reconnecting", error)
            self._stopping.wait(pause)
        self._become("stopped")

    def _run_session(self) -> None:
        """One lease, one generation, one session."""
        settings, ports = self._settings, self._ports
        connection = self._connect("ingest", synchronous_commit="off", lock_timeout="30s")
        stream: MessageStream | None = None
        notifier: Notifier | None = None
        caretaker: Caretaker | None = None
        lease = Lease.for_ingest(settings.namespace, owner=self._owner, seconds=settings.lease_seconds)
        taken = False
        try:
            identity = check_identity(connection, settings)
            if not self._take_lease(connection, lease):
                return
            taken = True
            slot_moved = ports.preflight(settings, connection)
            writer = OrderWriter(connection, settings.namespace, lease.generation)
            tail = writer.tail()
            seen = SeenSeqs(tail.max_seq, writer.known)
            assert self._buffer is not None
            self._buffer.reset(tail.next_offset)
            notifier = Notifier(lambda: self._connect("notify"), settings.namespace)
            watch = LedgerWatch(settings, identity.table_oid, lambda: self._connect("watch"))
            resume = Resume(tail.partial_lsn or tail.last_lsn, tail.partial_inserts)
            intake = Intake(
                settings.ledger.columns,
                watch.resolve,
                key_prefix=identity.key_prefix,
                resume=resume,
                chunk_bytes=settings.chunk_bytes,
            )
            stream = ports.open_stream(settings, start_lsn=resume.lsn, generation=lease.generation)
            store = FencedStore(
                writer,
                connection,
                settings.namespace,
                lease,
                stream,
                classify,
                idle_persist_seconds=settings.idle_persist_seconds,
            )
            orderer = Orderer(
                store,
                seen,
                self._buffer,
                next_offset=tail.next_offset,
                last_lsn=resume.lsn,
                partial_inserts=tail.partial_inserts or None,
                generation=lease.generation,
                key_prefix=identity.key_prefix,
                pending_limit=settings.pending_bytes,
                on_progress=_after_flush(stream, notifier),
                heartbeat=lambda: store.heartbeat(orderer, session),
                heartbeat_seconds=max(0.2, settings.lease_seconds / 4),
            )
            session = IngestSession(settings, stream, intake, orderer, lambda: _quietly(self._canary))
            store.announce()
            caretaker = self._caretaker(session, watch, lease.generation, identity, orderer, everything=slot_moved)
            caretaker.start()
            self._session = session
            if self._stopping.is_set():
                return
            self._become("streaming", generation=lease.generation)
            log.info(
                "streaming slot %s from %s as generation %d; next offset %d",
                settings.slot,
                format_lsn(resume.lsn),
                lease.generation,
                tail.next_offset,
            )
            session.run()
        finally:
            self._session = None
            if caretaker is not None:
                caretaker.stop()
            if notifier is not None:
                notifier.close()
            if stream is not None:
                stream.close()
            if taken:
                _quietly(lambda: self._let_go(connection, lease))
            _quietly(connection.close)

    def _caretaker(
        self,
        session: IngestSession,
        watch: LedgerWatch,
        generation: int,
        identity: Identity,
        orderer: Orderer,
        *,
        everything: bool,
    ) -> Caretaker:
        shared = _Shared(lambda: self._connect("chores", synchronous_commit="off", lock_timeout="5s"))

        def compact() -> None:
            Compactor(shared.connection, self._settings.namespace, generation).run()

        return Caretaker(
            [
                Chore("the look at the ledger's table", watch.check, _WATCH_SECONDS),
                Chore("compaction of the order", compact, _COMPACT_SECONDS),
            ],
            session.fail,
            shared.close,
        )

    def _take_lease(self, connection: Connection, lease: Lease) -> bool:
        """Take the lease, standing by while another has it; ``False`` if told to stop meanwhile."""
        namespace = quote(self._settings.namespace)
        announced = False
        while not self._stopping.is_set():
            with connection.cursor() as cur:
                cur.execute(
                    f"SELECT owner, control_pid, control_start::text, walsender_pid, walsender_start::text"
                    f" FROM {namespace}.ingest"
                )
                row = cur.fetchone()
                # One transaction: the lease's row and the fencing row change together, or not at all. It is durable, and
                # with it every order row before it: the stream may then start at the end of the order (rule 3).
                cur.execute("BEGIN; SET LOCAL synchronous_commit = local")
                try:
                    generation = lease.acquire(cur)
                    if generation is not None:
                        self._end_predecessor(row, connection)
                        cur.execute(f"UPDATE {namespace}.generation SET generation = %s", (generation,))
                    cur.execute("COMMIT")
                except BaseException:
                    _quietly(lambda: cur.execute("ROLLBACK"))
                    raise
            if generation is not None:
                return True
            if not announced:
                announced = True
                log.info("another ingest has the lease (%s); standing by", row and row[0])
                self._become("standby")
            self._stopping.wait(_STANDBY_POLL)
        return False

    def _end_predecessor(self, row: Sequence[Any] | None, connection: Connection) -> None:
        """End the backends of the ingest that is replaced, by recorded pid and start time, never anyone else's: a
        stopped one still holds the slot, and may hold the fencing row."""
        if row is None:
            return
        with connection.cursor() as cur:
            for pid, start in ((row[1], row[2]), (row[3], row[4])):
                if pid is not None and start is not None and pid != connection.info.backend_pid:
                    if end_backend(cur, Backend(pid, start)):
                        log.warning(
                            "ended backend %d (started %s) of the ingest that is replaced (%s)", pid, start, row[0]
                        )

    def _let_go(self, connection: Connection, lease: Lease) -> None:
        with connection.cursor() as cur:
            cur.execute(
                f"UPDATE {quote(self._settings.namespace)}.ingest SET state = 'stopped' WHERE generation = %s",
                (lease.generation,),
            )
            lease.release(cur)

    # -- small parts -----------------------------------------------------------------------------------------------

    def _connect(self, role: str, **options: str) -> Connection:
        return connect(
            self._settings.require_dsn(),
            application_name=f"walstream:{self._settings.namespace}:{role}",
            connect_timeout=self._settings.connect_timeout,
            options=options,
        )

    def _read_identity(self) -> Identity:
        connection = self._connect("host")
        try:
            require_schema(connection, self._settings)
            return check_identity(connection, self._settings)
        finally:
            connection.close()

    def _retry(self, call: Callable[[], Identity]) -> Identity | None:
        attempt = 0
        while not self._stopping.is_set():
            try:
                return call()
            except Unavailable as error:
                attempt += 1
                pause = min(self._settings.retry_cap_seconds, 0.1 * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
                log.warning("waiting for the server, next try in %.1f s: %s", pause, error)
                self._become("reconnecting", error)
                self._stopping.wait(pause)
        return None

    def _canary(self) -> None:
        connection = self._connect("canary", statement_timeout="5s")
        try:
            with connection.cursor() as cur:
                cur.execute("SELECT pg_logical_emit_message(false, 'walstream', 'canary')")
        finally:
            connection.close()

    def _become(self, state: str, error: WalstreamError | None = None, generation: int = 0) -> None:
        self.ingest_state = IngestState(state, time.monotonic(), error, generation)

    def _record_failure(self, error: WalstreamError) -> None:
        """Leave the reason where `walstream status` finds it, if the database can be reached."""

        def write() -> None:
            connection = self._connect("host", statement_timeout="5s")
            try:
                with connection.cursor() as cur:
                    cur.execute(
                        f"UPDATE {quote(self._settings.namespace)}.ingest SET state = 'failed', error = %s"
                        " WHERE owner IS NULL OR owner = %s",
                        (str(error)[:2000], self._owner),
                    )
            finally:
                connection.close()

        _quietly(write)


class _Shared:
    """A connection that is made when it is needed, and again after it was closed."""

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._made: Connection | None = None

    @property
    def connection(self) -> Connection:
        if self._made is None or self._made.closed:
            self._made = self._make()
        return self._made

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            _quietly(made.close)


def _after_flush(stream: MessageStream, notifier: Notifier) -> Callable[[], None]:
    def progress() -> None:
        stream.wakeup()
        notifier.notify()

    return progress


def _quietly(call: Callable[[], Any]) -> None:
    """For goodbyes: what fails here has been reported by what came before."""
    try:
        call()
    except Exception as error:
        log.debug("while ending: %s", error)
