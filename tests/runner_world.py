"""A ledger whose commit order the test itself writes: for tests of what reads the order, without ingest and slot."""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.conftest import Database, RunningServer, Server
from walstream.config import Settings
from walstream.engine.projector import Projector
from walstream.engine.runner_group import RunnerGroup
from walstream.event import Event
from walstream.ledger.identity import identity_sql
from walstream.ledger.schema import install, ledger_sql
from walstream.metrics import Metrics
from walstream.order.buffer import HotBuffer
from walstream.order.reader import ColdReader
from walstream.order.segment import Segment, size_codes
from walstream.order.writer import OrderWriter
from walstream.source.connection import connect

KEY_PREFIX = "5f0c5e0e-0000-4000-8000-000000000000:1"
SESSIONS = [str(uuid.UUID(int=0x1000 + n)) for n in range(8)]


class World:
    """A ledger, its order, and runner groups over it.

    Args:
        database: an empty one.
        settings: further settings; leases and polls are quick unless they say otherwise.
    """

    def __init__(self, database: Database, **settings: Any) -> None:
        self.database = database
        quick = {"lease_seconds": 2.0, "poll_seconds": 0.1, "drain_seconds": 5.0}
        self.settings = Settings.model_validate({"dsn": database.dsn, **quick, **settings})
        self.connection = connect(database.dsn, application_name="test", search_path="public")
        if self.execute("SELECT to_regclass('public.agent_events')") == [(None,)]:
            self.execute(ledger_sql(self.settings.ledger))
        install(self.connection, self.settings)
        self.execute(identity_sql(self.settings))
        self.execute("UPDATE walstream.identity SET ledger_id = %s, slot_state = 'ready'", KEY_PREFIX.partition(":")[0])
        self.writer = OrderWriter(self.connection, self.settings.namespace, 0)
        self.hot: HotBuffer | None = None
        self._lsn = 0x1000000
        self._groups: list[RunnerGroup] = []
        self._connections: list[Connection] = []

    def beside(self) -> World:
        """The same world with a connection of its own, for another thread. Close its ``connection`` afterwards."""
        made = copy.copy(self)
        made.connection = connect(self.database.dsn, application_name="test", search_path="public")
        made.writer = OrderWriter(made.connection, self.settings.namespace, 0)
        made._groups = []
        return made

    def connect(self) -> Connection:
        """A plain connection, not in autocommit; closed at the end of the test."""
        made: Connection = psycopg2.connect(self.database.dsn)
        self._connections.append(made)
        return made

    def close(self) -> None:
        for group in self._groups:
            group.stop(1.0)
        for connection in (*self._connections, self.connection):
            with contextlib.suppress(psycopg2.Error):
                connection.close()

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run SQL on the world's own connection; return the rows."""
        with self.connection.cursor() as cur:
            cur.execute(sql, args or None)
            return list(cur.fetchall()) if cur.description else []

    @contextlib.contextmanager
    def at_version(self, version: int) -> Iterator[None]:
        """The schema says of itself that it is an older one, meanwhile."""
        newer = self.execute("DELETE FROM walstream.migrations WHERE version > %s RETURNING version, name", version)
        try:
            yield
        finally:
            for row in newer:
                self.execute("INSERT INTO walstream.migrations (version, name) VALUES (%s, %s)", *row)

    # -- the ledger and its order ----------------------------------------------------------------------------------

    def insert(
        self, *event_types: str, session: str = SESSIONS[0], payload: Any = None, payload_text: str | None = None
    ) -> list[int]:
        """One transaction with an event of each type; return their seqs. They have no offsets yet."""
        text = json.dumps({} if payload is None else payload) if payload_text is None else payload_text
        rows = self.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " SELECT %s, 'agent', t, %s::jsonb FROM unnest(%s::text[]) WITH ORDINALITY AS u (t, n) ORDER BY n"
            " RETURNING seq",
            session,
            text,
            list(event_types),
        )
        return [int(row[0]) for row in rows]

    def order(self, *transactions: Sequence[int]) -> int:
        """Give these transactions (seqs) the next offsets, in one segment; return the last offset."""
        tail = self.writer.tail()
        seqs = [seq for transaction in transactions for seq in transaction]
        lsns = []
        for _ in transactions:
            self._lsn += 64
            lsns.append(self._lsn)
        segment = Segment(
            first_offset=tail.next_offset,
            seqs=seqs,
            tx_sizes=[len(transaction) for transaction in transactions],
            commit_lsns=lsns,
            commit_times=[int((time.time() - 946_684_800) * 1e6)] * len(transactions),
            sizes=size_codes([200] * len(seqs)),
            last_lsn=self._lsn + 48,
            partial_inserts=None,
            recovered=False,
            generation=0,
        )
        self.writer.append(segment)
        if self.hot is not None:
            events = self.cold().read(tail.next_offset - 1, len(seqs), 1 << 30).events
            assert len(events) == len(seqs)
            self.hot.publish(events, 500 * len(events))
        self.execute(f"SELECT pg_notify('{self.settings.namespace}.commit_order', '')")
        return segment.next_offset - 1

    def add(self, *event_types: str, **options: Any) -> int:
        """Insert one transaction and order it; return the last offset."""
        return self.order(self.insert(*event_types, **options))

    def add_many(self, count: int, *, sessions: int = 5, transaction: int = 1, event_type: str = "work.done") -> int:
        """Insert and order ``count`` events over some sessions; return the last offset."""
        rows = self.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " SELECT (%s::text[])[1 + i %% %s]::uuid, 'agent', %s, jsonb_build_object('n', i)"
            " FROM generate_series(0, %s) AS i ORDER BY i RETURNING seq",
            SESSIONS,
            sessions,
            event_type,
            count - 1,
        )
        seqs = sorted(int(row[0]) for row in rows)
        return self.order(*(seqs[i : i + transaction] for i in range(0, count, transaction)))

    def cold(self) -> ColdReader:
        """A cold reader on the world's own connection."""
        return ColdReader(self.connection, self.settings.namespace, self.settings.ledger, KEY_PREFIX)

    def events(self) -> list[Event]:
        """All events that have an offset."""
        return self.cold().read(0, 1_000_000, 1 << 30).events

    def make_hot(self, max_bytes: int = 1 << 20) -> HotBuffer:
        """From here on :meth:`order` also fills a hot buffer."""
        self.hot = HotBuffer(max_bytes)
        self.hot.reset(self.writer.tail().next_offset)
        return self.hot

    # -- runners ---------------------------------------------------------------------------------------------------

    def group(self, *projectors: Projector, **settings: Any) -> RunnerGroup:
        """A group that is not started yet; it is stopped at the end of the test."""
        merged = Settings.model_validate({**self.settings.model_dump(), **settings})
        group = RunnerGroup(merged, projectors, self.hot, KEY_PREFIX, metrics=Metrics())
        self._groups.append(group)
        return group

    def start(self, *projectors: Projector, **settings: Any) -> RunnerGroup:
        """A started group."""
        group = self.group(*projectors, **settings)
        group.start()
        return group

    def positions(self, projector: str) -> list[int]:
        """The stored cursors of a projector, by lane."""
        rows = self.execute("SELECT position FROM walstream.cursors WHERE projector = %s ORDER BY lane", projector)
        return [int(row[0]) for row in rows]

    def reached(self, projector: str, offset: int) -> bool:
        """Whether all lanes of a projector have passed ``offset``."""
        positions = self.positions(projector)
        return bool(positions) and min(positions) >= offset

    def state(self, projector: str) -> str:
        rows = self.execute("SELECT state FROM walstream.projectors WHERE name = %s", projector)
        return str(rows[0][0]) if rows else ""

    def parked(self, projector: str) -> list[tuple[int, str, int]]:
        """(offset, state, attempts) of what is parked."""
        return [
            (int(offset), str(state), int(attempts))
            for offset, state, attempts in self.execute(
                "SELECT event_offset, state, attempts FROM walstream.parked WHERE projector = %s ORDER BY 1", projector
            )
        ]


_databases: dict[str, Database] = {}


@contextlib.contextmanager
def world_on(server: Server, **settings: Any) -> Iterator[World]:
    """A world in a database that all tests of this process use, one after the other: emptied before, closed after."""
    database = _databases.get(server.dsn())
    if database is None:
        database = _databases[server.dsn()] = Database(server, f"t_runners_{secrets.token_hex(4)}")
        database.create()
        if isinstance(server, RunningServer):  # one of our own goes away with all that is in it
            atexit.register(database.drop)
    database.execute(_EMPTY)
    world = World(database, **settings)
    try:
        yield world
    finally:
        world.close()


# Cheaper than to make it all anew: only rows go, and what a test added.
_EMPTY = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
     WHERE datname = current_database() AND pid <> pg_backend_pid();
    DO $$ DECLARE what text; BEGIN
        FOR what IN SELECT format('SCHEMA %I', nspname) FROM pg_namespace
                     WHERE nspname NOT IN ('public', 'walstream', 'information_schema') AND nspname !~ '^pg_'
                    UNION ALL
                    SELECT format('%s public.%I', CASE relkind WHEN 'v' THEN 'VIEW IF EXISTS' ELSE 'TABLE' END, relname)
                      FROM pg_class
                     WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v')
                       AND relname NOT IN ('agent_events', 'agent_snapshots', 'agent_jobs') LOOP
            EXECUTE 'DROP ' || what || ' CASCADE';
        END LOOP;
        IF to_regnamespace('walstream') IS NOT NULL THEN
            FOR what IN SELECT tablename FROM pg_tables
                         WHERE schemaname = 'walstream' AND tablename NOT IN ('migrations', 'job_transitions') LOOP
                EXECUTE format('DELETE FROM walstream.%I', what);
            END LOOP;
            INSERT INTO walstream.generation (generation) VALUES (0);
            INSERT INTO walstream.ingest DEFAULT VALUES;
            DELETE FROM public.agent_events;
            DELETE FROM public.agent_snapshots;
            DELETE FROM public.agent_jobs;
            ALTER SEQUENCE public.agent_events_seq_seq RESTART;
        END IF;
    END $$"""


def eventually(condition: Callable[[], Any], timeout: float = 60, what: str = "") -> Any:
    """Poll until ``condition`` is true; fail after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"did not happen within {timeout} s: {what or condition}")
        time.sleep(0.02)
