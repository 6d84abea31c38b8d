"""Waiting until a projector has dealt with an event: read your own writes, across processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from walstream.config import Settings, quote
from walstream.errors import ConfigError, ProjectorHalted, WalstreamError
from walstream.order.reader import ColdReader
from walstream.source.connection import connect
from walstream.source.failures import classify

from .lanes import lane_of
from .retry import Backoff

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

_POLL_FIRST = 0.002
_POLL_CAP = 0.05
_AGAIN = Backoff(0.1, 2.0)


class EventParked(WalstreamError):
    """The event that was waited for is parked: the projector could not project it, or it waits behind one of its
    session that it could not."""


@dataclass(slots=True)
class _Wanted:
    """What is waited for, and what is known about it."""

    projector: str
    seq: int
    offset: int | None = None
    session_id: bytes = b""
    unknown: bool = False

    def out_of_time(self) -> bool:
        """The answer after the timeout.

        Raises:
            ConfigError: there is no such projector: it may come, but until now nobody has started it.
        """
        if self.unknown:
            raise ConfigError(
                f"no projector {self.projector!r} has run on this ledger",
                hint="`walstream projectors list` shows those that have",
            )
        return False


class ProgressWatch:
    """Asks the database how far projectors are. Safe to use from several threads; they take turns on one connection.

    Args:
        settings: of the stream.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._schema = quote(settings.namespace)
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def wait_for(self, projector: str, seq: int, timeout: float) -> bool:
        """Block until ``projector`` is done with the event ``seq``; see :meth:`walstream.Stream.wait_for`."""
        until = time.monotonic() + timeout
        wanted, pause = _Wanted(projector, seq), _POLL_FIRST
        while not self._is_done(wanted, until):
            left = until - time.monotonic()
            if left <= 0:
                return wanted.out_of_time()
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _POLL_CAP)
        return True

    async def await_for(self, projector: str, seq: int, timeout: float) -> bool:
        """The same without blocking the event loop; see :meth:`walstream.Stream.await_for`."""
        until = time.monotonic() + timeout
        wanted, pause = _Wanted(projector, seq), _POLL_FIRST
        while not await asyncio.to_thread(self._is_done, wanted, until):
            left = until - time.monotonic()
            if left <= 0:
                return wanted.out_of_time()
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _POLL_CAP)
        return True

    def close(self) -> None:
        """Give the connection back."""
        with self._lock:
            self._drop()

    def _is_done(self, wanted: _Wanted, until: float) -> bool:
        """Ask once; a connection that is lost or cannot be made is tried again while there is time."""
        attempt = 0
        while True:
            try:
                with self._lock:
                    return self._ask(wanted)
            except (WalstreamError, psycopg2.Error) as raised:
                error = classify(raised, doing=f"waiting for projector {wanted.projector!r}")
                if not error.transient:
                    raise error from (None if error is raised else raised)
                with self._lock:
                    self._drop()
                attempt += 1
                pause = _AGAIN.pause(attempt)
                if time.monotonic() + pause > until:
                    raise error from (None if error is raised else raised)
                time.sleep(pause)

    def _ask(self, wanted: _Wanted) -> bool:
        if self._connection is None:
            settings = self._settings
            self._connection = connect(
                settings.require_dsn(),
                application_name=f"walstream:{settings.namespace}:wait",
                connect_timeout=settings.connect_timeout,
            )
        if wanted.offset is None and not self._find(self._connection, wanted):
            return False
        with self._connection.cursor() as cur:
            return self._has_passed(cur, wanted)

    def _find(self, connection: Connection, wanted: _Wanted) -> bool:
        """Look the event's offset up; ``False`` if it has none yet."""
        reader = ColdReader(connection, self._settings.namespace, self._settings.ledger, "")
        offset = reader.offset_of(wanted.seq)
        if offset is None:
            return False
        events = reader.read(offset - 1, 1, 1).events
        wanted.session_id = events[0].row[1] if events else b""
        wanted.offset = offset
        return True

    def _has_passed(self, cur: Cursor, wanted: _Wanted) -> bool:
        cur.execute(
            f"""
            SELECT p.state, p.error, p.error_offset,
                   (SELECT array_agg(c.position ORDER BY c.lane) FROM {self._schema}.cursors AS c
                     WHERE c.projector = p.name),
                   (SELECT coalesce(k.error, 'it waits behind a parked event of its session')
                      FROM {self._schema}.parked AS k WHERE k.projector = p.name AND k.event_offset = %s)
              FROM {self._schema}.projectors AS p WHERE p.name = %s""",
            (wanted.offset, wanted.projector),
        )
        row = cur.fetchone()
        wanted.unknown = row is None
        if row is None:
            return False
        state, error, error_offset, positions, parked = row
        assert wanted.offset is not None
        if parked is not None:
            raise EventParked(
                f"projector {wanted.projector!r} has parked the event seq {wanted.seq} at offset {wanted.offset}:"
                f" {parked}",
                hint=f"see `walstream parked list {wanted.projector}`",
            )
        position = positions[lane_of(wanted.session_id, len(positions))] if positions else 0
        if position >= wanted.offset:
            return True
        if state == "halted" and (error_offset is None or error_offset <= wanted.offset):
            raise ProjectorHalted(
                f"projector {wanted.projector!r} halted before the event seq {wanted.seq} (offset {wanted.offset}):"
                f" {error}",
                hint=f"correct it, then `walstream projectors resume {wanted.projector}`",
            )
        return False

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None
