"""The swarm: agents in threads, each with a connection, writing to the ledger at a common pace.

They know nothing of the consumer; what they wrote is counted here as it was committed, so that the proof can compare
the ledger with the writers and not only the consumer with the ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from walstream.ledger.append import insert_events
from walstream.ledger.importing import Pace

from .scenario import Step

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import LedgerTable


class Spent(Exception):
    """There is nothing left to write."""


@dataclass(slots=True)
class Tally:
    """What the agents did, by their own account."""

    committed: int = 0
    transactions: int = 0
    undone: int = 0
    rollbacks: int = 0
    savepoints: int = 0
    handoffs_taken: int = 0


class Budget:
    """How much may still be written, and how fast.

    Args:
        events: in all; ``None`` for as many as there are.
        rate: events a second; ``None`` for no limit.
    """

    def __init__(self, events: int | None, rate: float | None) -> None:
        self._left = events
        self._pace = Pace(rate)
        self._change = threading.Condition()
        self._mark: int | None = None
        self._closed = False
        self.granted = 0

    def take(self, wanted: int) -> int:
        """Wait for the pace; return how many of ``wanted`` events may be written.

        Raises:
            Spent: none any more.
        """
        with self._change:
            granted = wanted if self._left is None else min(wanted, self._left)
            if self.spent:
                raise Spent
            if self._left is not None:
                self._left -= granted
            self.granted += granted
            self._pace.wait(granted)
            return granted

    @property
    def spent(self) -> bool:
        """Whether nothing may be written any more; agents that wait for a handoff need not wait longer."""
        return self._closed or self._left == 0

    def wait_at_gate(self) -> None:
        """Wait while the gate is closed. Called between transactions, never inside one."""
        with self._change:
            while self._mark is not None and self.granted >= self._mark and not self._closed:
                self._change.wait()

    def close_gate_at(self, mark: int | None) -> None:
        """Hold writers up once ``mark`` events were granted (a few more slip through); ``None`` opens the gate."""
        with self._change:
            self._mark = mark
            self._change.notify_all()

    def close(self) -> None:
        """Grant nothing any more."""
        with self._change:
            self._closed = True
            self._change.notify_all()


class Desk:
    """An agent's means to write: a connection (not in autocommit), and the budget and tally that all share."""

    def __init__(self, connection: Connection, ledger: LedgerTable, budget: Budget, tally: Tally) -> None:
        self.connection = connection
        self._ledger = ledger
        self._budget = budget
        self._tally = tally

    def write(self, step: Step) -> None:
        """Carry out ``step`` with all its accidents.

        Raises:
            Spent: nothing may be written any more; nothing of it was.
        """
        self._budget.wait_at_gate()
        if step.undo == "transaction":
            self.abandon(step)
        self.finish(step)

    def abandon(self, step: Step) -> None:
        """Insert what the step takes back, and roll back whatever is open."""
        with self.connection.cursor() as cur:
            insert_events(cur, self._ledger, step.undone)
        self.connection.rollback()
        with _counting:
            self._tally.undone += len(step.undone)
            self._tally.rollbacks += 1

    def finish(self, step: Step) -> None:
        """Write the step's events and commit, together with what the transaction holds already.

        Raises:
            Spent: nothing may be written any more; the transaction is rolled back.
        """
        try:
            granted = self._budget.take(len(step.events))
        except Spent:
            self.connection.rollback()
            raise
        events = step.events[:granted]
        savepoint = step.undo == "savepoint"
        with self.connection, self.connection.cursor() as cur:
            insert_events(cur, self._ledger, events[:1])
            if savepoint:
                cur.execute("SAVEPOINT attempt")
                insert_events(cur, self._ledger, step.undone)
                cur.execute("ROLLBACK TO SAVEPOINT attempt")
            if step.hold:
                time.sleep(step.hold)
            if events[1:]:
                insert_events(cur, self._ledger, events[1:])
        with _counting:
            self._tally.committed += len(events)
            self._tally.transactions += 1
            if savepoint:
                self._tally.undone += len(step.undone)
                self._tally.savepoints += 1

    def took_handoff(self) -> None:
        """Count a handoff that was taken up."""
        with _counting:
            self._tally.handoffs_taken += 1


_counting = threading.Lock()


class Agent(Protocol):
    """One agent."""

    name: str

    def work(self, desk: Desk) -> None:
        """Do the next piece of work, or wait for a moment if there is none.

        Raises:
            Spent: there is nothing left to do.
        """


class Swarm:
    """Runs agents until they are done.

    Args:
        connect: makes a connection, given an application name.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        budget: Budget,
        ledger: LedgerTable,
        connect: Callable[[str], Connection],
    ) -> None:
        self.budget = budget
        self.tally = Tally()
        self.error: BaseException | None = None
        self._ledger = ledger
        self._connect = connect
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(agent,), name=f"agent {agent.name}", daemon=True)
            for agent in agents
        ]

    def start(self) -> None:
        """Set the agents to work."""
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether any agent is still at work."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout: float = 10.0) -> None:
        """Let every agent finish its transaction, and wait for it."""
        self._stop.set()
        self.budget.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, agent: Agent) -> None:
        try:
            connection = self._connect(agent.name)
            try:
                desk = Desk(connection, self._ledger, self.budget, self.tally)
                while not self._stop.is_set() and not self.budget.spent:
                    agent.work(desk)
            finally:
                connection.close()
        except Spent:
            pass
        except BaseException as error:  # the supervisor shows it; a swarm without this agent proves less than it says
            self.error = error
            self.budget.close()
