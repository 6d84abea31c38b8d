"""walstream: tails an append-only Postgres ledger of agent events and drives projectors.

The public names are the ones below; everything else may change between releases.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from walstream.audit.trail import AuditTrail as AuditTrail
    from walstream.engine.context import Context as Context
    from walstream.engine.projector import FunctionProjector as FunctionProjector
    from walstream.engine.projector import Projector as Projector
    from walstream.engine.subscribe import Subscription as Subscription
    from walstream.engine.subscribe import subscribe as subscribe
    from walstream.engine.waiting import EventParked as EventParked
    from walstream.errors import ApprovalRefused as ApprovalRefused
    from walstream.errors import CallSettled as CallSettled
    from walstream.errors import ConfigError as ConfigError
    from walstream.errors import Fenced as Fenced
    from walstream.errors import GiveUp as GiveUp
    from walstream.errors import JobRefused as JobRefused
    from walstream.errors import LedgerError as LedgerError
    from walstream.errors import PayloadError as PayloadError
    from walstream.errors import RecoveryBusy as RecoveryBusy
    from walstream.errors import RetryLater as RetryLater
    from walstream.errors import RowMissing as RowMissing
    from walstream.errors import UnknownSession as UnknownSession
    from walstream.errors import WalstreamError as WalstreamError
    from walstream.event import Event as Event
    from walstream.ledger.approvals import Approval as Approval
    from walstream.ledger.approvals import Approvals as Approvals
    from walstream.ledger.fold import Fold as Fold
    from walstream.ledger.fold import add_message as add_message
    from walstream.ledger.fold import apply_event as apply_event
    from walstream.ledger.fold import sendable as sendable
    from walstream.ledger.folded_session import FoldedSession as FoldedSession
    from walstream.ledger.idempotency import idempotency_key as idempotency_key
    from walstream.ledger.inflight import InFlightCall as InFlightCall
    from walstream.ledger.inflight import call_key as call_key
    from walstream.ledger.inflight import inflight as inflight
    from walstream.ledger.job import Job as Job
    from walstream.ledger.jobs import Jobs as Jobs
    from walstream.ledger.ledger import Appended as Appended
    from walstream.ledger.ledger import Draft as Draft
    from walstream.ledger.ledger import Forked as Forked
    from walstream.ledger.ledger import Ledger as Ledger
    from walstream.ledger.rebuild import rebuild_context as rebuild_context
    from walstream.ledger.recovery import recover as recover
    from walstream.ledger.session_folds import SessionFolds as SessionFolds
    from walstream.stream import Stream as Stream
    from walstream.worker.claims import ClaimedJob as ClaimedJob
    from walstream.worker.turn import TurnLedger as TurnLedger
    from walstream.worker.worker import Worker as Worker

# Loaded when they are first asked for, so that `import walstream` (and the command line) stays quick.
_HOMES = {
    "Appended": "walstream.ledger.ledger",
    "AuditTrail": "walstream.audit.trail",
    "Approval": "walstream.ledger.approvals",
    "ApprovalRefused": "walstream.errors",
    "Approvals": "walstream.ledger.approvals",
    "CallSettled": "walstream.errors",
    "ClaimedJob": "walstream.worker.claims",
    "ConfigError": "walstream.errors",
    "Context": "walstream.engine.context",
    "Draft": "walstream.ledger.ledger",
    "Event": "walstream.event",
    "EventParked": "walstream.engine.waiting",
    "Fenced": "walstream.errors",
    "Forked": "walstream.ledger.ledger",
    "Fold": "walstream.ledger.fold",
    "FoldedSession": "walstream.ledger.folded_session",
    "FunctionProjector": "walstream.engine.projector",
    "GiveUp": "walstream.errors",
    "Job": "walstream.ledger.job",
    "JobRefused": "walstream.errors",
    "Jobs": "walstream.ledger.jobs",
    "Ledger": "walstream.ledger.ledger",
    "LedgerError": "walstream.errors",
    "InFlightCall": "walstream.ledger.inflight",
    "PayloadError": "walstream.errors",
    "Projector": "walstream.engine.projector",
    "RecoveryBusy": "walstream.errors",
    "RetryLater": "walstream.errors",
    "RowMissing": "walstream.errors",
    "SessionFolds": "walstream.ledger.session_folds",
    "Stream": "walstream.stream",
    "Subscription": "walstream.engine.subscribe",
    "TurnLedger": "walstream.worker.turn",
    "UnknownSession": "walstream.errors",
    "WalstreamError": "walstream.errors",
    "Worker": "walstream.worker.worker",
    "idempotency_key": "walstream.ledger.idempotency",
    "add_message": "walstream.ledger.fold",
    "apply_event": "walstream.ledger.fold",
    "call_key": "walstream.ledger.inflight",
    "inflight": "walstream.ledger.inflight",
    "recover": "walstream.ledger.recovery",
    "rebuild_context": "walstream.ledger.rebuild",
    "sendable": "walstream.ledger.fold",
    "subscribe": "walstream.engine.subscribe",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
