"""Ingest, kept running: one session after the other, with a lease, in a thread of its own.

A session ends with the loss of any of its connections, and the next one reads the order again (rule 4). What may heal
is tried again with capped and jittered backoff; what cannot ends ingest, with its reason where `walstream status` finds
it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg2

from walstream.config import Settings, quote
from walstream.errors import Fenced, SlotGone, WalstreamError
from walstream.ledger.identity import Identity, check_identity
from walstream.lsn import format_lsn
from walstream.metrics import METRICS
from walstream.order.buffer import HotBuffer
from walstream.order.compaction import Compactor
from walstream.order.seen import SeenSeqs
from walstream.order.wake import Notifier
from walstream.order.writer import OrderWriter
from walstream.source.connection import abandon, connect
from walstream.source.failures import classify

from .birth import BirthStopped, SlotMaker
from .caretaker import Caretaker, Chore, SharedConnection
from .catalogue_watch import CatalogueWatch
from .erasure_watch import ErasureWatch
from .halting import wait_until_acknowledged
from .ingest import IngestSession, MessageStream
from .intake import Intake, Resume
from .leadership import Lease
from .ledger_watch import LedgerWatch
from .liveness import Look, look_at
from .order_store import COUNTERS, FencedStore
from .orderer import Orderer
from .partition_watch import warn_of_partitions
from .rebirth import Rebirth
from .reconciler import Reconciler
from .takeover import let_go, take_over

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.ingest")

_WATCH_SECONDS = 5.0
_ERASURES_SECONDS = 1.0
_COMPACT_SECONDS = 30.0
_RECONCILE_SECONDS = 60.0
_PARTITIONS_SECONDS = 3600.0
_HEALTHY_AFTER = 10.0  # a session that lived this long starts the backoff again from its shortest pause


@dataclass(frozen=True)
class Ports:
    """What ingest gets from outside, so that the engine knows no driver's replication classes (walstream.wiring).

    Attributes:
        preflight: checks slot, publication and table before anything is read; raises what is wrong, and returns
            whether somebody else moved the slot, so that the whole ledger has to be compared. What a new slot heals it
            raises as :class:`~walstream.errors.SlotGone`.
        open_stream: opens the slot's stream (``settings, start_lsn=…, generation=…``).
        slots: makes a slot anew.
    """

    preflight: Callable[[Settings, Connection], bool]
    open_stream: Callable[..., MessageStream]
    slots: SlotMaker


INGEST_STATES: Final = ("starting", "standby", "recovering", "streaming", "halted", "reconnecting", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class IngestState:
    """What ingest is doing, for `status`, logs and health checks."""

    state: str  # one of INGEST_STATES
    since: float
    error: WalstreamError | None = None
    generation: int = 0


class IngestSupervisor:
    """Makes ingest sessions until it is stopped or one ends with what cannot heal.

    Args:
        settings: of the stream.
        ports: preflight and stream.
        buffer: where ordered events go.
        owner: this process's name.
    """

    def __init__(self, settings: Settings, ports: Ports, buffer: HotBuffer, owner: str) -> None:
        self._settings = settings
        self._ports = ports
        self._buffer = buffer
        self._buffer.suspend()  # until a session begins: another process may be the one that ingests
        self._owner = owner
        self._stopping = threading.Event()
        self._rebirth = Rebirth(settings, ports.preflight, ports.slots, self._stopping.is_set)
        self._session: IngestSession | None = None
        self._thread = threading.Thread(target=self._supervise, name="walstream-ingest", daemon=True)
        self.state = IngestState("starting", time.monotonic())
        for name in (*COUNTERS, "ingest_reconnects_total"):
            METRICS.add(name, 0)  # one that begins with its first event hides that from whoever watches it rise

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Let the session order what it has; ``False`` if it did not end within ``timeout`` seconds."""
        self._stopping.set()
        session = self._session
        if session is not None:
            session.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def error(self) -> WalstreamError | None:
        """What ended ingest for good."""
        state = self.state
        return state.error if state.state == "failed" else None

    @property
    def alive(self) -> bool:
        """Whether its thread works, or was told to stop."""
        return self._thread.is_alive() or self._thread.ident is None or self._stopping.is_set()

    @property
    def silence(self) -> float | None:
        """Seconds since anything arrived on the stream; ``None`` while there is no session."""
        session = self._session
        return None if session is None else session.silence

    def _supervise(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._run_session()
                if self._stopping.is_set():
                    break
                continue
            except WalstreamError as raised:
                error = raised
            except Exception as raised:
                if not isinstance(raised, psycopg2.Error):
                    log.exception("a fault of walstream ends ingest")
                error = classify(raised, doing="ingest")
            if isinstance(error, Fenced):
                log.warning("%s", error)
                attempt = 0
                continue
            if isinstance(error, BirthStopped):
                break
            if not (error.transient or self._rebirth.note(error)):
                log.error("ingest ends: %s%s", error, f" ({error.hint})" if error.hint else "")
                self._become("failed", error)
                self._record_failure(error)
                return
            if time.monotonic() - began > _HEALTHY_AFTER:
                attempt = 0
            attempt += 1
            pause = min(self._settings.retry_cap_seconds, 0.1 * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
            log.warning("ingest reconnects in %.1f s (attempt %d): %s", pause, attempt, error)
            self._become("reconnecting", error)
            METRICS.add("ingest_reconnects_total")
            self._stopping.wait(pause)
        self._become("stopped")

    def _run_session(self) -> None:
        """One lease, one generation, one session."""
        settings, ports = self._settings, self._ports
        connection = self._connect("ingest", synchronous_commit="off", lock_timeout="30s")
        stream: MessageStream | None = None
        notifier: Notifier | None = None
        caretaker: Caretaker | None = None
        session: IngestSession | None = None
        lease = Lease.for_ingest(settings.namespace, owner=self._owner, seconds=settings.lease_seconds)
        taken = False
        try:
            unfinished = self._rebirth.automatic
            check_identity(connection, settings, unfinished=unfinished)
            if not take_over(connection, settings.namespace, lease, stopping=self._stopping, on_standby=self._stand_by):
                return
            taken = True
            # Again: an adoption or a set-up may have gone before.
            identity = check_identity(connection, settings, unfinished=unfinished)
            if not wait_until_acknowledged(connection, settings, lease, self._stopping, self._halt):
                return
            notifier = Notifier(lambda: self._connect("notify"), settings.namespace)
            slot_moved = self._rebirth.ensure(
                connection, lease, identity, on_begin=self._recover, on_filled=notifier.notify
            )
            writer = OrderWriter(connection, settings.namespace, lease.generation)
            tail = writer.tail()
            seen = SeenSeqs(tail.max_seq, writer.known)
            self._buffer.reset(tail.next_offset)
            watch = LedgerWatch(settings, identity.table_oid, lambda: self._connect("watch"))
            resume = Resume(tail.partial_lsn or tail.last_lsn, tail.partial_inserts)
            intake = Intake(
                settings.ledger.columns,
                watch.resolve,
                key_prefix=identity.key_prefix,
                resume=resume,
                chunk_bytes=settings.chunk_bytes,
                mapped_now=watch.mapped,
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
                policy=settings.violations,
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
                announce=notifier.notify,
                wake=stream.wakeup,
                heartbeat=lambda: store.heartbeat(orderer, running),
                heartbeat_seconds=max(0.2, settings.lease_seconds / 4),
            )
            running = IngestSession(settings, stream, intake, orderer, self._look_at(stream))
            session = running
            store.announce(nothing_proven=slot_moved)
            caretaker = self._caretaker(running, watch, lease.generation, identity, orderer)
            caretaker.start()
            self._session = running
            if self._stopping.is_set():
                return
            self._become("streaming", generation=lease.generation)
            log.info(
                "streaming slot %s from %s as generation %d; next offset %d",
                settings.slot,
                format_lsn(resume.lsn) if resume.lsn else "where it stands",
                lease.generation,
                tail.next_offset,
            )
            running.run()
        finally:
            self._session = None
            self._buffer.suspend()
            if session is not None and not session.ended_in_time:
                abandon(connection)  # closing a connection waits for the statement that runs on it
            if caretaker is not None:
                caretaker.stop()
            if notifier is not None:
                notifier.close()
            if stream is not None:
                stream.close()
            if taken:
                _quietly(lambda: let_go(connection, settings.namespace, lease))
            _quietly(connection.close)

    def _caretaker(
        self,
        session: IngestSession,
        watch: LedgerWatch,
        generation: int,
        identity: Identity,
        orderer: Orderer,
    ) -> Caretaker:
        shared = SharedConnection(lambda: self._connect("chores", synchronous_commit="off", lock_timeout="5s"))

        compactor: Compactor | None = None

        def compact() -> None:
            nonlocal compactor
            connection = shared.connection
            if compactor is None or compactor.connection is not connection:
                compactor = Compactor(connection, self._settings.namespace, generation)
            compactor.run()

        catalogue = CatalogueWatch(self._settings, identity.table_oid, orderer.submit)

        def look() -> None:
            try:
                watch.check()
            finally:
                catalogue.look(shared.connection)  # what ends the session is on record as well

        stopping = threading.Event()
        reconciler = Reconciler(
            self._settings, identity, session, orderer, generation, lambda: shared.connection, stopping, look
        )
        erasures = ErasureWatch(self._settings, lambda: shared.connection, self._buffer)
        return Caretaker(
            [
                Chore("the comparison of ledger and order", reconciler.run, _RECONCILE_SECONDS),
                Chore("the look at the ledger's table", look, _WATCH_SECONDS),
                Chore("the look for erasures", erasures.look, _ERASURES_SECONDS),
                Chore("compaction of the order", compact, _COMPACT_SECONDS),
                Chore(
                    "the look at the partitions",
                    lambda: warn_of_partitions(shared.connection, self._settings.ledger),
                    _PARTITIONS_SECONDS,
                ),
            ],
            session.fail,
            stopping,
            shared.close,
        )

    # -- small parts -----------------------------------------------------------------------------------------------

    def _connect(self, role: str, **options: str) -> Connection:
        settings = self._settings
        return connect(
            settings.require_dsn(),
            application_name=f"walstream:{settings.namespace}:{role}",
            connect_timeout=settings.connect_timeout,
            options=options,
        )

    def _stand_by(self, holder: str) -> None:
        log.info("another ingest has the lease (%s); standing by", holder)
        self._become("standby")

    def _halt(self, reason: WalstreamError) -> None:
        self._become("halted", reason)

    def _recover(self, cause: str) -> None:
        self._become("recovering", SlotGone(cause))

    def _look_at(self, stream: MessageStream) -> Callable[[], Look | None]:
        def look() -> Look | None:
            found: list[Look] = []

            def ask() -> None:
                with contextlib.closing(self._connect("canary", statement_timeout="5s")) as connection:
                    found.append(look_at(stream, connection))

            _quietly(ask)
            return found[0] if found else None

        return look

    def _become(self, state: str, error: WalstreamError | None = None, generation: int = 0) -> None:
        self.state = IngestState(state, time.monotonic(), error, generation)

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


def _quietly(call: Callable[[], Any]) -> None:
    """For goodbyes: what fails here has been reported by what came before."""
    try:
        call()
    except Exception as error:
        log.debug("while ending: %s", error)
