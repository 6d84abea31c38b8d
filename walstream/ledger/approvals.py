"""Approvals: what a job asked a person, and what was decided.

Like jobs this is a thin layer over SQL functions that any language can call (``sql/approvals.sql``, docs/handoffs.md).
Each call works in the transaction that the caller has open, and commits nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from walstream.config import Settings, load
from walstream.errors import LedgerError
from walstream.event import parse_payload

from .adapters import Rows, Statement
from .function_calls import call, shown_time, statement, time_of
from .job import Job, lease_of, name_of
from .json_values import check_word, json_text


@dataclass(frozen=True, slots=True)
class Approval:
    """A request for an approval as it stood when it was read.

    Attributes:
        request_seq: its number: the ``seq`` of the event ``approval.requested``.
        job_id, session_id, agent_id: the job that asked, and whose it is.
        action: what is to be approved; ``None`` if the event is no longer in the ledger.
        request_reason: why it was asked.
        deadline: nobody can decide from then on, and the request is rejected.
        is_open: somebody can decide it now. Of what was never decided, it is not once the job waits for it no longer
            (it was canceled, or goes on by another way), or the deadline has passed.
        decision: ``"granted"``, ``"rejected"`` or ``None``.
        decision_seq: the ``seq`` of the event that says so.
        decided_by: who decided; ``"deadline"`` if nobody did in time.
        edit: what was granted in the place of ``action``; ``None`` if that was granted as it stood.
        reason: why it was decided so.
        requested_at, decided_at: by the server's clock.
    """

    request_seq: int
    job_id: int
    session_id: str
    agent_id: str
    action: Any
    request_reason: str | None
    is_open: bool
    decision: str | None
    decision_seq: int | None
    decided_by: str | None
    edit: Any
    reason: str | None
    deadline: datetime | None
    requested_at: datetime | None
    decided_at: datetime | None

    @property
    def granted(self) -> bool:
        """Whether it was granted, as asked or edited."""
        return self.decision == "granted"

    @property
    def rejected(self) -> bool:
        """Whether it was rejected, by a person or by its deadline."""
        return self.decision == "rejected"

    @property
    def approved_action(self) -> Any:
        """What may be done: the edit if there is one, else the action; ``None`` unless it was granted."""
        if not self.granted:
            return None
        return self.action if self.edit is None else self.edit


class Approvals:
    """The approvals of one ledger. Holds no connection and may be shared by threads.

    ``on`` is, in every call, what :meth:`walstream.Ledger.append` takes.

    Every call may raise ``ConfigError`` (walstream is not installed there, or this login may not call it),
    ``TypeError`` (``on`` is none of these), and whatever else the driver raises. After any error the transaction has to
    be rolled back.

    Args:
        settings: where the ledger is; from environment and ``walstream.toml`` if not given.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or load()

    def request(
        self,
        job: Job | int,
        action: Any,
        *,
        token: int | None = None,
        deadline: datetime | timedelta | None = None,
        reason: str | None = None,
        on: Any,
    ) -> int:
        """Ask a person, and leave the job until there is an answer; return the number of the request.

        To be called last in the transaction that holds what was done until then.

        Args:
            job: as claimed, or its number; work on it has begun.
            action: what is to be approved: JSON, and not ``None``.
            token: the fencing token of the claim; that of ``job`` if not given.
            deadline: an aware time, or so much time from now. Once it has passed, the request is rejected. Without one
                the job waits as long as it takes.
            reason: why it is asked, for who decides.

        Raises:
            Fenced: the token is stale.
            JobRefused: work has not begun, or the job waits already.
            LedgerError: there is no such job.
            PayloadError: ``jsonb`` cannot hold the action.
            ValueError: there is no action, or the deadline has no offset.
        """
        if action is None:
            raise ValueError("there has to be an action to be approved")
        if isinstance(deadline, datetime) and deadline.utcoffset() is None:
            raise ValueError("a deadline needs an offset: datetime.now(UTC) has one")
        until = deadline.isoformat() if isinstance(deadline, datetime) else None
        wait = _interval(deadline) if isinstance(deadline, timedelta) else None
        text = json_text(action, root="action")
        values = (*lease_of(job, token), text, until, wait, _word(reason))
        ((request,),) = self._call(_REQUEST, values, on, "request_approval", name_of(job))
        return int(request)

    def approve(self, request_seq: int, *, by: str, edit: Any = None, reason: str | None = None, on: Any) -> int:
        """Grant a request, and the job goes on; return the ``seq`` of the event that says so.

        Workers hear of it at once if :meth:`walstream.Jobs.wake` is called after the commit, and otherwise soon.

        Args:
            by: who decides.
            edit: what may be done in the place of what was asked.
            reason: why, for the agent.

        Raises:
            ApprovalRefused: it was decided already, its job waits for it no longer, or its deadline has passed.
            LedgerError: there is no such request, or its job is gone.
            PayloadError: ``jsonb`` cannot hold the edit.
            ValueError: ``by`` is empty, or the ``"deadline"`` that decides what nobody decided.
        """
        text = None if edit is None else json_text(edit, root="edit")
        return self._decide(request_seq, "granted", by, text, reason, on)

    def reject(self, request_seq: int, *, by: str, reason: str | None = None, on: Any) -> int:
        """Reject a request, and the job goes on, knowing it; return the ``seq`` of the event that says so.

        Raises:
            ApprovalRefused, LedgerError, ValueError: as for :meth:`approve`.
        """
        return self._decide(request_seq, "rejected", by, None, reason, on)

    def expire(self, agent_id: str, *, on: Any) -> list[int]:
        """Reject an agent's requests whose deadline has passed, at most a hundred; return their jobs, which go on.

        Workers do this now and then. It waits for nobody.
        """
        return [int(job) for (job,) in self._call(_EXPIRE, (agent_id,), on, "expire_approvals", f"agent {agent_id}")]

    def get(self, request_seq: int, *, on: Any) -> Approval:
        """How a request stands.

        Raises:
            LedgerError: there is no such request.
        """
        rows = self._read(_GET, (request_seq,), on, f"request {request_seq}")
        if not rows:
            raise LedgerError(
                f"there is no request {request_seq} for an approval",
                hint="`walstream approvals list` lists the open ones",
            )
        return rows[0]

    def newest(self, job_id: int, *, on: Any) -> Approval | None:
        """The newest request of a job, decided or not; ``None`` if it never asked."""
        rows = self._read(_NEWEST, (job_id,), on, name_of(job_id))
        return rows[0] if rows else None

    def open(
        self, *, agent_id: str | None = None, session_id: str | UUID | None = None, limit: int = 100, on: Any
    ) -> list[Approval]:
        """What can be decided now, the oldest first: all, or those of this agent, in this session."""
        session = None if session_id is None else str(session_id)
        return self._read(_OPEN, (agent_id, agent_id, session, session, limit), on, "approvals")

    def _decide(self, request_seq: int, decision: str, by: str, edit: str | None, reason: str | None, on: Any) -> int:
        if check_word(by, "by") in ("", "deadline"):
            raise ValueError(f"a decision needs the name of who decides, and {by!r} is none")
        values = (request_seq, decision, by, edit, _word(reason))
        ((seq,),) = self._call(_DECIDE, values, on, "decide_approval", f"request {request_seq}")
        return int(seq)

    def _read(self, sql: Statement, values: tuple[Any, ...], on: Any, what: str) -> list[Approval]:
        return [_approval(row) for row in self._call(sql, values, on, "approvals", what)]

    def _call(self, sql: Statement, values: tuple[Any, ...], on: Any, function: str, what: str) -> Rows:
        doing = "decide approvals" if function == "decide_approval" else "work on approvals"
        return call(self._settings, sql, values, on, function=function, what=what, doing=doing)


def _interval(time: timedelta) -> str:
    """In hours, because days are not all equally long; and no part of it too large for PostgreSQL 14."""
    hours, rest = divmod(time, timedelta(hours=1))
    return f"{hours:+d} hours {rest.seconds:+d} seconds {rest.microseconds:+d} microseconds"


def _word(reason: str | None) -> str | None:
    return None if reason is None else check_word(reason, "reason")


def _approval(row: tuple[Any, ...]) -> Approval:
    seq, job, session, agent, action, asked, is_open, decision, decision_seq, by, edit, reason, *times = row
    return Approval(
        seq,
        job,
        session,
        agent,
        _json(action),
        asked,
        bool(is_open),
        decision,
        decision_seq,
        by,
        _json(edit),
        reason,
        *(time_of(text) for text in times),
    )


def _json(text: str | None) -> Any:
    return None if text is None else parse_payload(text.encode())


IS_OPEN: Final = """
    a.decision IS NULL AND coalesce(a.deadline > pg_catalog.clock_timestamp(), true)
    AND j.status = 'AWAITING_HUMAN' AND j.fencing_token = a.fencing_token"""
"""Of a row ``a`` of approvals and its job ``j``: whether it can be decided. ``decide_approval`` says the same."""

_READ: Final = f"""
SELECT a.request_seq, a.job_id, a.session_id, a.agent_id,
       CAST(CAST(q.$payload AS pg_catalog.jsonb) -> 'action' AS pg_catalog.text),
       CAST(q.$payload AS pg_catalog.jsonb) ->> 'reason',
       coalesce({IS_OPEN}, false), a.decision, a.decision_seq, a.decided_by,
       CAST(CAST(d.$payload AS pg_catalog.jsonb) -> 'edit' AS pg_catalog.text),
       CAST(d.$payload AS pg_catalog.jsonb) ->> 'reason',
       {", ".join(shown_time(f"a.{name}") for name in ("deadline", "requested_at", "decided_at"))}
  FROM $namespace.approvals AS a
  LEFT JOIN $jobs AS j ON j.job_id = a.job_id
  LEFT JOIN $table AS q ON q.$seq = a.request_seq
  LEFT JOIN $table AS d ON d.$seq = a.decision_seq
 WHERE """
_GET: Final = statement(f"{_READ} a.request_seq = ?int8")
_NEWEST: Final = statement(f"{_READ} a.job_id = ?int8 ORDER BY a.request_seq DESC LIMIT 1")
_OPEN: Final = statement(
    f"{_READ} {IS_OPEN} AND (?text IS NULL OR a.agent_id = ?text) AND (?text IS NULL OR a.session_id = ?text)"
    " ORDER BY a.request_seq LIMIT ?int8"
)
_REQUEST: Final = statement(
    "SELECT $namespace.request_approval(?int8, ?int8, ?jsonb,"
    " coalesce(?timestamptz, pg_catalog.clock_timestamp() + ?interval), ?text)"
)
_DECIDE: Final = statement("SELECT $namespace.decide_approval(?int8, ?text, ?text, ?jsonb, ?text)")
_EXPIRE: Final = statement("SELECT $namespace.expire_approvals(?text)")
