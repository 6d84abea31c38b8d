"""Where the rooms are put together for `walstream run` and for `Stream`: the engine gets its connections from here, and
its companions: the guard of the slot, and metrics and health.

The engine works against small interfaces and knows no replication class of the driver; this module knows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings
from walstream.engine.birth import InTheWay, MadeSlot
from walstream.engine.host import Host
from walstream.engine.host_samples import host_samples
from walstream.engine.ingest_supervisor import Ports
from walstream.engine.projector import Projector
from walstream.engine.runner_group import NOT_WELL
from walstream.guard.samples import samples
from walstream.guard.watch import Guard, Watch
from walstream.monitoring.health import Health, Source
from walstream.monitoring.reporting import reporters
from walstream.source import slots
from walstream.source.preflight import preflight
from walstream.source.stream import ReplicationStream

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


_OWN_START: Final = 3.0
"""Seconds after which a host that starts usually reads its slot, so that the guard does not begin with an alarm."""


def make_host(settings: Settings, projectors: Sequence[Projector], *, ingest: bool = True) -> Host:
    """A host for these projectors, with ingest (over a real replication connection) or without."""
    host = Host(settings, projectors, Ports(_slot_moved, ReplicationStream.open, SourceSlots()), ingest=ingest)
    watch = Watch(settings, Guard(settings, watching=True), delay=_OWN_START) if ingest else None
    if watch is not None:
        host.accompany(watch)
    sources: list[Source] = [lambda: host_samples(host)]
    if watch is not None:
        sources.append(lambda: samples(watch.latest))
    for reporter in reporters(settings, lambda: health_of(host), *sources):
        host.accompany(reporter)
    return host


def health_of(host: Host) -> Health:
    """How a host is: ingest, and each projector. A stand-by is as ready as it can be."""
    ingest, runners = host.ingest, host.runners
    parts: dict[str, dict[str, Any]] = {}
    if host.with_ingest:
        state = "starting" if ingest is None else ingest.state.state
        error = None if ingest is None or ingest.state.error is None else str(ingest.state.error)
        parts["ingest"] = {"ready": state in ("streaming", "standby"), "state": state, "error": error}
    connected = runners is not None and runners.connected
    for name, (state, error) in ({} if runners is None else runners.states()).items():
        parts[f"projector:{name}"] = {
            "ready": connected and state not in NOT_WELL,
            "state": state,
            "error": error if connected else error or "the database does not answer",
        }
    live = host.error is None and (ingest is None or ingest.alive)
    return Health(live, parts, starting=runners is None)


class SourceSlots:
    """Makes and drops the slot of a stream, over the replication connection that the settings name."""

    def drop(self, settings: Settings, connection: Connection) -> None:
        """Drop the stream's slot, if there is one.

        Raises:
            Unavailable: somebody reads it.
            SlotError: it is another database's, or none that walstream reads.
        """
        slots.drop(connection, settings.slot)

    def create(
        self, settings: Settings, *, timeout: float, on_wait: Callable[[Sequence[InTheWay]], None]
    ) -> AbstractContextManager[MadeSlot]:
        """Make it; errors as :func:`walstream.source.slots.create` has them."""
        return slots.create(
            settings.replication_dsn or settings.require_dsn(),
            settings.slot,
            timeout=timeout,
            connect_timeout=settings.connect_timeout,
            failover=None if settings.failover_slot == "auto" else settings.failover_slot == "on",
            on_wait=on_wait,
        )


def _slot_moved(settings: Settings, connection: Connection) -> bool:
    return preflight(settings, connection).slot_moved
