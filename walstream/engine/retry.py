"""What happens after a projector raised: whose fault it is, how long to wait, how to find the one bad event.

All of this is pure, so that the rules can be read in one place:

- ``RetryLater`` and transient errors (:class:`~walstream.errors.Unavailable`) are not the event's fault. They are
  retried for as long as it takes and count as no attempt.
- When *our* connection is gone, or the server has no room or is going down, the runner starts over from the stored
  cursor.
- A deadlock or a serialization failure is a matter of chance: retried without counting, but not for ever.
- Everything else, an exceeded deadline included, is the event's fault. A batch is narrowed down until the bad event
  stands alone; that one is retried ``max_attempts`` times and then parked, or the projector halts.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import psycopg2

from walstream.errors import ConnectionLost, Fenced, RetryLater, WalstreamError
from walstream.event import Event

TRACEBACK_BYTES: Final = 4000
ERROR_BYTES: Final = 1000
CONFLICTS_FOR_FREE: Final = 10
"""Deadlocks and serialization failures of one batch in a row that count as no attempt."""

# SQLSTATE classes and codes (documentation, appendix A "PostgreSQL Error Codes"). Not among them: 53200 out_of_memory
# and 53400 configuration_limit_exceeded, which one large event can cause every time.
_SERVER_IN_TROUBLE: Final = ("08", "57P", "58", "53100", "53300")  # connection, shutdown, system, disk, connections
_CONFLICTS: Final = frozenset({"40001", "40P01"})  # serialization_failure, deadlock_detected
_IDLE_IN_TRANSACTION: Final = "25P03"  # ended by idle_in_transaction_session_timeout


class Fault(Enum):
    """Whose fault a failed delivery is."""

    EVENT = "event"
    LATER = "later"
    CONFLICT = "conflict"
    CONNECTION = "connection"
    FENCED = "fenced"


class DeadlineExceeded(WalstreamError):
    """A batch took longer than the projector's deadline, and its transaction was ended from outside."""


def judge(error: BaseException, *, connection_lost: bool) -> Fault:
    """Whose fault ``error``, raised while a batch was delivered, is.

    Args:
        error: what the projector, or a statement of the runner, raised.
        connection_lost: the runner's own connection no longer works.
    """
    if isinstance(error, DeadlineExceeded):
        return Fault.EVENT  # although its connection is gone: it was ended because of this batch
    if isinstance(error, Fenced):
        return Fault.FENCED
    if connection_lost or isinstance(error, ConnectionLost):
        return Fault.CONNECTION
    if isinstance(error, RetryLater) or (isinstance(error, WalstreamError) and error.transient):
        return Fault.LATER
    if isinstance(error, psycopg2.Error):
        if error.pgcode in _CONFLICTS:
            return Fault.CONFLICT
        if error.pgcode is not None and error.pgcode.startswith(_SERVER_IN_TROUBLE):
            return Fault.LATER
        if error.pgcode is None and isinstance(error, psycopg2.OperationalError):
            return Fault.LATER  # libpq has no SQLSTATE for a connection that cannot be made or breaks: another database
    return Fault.EVENT


def ended_by_idle_timeout(error: BaseException) -> bool:
    """Whether the server ended the transaction because nothing was sent in it for too long."""
    return isinstance(error, psycopg2.Error) and error.pgcode == _IDLE_IN_TRANSACTION


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from ``first`` to ``cap`` seconds, each spread by up to a quarter, so that many waiters do
    not come back at the same moment.
    """

    first: float = 0.2
    cap: float = 30.0

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the ``attempt``-th failure (from 1)."""
        exact = min(self.cap, self.first * 2.0 ** min(max(attempt, 1) - 1, 40))
        return exact * random.uniform(0.875, 1.125)


def narrow(events: Sequence[Event], *, done: int, repeatable: bool) -> list[Sequence[Event]]:
    """Cut a batch of two or more events that failed into parts to be delivered one after the other.

    Args:
        events: the batch.
        done: how many of them the projector said it had finished (``ctx.done``): the next one is the suspect.
        repeatable: its effects were rolled back, so delivering a good event again costs time only. If not, each is
            delivered at most once more: alone.
    """
    if 0 < done < len(events):
        parts = [events[:done]] if repeatable else []
        parts.append(events[done : done + 1])
        parts.append(events[done + 1 :])
        return [part for part in parts if part]
    if repeatable:
        half = len(events) // 2
        return [events[:half], events[half:]]
    return [events[i : i + 1] for i in range(len(events))]


def describe(error: BaseException) -> tuple[str, str]:
    """An error as two texts that Postgres accepts: one line, and the head of the traceback (4 kB in UTF-8)."""
    try:
        line = f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ fails
        line = f"{type(error).__name__} (which cannot be printed)"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # a chain of causes that is deeper than the stack that is left, or the like
        trace = line
    return _storable(line, ERROR_BYTES), _storable(trace, TRACEBACK_BYTES)


def _storable(text: str, limit: int) -> str:
    # `text` in Postgres holds neither NUL nor lone surrogates, and the limit is in bytes.
    raw = text.replace("\0", "\\0").encode("utf-8", "replace")
    return text if len(raw) <= limit and raw.decode() == text else raw[:limit].decode("utf-8", "ignore")
