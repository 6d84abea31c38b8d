"""A projector's life in a process of its own, which can end in the middle of a line (for :mod:`.rehearsal`)."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from walstream.engine.context import Context
from walstream.engine.projector import Projector
from walstream.event import Event

_OURS: Final = str(Path(__file__).resolve().parents[1])
_STANDARD: Final = str(Path(os.__file__).resolve().parent)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one delivery.

    Attributes:
        kind: one of :data:`walstream.testing.rehearsal.FAULTS`.
        share: how far into the projector's work, of 1.
    """

    kind: str
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch that a life is to be given.

    Attributes:
        hot: the events are those that other projectors have read before; else they are made anew from the rows.
        fault: what goes wrong with it.
    """

    start: int
    end: int
    hot: bool
    fault: Fault | None = None


@dataclass(slots=True)
class Ended:
    """How a life ended.

    Attributes:
        position: how many events are done.
        lines: how many lines of code the projector took for them.
        error: what it raised; empty if nothing.
    """

    position: int
    lines: int = 0
    error: str = ""


class Lines:
    """Counts the lines that a projector's code runs, and can end the process before one of them.

    walstream's own and the standard library's do not count.
    """

    def __init__(self) -> None:
        self.run = 0
        self.deadly: int | None = None

    def counted(self, call: Callable[[], None]) -> None:
        """Call, and count."""
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename.startswith((_OURS, _STANDARD, "<frozen")):
            return None
        if event == "line":
            self.run += 1
            if self.run == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


class Life:
    """What the child does: one projector, from its making to its end.

    Args:
        make: makes the projector.
        connect: makes a connection, for a transactional one.
        events: all of them.
        lines_an_event: how many lines of code an event takes, as far as is known.
        report: takes the position whenever the cursor moves.
    """

    def __init__(
        self,
        make: Callable[[], Projector],
        connect: Callable[[], Any] | None,
        events: Sequence[Event],
        lines_an_event: float,
        report: Callable[[int], None],
    ) -> None:
        self._events = events
        self._lines_an_event = lines_an_event
        self._report = report
        self._lines = Lines()
        self._projector = make()
        if self._projector.transactional and connect is None:
            raise ValueError(f"projector {self._projector.name!r} is transactional: rehearse(…, connect=…)")
        self._connection = connect() if connect is not None and self._projector.transactional else None
        self._context = Context(self._projector.name, connection=self._connection)

    def live(self, deliveries: Iterator[Delivery]) -> int:
        """Set up, be given every delivery, close; return how many lines the projector took."""
        self._context.begin()
        _run(self._projector.setup(self._context))
        self._commit()
        for delivery in deliveries:
            self._deliver(delivery)
        _run(self._projector.close())
        if self._connection is not None:
            self._connection.close()
        return self._lines.run

    def _deliver(self, delivery: Delivery) -> None:
        events = self._events[delivery.start : delivery.end]
        batch = [event if delivery.hot else Event(event.offset, event.row, event.commit) for event in events]
        if delivery.hot:
            for event in batch:
                _ = event.payload
        fault = delivery.fault
        kind = "" if fault is None else fault.kind
        if fault is not None and kind == "kill":
            self._lines.deadly = self._lines.run + 1 + int(fault.share * self._lines_an_event * len(batch))
        self._project(batch)
        self._lines.deadly = None
        if kind in ("kill", "kill_before_cursor"):  # the work was over before its line came
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "redeliver":
            self._roll_back()
            self._project(batch)
        elif kind == "one_by_one":
            self._roll_back()
            for number, event in enumerate(batch, 1):
                self._project([event])
                self._commit()
                self._report(delivery.start + number)
            return
        self._commit()
        self._report(delivery.end)
        if kind == "kill_after_cursor":
            os.kill(os.getpid(), signal.SIGKILL)

    def _project(self, batch: Sequence[Event]) -> None:
        self._context.begin()
        self._lines.counted(lambda: _run(self._projector.project(batch, self._context)))

    def _commit(self) -> None:
        if self._connection is not None:
            self._connection.commit()

    def _roll_back(self) -> None:
        if self._connection is not None:
            self._connection.rollback()


def live(
    make: Callable[[], Projector],
    connect: Callable[[], Any] | None,
    events: Sequence[Event],
    deliveries: Sequence[Delivery],
    lines_an_event: float,
) -> Ended:
    """Fork, let the child live, and say how it ended."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the parent has: the child needs none
        child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_child(make, connect, events, deliveries, lines_an_event, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    ended = Ended(position=deliveries[0].start)
    words = told.split("\0")[:-1]  # what was told by halves was not told
    for word in words:
        kind, _, rest = word.partition(" ")
        if kind == "at":
            ended.position = int(rest)
        elif kind == "lines":
            ended.lines = int(rest)
        else:
            ended.error = rest
    return ended


def _be_the_child(
    make: Callable[[], Projector],
    connect: Callable[[], Any] | None,
    events: Sequence[Event],
    deliveries: Sequence[Delivery],
    lines_an_event: float,
    writer: int,
) -> NoReturn:
    def tell(word: str) -> None:
        os.write(writer, f"{word}\0".encode())

    try:
        life = Life(make, connect, events, lines_an_event, lambda position: tell(f"at {position}"))
        tell(f"lines {life.live(iter(deliveries))}")
    except BaseException:
        tell("error " + traceback.format_exc()[-4000:])
    finally:
        os._exit(0)  # nothing of the parent's is closed, flushed or reported by the child


def _run(outcome: object) -> None:
    if inspect.isawaitable(outcome):

        async def wait_for_it() -> None:
            await outcome

        asyncio.run(wait_for_it())
