"""The agents that write from the demo's own process: planners, who hand on to workers, and those who replay runs."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from walstream.errors import ConfigError
from walstream.ledger.append import NewEvent
from walstream.ledger.importing import copied_session
from walstream.ledger.json_lines import read_events

from .scenario import events_after, new_task, shaped, turn
from .swarm import Agent, Desk, Spent


class OpenSessions:
    """How many sessions are on their way between agents.

    Args:
        most: how many may be. With more in flight, planners carry a session through alone.

    Attributes:
        ended: of those that were handed on, as somebody else has seen it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._opened = 0
        self._lock = threading.Lock()
        self.ended = 0

    @property
    def full(self) -> bool:
        """Whether planners should hand on no more for now. So it is while the consumer is dead."""
        return self._opened - self.ended >= self._most

    def opened(self) -> None:
        """Count a session that was handed on."""
        with self._lock:
            self._opened += 1


class Planner:
    """Opens sessions and hands them on to the workers."""

    def __init__(self, name: str, seed: str, sessions: OpenSessions) -> None:
        self.name = name
        self._rng = random.Random(seed)
        self._sessions = sessions

    def work(self, desk: Desk) -> None:
        task = new_task(self._rng)
        if not self._sessions.full:
            steps = list(turn("planner", self.name, task, self._rng))
            if desk.hand_on(steps, events_after(steps)):
                self._sessions.opened()
                return
        for step in turn("planner", self.name, task, self._rng, alone=True):
            desk.write(step)


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


def planners(count: int, seed: int, sessions: OpenSessions) -> list[Agent]:
    """Return ``count`` planners, the same for the same seed."""
    return [Planner(f"planner-{n}", f"{seed}:planner-{n}", sessions) for n in range(1, count + 1)]


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
