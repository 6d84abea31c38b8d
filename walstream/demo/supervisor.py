"""The demo from beginning to end: server, swarm, consumer, workers, kills, proof."""

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

from .agents import OpenSessions, planners, recorded_sessions, replaying
from .child import Child
from .crew import WORKERS, Crew
from .driving import Drive, Schedule
from .journal import FILE as JOURNAL
from .journal import Begun, Undone, read
from .proof import Proof, prove
from .scenario import numbers_of
from .screen import CONSUMER, Kill, Progress
from .swarm import Agent, Budget, Swarm, Tally
from .workers import EFFECTS

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

STREAM: Final = "walstream.demo.consumer:stream"
FILE: Final = "events.jsonl"  # what the consumer's file is called, in the demo's folder

_TO_SPARE: Final = 2  # hands beyond the number of agents: seldom does a handoff wait for one that is free
_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 15.0
_LOOK: Final = 0.1  # seconds between two questions to the database

_READY: Final = """\
SELECT to_regclass('demo_deliveries') IS NOT NULL AND to_regclass('event_counts') IS NOT NULL
   AND EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s AND active)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be shown.

    Attributes:
        events: how many are written in all; ``None``: all that are recorded (with ``replay``).
        kills: of the consumer.
        worker_kills: of workers. A replay has none.
        rate: events a second, at the most; ``None`` for as fast as it goes.
        replay: folder of recorded runs, instead of the simulation.
        copies: of each of them.
    """

    events: int | None
    agents: int
    kills: int
    worker_kills: int
    rate: float | None
    seed: int
    replay: Path | None = None
    copies: int = 1


@dataclass(slots=True)
class Outcome:
    """What was shown.

    Attributes:
        workers: whether there were any.
        gave_up: nothing moved any more although not everything was done.
        logs: the end of what consumer and workers said, if the proof does not hold.
    """

    proof: Proof
    kills: list[Kill]
    tally: Tally
    seconds: float
    postgres: str
    seed: int
    workers: bool = True
    gave_up: bool = False
    logs: str = ""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        consumer, workers = self.kills_of(worker=False), self.kills_of(worker=True)
        return self.proof.as_json() | {
            "kills": len(consumer),
            "outages_s": [round(kill.seconds, 3) for kill in consumer],
            "worker_kills": len(workers),
            "worker_outages_s": [round(kill.seconds, 3) for kill in workers],
            "turns_killed": sum(kill.turns for kill in workers),
            "rollbacks": self.tally.rollbacks,
            "savepoints": self.tally.savepoints,
            "rolled_back_events": self.tally.undone,
            "seconds": round(self.seconds, 1),
            "postgres": self.postgres,
            "seed": self.seed,
            "gave_up": self.gave_up,
        }

    def kills_of(self, *, worker: bool) -> list[Kill]:
        """The kills of workers, or of the consumer."""
        return [kill for kill in self.kills if (kill.who != CONSUMER) is worker]


class Demo:
    """A server and a folder for one run, as a context manager that leaves nothing behind.

    Attributes:
        folder: configuration, logs, and the files of consumer and workers.
        stop_command: after :meth:`keep`: the line that stops the server and removes everything.
    """

    stop_command = ""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan = plan
        self.progress = progress
        self.folder = Path()
        self._stack = ExitStack()
        self._sessions = OpenSessions(plan.agents)
        self._crew: Crew | None = None

    def __enter__(self) -> Demo:
        with ExitStack() as stack:
            agents, total = self._agents()
            self._swarm_agents, self._total = agents, total
            self.progress.goal = total
            self.progress.kills_planned = self.plan.kills + (self.plan.worker_kills if self.plan.replay is None else 0)
            self.server = stack.enter_context(PostgresServer())
            self.folder = self._make_folder()
            self.settings = Settings(dsn=self.server.dsn())
            self.config = self.folder / "walstream.toml"
            self.config.write_text(f"dsn = '''{self.settings.dsn}'''\n")
            self._consumer = Child(CONSUMER, "run", STREAM, self.config)
            stack.callback(self._consumer.kill)
            if self.plan.replay is None:
                numbers = numbers_of(self.plan.agents)
                hands = {str(role): n + _TO_SPARE for role, n in numbers.items() if role != "planner"}
                self._crew = Crew(self.config, hands, WORKERS, self.settings.namespace)
                stack.callback(self._crew.kill)
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
        drive = self._drive(swarm)
        with self._observer() as observer:
            self.progress.phase = "walstream init"
            self._init()
            with observer.cursor() as cur:
                cur.execute(EFFECTS)
            self.progress.phase = "starting the consumer" + (" and the workers" if self._crew else "")
            self._consumer.start()
            if self._crew is not None:
                self._crew.start()
            self._until_ready(observer)
            self.progress.phase = "agents at work"
            try:
                swarm.start()
                drive.run(observer)
            finally:
                swarm.stop()
            self.progress.phase = "stopping everybody"
            if self._crew is not None:
                self._crew.stop(_STOP_SECONDS)
            self._consumer.stop(_STOP_SECONDS)
            self.progress.phase = "comparing with the ledger"
        proof = self._prove(swarm.tally)
        return Outcome(
            proof,
            self.progress.kills,
            swarm.tally,
            time.monotonic() - started,
            self.server.version,
            self.plan.seed,
            workers=self._crew is not None,
            gave_up=drive.gave_up,
            logs="" if proof.holds else self._logs(),
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _agents(self) -> tuple[list[Agent], int]:
        plan = self.plan
        if plan.replay is None:
            assert plan.events is not None
            return planners(numbers_of(plan.agents)["planner"], plan.seed, self._sessions), plan.events
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
            env=self._consumer.environment,
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
            self._consumer.check()
            if self._crew is not None:
                self._crew.check()
            with observer.cursor() as cur:
                cur.execute(_READY, (self.settings.slot,))
                (ready,) = cur.fetchone() or (False,)
            if ready and (self._crew is None or self._crew.ready(observer)):
                return
            if time.monotonic() > deadline:
                raise WalstreamError(f"nobody was at work within {_READY_SECONDS:.0f} s: {self._logs()}")
            time.sleep(_LOOK)

    def _drive(self, swarm: Swarm) -> Drive:
        rng = random.Random(self.plan.seed)
        schedules = (
            Schedule(self.plan.kills, self._total, rng),
            Schedule(self.plan.worker_kills if self._crew else 0, self._total, rng),
        )
        return Drive(self.progress, swarm, self._sessions, self._consumer, self._crew, schedules, rng)

    def _prove(self, tally: Tally) -> Proof:
        """Compare everything, and add to ``tally`` what workers took back."""
        turns: list[Begun] = []
        for entry in read(self.folder / JOURNAL):
            if isinstance(entry, Begun):
                turns.append(entry)
            else:
                count_undone(tally, entry)
        outages = [
            (kill.who, int(kill.at * 1e6), int(kill.back * 1e6) if kill.back else time.time_ns() // 1000)
            for kill in self.progress.kills
        ]
        connection = self.connect("proof")
        try:
            return prove(
                connection,
                self.settings,
                self.folder / FILE,
                claimed=tally.claimed,
                turns=turns if self._crew else None,
                outages=outages,
            )
        finally:
            connection.close()

    def _logs(self) -> str:
        workers = f"\n{self._crew.said}" if self._crew else ""
        return f"consumer: {self._consumer.said}{workers}"


def count_undone(tally: Tally, entry: Undone) -> None:
    """Add what a worker took back."""
    tally.undone += entry.events
    if entry.savepoint:
        tally.savepoints += 1
    else:
        tally.rollbacks += 1
