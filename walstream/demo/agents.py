"""Two kinds of agents: those that play a scenario, woken by handoffs, and those that replay recorded runs."""

from __future__ import annotations

import queue
import random
import select
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from walstream.errors import ConfigError
from walstream.ledger.append import NewEvent
from walstream.ledger.importing import copied_session
from walstream.ledger.json_lines import read_events

from .scenario import Role, Step, Task, new_task, roles_of, shaped, turn
from .swarm import Agent, Desk, Spent

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

INBOX_CHANNEL: Final = "agent_inbox"
_IDLE: Final = 0.1  # seconds that an agent waits for a knock before it looks into its inbox by itself
_OPEN_SESSIONS: Final = 4  # for each agent; with more in flight, planners carry a session through alone

_TAKE: Final = """\
UPDATE agent_inbox SET state = 'taken', taken_by = %s, taken_at = clock_timestamp()
 WHERE key = (SELECT key FROM agent_inbox WHERE recipient = ANY (%s) AND state = 'waiting'
               ORDER BY event_offset LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING recipient, key, session_id, sender, message"""


class OpenSessions:
    """How many sessions are on their way between agents."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether planners should hand on no more for now. So it is while the consumer is dead."""
        return self._open >= self._most

    def change(self, by: int) -> None:
        """Count a session that was handed on for the first time (1), or that ended (-1)."""
        with self._lock:
            self._open += by


class SimulatedAgent:
    """Takes up what is in the inbox for its roles; a planner with an empty inbox opens a session."""

    def __init__(self, name: str, roles: Sequence[Role], seed: str, sessions: OpenSessions) -> None:
        self.name = name
        self._roles = tuple(roles)
        self._rng = random.Random(seed)
        self._sessions = sessions
        self._listening = False

    def work(self, desk: Desk) -> None:
        connection = desk.connection
        if not self._listening:
            with connection, connection.cursor() as cur:
                cur.execute(f"LISTEN {INBOX_CHANNEL}")
            self._listening = True
        if self._take_up_a_handoff(desk):
            return
        if "planner" in self._roles:
            self._open_a_session(desk)
        else:
            _wait_for_a_knock(connection)

    def _take_up_a_handoff(self, desk: Desk) -> bool:
        with desk.connection.cursor() as cur:
            cur.execute(_TAKE, (self.name, list(self._roles)))
            row = cur.fetchone()
        if row is None:
            desk.connection.rollback()
            return False
        role, key, session_id, sender, message = row
        task = Task(session_id, message["task"], sender, key, message["rounds"])
        steps = turn(role, self.name, task, self._rng)
        opening = next(steps)
        if opening.undo == "transaction":
            desk.abandon(opening)  # the agent failed as it took the handoff up: it waits in the inbox again
            return True
        desk.finish(opening)
        desk.took_handoff()
        self._carry_out(desk, steps)
        return True

    def _open_a_session(self, desk: Desk) -> None:
        alone = self._sessions.full
        if not alone:
            self._sessions.change(1)
        self._carry_out(desk, turn("planner", self.name, new_task(self._rng), self._rng, alone=alone), alone=alone)

    def _carry_out(self, desk: Desk, steps: Iterable[Step], *, alone: bool = False) -> None:
        for step in steps:
            desk.write(step)
            if step.events[-1].event_type in ("task.completed", "task.failed") and not alone:
                self._sessions.change(-1)


class ReplayingAgent:
    """Takes recorded sessions, one after the other, and appends them as they were."""

    def __init__(self, name: str, seed: str, sessions: queue.SimpleQueue[Sequence[NewEvent]]) -> None:
        self.name = name
        self._rng = random.Random(seed)
        self._sessions = sessions

    def work(self, desk: Desk) -> None:
        try:
            events = self._sessions.get_nowait()
        except queue.Empty:
            raise Spent from None
        for step in shaped(events, self._rng):
            desk.write(step)


def simulated(count: int, seed: int) -> list[Agent]:
    """Return ``count`` agents with the roles of the scenario, the same for the same seed."""
    sessions = OpenSessions(_OPEN_SESSIONS * count)
    numbers: dict[str, int] = {}
    agents: list[Agent] = []
    for roles in roles_of(count):
        kind = roles[0] if len(roles) == 1 else "agent"
        numbers[kind] = numbers.get(kind, 0) + 1
        name = f"{kind}-{numbers[kind]}"
        agents.append(SimulatedAgent(name, roles, f"{seed}:{name}", sessions))
    return agents


def replaying(count: int, seed: int, sessions: Iterable[Sequence[NewEvent]]) -> list[Agent]:
    """Return ``count`` agents that share ``sessions``, taken in an order that the seed decides."""
    shuffled = list(sessions)
    random.Random(seed).shuffle(shuffled)
    shared: queue.SimpleQueue[Sequence[NewEvent]] = queue.SimpleQueue()
    for session in shuffled:
        shared.put(session)
    return [ReplayingAgent(f"replayer-{n}", f"{seed}:{n}", shared) for n in range(1, count + 1)]


def recorded_sessions(folder: Path, copies: int) -> list[list[NewEvent]]:
    """Read every ``*.jsonl`` in ``folder``; return ``copies`` of every session in it.

    Raises:
        ConfigError: there are none.
        BadLine: a line is not an event.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{folder} holds no *.jsonl", hint="give a folder of files that `walstream import` can read")
    found: dict[str, list[NewEvent]] = {}
    for file in files:
        with file.open("rb") as stream:
            for _line, event in read_events(stream, str(file)):
                found.setdefault(event.session_id, []).append(event)
    return [
        [event._replace(session_id=copied_session(session_id, copy)) for event in events]
        for copy in range(1, copies + 1)
        for session_id, events in found.items()
    ]


def _wait_for_a_knock(connection: Connection) -> None:
    select.select([connection], [], [], _IDLE)
    connection.poll()
    connection.notifies.clear()
