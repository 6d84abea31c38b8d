"""What a projector is told about a delivery, and the transaction that it writes through."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings
from walstream.errors import ConfigError
from walstream.event import Event

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

    from walstream.ledger.ledger import Appended, Ledger

REBUILD_SUFFIX: Final = "~rebuild"
"""What is put behind a projector's name while it is replayed beside the live one."""


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
        self._ledger: Ledger | None = None
        self._answers: Counter[int] = Counter()
        self._announcements: dict[tuple[str, str], None] = {}

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

    def append(
        self,
        event: Event,
        event_type: str,
        payload: Any,
        *,
        session_id: str | None = None,
        agent_id: str | None = None,
        name: str | None = None,
        store_messages: bool = False,
        replace_invalid: bool = False,
    ) -> Appended | None:
        """Append an event in answer to ``event``, in the transaction that also moves the projector on.

        It gets a key made of the projector, the event that it answers, and ``name``, so that a replay after a reset
        appends nothing twice. While the projector is rebuilt nothing is appended; what the live one has appended is
        returned. The session is locked until the batch is committed: agents that append to it wait for that long.

        Args:
            session_id: of the new event; the session of ``event`` if not given.
            agent_id: who it is from; the projector's name if not given.
            name: tells apart several answers to one event. Without it they are counted, which holds only as long as
                the code gives the same answers in the same order.
            store_messages, replace_invalid: as for :meth:`walstream.Ledger.append`.

        Returns:
            What became of it; ``None`` in a rebuild if the live projector gave no such answer.

        Raises:
            ConfigError: the projector is not transactional, or its role may not append.
            PayloadError: the payload is not what its type wants, or ``jsonb`` cannot hold it.
            psycopg2.Error: as for whatever the projector does in the transaction.
        """
        connection = self.connection
        if self._ledger is None:
            from walstream.ledger.ledger import Ledger  # only for who appends: the models take time to load

            self._ledger = Ledger(self.settings)
        if name is None:
            self._answers[event.seq] += 1
            name = str(self._answers[event.seq])
        # By seq and not by `event.key`: the epoch rises when a lossy fail-over is adopted, and here, in the same
        # database, an answer is lost together with what it answers.
        projector = self.projector.removesuffix(REBUILD_SUFFIX)
        key = f"answer:{projector}:{event.seq}:{name}"
        session = session_id or event.session_id
        if self.rebuilding:
            return self._ledger.find(session, key, on=connection)
        return self._ledger.append(
            session,
            agent_id or projector,
            event_type,
            payload,
            key=key,
            store_messages=store_messages,
            replace_invalid=replace_invalid,
            on=connection,
        )

    def notify(self, channel: str, payload: str = "") -> None:
        """NOTIFY a channel once this delivery has committed; nothing is sent if it fails, or in a rebuild.

        It is a hint: sent from another connection, right after the commit, and lost if the process dies in between.
        Whoever listens has to look by himself now and then. (A NOTIFY inside of the transaction would take a lock of
        the whole cluster for as long as the commit takes.)

        Args:
            payload: less than 8,000 bytes; what is longer is dropped, with a warning. The same text many times is sent
                once.
        """
        if not self.rebuilding:
            self._announcements[channel, payload] = None

    def done(self, event: Event) -> None:
        """Say that everything up to and including ``event`` is finished. Optional: if the rest of the batch then fails,
        an external projector does not get the finished ones again, and the bad one is found at once.
        """
        self._done = event

    def begin(self) -> None:
        """Forget the last delivery (called by the runner)."""
        self._done = None
        self._answers.clear()
        self._announcements.clear()
        if self._cursor is not None and not self._cursor.closed:
            self._cursor.close()
        self._cursor = None

    @property
    def announcements(self) -> tuple[tuple[str, str], ...]:
        """What is to be announced now that the delivery has committed, as (channel, payload)."""
        return tuple(self._announcements)

    @property
    def finished(self) -> Event | None:
        """The last event that :meth:`done` was told about in this delivery."""
        return self._done
