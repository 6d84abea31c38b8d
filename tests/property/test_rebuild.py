"""Random histories of a ledger, snapshots at random moments: every rebuild equals a fold of SQL's rows in order.

Writers work side by side on the same sessions, with ``append`` and without; transactions commit out of the order of
seq, roll back, go back to savepoints, are prepared; the stream lags behind by any amount; the writer's transactions
roll back, its process is exchanged, its memory is too small for the sessions that it follows.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Server
from tests.ledger_oracle import check
from tests.runner_world import SESSIONS, World, world_on
from walstream.engine.context import Context
from walstream.engine.lanes import lane_of
from walstream.event import Event
from walstream.projectors.snapshot_writer import SnapshotWriter

CALLS = ["a", "b", "c"]


def payload_of(rng: random.Random, event_type: str) -> Any:
    call = rng.choice(CALLS)
    word = rng.choice(["", "x", "Grüße", "line\n", "9" * 30])
    number = rng.choice([0, -0.0, 1.5, 2**60, 10**25, 1e30])
    if event_type == "context.loaded":
        return {"messages": [{"role": "user", "content": f"{word}{n}"} for n in range(rng.randrange(4))]}
    if event_type == "model.responded":
        called = rng.sample(CALLS, rng.randrange(3))
        calls = [{"id": c, "type": "function", "function": {"name": "f", "arguments": "{}"}} for c in called]
        return {"message": {"role": "assistant", "content": word, **({"tool_calls": calls} if calls else {})}}
    if event_type in ("tool.invoked", "tool.retried"):
        return {"call_id": call, "name": "f", "arguments": {"n": number}, "attempt": rng.randrange(1, 4)}
    if event_type in ("tool.observed", "tool.abandoned"):
        return {"call_id": call, "result": {"n": number, "w": word}, "reason": word}
    return {"to": word, "n": number}


TYPES = [
    *["context.loaded", "model.requested", "model.responded", "tool.invoked", "tool.observed"] * 2,
    *["tool.retried", "tool.abandoned", "handoff.emitted", "handoff.received", "task.completed", "task.failed", "x.y"],
]


@dataclass
class Agent:
    """One connection that writes.

    Attributes:
        seqs: what it has inserted and not committed, and not rolled back either.
        locked: sessions whose lock it holds.
    """

    conn: Connection
    seqs: list[int] = field(default_factory=list)
    locked: set[str] = field(default_factory=set)
    prepared: str | None = None

    def run(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        with self.conn.cursor() as cur:
            cur.execute(sql, args or None)
            return cur.fetchall() if cur.description else []


class Writer:
    """The snapshot writer as the engine drives it: its position moves when its transaction commits."""

    def __init__(self, world: World, lanes: int, **options: Any) -> None:
        self._world = world
        self._options = options
        self.lanes = lanes
        self.positions = [0] * lanes
        self.restart()

    def restart(self) -> None:
        self.projector = SnapshotWriter(**self._options)
        self.contexts = [self.new_context(lane) for lane in range(self.lanes)]

    def new_context(self, lane: int) -> Context:
        return Context("snapshot-writer", lane=lane, connection=self._world.connect(), settings=self._world.settings)

    def step(self, lane: int, events: Sequence[Event], *, commit: bool) -> None:
        ctx = self.contexts[lane]
        through = events[-1].offset
        mine = [event for event in events if lane_of(event.row[1], self.lanes) == lane]
        if mine:
            ctx.begin()
            self.projector.project(mine, ctx)
        if commit:
            ctx.connection.commit()
            self.positions[lane] = through
        else:
            ctx.connection.rollback()


class History:
    """A random history."""

    def __init__(self, world: World, rng: random.Random, *, lanes: int, options: dict[str, Any], hostile: bool) -> None:
        self.world, self.rng, self.hostile = world, rng, hostile
        self.agents = [Agent(world.connect()) for _ in range(3)]
        self.sessions = SESSIONS[:2]
        self.committed: list[list[int]] = []  # transactions without an offset, as they committed
        self.drawn: list[int] = []  # numbers that somebody drew and will insert later
        self.writer = Writer(world, lanes, **options)
        self.prepared = 0

    def act(self) -> None:
        rng = self.rng
        agent = rng.choice(self.agents)
        act = rng.choices(
            [self.insert, self.append, self.end, self.savepoint, self.prepare, self.fork, self.order, self.write,
             self.exchange, self.draw],
            [6, 4, 5, 1, 0.5, 0.6, 5, 6, 0.4, 0.7 if self.hostile else 0],
        )[0]  # fmt: skip
        act(agent)

    def insert(self, agent: Agent) -> None:
        if agent.prepared:
            return self.end(agent)
        event_type = self.rng.choice(TYPES)
        text = json.dumps(payload_of(self.rng, event_type))
        columns = "session_id, agent_id, event_type, payload"
        sql = f"INSERT INTO agent_events ({columns}) VALUES (%s, 'a', %s, %s) RETURNING seq"
        agent.seqs += [row[0] for row in agent.run(sql, self.rng.choice(self.sessions), event_type, text)]
        return None

    def append(self, agent: Agent) -> None:
        free = [s for s in self.sessions if not any(s in other.locked for other in self.agents if other is not agent)]
        if agent.prepared or not free:
            return self.end(agent)
        session, event_type = self.rng.choice(free), self.rng.choice(TYPES)
        stored = event_type == "context.loaded" and self.rng.random() < 0.7
        if stored and any(other.locked for other in self.agents):
            return None  # two that store the same message wait for each other
        key = self.rng.choice([None, "k1", "k2", str(self.rng.random())])
        text = json.dumps(payload_of(self.rng, event_type))
        sql = "SELECT seq, appended FROM walstream.append(%s, 'a', %s, %s, key => %s, store_messages => %s)"
        agent.locked.add(session)
        agent.seqs += [row[0] for row in agent.run(sql, session, event_type, text, key, stored) if row[1]]
        return None

    def fork(self, agent: Agent) -> None:
        rows = agent.run("SELECT session_id::text, seq FROM agent_events ORDER BY random() LIMIT 1")
        if agent.prepared or not rows or len(self.sessions) > 5 or any(other.locked for other in self.agents):
            return
        session, seq = agent.run("SELECT session, seq FROM walstream.fork(%s, %s, 'a')", *rows[0])[0]
        agent.locked |= {session, rows[0][0]}
        agent.seqs.append(seq)
        self.sessions.append(session)

    def savepoint(self, agent: Agent) -> None:
        if agent.prepared:
            return
        agent.run("SAVEPOINT s")
        held, locked = list(agent.seqs), set(agent.locked)
        for _ in range(self.rng.randrange(1, 3)):
            self.insert(agent)
        if self.rng.random() < 0.5:
            agent.run("ROLLBACK TO s")
            agent.seqs, agent.locked = held, locked
        agent.run("RELEASE s")

    def prepare(self, agent: Agent) -> None:
        if agent.prepared or not agent.seqs:
            return
        self.prepared += 1
        agent.prepared = f"p{self.prepared}"
        agent.run(f"PREPARE TRANSACTION '{agent.prepared}'")

    def end(self, agent: Agent) -> None:
        commit = self.rng.random() < 0.8
        if agent.prepared:
            agent.conn.rollback()
            agent.conn.autocommit = True
            agent.run(f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{agent.prepared}'")
            agent.conn.autocommit = False
            agent.prepared = None
        elif commit:
            agent.conn.commit()
        else:
            agent.conn.rollback()
        if commit and agent.seqs:
            self.committed.append(agent.seqs)
        agent.seqs, agent.locked = [], set()

    def draw(self, agent: Agent) -> None:
        """Take a number without any lock, and insert it some time later."""
        if not self.drawn or self.rng.random() < 0.5:
            self.drawn.append(self.world.execute("SELECT nextval('agent_events_seq_seq')")[0][0])
            return
        if agent.prepared:
            return
        seq = self.drawn.pop(self.rng.randrange(len(self.drawn)))
        event_type = self.rng.choice(TYPES)
        text = json.dumps(payload_of(self.rng, event_type))
        sql = "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload) VALUES (%s, %s, 'a', %s, %s)"
        agent.run(sql, seq, self.rng.choice(self.sessions), event_type, text)
        agent.seqs.append(seq)

    def order(self, _agent: Agent) -> None:
        count = self.rng.randrange(1, 4)
        for seqs in self.committed[:count]:
            self.world.order(seqs)
        del self.committed[:count]

    def write(self, _agent: Agent) -> None:
        writer = self.writer
        lane = self.rng.randrange(writer.lanes)
        events = [event for event in self.world.events() if event.offset > writer.positions[lane]]
        if events:
            events = events[: self.rng.randrange(1, 12)]
            writer.step(lane, events, commit=self.rng.random() < 0.85)

    def exchange(self, _agent: Agent) -> None:
        """Another process, or only another connection."""
        if self.rng.random() < 0.5:
            self.writer.restart()
        else:
            lane = self.rng.randrange(self.writer.lanes)
            self.writer.contexts[lane] = self.writer.new_context(lane)

    def end_all(self) -> None:
        for agent in self.agents:
            agent.conn.rollback()
            self.end(agent)

    def finish(self) -> None:
        for agent in self.agents:
            self.end(agent)
        while self.committed:
            self.order(self.agents[0])
        while min(self.writer.positions) < len(self.world.events()):
            self.write(self.agents[0])


@contextlib.contextmanager
def played(server: Server, seed: int, steps: int, *, hostile: bool = False, cache: int = 1) -> Any:
    rng = random.Random(seed)
    options = {
        "every_events": rng.choice([1, 2, 5]),
        "keep": rng.choice([1, 3, 1000]),
        "memory_bytes": rng.choice([1, 20_000, 10_000_000]),
    }
    with world_on(server) as world:
        world.execute(f"ALTER SEQUENCE agent_events_seq_seq CACHE {cache}")
        history = History(world, rng, lanes=rng.choice([1, 2]), options=options, hostile=hostile)
        try:
            for step in range(steps):
                history.act()
                if not hostile and step % 25 == 24:
                    check(world.connection, world.settings, every=7)
            history.finish()
            yield check(world.connection, world.settings)
        finally:
            history.end_all()
            world.execute("ALTER SEQUENCE agent_events_seq_seq CACHE 1")


@pytest.mark.parametrize("seed", range(4))
def test_every_rebuild_is_the_fold_of_the_rows_in_order(server: Server, seed: int) -> None:
    with played(server, seed, 120) as from_snapshots:
        assert from_snapshots > 0


def test_with_numbers_in_stock_nothing_is_settled_and_all_is_exact(server: Server) -> None:
    with played(server, 1000, 120, cache=7) as from_snapshots:
        assert from_snapshots > 0


def test_a_number_that_is_drawn_first_and_inserted_later_is_in_once_the_writer_saw_it(server: Server) -> None:
    with played(server, 2000, 150, hostile=True) as from_snapshots:
        assert from_snapshots > 0


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("cache", [1, 7])
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_more(server: Server, seed: int, cache: int, hostile: bool) -> None:
    with played(server, seed, 300, hostile=hostile, cache=cache):
        pass
