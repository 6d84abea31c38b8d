"""The swarm: agents in threads, each with a connection, writing to the ledger at a common pace.

They know nothing of the consumer, nor of the workers that they hand sessions to. What they wrote is counted here as it
was committed, and what they handed on as it has to come back, so that the proof can compare the ledger with what was
meant to be in it and not only the consumer with the ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from walstream.ledger.append import NewEvent, insert_events
from walstream.ledger.importing import Pace

from .scenario import Step

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import LedgerTable


class Spent(Exception):
    """There is nothing left to write."""


@dataclass(slots=True)
class Tally:
    """What the agents did, by their own account.

    Attributes:
        committed: events that they wrote themselves.
        handed_on: events that workers have to write in the sessions that were handed to them.
        undone: events that were inserted and taken back.
    """

    committed: int = 0
    handed_on: int = 0
    undone: int = 0
    rollbacks: int = 0
    savepoints: int = 0

    @property
    def claimed(self) -> int:
        """Events that the ledger has to hold in the end."""
        return self.committed + self.handed_on


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

    def reserve(self, wanted: int) -> bool:
        """Wait for the pace, and set aside ``wanted`` events; ``False``, and nothing is, if there are not so many."""
        with self._change:
            if self._closed or (self._left is not None and self._left < wanted):
                return False
            if self._left is not None:
                self._left -= wanted
            self.granted += wanted
            self._pace.wait(wanted)
            return True

    @property
    def spent(self) -> bool:
        """Whether nothing may be written any more, but for what is set aside."""
        return self._closed or self._left == 0

    def wait_at_gate(self) -> None:
        """Wait while the gate is closed. Called between transactions, never inside one."""
        with self._change:
            while self._mark is not None and self.granted >= self._mark and not self._closed:
                self._change.wait()

    @property
    def held(self) -> bool:
        """Whether the gate holds writers up."""
        return self._mark is not None and self.granted >= self._mark

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
        granted = self._budget.take(len(step.events))
        self._carry_out(step, granted)

    def hand_on(self, steps: Sequence[Step], follow: int) -> bool:
        """Carry out ``steps``, the last of which hands the session on; ``False`` if there is not enough left for it.

        Args:
            follow: how many events others then write in the session.
        """
        self._budget.wait_at_gate()
        if not self._budget.reserve(follow + sum(len(step.events) for step in steps)):
            return False
        for step in steps:
            self._carry_out(step, len(step.events))
        with _counting:
            self._tally.handed_on += follow
        return True

    def _carry_out(self, step: Step, granted: int) -> None:
        if step.undo == "transaction":
            self._abandon(step)
        self._finish(step, step.events[:granted])

    def _abandon(self, step: Step) -> None:
        """Insert what the step takes back, and roll it back."""
        with self.connection.cursor() as cur:
            insert_events(cur, self._ledger, step.undone)
        self.connection.rollback()
        with _counting:
            self._tally.undone += len(step.undone)
            self._tally.rollbacks += 1

    def _finish(self, step: Step, events: Sequence[NewEvent]) -> None:
        """Write ``events`` of the step, and commit."""
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
            if savepoint:
                self._tally.undone += len(step.undone)
                self._tally.savepoints += 1


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
