"""The demo from beginning to end: server, swarm, consumer, kills, proof."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings
from walstream.errors import WalstreamError
from walstream.postgres import PostgresServer
from walstream.source.connection import connect

from .agents import recorded_sessions, replaying, simulated
from .child import STREAM, Child
from .proof import Proof, prove
from .screen import Kill, Progress
from .swarm import Agent, Budget, Swarm, Tally

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

FILE: Final = "events.jsonl"  # what the consumer's file is called, in the demo's folder

_READY_SECONDS: Final = 30.0
_OUTAGE_SECONDS: Final = 60.0
_STUCK_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 15.0
_RESPITE: Final = 1.5  # seconds that a consumer delivers before it is killed again, at random up to this
_TICK: Final = 0.02
_LOOK: Final = 0.1  # seconds between two questions to the database

_READY: Final = """\
SELECT to_regclass('demo_deliveries') IS NOT NULL AND to_regclass('agent_inbox') IS NOT NULL
   AND to_regclass('event_counts') IS NOT NULL
   AND EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s AND active)"""
_DELIVERED: Final = """\
SELECT coalesce(max(event_offset), 0), min(handled_us) FILTER (WHERE handled_us > %s) FROM demo_deliveries"""
_BEHIND: Final = """\
SELECT coalesce(min(position), 0), coalesce(sum(position), 0), count(*), (SELECT generation FROM walstream.generation)
  FROM walstream.cursors"""
_PROJECTORS: Final = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be shown.

    Attributes:
        events: how many are written in all; ``None``: all that are recorded (with ``replay``).
        rate: events a second, at the most; ``None`` for as fast as it goes.
        replay: folder of recorded runs, instead of the simulation.
        copies: of each of them.
    """

    events: int | None
    agents: int
    kills: int
    rate: float | None
    seed: int
    replay: Path | None = None
    copies: int = 1


@dataclass(slots=True)
class Outcome:
    """What was shown.

    Attributes:
        gave_up: nothing moved any more although not everything was delivered.
        consumer_said: the end of the consumer's log, if the proof does not hold.
    """

    proof: Proof
    kills: list[Kill]
    tally: Tally
    seconds: float
    postgres: str
    seed: int
    gave_up: bool = False
    consumer_said: str = ""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return self.proof.as_json() | {
            "kills": len(self.kills),
            "outages_s": [round(kill.seconds, 3) for kill in self.kills],
            "transactions": self.tally.transactions,
            "rollbacks": self.tally.rollbacks,
            "savepoints": self.tally.savepoints,
            "rolled_back_events": self.tally.undone,
            "handoffs_taken": self.tally.handoffs_taken,
            "seconds": round(self.seconds, 1),
            "postgres": self.postgres,
            "seed": self.seed,
            "gave_up": self.gave_up,
        }


class Demo:
    """A server and a folder for one run, as a context manager that leaves nothing behind.

    Attributes:
        folder: configuration, log and file of the consumer.
        stop_command: after :meth:`keep`: the line that stops the server and removes everything.
    """

    stop_command = ""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan = plan
        self.progress = progress
        self.folder = Path()
        self._stack = ExitStack()
        self._random = random.Random(plan.seed)
        self._generation = 0
        self._gave_up = False

    def __enter__(self) -> Demo:
        with ExitStack() as stack:
            agents, total = self._agents()
            self._swarm_agents, self._total = agents, total
            self.progress.goal = total
            self.progress.kills_planned = self.plan.kills
            self.server = stack.enter_context(PostgresServer())
            self.folder = self._make_folder()
            self.settings = Settings(dsn=self.server.dsn())
            self.config = self.folder / "walstream.toml"
            self.config.write_text(f"dsn = '''{self.settings.dsn}'''\n")
            self._child = Child(self.config, self.folder / "consumer.log", STREAM)
            stack.callback(self._child.kill)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def keep(self) -> None:
        """Leave server and folder behind."""
        self.stop_command = f"kill -INT {self.server.pid}; sleep 2; rm -rf {self.server.data_dir.parent}"
        self.server.keep()
        self._stack.pop_all()

    def connect(self, name: str) -> Connection:
        """A connection, not in autocommit mode, that finds the consumer's tables."""
        return connect(self.settings.dsn, application_name=f"walstream:demo {name}", autocommit=False, search_path=None)

    def run(self) -> Outcome:
        """Run it all.

        Raises:
            WalstreamError: something ended that should not have.
        """
        started = time.monotonic()
        budget = Budget(self.plan.events, self.plan.rate)
        swarm = Swarm(self._swarm_agents, budget, self.settings.ledger, self.connect)
        with self._observer() as observer:
            self.progress.phase = "walstream init"
            self._init()
            self.progress.phase = "starting the consumer"
            self._child.start()
            self._until_ready(observer)
            self.progress.phase = "agents at work"
            try:
                swarm.start()
                self._drive(swarm, observer)
            finally:
                swarm.stop()
            self.progress.phase = "stopping the consumer"
            self._child.stop(_STOP_SECONDS)
            self.progress.phase = "comparing with the ledger"
        outages = [
            (int(kill.at * 1e6), int(kill.back * 1e6) if kill.back else time.time_ns() // 1000)
            for kill in self.progress.kills
        ]
        connection = self.connect("proof")
        try:
            proof = prove(connection, self.settings, self.folder / FILE, claimed=swarm.tally.committed, outages=outages)
        finally:
            connection.close()
        seconds = time.monotonic() - started
        told = "" if proof.holds else self._child.said
        return Outcome(
            proof,
            self.progress.kills,
            swarm.tally,
            seconds,
            self.server.version,
            self.plan.seed,
            gave_up=self._gave_up,
            consumer_said=told,
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _agents(self) -> tuple[list[Agent], int]:
        plan = self.plan
        if plan.replay is None:
            assert plan.events is not None
            return simulated(plan.agents, plan.seed), plan.events
        sessions = recorded_sessions(plan.replay, plan.copies)
        recorded = sum(map(len, sessions))
        return replaying(plan.agents, plan.seed, sessions), min(plan.events or recorded, recorded)

    def _make_folder(self) -> Path:
        """A folder beside the server's data, which goes when that goes, even if this process is killed.

        Who removes it then is the server's account, so it gets the folder; the files in it may be another's.
        """
        folder = self.server.data_dir.parent / "demo"
        folder.mkdir()
        owner = self.server.data_dir.stat()
        if os.geteuid() == 0:
            os.chown(folder, owner.st_uid, owner.st_gid)
        return folder

    def _init(self) -> None:
        """Set up as a user does, with the command."""
        done = subprocess.run(
            [sys.executable, "-m", "walstream.cli", "init", "--config", str(self.config)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self._child.environment,
            check=False,
        )
        if done.returncode:
            raise WalstreamError(f"walstream init failed with exit code {done.returncode}: {done.stderr.strip()}")

    @contextmanager
    def _observer(self) -> Iterator[Connection]:
        connection = self.connect("supervisor")
        try:
            connection.autocommit = True
            yield connection
        finally:
            connection.close()

    def _until_ready(self, observer: Connection) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            self._child.check()
            with observer.cursor() as cur:
                cur.execute(_READY, (self.settings.slot,))
                (ready,) = cur.fetchone() or (False,)
            if ready:
                return
            if time.monotonic() > deadline:
                raise WalstreamError(
                    f"the consumer did not begin to stream within {_READY_SECONDS:.0f} s: {self._child.said}"
                )
            time.sleep(_LOOK)

    def _drive(self, swarm: Swarm, observer: Connection) -> None:
        """Kill the consumer at its marks, until the agents are done and everything is delivered."""
        marks = self._marks()
        swarm.budget.close_gate_at(marks[0] + self._slack() if marks else None)
        look_at = moved_at = respite = 0.0
        moved = (0, 0)
        while True:
            self._child.check()
            if swarm.error is not None:
                raise swarm.error
            progress = self.progress
            progress.committed = swarm.tally.committed
            progress.undone = swarm.tally.undone
            progress.handoffs = swarm.tally.handoffs_taken
            busy = swarm.busy
            if marks and progress.committed >= marks[0] and self._alive_for() > respite:
                respite = self._random.uniform(0.0, _RESPITE)
                marks.pop(0)
                swarm.budget.close_gate_at(marks[0] + self._slack() if marks else None)
                self._kill()
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK
                reached, steps = self._look(observer)
                if busy or marks or self._outage() or moved != (progress.delivered, steps):
                    moved, moved_at = (progress.delivered, steps), now
                if not busy and not marks and not self._outage():
                    progress.phase = "catching up"
                    if reached >= progress.committed:
                        return
                    if now - moved_at > _STUCK_SECONDS:
                        self._gave_up = True  # the proof shows what is missing
                        return
            time.sleep(_TICK)

    def _marks(self) -> list[int]:
        """After how many events the consumer is killed: a random number in each of so many equal parts of the way."""
        low, high = self._total * 0.05, self._total * 0.92
        part = (high - low) / max(self.plan.kills, 1)
        return [max(1, int(low + part * (n + self._random.random()))) for n in range(self.plan.kills)]

    def _slack(self) -> int:
        """How far agents may get beyond a mark whose kill is not due yet, because the last one is not over."""
        return int(self._total / (self.plan.kills + 1) / 2)

    def _outage(self) -> Kill | None:
        kills = self.progress.kills
        return kills[-1] if kills and kills[-1].back is None else None

    def _alive_for(self) -> float:
        """Seconds since the consumer delivers (again); below 0 while it does not."""
        kills = self.progress.kills
        if self._outage() or not self.progress.delivered:
            return -1.0
        return time.time() - (kills[-1].back or 0.0) if kills else _RESPITE + 1

    def _kill(self) -> None:
        time.sleep(self._random.uniform(0, 0.05))
        self._child.kill()
        self.progress.kills.append(Kill(self.progress.committed, time.time()))
        self._child.start()

    def _look(self, observer: Connection) -> tuple[int, int]:
        """Ask how far the deliveries are; return the offset that every projector has reached, and the sum of all."""
        outage = self._outage()
        with observer.cursor() as cur:
            cur.execute(_DELIVERED, (int((outage.at if outage else time.time()) * 1e6),))
            self.progress.delivered, back_us = cur.fetchone() or (0, None)
            cur.execute(_BEHIND)
            reached, steps, cursors, generation = cur.fetchone() or (0, 0, 0, 0)
        if outage is not None:
            idle = self.progress.delivered >= self.progress.committed and generation > self._generation
            if back_us is not None:
                outage.back = back_us / 1e6
            elif idle:  # it took over, and there was nothing to deliver
                outage.back = time.time()
            elif outage.seconds > _OUTAGE_SECONDS:
                raise WalstreamError(
                    f"no consumer took over within {_OUTAGE_SECONDS:.0f} s of the kill: {self._child.said}"
                )
        if not self._outage():
            self._generation = generation
        return int(reached) if cursors >= _PROJECTORS else 0, int(steps)
