"""What the simulated agents do: pure, seeded, without a clock or a connection.

A planner opens a session and hands it to a researcher; the researcher asks a model, calls tools and hands on to a
writer; the writer drafts and hands on to a reviewer, who completes the task, fails it, or sends it back. Each of them
writes its steps in small transactions. Some of those fail on the way and are rolled back, whole or to a savepoint, and
tried again: a ledger of agents looks like that, and a consumer that read the log carelessly would show it.

What follows a handoff depends on the session alone. So a turn that is tried again, in another process maybe, does the
same again, and it is known beforehand how many events a session has when everything went well, whoever dies meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from walstream.ledger.append import NewEvent

Role = Literal["planner", "researcher", "writer", "reviewer"]
ROLES: Final[tuple[Role, ...]] = ("planner", "researcher", "writer", "reviewer")

# The roles of the agents beyond the first four, in turns: reading takes longest, so most agents are researchers.
_MORE: Final[tuple[Role, ...]] = ("researcher", "writer", "researcher", "reviewer", "planner")

Undo = Literal["nothing", "transaction", "savepoint"]


@dataclass(frozen=True, slots=True)
class Step:
    """One transaction of an agent.

    Attributes:
        events: what is committed, in this order.
        undone: what is inserted and taken back: before ``events``, in a transaction of its own that is rolled back
            (``undo`` is ``transaction``), or after the first of them, behind a savepoint (``savepoint``).
        hold: seconds between the inserts and the end of the transaction. Transactions of other agents commit in
            between, so that ``seq`` and the commit order differ, as they do in life.
    """

    events: tuple[NewEvent, ...]
    undo: Undo = "nothing"
    undone: tuple[NewEvent, ...] = ()
    hold: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent takes up: a session at the point where it is this agent's turn.

    Attributes:
        rounds: how often a reviewer has sent it back.
    """

    session_id: str
    subject: str
    rounds: int = 0


def numbers_of(agents: int) -> dict[Role, int]:
    """How many of ``agents`` agents have each role. There is always one."""
    numbers: dict[Role, int] = dict.fromkeys(ROLES, 1)
    for extra in range(agents - len(ROLES)):
        numbers[_MORE[extra % len(_MORE)]] += 1
    return numbers


def new_task(rng: random.Random) -> Task:
    """A session that nobody has worked on yet."""
    session = uuid.UUID(int=rng.getrandbits(128), version=4)
    return Task(str(session), f"{rng.choice(_VERBS)} {rng.choice(_OBJECTS)} {rng.choice(_PURPOSES)}")


def turn(role: Role, agent_id: str, task: Task, rng: random.Random, *, alone: bool = False) -> Iterator[Step]:
    """Yield the transactions of one agent's turn, without the ``handoff.received`` that comes with the claim.

    Args:
        alone: the agent does everything itself and hands nothing on.
    """
    work = _Work(agent_id, task, rng)
    if role == "planner" or rng.random() < 0.3:
        yield work.step([work.context(role)])
    for _ in range({"planner": 1, "researcher": rng.randint(1, 4), "writer": 2, "reviewer": 1}[role] + 2 * alone):
        yield from work.thought()
        if role in ("researcher", "writer") or alone:
            yield from work.tool_call()
    yield work.step([work.ending(role, alone)])


def turn_after(handoff: Mapping[str, Any], session_id: str) -> list[Step]:
    """The turn of the agent that ``handoff``, a payload, names: the same whenever it is asked for."""
    role: Role = handoff["to"]
    task = Task(session_id, handoff["task"], handoff["rounds"])
    return list(turn(role, role, task, random.Random(f"{session_id}:{role}:{task.rounds}")))


def events_after(steps: Sequence[Step]) -> int:
    """How many events others write after ``steps``, a turn, until the session ends."""
    count = 0
    while (last := steps[-1].events[-1]).event_type == "handoff.emitted":
        steps = turn_after(json.loads(last.payload), last.session_id)
        count += 1 + sum(len(step.events) for step in steps)  # with the handoff.received
    return count


def shaped(events: Sequence[NewEvent], rng: random.Random) -> Iterator[Step]:
    """Cut recorded events into transactions, some of which are undone and tried again first."""
    start = 0
    while start < len(events):
        end = start + rng.choice((1, 1, 1, 2, 2, 3, 5))
        yield _with_accidents(events[start:end], rng)
        start = end


def _with_accidents(events: Sequence[NewEvent], rng: random.Random) -> Step:
    chance = rng.random()
    undo: Undo = "transaction" if chance < 0.06 else "savepoint" if chance < 0.12 else "nothing"
    hold = rng.uniform(0.001, 0.012) if rng.random() < 0.25 else 0.0
    return Step(tuple(events), undo, tuple(events) if undo != "nothing" else (), hold)


class _Work:
    """One agent on one task: makes its events."""

    def __init__(self, agent_id: str, task: Task, rng: random.Random) -> None:
        self._agent_id = agent_id
        self._task = task
        self._rng = rng

    def step(self, events: Sequence[NewEvent]) -> Step:
        return _with_accidents(events, self._rng)

    def context(self, role: Role) -> NewEvent:
        messages = [
            {"role": "system", "content": f"You are the {role} of a small team. Be brief, cite what you read."},
            {"role": "user", "content": f"{self._task.subject}. {self._prose(3, 12)}"},
        ]
        return self._event("context.loaded", {"messages": messages})

    def thought(self) -> Iterator[Step]:
        prompt = self._prose(2, 4)
        answer = self._prose(2, 8)
        asked = self._event(
            "model.requested",
            {
                "model": "simulated-1",
                "parameters": {"temperature": self._rng.choice((0, 0.2, 0.7)), "max_tokens": 1024},
                "prompt_hash": hashlib.sha256(prompt.encode()).hexdigest(),
            },
        )
        answered = self._event(
            "model.responded",
            {
                "message": {"role": "assistant", "content": answer},
                "usage": {"input_tokens": self._rng.randint(200, 9000), "output_tokens": len(answer) // 4},
                "finish_reason": "stop",
            },
        )
        if self._rng.random() < 0.5:
            yield self.step([asked, answered])
        else:
            yield self.step([asked])
            yield self.step([answered])

    def tool_call(self) -> Iterator[Step]:
        call = f"call_{self._rng.getrandbits(32):08x}"
        name = self._rng.choice(("search", "read_file", "fetch", "python", "calculator"))
        yield self.step([self._event("tool.invoked", {"call_id": call, "name": name, "arguments": self._arguments()})])
        if self._rng.random() < 0.1:
            observed: dict[str, Any] = {"call_id": call, "error": "timed out after 30 s"}
        else:
            observed = {"call_id": call, "result": self._prose(1, 20)}
        yield self.step([self._event("tool.observed", observed)])

    def ending(self, role: Role, alone: bool) -> NewEvent:
        chance = self._rng.random()
        if role == "reviewer" or alone:
            if chance < 0.06:
                return self._event("task.failed", {"reason": "the sources contradict each other"})
            if alone or chance > 0.3 or self._task.rounds >= 2:
                return self._event("task.completed", {"result": self._prose(1, 6)})
            return self._handoff("writer", rounds=self._task.rounds + 1)
        return self._handoff(ROLES[ROLES.index(role) + 1], rounds=self._task.rounds)

    def _handoff(self, to: Role, rounds: int) -> NewEvent:
        message = {"to": to, "task": self._task.subject, "rounds": rounds, "message": self._prose(1, 4)}
        return self._event("handoff.emitted", message)

    def _arguments(self) -> dict[str, Any]:
        return {"query": self._prose(1, 1), "limit": self._rng.randint(1, 50)}

    def _prose(self, fewest: int, most: int) -> str:
        rng = self._rng
        return " ".join(
            f"{rng.choice(_SUBJECTS)} {rng.choice(_CLAIMS)} {rng.choice(_REASONS)}."
            for _ in range(rng.randint(fewest, most))
        )

    def _event(self, event_type: str, payload: dict[str, Any]) -> NewEvent:
        text = json.dumps(payload, ensure_ascii=False)
        return NewEvent(self._task.session_id, self._agent_id, event_type, text)


_VERBS: Final = ("Compare", "Summarise", "Verify", "Explain", "Estimate", "Draft", "Collect", "Translate")
_OBJECTS: Final = ("the quarterly figures", "two suppliers", "the incident of Monday", "the new licence", "flood maps")
_PURPOSES: Final = ("for the board", "for a reader in a hurry", "with sources", "in one page", "für das Team in Köln")
_SUBJECTS: Final = ("The first source", "The table on page 4", "The log", "The older draft", "Ms Ōtani", "The archive")
_CLAIMS: Final = ("says so plainly", "contradicts it", "is silent on this", "gives 3.14 as the value", "cites itself")
_REASONS: Final = (
    "since it is newer",
    "as far as one can see",
    "“by definition”",
    "→ see the appendix",
    "for 2 reasons",
)
