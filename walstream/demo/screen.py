"""What a person sees while the demo runs: the stream, the counters, the kills. Without a terminal: a line now and then.

It reads the demo's database from a thread of its own, as any other observer would, and has no say in anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from rich.console import Console, RenderableType

_LINES: Final = 12
_REFRESH: Final = 0.25
_PLAIN_EVERY: Final = 5.0

_LATEST: Final = """\
SELECT d.event_offset, e.session_id::text, e.agent_id, e.event_type, left(e.payload::text, 160),
       (d.handled_us - d.committed_us) / 1000.0
  FROM demo_deliveries AS d JOIN agent_events AS e USING (seq)
 ORDER BY d.delivery DESC LIMIT %s"""

_STYLES: Final = {
    "context": "blue",
    "model": "cyan",
    "tool": "yellow",
    "handoff": "magenta",
    "task": "green",
}


CONSUMER: Final = "consumer"


@dataclass(slots=True)
class Kill:
    """One SIGKILL.

    Attributes:
        who: the consumer, or the agent whose worker it was.
        at_event: how many events the agents had committed.
        at: when, seconds since 1970.
        back: when the consumer delivered the next event, or the worker was at work again; ``None`` until then.
        turns: how many turns the worker had in hand.
    """

    who: str
    at_event: int
    at: float
    back: float | None = None
    turns: int = 0

    @property
    def seconds(self) -> float:
        """How long nobody did its work."""
        return (self.back or time.time()) - self.at


@dataclass(slots=True)
class Progress:
    """What the supervisor tells the screen; plain attributes, written by one thread and read by another."""

    goal: int | None = None
    phase: str = "starting Postgres"
    committed: int = 0
    delivered: int = 0
    undone: int = 0
    turns: int = 0
    kills_planned: int = 0
    kills: list[Kill] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def outages(self) -> list[Kill]:
        """The kills that are not over."""
        return [kill for kill in self.kills if kill.back is None]


class Screen(Protocol):
    """Shown while the block runs."""

    def __enter__(self) -> Screen: ...
    def __exit__(self, *exc: object) -> None: ...
    def watch(self, connect: Callable[[], Connection]) -> None:
        """From now on there is a database to look at."""


class PlainScreen:
    """A line whenever the phase changes, somebody is killed, or some seconds have passed."""

    def __init__(self, progress: Progress, say: Callable[[str], None]) -> None:
        self._progress = progress
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def __enter__(self) -> PlainScreen:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(2)

    def watch(self, connect: Callable[[], Connection]) -> None:
        """Nothing here needs the database."""

    def _run(self) -> None:
        phase, kills, spoken = "", 0, 0.0
        while not self._ended.wait(0.1):
            progress = self._progress
            if progress.phase != phase:
                phase, spoken = progress.phase, time.monotonic()
                self._say(phase)
            for kill in progress.kills[kills:]:
                kills += 1
                caught = f", turns in hand: {kill.turns}" if kill.turns else ""
                whom = "consumer" if kill.who == CONSUMER else f"{kill.who}s' worker"
                self._say(f"kill -9 of the {whom}, number {kills}, after {kill.at_event:,} events{caught}")
            if progress.committed and time.monotonic() - spoken > _PLAIN_EVERY:
                spoken = time.monotonic()
                self._say(
                    f"{progress.committed:,} committed, {progress.delivered:,} delivered,"
                    f" {progress.turns:,} handoffs completed"
                )


class LiveScreen:
    """The whole terminal's width, redrawn four times a second."""

    def __init__(self, progress: Progress, console: Console) -> None:
        from rich.live import Live

        self._progress = progress
        self._console = console
        self._rows: list[tuple[int, str, str, str, str, float | None]] = []
        self._ended = threading.Event()
        self._connect: Callable[[], Connection] | None = None
        self._connection: Connection | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(2)
        self._live.__exit__(None, None, None)
        if self._connection is not None:
            self._connection.close()

    def watch(self, connect: Callable[[], Connection]) -> None:
        """From now on the latest events are shown."""
        self._connect = connect

    def _run(self) -> None:
        while not self._ended.wait(_REFRESH):
            self._look()
            self._live.update(self._drawing(), refresh=True)

    def _look(self) -> None:
        import psycopg2

        if self._connect is None:
            return
        try:
            if self._connection is None:
                self._connection = self._connect()
                self._connection.autocommit = True
            with self._connection.cursor() as cur:
                cur.execute(_LATEST, (_LINES,))
                self._rows = list(reversed(cur.fetchall()))
        except psycopg2.Error:
            pass  # the tables are not there yet, or the server is going down: the next look will tell

    def _drawing(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        stream = Table.grid(padding=(0, 1), expand=True)
        for _ in range(3):
            stream.add_column(no_wrap=True)
        stream.add_column(no_wrap=True)
        stream.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        stream.add_column(no_wrap=True, justify="right")
        for offset, session, agent, kind, payload, ms in self._rows:
            style = _STYLES.get(kind.partition(".")[0], "")
            delay = Text("" if ms is None else f"{ms:,.1f} ms", style="red" if (ms or 0) > 250 else "dim")
            stream.add_row(
                Text(f"{offset:>7}", style="dim"),
                Text(session[:8], style="dim"),
                Text(agent[:14]),
                Text(kind, style=style),
                Text(payload, style="dim"),
                delay,
            )
        numbers = Table.grid(padding=(0, 3))
        goal = f" of {progress.goal:,}" if progress.goal else ""
        numbers.add_row(
            f"committed [bold]{progress.committed:,}[/]{goal}",
            f"delivered [bold]{progress.delivered:,}[/]",
            f"lag [bold]{max(0, progress.committed - progress.delivered):,}[/]",
            f"rolled back [bold]{progress.undone:,}[/]",
            f"handoffs completed [bold]{progress.turns:,}[/]",
            f"{time.monotonic() - progress.started:.0f} s",
        )
        return Panel(
            Group(stream, Text(), numbers, self._kills()),
            title=f"walstream demo · {progress.phase}",
            title_align="left",
        )

    def _kills(self) -> RenderableType:
        from rich.text import Text

        line = Text(f"kill -9  {len(self._progress.kills)} of {self._progress.kills_planned}  ")
        for kill in self._progress.kills[-6:]:
            if kill.back is None:
                line.append(f" ✗ {kill.who} {kill.seconds:.1f} s …", style="bold red")
            else:
                line.append(f" ✓ {kill.who} {kill.seconds:.1f} s", style="green")
        return line


def screen_for(console: Console, progress: Progress, say: Callable[[str], None], *, live: bool) -> Screen:
    """A live screen where a person watches, else lines for ``say``."""
    return LiveScreen(progress, console) if live else PlainScreen(progress, say)
