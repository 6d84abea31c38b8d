"""A load that does to the ledger what swarms do: concurrent writers, rollbacks, savepoints, COPY, late commits."""

from __future__ import annotations

import io
import random
import threading
import time
import uuid

import psycopg2

_INSERT = "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, %s, %s, %s)"
_TYPES = ("model.requested", "model.responded", "tool.invoked", "tool.observed", "handoff.emitted")


class Load:
    """Writers in threads, each with random transactions, until :meth:`stop`. They outlive a crash of the server.

    Args:
        dsn: of the ledger's database.
        writers: how many.
        seed: the same seed draws the same transactions (what commits first is up to the server).
        pause: seconds between two transactions of a writer, at the most.
    """

    types: tuple[str, ...] = _TYPES

    def __init__(self, dsn: str, *, writers: int = 4, seed: int = 1, pause: float = 0.004) -> None:
        self._dsn = dsn
        self._pause = pause
        self._stopping = threading.Event()
        self.committed = [0] * writers
        self._threads = [
            threading.Thread(target=self._write, args=(index, random.Random(seed * 1000 + index)), daemon=True)
            for index in range(writers)
        ]

    def start(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> int:
        """Stop; return how many transactions were seen to commit."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a writer hangs"
        return sum(self.committed)

    def wait_for(self, transactions: int, timeout: float = 60) -> None:
        """Until so many transactions more have committed."""
        goal = sum(self.committed) + transactions
        deadline = time.monotonic() + timeout
        while sum(self.committed) < goal:
            assert time.monotonic() < deadline, "the load does not get on"
            time.sleep(0.01)

    def _write(self, index: int, chance: random.Random) -> None:
        sessions = [str(uuid.UUID(int=chance.getrandbits(128), version=4)) for _ in range(5)]
        connection = None
        while not self._stopping.is_set():
            try:
                if connection is None:
                    connection = psycopg2.connect(self._dsn, connect_timeout=5)
                if self._transaction(connection, chance, sessions, f"agent-{index}"):
                    self.committed[index] += 1
            except psycopg2.Error:
                if connection is not None:
                    connection.close()
                connection = None
                time.sleep(0.05)
            time.sleep(chance.random() * self._pause)
        if connection is not None:
            connection.close()

    def _transaction(
        self, connection: psycopg2.extensions.connection, chance: random.Random, sessions: list[str], agent: str
    ) -> bool:
        kind = chance.random()
        session = chance.choice(sessions)

        def one(size: int = 60) -> tuple[str, str, str, str]:
            return session, agent, chance.choice(self.types), '{"text": "' + "x" * chance.randrange(size) + '"}'

        with connection.cursor() as cur:
            if kind < 0.10:  # rolled back: a gap in seq
                cur.execute(_INSERT, one())
                connection.rollback()
                return False
            if kind < 0.20:  # a savepoint that is rolled back
                cur.execute(_INSERT, one())
                cur.execute("SAVEPOINT s")
                cur.execute(_INSERT, one())
                cur.execute("ROLLBACK TO SAVEPOINT s")
                cur.execute(_INSERT, one())
            elif kind < 0.30:  # commits late: others with a higher seq come first
                cur.execute(_INSERT, one())
                time.sleep(chance.random() * 0.05)
                cur.execute(_INSERT, one())
            elif kind < 0.33:  # COPY: rows that share an LSN
                lines = "".join("\t".join(one()) + "\n" for _ in range(chance.randrange(1, 60)))
                cur.copy_expert(
                    "COPY agent_events (session_id, agent_id, event_type, payload) FROM STDIN", io.StringIO(lines)
                )
            elif kind < 0.36:
                for _ in range(chance.randrange(2, 40)):
                    cur.execute(_INSERT, one(600))
            else:
                cur.execute(_INSERT, one())
        connection.commit()
        return True
