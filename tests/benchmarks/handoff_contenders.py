"""The contenders of the handoff benchmark, each on a server of its own: how one is set up, run, and given work."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import psycopg2
from procrastinate.types import JSONDict
from typer.testing import CliRunner

from tests.benchmarks import handoff_polling, handoff_procrastinate, handoff_receipts
from tests.benchmarks.processes import Processes, server_cpu_seconds
from walstream import Draft, Jobs, Ledger
from walstream.cli.app import app as command_line
from walstream.config import Settings
from walstream.postgres import PostgresServer
from walstream.postgres.server import execute

Emit = Callable[[int], tuple[int, int]]
"""Hands over number ``n``; answers with the moments before its COMMIT was sent and after it had returned."""

_AGENT: Final = "researcher"
_PATIENCE: Final = 120.0


class Contender(ABC):
    """A way to hand work to a worker in another process.

    Args:
        server: its own, running.
        folder: where its files are.
    """

    name: str

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.processes = Processes(folder / f"{self.name}.log", {})
        self._next = 1
        self._runs = 0
        execute(server.dsn(), "CREATE DATABASE bench")
        self.dsn = server.dsn("bench")
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Make the tables."""

    @abstractmethod
    def start(self, processes: int, environment: dict[str, str]) -> None:
        """Start what receives the work, so many workers of it."""

    @abstractmethod
    def emitter(self) -> contextlib.AbstractContextManager[Emit]:
        """What hands over, with a connection of its own."""

    @abstractmethod
    def fill(self, numbers: range) -> Callable[[], object]:
        """Make a backlog, and return what says to the workers, once they go on, that there is one."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether everything that was handed over is completed."""

    @property
    def workers_from(self) -> int:
        """The number of the first process that is a worker."""
        return 0

    @contextlib.contextmanager
    def running(self, processes: int, hands: int) -> Iterator[Path]:
        """The workers, warm and without work; gives the file where they leave their receipts."""
        self._runs += 1
        receipts = self.folder / f"{self.name}-{self._runs}"
        receipts.touch()
        environment = {
            handoff_receipts.FILE: str(receipts),
            handoff_receipts.HANDS: str(hands),
            handoff_receipts.DSN: self.dsn,
        }
        self.start(processes, environment)
        try:
            with self.emitter() as emit:
                for _ in range(2):  # all hands have connections, and statements that have run
                    before = handoff_receipts.count(receipts)
                    for number in self.take_numbers(4 * processes * hands):
                        emit(number)
                    self.received(receipts, before + 4 * processes * hands, "warming up")
                    time.sleep(0.3)
            yield receipts
        finally:
            self.processes.stop()

    def take_numbers(self, count: int) -> range:
        """Numbers that no handoff had before."""
        first, self._next = self._next, self._next + count
        return range(first, self._next)

    def received(self, receipts: Path, wanted: int, doing: str, pause: float = 0.02) -> None:
        """Wait until so many have been received, and all are completed.

        Raises:
            RuntimeError: see :meth:`wait`.
        """
        self.wait(lambda: handoff_receipts.count(receipts) >= wanted and self.idle(), doing, pause)

    def wait(self, reached: Callable[[], bool], doing: str, pause: float = 0.02) -> None:
        """Wait until it is so.

        Raises:
            RuntimeError: a process has ended, or it takes too long.
        """
        until = time.monotonic() + _PATIENCE
        while not reached():
            self.processes.check()
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name}: {doing} took more than {_PATIENCE:.0f} s")
            time.sleep(pause)

    def cpu_seconds(self) -> tuple[float | None, float | None]:
        """Processor time of the receiving processes and of the server, so far."""
        return self.processes.cpu_seconds(), server_cpu_seconds(self.server)

    def ask(self, sql: str) -> Any:
        """The first value of a query."""
        return execute(self.dsn, sql)[0][0]


class Walstream(Contender):
    """``walstream run`` with the router, and ``walstream worker``."""

    name = "walstream"
    _SLOT: Final = "bench"

    def set_up(self) -> None:
        result = CliRunner().invoke(command_line, ["init", "--dsn", self.dsn, "--slot", self._SLOT])
        if result.exit_code != 0:
            raise RuntimeError(f"walstream init failed: {result.output}")
        self.settings = Settings(dsn=self.dsn, slot=self._SLOT)

    def start(self, processes: int, environment: dict[str, str]) -> None:
        environment |= {"WALSTREAM_DSN": self.dsn, "WALSTREAM_SLOT": self._SLOT}
        target = "tests.benchmarks.handoff_walstream"
        self.processes.start("walstream", "run", f"{target}:stream", **environment)
        for _ in range(processes):
            self.processes.start("walstream", "worker", f"{target}:worker", **environment)

    @property
    def workers_from(self) -> int:
        return 1

    @contextlib.contextmanager
    def emitter(self) -> Iterator[Emit]:
        ledger = Ledger(self.settings)
        with contextlib.closing(psycopg2.connect(self.dsn)) as conn:

            def emit(number: int) -> tuple[int, int]:
                ledger.append(str(uuid.uuid4()), "planner", "handoff.emitted", _payload(number), on=conn)
                sent = time.monotonic_ns()
                conn.commit()
                return sent, time.monotonic_ns()

            yield emit

    def fill(self, numbers: range) -> Callable[[], object]:
        with contextlib.closing(psycopg2.connect(self.dsn)) as conn:
            drafts = [Draft(str(uuid.uuid4()), "planner", "handoff.emitted", _payload(number)) for number in numbers]
            for first in range(0, len(drafts), 500):
                Ledger(self.settings).append_batch(drafts[first : first + 500], on=conn)
                conn.commit()
        self.wait(
            lambda: self.ask("SELECT count(*) FROM agent_jobs WHERE status = 'SUBMITTED'") >= len(numbers), "routing"
        )
        return lambda: None  # the router has said so

    def idle(self) -> bool:
        open_ones = "SELECT FROM agent_jobs WHERE status IN ('SUBMITTED', 'DELIVERED', 'IN_PROGRESS')"
        return not self.ask(f"SELECT EXISTS ({open_ones})")


class WithoutEvents(Walstream):
    """The same, with jobs that an application submits and that write no events: what the queue alone does."""

    name = "walstream, jobs without events"

    def fill(self, numbers: range) -> Callable[[], object]:
        jobs = Jobs(self.settings)
        with contextlib.closing(psycopg2.connect(self.dsn)) as conn:
            for number in numbers:
                jobs.submit(uuid.UUID(int=number), _AGENT, on=conn)
            conn.commit()

        def wake() -> None:
            with contextlib.closing(psycopg2.connect(self.dsn)) as conn:
                jobs.wake(_AGENT, on=conn)
                conn.commit()

        return wake


class Polling(Contender):
    """A table, and a worker that looks there every 100 ms."""

    name = "polled every 100 ms"

    def set_up(self) -> None:
        execute(self.dsn, handoff_polling.TABLE)

    def start(self, processes: int, environment: dict[str, str]) -> None:
        for _ in range(processes):
            self.processes.start("tests.benchmarks.handoff_polling", **environment)

    @contextlib.contextmanager
    def emitter(self) -> Iterator[Emit]:
        with contextlib.closing(psycopg2.connect(self.dsn)) as conn, conn.cursor() as cur:

            def emit(number: int) -> tuple[int, int]:
                cur.execute(handoff_polling.INSERT, (json.dumps(_payload(number)),))
                sent = time.monotonic_ns()
                conn.commit()
                return sent, time.monotonic_ns()

            yield emit

    def fill(self, numbers: range) -> Callable[[], object]:
        with contextlib.closing(psycopg2.connect(self.dsn)) as conn, conn.cursor() as cur:
            for number in numbers:
                cur.execute(handoff_polling.INSERT, (json.dumps(_payload(number)),))
            conn.commit()
        return lambda: None

    def idle(self) -> bool:
        return not self.ask("SELECT EXISTS (SELECT FROM jobs WHERE status <> 'COMPLETED')")


class Procrastinate(Contender):
    """procrastinate, with its worker that is woken by LISTEN/NOTIFY."""

    name = "procrastinate"

    def set_up(self) -> None:
        with handoff_procrastinate.emitting(self.dsn).open() as app:
            app.schema_manager.apply_schema()

    def start(self, processes: int, environment: dict[str, str]) -> None:
        for _ in range(processes):
            self.processes.start("tests.benchmarks.handoff_procrastinate", **environment)

    @contextlib.contextmanager
    def emitter(self) -> Iterator[Emit]:
        with handoff_procrastinate.emitting(self.dsn).open() as app, psycopg.connect(self.dsn) as conn:
            task = app.configure_task("receive", connection=conn)

            def emit(number: int) -> tuple[int, int]:
                task.defer(number=number)
                sent = time.monotonic_ns()
                conn.commit()
                return sent, time.monotonic_ns()

            yield emit

    def fill(self, numbers: range) -> Callable[[], object]:
        arguments: list[JSONDict] = [{"number": number} for number in numbers]
        with handoff_procrastinate.emitting(self.dsn).open() as app:
            app.configure_task("receive").batch_defer(*arguments)
        return lambda: None  # a trigger says so

    def idle(self) -> bool:
        return not self.ask("SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))")


def _payload(number: int) -> dict[str, Any]:
    return {"to": _AGENT, "number": number, "message": "look into this, and tell the writer what you found"}
