"""The demo's workers, as a user would write them: ``walstream worker walstream.demo.workers:researcher``.

Each runs in a process of its own, because it is killed again and again. A turn commits its tool calls at once, under
keys that are the same in every attempt, and everything else together with the job's completion. Some turns fail on
purpose in their first attempt: in the middle, or in the transaction that completes them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from walstream import ClaimedJob, TurnLedger, Worker, idempotency_key
from walstream.ledger.append import NewEvent

from .journal import Begun, Undone, note
from .orphans import end_with_the_demo
from .scenario import Role, Step, turn_after

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

HANDS_VARIABLE: Final = "WALSTREAM_DEMO_HANDS"
"""Environment variable with the number of turns that a process works on at the same time."""

EFFECTS: Final = """\
CREATE TABLE demo_effects (
    effect bigserial PRIMARY KEY,
    event_seq bigint NOT NULL,
    job_id bigint NOT NULL,
    agent text NOT NULL,
    events integer NOT NULL,
    ends boolean NOT NULL)"""
"""What turns do to the world: a row each, with no key that could hide a second one."""

LEASE_SECONDS: Final = 3.0  # short, so that the demo need not wait long for what a dead worker had in hand
_THINKING: Final = 0.01  # seconds that a model, or a tool, takes to answer

Effect = Callable[["Cursor", ClaimedJob, Sequence[Step]], None]


class Mishap(Exception):
    """A turn fails on purpose."""


def note_effect(cur: Cursor, job: ClaimedJob, steps: Sequence[Step]) -> None:
    """Write the row of a turn, in the transaction that completes it."""
    cur.execute(
        "INSERT INTO demo_effects (event_seq, job_id, agent, events, ends) VALUES (%s, %s, %s, %s, %s)",
        (
            job.event_seq,
            job.job_id,
            job.agent_id,
            1 + sum(len(step.events) for step in steps),
            steps[-1].events[-1].event_type != "handoff.emitted",
        ),
    )


def worker_of(role: Role, effect: Effect = note_effect) -> Worker:
    """A worker of the agents of one kind.

    Args:
        effect: what a turn does in the transaction of its completion.
    """
    worker = Worker(
        agent=role,
        concurrency=int(os.environ.get(HANDS_VARIABLE, "2")),
        lease_seconds=LEASE_SECONDS,
        retry_first=0.2,
        poll_seconds=0.5,
    )

    @worker.handle
    def work(_context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        began = time.time_ns() // 1000
        assert job.event_seq is not None
        assert job.handoff is not None
        note(Begun(job.event_seq, job.fencing_token, role, began))
        steps = turn_after(job.handoff.payload, job.session_id)
        _carry_out(steps, job, ledger)
        ledger.on_completion(lambda cur: effect(cur, job, steps))
        ledger.on_completion(lambda cur: _accident(cur, job, ledger, steps))

    return worker


def _carry_out(steps: Sequence[Step], job: ClaimedJob, ledger: TurnLedger) -> None:
    for number, step in enumerate(steps):
        time.sleep(_THINKING + step.hold)
        for place, event in enumerate(step.events):
            payload = json.loads(event.payload)
            if _at_once(event):
                ledger.append_now(event.event_type, payload, key=idempotency_key("demo", job.job_id, number, place))
            elif event.event_type == "handoff.emitted":
                ledger.hand_off(payload.pop("to"), payload.pop("message"), **payload)
            else:
                ledger.append(event.event_type, payload)
        if number == 0 and step.undo == "transaction" and job.attempts == 1:
            raise Mishap("the model refused the request")


def _accident(cur: Cursor, job: ClaimedJob, ledger: TurnLedger, steps: Sequence[Step]) -> None:
    """What goes wrong after everything of the turn was written, and before it is committed."""
    last = steps[-1]
    if last.undo == "savepoint":
        cur.execute("SAVEPOINT attempt")
        for event in last.undone:
            ledger.fenced.append(
                event.session_id, event.agent_id, event.event_type, json.loads(event.payload), on=cur.connection
            )
        cur.execute("ROLLBACK TO SAVEPOINT attempt")
        note(Undone(len(last.undone), savepoint=True))
    elif last.undo == "transaction" and job.attempts == 1:
        kept = [event for step in steps for event in step.events if not _at_once(event)]
        note(Undone(len(kept), savepoint=False))
        raise Mishap("the last check before the commit failed")


def _at_once(event: NewEvent) -> bool:
    """Whether it is committed before the turn ends: a tool's call has to stand before the tool is executed."""
    return event.event_type.startswith("tool.")


end_with_the_demo()

researcher = worker_of("researcher")
writer = worker_of("writer")
reviewer = worker_of("reviewer")
