"""A job as it stands in its table, and what it is called."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import orjson

from .fold import FoldEvent
from .function_calls import shown_time, time_of

STATUSES: Final = (
    "CREATED",
    "SUBMITTED",
    "DELIVERED",
    "IN_PROGRESS",
    "AWAITING_HUMAN",
    "COMPLETED",
    "FAILED",
    "CANCELED",
)
"""Every status that a job can have, in the order in which it may come to them."""

UNFINISHED: Final = STATUSES[:5]

LEASE_SECONDS: Final = 60.0
"""How long a claim, or a renewal, is good for if nothing else is said."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stood when it was read.

    Attributes:
        job_id: its number.
        session_id: the session that it works in.
        agent_id: whose job it is; ``None`` for one that was written by hand without saying.
        event_seq: the event that it came from, a handoff as a rule; ``None`` if it came from none.
        status: one of :data:`STATUSES`.
        priority: jobs with a higher one are claimed first.
        attempts: deliveries that count, this one included.
        max_delivery_attempts: after so many it fails for good.
        hops: how many handoffs the chain had that led to it.
        error: why it failed last, or was canceled.
        lease_owner, lease_expires_at: who has it, and until when if the lease is not renewed.
        fencing_token: rises with each claim; only who holds the newest may write in the job's name.
        next_try: it is not claimed before.
        created_at, updated_at, finished_at: by the server's clock.
    """

    job_id: int
    session_id: str
    agent_id: str | None
    event_seq: int | None
    status: str
    priority: int
    attempts: int
    max_delivery_attempts: int
    hops: int
    error: str | None
    lease_owner: str | None
    fencing_token: int
    lease_expires_at: datetime | None
    next_try: datetime | None
    created_at: datetime | None
    updated_at: datetime | None
    finished_at: datetime | None


class Taken(NamedTuple):
    """What became of a try to take a job.

    Attributes:
        job: as it was claimed.
        handoff: its event; ``None`` if it came from none, or the event is no longer in the ledger.
        refused: why it could not be begun, and was given back; ``None`` if all is well.
        more: other jobs of the agent wait.
    """

    job: Job
    handoff: FoldEvent | None
    refused: str | None
    more: bool


_TIMES: Final = ("lease_expires_at", "next_try", "created_at", "updated_at", "finished_at")
ROW: Final = (
    "j.job_id, CAST(j.session_id AS pg_catalog.text), j.agent_id, j.event_seq, j.status, j.priority, j.attempts,"
    " j.max_delivery_attempts, j.hops, j.error, j.lease_owner, j.fencing_token, "
) + ", ".join(shown_time(f"j.{name}") for name in _TIMES)
"""The columns of a job ``j``, its times as texts that :func:`job_of` reads."""


def lease_of(job: Job | int, token: int | None) -> tuple[int, int]:
    """A job's number, and the token by which a worker has it.

    Raises:
        TypeError: it is a number without a token.
    """
    if isinstance(job, Job):
        return job.job_id, job.fencing_token if token is None else token
    if token is None:
        raise TypeError("the fencing token of the claim is needed, or the job as it was claimed")
    return job, token


def name_of(job: Job | int) -> str:
    """What a job is called in errors."""
    return f"job {job.job_id if isinstance(job, Job) else job}"


def job_of(row: tuple[Any, ...]) -> Job:
    """The job of a row of :data:`ROW`."""
    numbers = len(_TIMES)
    return Job(*row[:-numbers], *(time_of(text) for text in row[-numbers:]))


def job_of_text(text: str) -> Job:
    """A job that comes as an object: its times are in the session's time zone, and say so."""
    fields = orjson.loads(text)
    for name in _TIMES:
        fields[name] = _moment(fields[name])
    return Job(**fields)


def _moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # infinity, or a year that Python does not know
        return None
