"""What a projector is told about a delivery, and the transaction that it writes through."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from walstream.config import Settings
from walstream.errors import ConfigError
from walstream.event import Event

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor


class Context:
    """Handed to :meth:`~walstream.Projector.project` together with the events. One a lane; good for that call only.

    Attributes:
        projector: the projector's name.
        lane: which of its lanes this is, from 0.
        rebuilding: the projector is being rebuilt beside the live one: fill the tables, do nothing outward.
        environment: of the ledger (``production``, ``staging``, …), from the configuration.
        settings: of the stream, for a projector that reads more of the ledger than its events.
        log: a logger that names projector and lane.

    >>> from walstream.testing import make_context
    >>> ctx = make_context("router")
    >>> ctx.projector, ctx.lane, ctx.rebuilding
    ('router', 0, False)
    """

    def __init__(
        self,
        projector: str,
        *,
        lane: int = 0,
        environment: str = "default",
        rebuilding: bool = False,
        connection: Connection | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.projector = projector
        self.lane = lane
        self.environment = environment
        self.rebuilding = rebuilding
        self.settings = settings or Settings.model_validate({"environment": environment})
        self.log: logging.LoggerAdapter[Any] = logging.LoggerAdapter(
            logging.getLogger(f"walstream.projector.{projector}"), {"projector": projector, "lane": lane}
        )
        self._connection = connection
        self._cursor: Cursor | None = None
        self._done: Event | None = None

    @property
    def connection(self) -> Connection:
        """The transaction's connection (psycopg2), for code that makes cursors of its own. Whoever commits on it breaks
        "exactly once"; the runner refuses that.

        Raises:
            ConfigError: the projector is not transactional.
        """
        if self._connection is None:
            raise ConfigError(
                f"projector {self.projector!r} is external: there is no transaction for it to write through",
                hint="say `transactional = True` if it writes to the ledger's own database",
            )
        return self._connection

    @property
    def cursor(self) -> Cursor:
        """A cursor (psycopg2) in the transaction that also moves the projector on: what is written through it is
        committed exactly once.

        Raises:
            ConfigError: the projector is not transactional.
        """
        if self._cursor is None or self._cursor.closed:
            self._cursor = self.connection.cursor()
        return self._cursor

    def done(self, event: Event) -> None:
        """Say that everything up to and including ``event`` is finished. Optional: if the rest of the batch then fails,
        an external projector does not get the finished ones again, and the bad one is found at once.
        """
        self._done = event

    def begin(self) -> None:
        """Forget the last delivery (called by the runner)."""
        self._done = None
        if self._cursor is not None and not self._cursor.closed:
            self._cursor.close()
        self._cursor = None

    @property
    def finished(self) -> Event | None:
        """The last event that :meth:`done` was told about in this delivery."""
        return self._done
