"""walstream as a contender: the stream for ``walstream run`` and the worker for ``walstream worker``."""

from __future__ import annotations

import os
from typing import Any, Final

from tests.benchmarks.handoff_receipts import HANDS, Receipts
from walstream import ClaimedJob, Stream, TurnLedger, Worker
from walstream.projectors.handoff_router import HandoffRouter

AGENT: Final = "researcher"

stream = Stream()
stream.add(HandoffRouter())
worker = Worker(agent=AGENT, concurrency=int(os.environ.get(HANDS, "4")))
_receipts = Receipts()


@worker.handle
def receive(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
    """A job that a handoff made answers it; one without an event has its number in the session's id."""
    del context
    if job.handoff is None:
        _receipts.note(int(job.session_id.replace("-", ""), 16))
        return
    _receipts.note(job.handoff.payload["number"])
    ledger.append("task.completed", {"result": "done"})
