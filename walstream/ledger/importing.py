"""Importing events from JSON Lines: checked first, then appended in transactions of a known extent.

A file is read twice: once to check every line before anything is written, and once to append. The standard input is
read once, as it comes (held in memory if copies are wanted), so there a bad line can follow lines
that are committed already; the error says which. A transaction holds consecutive lines of one file and never spans
two files, so nothing of a transaction that holds a bad line is ever in the ledger.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream.config import LedgerTable, quote
from walstream.errors import ConfigError, LedgerError

from .append import NewEvent, insert_events
from .json_lines import BadLine, read_events

STDIN: Final = "-"
DEFAULT_BATCH: Final = 500

_COPIES: Final = uuid.UUID("6f0c7a52-0a59-5e0f-8f57-0d8f3e3f2a11")
"""Namespace of the session ids that copies get; drawn once and never to change, so that a rerun is recognised."""

_SESSIONS_LOOKED_UP: Final = 1000

# SQLSTATE classes that a row itself can cause: data exception, constraint violation, program limit, and `raise` in a
# trigger (documentation, appendix A).
_ROW_ERRORS: Final = ("22", "23", "54", "P0", "44")


def copied_session(session_id: str, copy: int) -> str:
    """Return the session id that copy number ``copy`` (from 1) of ``session_id`` gets: the same in every run."""
    return str(uuid.uuid5(_COPIES, f"{copy}:{session_id}"))


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes into one transaction: consecutive lines of one file.

    Attributes:
        copy: number of the copy, from 1; 0 where none were asked for.
        lines: the line number of every event.
    """

    file: str
    copy: int
    lines: list[int]
    events: list[NewEvent]

    @property
    def extent(self) -> str:
        """``lines 1 to 500 of runs.jsonl``, for errors."""
        copy = f", copy {self.copy}" if self.copy else ""
        return f"lines {self.lines[0]} to {self.lines[-1]} of {self.file}{copy}"


@dataclass(slots=True)
class Checked:
    """What the first reading of the files found.

    Attributes:
        events: lines that are events, in all files, without copies; ``None`` if the standard input is still unread.
        sessions: the first session ids that will be written, to see whether they are in the ledger already.
    """

    events: int | None = 0
    sessions: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Imported:
    """What was committed."""

    events: int = 0
    transactions: int = 0


class Pace:
    """Holds a loop to a number of events a second, without making up for time that it stood still."""

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._interval = 1 / rate if rate else 0.0
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    def wait(self, events: int) -> None:
        """Wait until ``events`` more are due."""
        if not self._interval:
            return
        now = self._clock()
        self._due = max(self._due, now - 1.0)
        if self._due > now:
            self._sleep(self._due - now)
        self._due += events * self._interval


class Sources:
    """The files of one import, in the order in which they were given."""

    def __init__(self, files: Sequence[str], *, copies: int = 0) -> None:
        if list(files).count(STDIN) > 1:
            raise ConfigError("the standard input can be imported once only", hint="give '-' a single time")
        self.files = tuple(files)
        self.copies = copies
        self._held: bytes | None = None

    @property
    def streaming(self) -> bool:
        """Whether lines come from the standard input as they are written: they cannot be checked beforehand."""
        return STDIN in self.files and not self.copies

    @property
    def times(self) -> int:
        """How often each line is appended."""
        return max(self.copies, 1)

    def check(self) -> Checked:
        """Read every line that can be read twice.

        Raises:
            BadLine: the first line that is not an event.
            ConfigError: a file cannot be read.
        """
        found = Checked()
        for file in self.files:
            if file == STDIN and self.streaming:
                found.events = None
                continue
            with self._open(file) as stream:
                for _line, event in read_events(stream, file):
                    if found.events is not None:
                        found.events += 1
                    if len(found.sessions) < _SESSIONS_LOOKED_UP:
                        found.sessions[self._session(event.session_id, min(self.copies, 1))] = None
        return found

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield transactions of at most ``size`` events; 0 means one a file.

        All of copy 1 comes before copy 2, file after file, so within a session the order is the file's.
        """
        for copy in range(1, self.copies + 1) if self.copies else (0,):
            for file in self.files:
                batch = Batch(file, copy, [], [])
                with self._open(file) as stream:
                    for line, event in read_events(stream, file):
                        batch.lines.append(line)
                        batch.events.append(event._replace(session_id=self._session(event.session_id, copy)))
                        if len(batch.lines) == size:
                            yield batch
                            batch = Batch(file, copy, [], [])
                if batch.lines:
                    yield batch

    def _session(self, session_id: str, copy: int) -> str:
        return copied_session(session_id, copy) if copy else session_id

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[IO[bytes]]:
        if file == STDIN:
            yield self._standard_input()
            return
        try:
            with open(file, "rb") as stream:
                yield stream
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None

    def _standard_input(self) -> IO[bytes]:
        if self.streaming:
            return sys.stdin.buffer
        if self._held is None:
            self._held = sys.stdin.buffer.read()
        return io.BytesIO(self._held)


class Importer:
    """Appends batches to a ledger, each in a transaction of its own.

    Args:
        connection: not in autocommit mode.
    """

    def __init__(self, connection: Connection, ledger: LedgerTable) -> None:
        self._connection = connection
        self._ledger = ledger
        self.done = Imported()

    def known_sessions(self, sessions: Sequence[str]) -> int:
        """Return how many of ``sessions`` have events in the ledger already."""
        column = quote(self._ledger.columns.session_id).replace("%", "%%")
        table = self._ledger.qualified.replace("%", "%%")
        known = 0
        try:
            with self._connection, self._connection.cursor() as cur:
                for session in sessions:  # as a literal it takes the column's own type, the one that has the index
                    cur.execute(f"SELECT EXISTS (SELECT FROM {table} WHERE {column} = %s)", (session,))
                    (there,) = cur.fetchone() or (False,)
                    known += bool(there)
        except psycopg2.DataError:
            pass  # not an id of the column's type: appending will name its line
        return known

    def append(self, batch: Batch) -> None:
        """Append ``batch`` and commit.

        Raises:
            BadLine: the server refuses one of its rows. Nothing of the batch is in the ledger.
            psycopg2.Error: anything else that goes wrong with the server.
        """
        try:
            with self._connection.cursor() as cur:
                insert_events(cur, self._ledger, batch.events)
            self._connection.commit()
        except psycopg2.Error as error:
            with contextlib.suppress(psycopg2.Error):  # the connection may be gone; the first error is the one to show
                self._connection.rollback()
            if (error.pgcode or "")[:2] not in _ROW_ERRORS:
                raise
            raise self._culprit(batch, error) from None
        self.done.events += len(batch.events)
        self.done.transactions += 1

    def _culprit(self, batch: Batch, error: psycopg2.Error) -> LedgerError:
        """Find the first row that the server refuses, by halves, in transactions that are rolled back."""
        low, high = 0, len(batch.events)
        while high - low > 1:
            middle = (low + high) // 2
            if self._refused(batch.events[low:middle]) is None:
                low = middle
            else:
                high = middle
        found = self._refused(batch.events[low:high])
        if found is None:  # together they fail, each of them alone does not: a constraint over several rows
            return LedgerError(f"{batch.extent} are refused together: {_said(error)}")
        return BadLine(batch.file, batch.lines[low], _said(found))

    def _refused(self, events: Sequence[NewEvent]) -> psycopg2.Error | None:
        try:
            with self._connection.cursor() as cur:
                insert_events(cur, self._ledger, events)
                cur.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except psycopg2.Error as error:
            if (error.pgcode or "")[:2] not in _ROW_ERRORS:
                raise
            return error
        finally:
            self._connection.rollback()
        return None


def _said(error: psycopg2.Error) -> str:
    primary = error.diag.message_primary or str(error)
    return f"{primary} ({error.diag.message_detail})" if error.diag.message_detail else primary
