"""The load of a chaos run: what :class:`~tests.chaos.load.Load` does, and large transactions, poison, handoffs,
sessions that several writers share through ``append``, and commits whose answer never came and that are tried again
under their key.
"""

from __future__ import annotations

import random
import time
import uuid

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream import Ledger
from walstream.config import Settings
from walstream.errors import WalstreamError

from .cast import AGENT, POISON
from .load import Load

_MANY = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
    " SELECT %s, %s, 'tool.observed', jsonb_build_object('n', n, 'text', repeat('x', %s))"
    " FROM generate_series(1, %s) AS n"
)
_HANDOFF = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
    " SELECT %s, %s, 'handoff.emitted', jsonb_build_object('to', %s::text, 'message', n)"
    " FROM generate_series(1, %s) AS n"
)
_ONE = "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, %s, %s, '{}')"


class Crowd(Load):
    """Writers until :meth:`stop`.

    Attributes:
        appended: keys under which an event was appended and seen to be there.
        poison_sessions: sessions in which an event was committed that the projector ``poisoned`` cannot stomach.
    """

    types = ("model.requested", "model.responded", "tool.invoked", "tool.observed")  # a handoff is one of its own here

    def __init__(self, settings: Settings, *, writers: int, seed: int, pause: float, largest: int) -> None:
        super().__init__(settings.require_dsn(), writers=writers, seed=seed, pause=pause)
        self._ledger = Ledger(settings, types={})
        self._largest = largest
        self._shared = [str(uuid.UUID(int=0x5A5A0000 + n)) for n in range(3)]
        self.appended: set[str] = set()
        self.poison_sessions: set[str] = set()

    def ease(self, pause: float) -> None:
        """From now on so many seconds between two transactions of a writer, at the most."""
        self._pause = pause

    def _transaction(self, connection: Connection, chance: random.Random, sessions: list[str], agent: str) -> bool:
        kind = chance.random()
        if kind < 0.0006:
            with connection.cursor() as cur:
                rows = chance.randrange(100, self._largest)
                cur.execute(_MANY, (chance.choice(sessions), agent, chance.randrange(120), rows))
            connection.commit()
            return True
        if kind < 0.002:
            session = str(uuid.UUID(int=chance.getrandbits(128), version=4))
            with connection.cursor() as cur:
                for event_type in ("task.started", POISON, "task.completed"):
                    cur.execute(_ONE, (session, agent, event_type))
            self.poison_sessions.add(session)  # before the commit: if its answer is lost it may be there all the same
            connection.commit()
            return True
        if kind < 0.012:
            # In sessions of their own, for workers append there as well, and they take turns with `append` only.
            session = str(uuid.UUID(int=chance.getrandbits(128), version=4))
            with connection.cursor() as cur:
                cur.execute(_HANDOFF, (session, agent, AGENT, chance.randrange(1, 4)))
            connection.commit()
            return True
        if kind < 0.1:
            self._append(connection, chance, agent)
            return True
        return super()._transaction(connection, chance, sessions, agent)

    def _append(self, connection: Connection, chance: random.Random, agent: str) -> None:
        """Under a key, until it is known to be there: over lost connections too."""
        key = f"chaos-{chance.getrandbits(64):x}"
        session = chance.choice(self._shared)
        left = 2 if chance.random() < 0.2 else 1
        current = connection
        while left and not self._stopping.is_set():
            try:
                if current.closed:
                    current = psycopg2.connect(self._dsn, connect_timeout=5)
                self._ledger.append(session, agent, "model.responded", {"text": "x" * 50}, key=key, on=current)
                current.commit()
            except (psycopg2.Error, WalstreamError):
                current.close()
                time.sleep(0.1)
            else:
                self.appended.add(key)
                left -= 1
        if current is not connection:
            current.close()
