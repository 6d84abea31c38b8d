"""From the first event to the last: looks how far everything is, and kills consumer and workers on the way."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from walstream.errors import WalstreamError

from .agents import OpenSessions
from .child import Child
from .crew import Crew
from .screen import CONSUMER, Kill, Progress
from .swarm import Swarm

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_OUTAGE_SECONDS: Final = 60.0
_STUCK_SECONDS: Final = 30.0
_RESPITE: Final = 1.5  # seconds that a process works before it is killed again, at random up to this
_PATIENCE: Final = 2.0  # seconds that workers are watched for one in the middle of a turn
_IN_A_TURN: Final = 0.75  # so many of the kills of workers wait for a turn
_TICK: Final = 0.02
_LOOK: Final = 0.1  # seconds between two questions to the database

_DELIVERED: Final = """\
SELECT coalesce(max(event_offset), 0), min(handled_us) FILTER (WHERE handled_us > %s) FROM demo_deliveries"""
_BEHIND: Final = """\
SELECT coalesce(min(position), 0), coalesce(sum(position), 0), count(*), (SELECT generation FROM walstream.generation)
  FROM walstream.cursors"""
_TURNS: Final = "SELECT count(*), coalesce(sum(events), 0), count(*) FILTER (WHERE ends) FROM demo_effects"
_PROJECTORS: Final = 4


class Schedule:
    """When processes of one kind are killed: a random number of events in each of so many equal parts of the way.

    Attributes:
        marks: after how many events, those that are left.
    """

    def __init__(self, kills: int, total: int, rng: random.Random) -> None:
        low, high = total * 0.05, total * 0.92
        part = (high - low) / max(kills, 1)
        self.marks = [max(1, int(low + part * (n + rng.random()))) for n in range(kills)]
        self._random = rng
        self._slack = int(total / (kills + 1) / 2)
        self._respite = 0.0

    def due(self, committed: int, alive_for: float) -> bool:
        """Whether it is time, of a process that works for so many seconds."""
        return bool(self.marks) and committed >= self.marks[0] and alive_for > self._respite

    def done(self) -> None:
        """Go on to the next."""
        self.marks.pop(0)
        self._respite = self._random.uniform(0.0, _RESPITE)

    @property
    def gate(self) -> float:
        """How far agents may get before a kill that is not due yet, because the last one is not over."""
        return self.marks[0] + self._slack if self.marks else float("inf")


class Drive:
    """One way from the first event to the last.

    Args:
        consumer, crew: the processes. ``crew`` is ``None`` if there are no workers.
        schedules: of the consumer's kills, and of the workers'.

    Attributes:
        gave_up: nothing moved any more although not everything was done.
    """

    def __init__(
        self,
        progress: Progress,
        swarm: Swarm,
        sessions: OpenSessions,
        consumer: Child,
        crew: Crew | None,
        schedules: tuple[Schedule, Schedule],
        rng: random.Random,
    ) -> None:
        self._progress = progress
        self._swarm = swarm
        self._sessions = sessions
        self._consumer = consumer
        self._crew = crew
        self._consumer_kills, self._worker_kills = schedules
        self._random = rng
        self._watched_until: float | None = None
        self._generation = 0
        self.gave_up = False

    def run(self, observer: Connection) -> None:
        """Kill at the marks, until the agents are done and everything is delivered.

        Args:
            observer: in autocommit.

        Raises:
            WalstreamError: a process ended by itself, or none took over.
        """
        progress = self._progress
        look_at = moved_at = 0.0
        moved: tuple[int, ...] = ()
        self._set_gate()
        while True:
            self._consumer.check()
            if self._crew is not None:
                self._crew.check()
            if self._swarm.error is not None:
                raise self._swarm.error
            self._kill_who_is_due(observer)
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK
                reached, *steps = self._look(observer)
                written = not self._swarm.busy
                killed = not (self._consumer_kills.marks or self._worker_kills.marks or progress.outages)
                waited_for = progress.outages or not (written or self._swarm.budget.held)
                if waited_for or moved != (progress.delivered, *steps):
                    moved, moved_at = (progress.delivered, *steps), now
                if written and killed:
                    progress.phase = "catching up"
                    if reached >= self._swarm.tally.claimed:
                        return
                if now - moved_at > _STUCK_SECONDS:
                    self.gave_up = True  # the proof shows what is missing
                    return
            time.sleep(_TICK)

    # -- kills ---------------------------------------------------------------------------------------------------------

    def _set_gate(self) -> None:
        gate = min(self._consumer_kills.gate, self._worker_kills.gate)
        self._swarm.budget.close_gate_at(None if gate == float("inf") else int(gate))

    def _kill_who_is_due(self, observer: Connection) -> None:
        committed = self._progress.committed
        if self._consumer_kills.due(committed, self._alive_for(worker=False) if self._progress.delivered else -1.0):
            time.sleep(self._random.uniform(0, 0.05))
            self._consumer.kill()
            self._progress.kills.append(Kill(CONSUMER, committed, time.time()))
            self._consumer.start()
            self._consumer_kills.done()
            self._set_gate()
        if self._crew is None:
            return
        if self._watched_until is None and self._worker_kills.due(committed, self._alive_for(worker=True)):
            patience = _PATIENCE if self._random.random() < _IN_A_TURN else 0.0
            self._watched_until = time.monotonic() + patience
        if self._watched_until is not None:
            over = time.monotonic() >= self._watched_until
            found = self._crew.roles if over else [role for role in self._crew.roles if self._crew.busy(role, observer)]
            if found:
                self._watched_until = None
                role, at = self._random.choice(found), time.time()
                turns = self._crew.killed(role, observer)
                self._progress.kills.append(Kill(role, committed, at, turns=turns))
                self._crew.restart(role)
                self._worker_kills.done()
                self._set_gate()

    def _alive_for(self, *, worker: bool) -> float:
        """Seconds since the process that was killed last works again; below 0 while it does not."""
        kills = [kill for kill in self._progress.kills if (kill.who != CONSUMER) is worker]
        if not kills:
            return _RESPITE + 1
        back = kills[-1].back
        return -1.0 if back is None else time.time() - back

    # -- looking -------------------------------------------------------------------------------------------------------

    def _look(self, observer: Connection) -> tuple[int, ...]:
        """Ask how far everything is; return the offset that every projector has reached, and what moves as well."""
        progress = self._progress
        outages = progress.outages
        dead = next((kill for kill in outages if kill.who == CONSUMER), None)
        with observer.cursor() as cur:
            cur.execute(_TURNS)
            turns, written, self._sessions.ended = map(int, cur.fetchone() or (0, 0, 0))
            cur.execute(_DELIVERED, (int((dead.at if dead else time.time()) * 1e6),))
            progress.delivered, back_us = cur.fetchone() or (0, None)
            cur.execute(_BEHIND)
            reached, steps, cursors, generation = map(int, cur.fetchone() or (0, 0, 0, 0))
        progress.turns = turns
        progress.committed = self._swarm.tally.committed + written
        progress.undone = self._swarm.tally.undone
        for kill in outages:
            if kill is dead:
                idle = progress.delivered >= progress.committed and generation > self._generation
                if back_us is not None:
                    kill.back = back_us / 1e6
                elif idle:  # it took over, and there was nothing to deliver
                    kill.back = time.time()
            elif self._crew is not None and self._crew.back(kill.who, kill.at, observer):
                kill.back = time.time()
            if kill.back is None and kill.seconds > _OUTAGE_SECONDS:
                said = self._consumer.said if kill is dead or self._crew is None else self._crew.said
                raise WalstreamError(f"no {kill.who} took over within {_OUTAGE_SECONDS:.0f} s of the kill: {said}")
        if not any(kill.who == CONSUMER for kill in progress.outages):
            self._generation = generation
        return reached if cursors >= _PROJECTORS else 0, steps, turns
