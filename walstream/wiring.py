"""Where the rooms are put together for `walstream run` and for `Stream`: the engine gets its connections from here.

The engine works against small interfaces and knows no replication class of the driver; this module knows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from walstream.config import Settings
from walstream.engine.host import Host
from walstream.engine.ingest_supervisor import Ports
from walstream.engine.projector import Projector
from walstream.source.preflight import preflight
from walstream.source.stream import ReplicationStream

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


def make_host(settings: Settings, projectors: Sequence[Projector], *, ingest: bool = True) -> Host:
    """A host for these projectors, with ingest (over a real replication connection) or without."""
    return Host(settings, projectors, Ports(_slot_moved, ReplicationStream.open), ingest=ingest)


def _slot_moved(settings: Settings, connection: Connection) -> bool:
    return preflight(settings, connection).slot_moved
