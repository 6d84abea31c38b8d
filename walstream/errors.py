"""Every error that walstream raises on purpose, with the remedy an operator reads and the exit code a script reads.

One rule decides what happens next: an error is either *transient* (the same call may succeed later: reconnect, with
backoff) or it ends the process at once. What is unknown ends it.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line (docs/operations.md lists them)."""

    OK = 0
    FAILED = 1  # the command ran and found what it looks for: a lost event, a failed check, a difference
    USAGE = 2  # the words of the call are off (typer's own code)
    CONFIG = 3  # configuration or privileges: a retry cannot help, a person must change something
    UNAVAILABLE = 4  # the server does not answer, or not in time
    SLOT = 5  # the slot or its history cannot be continued: lost, foreign, ahead of the server
    DATA = 6  # the stream or the ledger holds something that cannot be decoded or accepted
    HALTED = 7  # a projector with the policy `halt` stopped
    FENCED = 8  # another process took over


class WalstreamError(Exception):
    """Base of all of them.

    Attributes:
        hint: what to do about it, in one or two sentences; may be empty.
        exit_code: what the command line exits with when this ends it.
        transient: whether the same call may succeed later without anybody changing anything.
    """

    exit_code: ExitCode = ExitCode.FAILED
    transient: bool = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(WalstreamError):
    """Configuration, privileges or set-up that only a person can change."""

    exit_code = ExitCode.CONFIG


class PublicationGone(ConfigError):
    """The publication is not there, or does not hold the ledger (any more).

    Attributes:
        statement: what puts it right; `walstream run` tries it, where its login owns the table.
    """

    def __init__(self, message: str, *, statement: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.statement = statement


class Unavailable(WalstreamError):
    """The server (or the network) does not answer; it may later."""

    exit_code = ExitCode.UNAVAILABLE
    transient = True


class ConnectionLost(Unavailable):
    """An established connection ended. What was held in memory about the order is worthless from here on (rule 4)."""


class Stalled(ConnectionLost):
    """This process stood still (stopped, swapped, suspended) so long that the connection is dropped unread (rule 9)."""


class SlotError(WalstreamError):
    """The slot cannot be continued: missing, lost, of another plugin or database, with a foreign position."""

    exit_code = ExitCode.SLOT


class SlotGone(SlotError):
    """The slot can never be read any further, and a new one in its place loses nothing: what it would have sent stands
    in the ledger. `walstream run` makes it by itself, unless the configuration says otherwise."""


class DecodeError(WalstreamError):
    """Bytes that are not what the protocol says. Never acknowledged, never a wrong value.

    Attributes:
        tag: the message type's letter, or ``''`` before one was read.
        lsn: where the message stood in the WAL (0 if unknown).
    """

    exit_code = ExitCode.DATA

    def __init__(self, message: str, *, tag: str = "", lsn: int = 0, hint: str = "") -> None:
        where = f" in message {tag!r}" if tag else ""
        at = f" at LSN {lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}" if lsn else ""
        super().__init__(f"{message}{where}{at}", hint=hint)
        self.reason = message
        self.tag = tag
        self.lsn = lsn


class LedgerError(WalstreamError):
    """The ledger (table, rows, order) is not what it must be: a column is gone, a row that has an offset is gone."""

    exit_code = ExitCode.DATA


class RowMissing(LedgerError):
    """An event has an offset but its row is no longer in the ledger, and no erasure declares that."""


class PayloadError(WalstreamError):
    """A payload that is legal in Postgres but cannot be parsed here (too deep, an integer of thousands of digits).

    Only the projector that asks for the parsed form sees it; the stream and everybody else go on with the text.
    """

    exit_code = ExitCode.DATA


class UnknownSession(ConfigError):
    """No event of the ledger has this session id, or it is none that the ledger's column can hold."""


class RecoveryBusy(WalstreamError):
    """Another worker recovers this session, or works on it inside of ``recover``, right now."""

    exit_code = ExitCode.UNAVAILABLE
    transient = True


class CallSettled(WalstreamError):
    """A tool call is not in flight any more as it was listed: answered, abandoned, or tried again by somebody else."""


class JobRefused(WalstreamError):
    """A job is not in a state in which what was asked of it can be done."""


class ApprovalRefused(WalstreamError):
    """A request for an approval cannot be decided (any more): decided already, stale, or past its deadline."""


class Fenced(WalstreamError):
    """Another process holds a newer generation: whatever this one still wanted to write was refused."""

    exit_code = ExitCode.FENCED


class ProjectorHalted(WalstreamError):
    """A projector with the policy ``halt`` met an event it cannot project."""

    exit_code = ExitCode.HALTED


class GiveUp(WalstreamError):
    """Raised *by a worker's handler*: no further attempt at this job is of any use. It fails for good."""


class RetryLater(WalstreamError):
    """Raised *by a projector or a worker's handler*: its target is away, and the event, or the job, is fine. Retried
    without counting as an attempt.

    Attributes:
        delay: seconds to wait before the next try, or ``None`` for the projector's, or the worker's, own backoff.
    """

    def __init__(self, message: str = "it asked to be tried again later", *, delay: float | None = None) -> None:
        super().__init__(message)
        self.delay = delay
