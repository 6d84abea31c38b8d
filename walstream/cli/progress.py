"""A bar for the person at the terminal, on standard error; silent where none reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from . import console

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from walstream.engine.birth import InTheWay


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for one piece of work; the function that it gives is told how much more is done."""
    if not console.person_reads():
        yield lambda _more: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console.err(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)


class FillBar:
    """Shows a birth (see :class:`walstream.engine.birth.Progress`)."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._told: set[str] = set()

    def __enter__(self) -> FillBar:
        if console.person_reads():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console.err(),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str, total: int | None) -> None:
        """A pass over the table begins."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)

    def advance(self, rows: int) -> None:
        """So many more rows are ordered. An estimate that was too low gives way."""
        if self._bar is None or self._task is None:
            return
        task = next(each for each in self._bar.tasks if each.id == self._task)
        done = task.completed + rows
        total = task.total if task.total is None or task.total >= done else done
        self._bar.update(self._task, completed=done, total=total)

    def waiting(self, blockers: Sequence[InTheWay]) -> None:
        """The slot cannot be made yet: each transaction in the way is named once."""
        for blocker in blockers:
            if str(blocker) not in self._told:
                self._told.add(str(blocker))
                console.note(f"the slot waits for {blocker}; to end it: {blocker.remedy}")
