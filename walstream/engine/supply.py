"""What all runners of a process draw on: connections, sources of events, and the watchdog over deadlines."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psycopg2

from walstream.config import Settings
from walstream.metrics import Metrics
from walstream.order.buffer import HotBuffer
from walstream.order.reader import ColdReader
from walstream.order.wake import Listener, Notifier
from walstream.source.connection import connect

from .deadline import Watchdog
from .doorbell import Doorbell
from .projector import Options
from .source import EventSource, StreamSource

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


class Supply:
    """Made once a process. Connections are made when they are needed, and belong to whoever asked.

    Args:
        settings: of the stream.
        hot: the buffer that ingest fills in this process; ``None`` if it runs elsewhere.
        key_prefix: ``ledger:epoch`` of the ledger's identity.
        metrics: where numbers go.
    """

    def __init__(self, settings: Settings, hot: HotBuffer | None, key_prefix: str, metrics: Metrics) -> None:
        self.settings = settings
        self._hot = hot
        self._key_prefix = key_prefix
        self.namespace = settings.namespace
        self.environment = settings.environment
        self.metrics = metrics
        self.watchdog = Watchdog(lambda: self.connect("deadline", connect_timeout=5))
        self._doorbell = Doorbell(
            lambda: Listener(lambda: self.connect("wake"), settings.namespace, settings.poll_seconds),
            settings.poll_seconds,
        )
        self._notifier: Notifier | None = None
        self._making = threading.Lock()

    def stop(self) -> None:
        """End the threads that serve all runners."""
        with self._making:
            notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.close()
        self._doorbell.stop()
        self.watchdog.stop()

    def open_source(self) -> EventSource:
        """An event source, for one thread."""
        settings = self.settings
        return StreamSource(
            self._hot,
            lambda: self.connect("cold"),
            lambda connection: ColdReader(connection, settings.namespace, settings.ledger, self._key_prefix),
            self._doorbell.waiter(),
            poll_seconds=settings.poll_seconds,
            max_bytes=settings.chunk_bytes,
        )

    def announce(self, channel: str, payload: str) -> None:
        """NOTIFY soon, from a connection and a thread of their own; never fails, and costs nothing until then."""
        with self._making:
            if self._notifier is None:
                self._notifier = Notifier(lambda: self.connect("announce"), self.namespace)
            notifier = self._notifier
        notifier.notify(channel, payload)

    def connect(self, role: str, connect_timeout: int | None = None, **options: str) -> Connection:
        """A pinned connection in autocommit, named after its role.

        Raises:
            WalstreamError: see :func:`walstream.source.connection.connect`.
        """
        settings = self.settings
        return connect(
            settings.require_dsn(),
            application_name=f"walstream:{settings.namespace}:{role}",
            connect_timeout=connect_timeout or settings.connect_timeout,
            options=options,
        )

    def connect_projector(self, options: Options) -> Connection:
        """A projector's own connection. A transactional one is the user's: the server's ``search_path``,
        ``row_security`` and ``synchronous_commit``. The cursor of an external one may be lost with the server: the
        order it refers to was written before it, and the events come again."""
        settings = self.settings
        # Should this process be stopped in mid-transaction, the server ends it; an external one's are a few statements.
        patience = options.deadline if options.transactional else settings.lease_seconds
        session = {"idle_in_transaction_session_timeout": str(max(1, round(patience * 1000)))}
        if not (options.transactional and options.synchronous_commit):
            session["synchronous_commit"] = "off"
        made = connect(
            settings.require_dsn(),
            application_name=f"walstream:{settings.namespace}:{options.name}",
            autocommit=False,
            connect_timeout=settings.connect_timeout,
            options=session,
            search_path=None if options.transactional else "pg_catalog",
        )
        try:
            with made.cursor() as cur:
                if options.transactional:
                    cur.execute("SET row_security = on")
                if made.server_version >= 170000:
                    # The deadline does it, and knows whose fault it was. A session that the server ends is only lost.
                    cur.execute("SET transaction_timeout = 0")
            made.commit()
        except psycopg2.Error:
            made.close()
            raise
        return made
