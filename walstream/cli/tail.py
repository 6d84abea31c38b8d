"""``walstream tail``: events as they commit."""

from __future__ import annotations

import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walstream.event import Event

from .options import Json, takes_settings
from .shown import one_line
from .signals import unwinding

if TYPE_CHECKING:
    from walstream.config import Settings

    from .tail_sources import Source

_PATIENCE: Final = 0.5  # seconds between two looks at whether anybody still reads what we print

# Colour by the first word of the event type; the rest of the taxonomy's names follow the same pattern.
_COLOURS: Final = {"context": 34, "model": 36, "tool": 33, "handoff": 35, "approval": 31, "task": 32}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(tail)


@takes_settings
def tail(
    settings: Settings,
    *,
    session: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only these sessions; the beginning of an id is enough.")
    ] = None,
    agent: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these agents; * and ? match.")] = None,
    event_type: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only these event types; tool.* is possible.")
    ] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="OFFSET", help="Begin with this offset; -20 begins 20 before the end."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many events.")] = None,
    as_json: Json = False,
) -> None:
    """Show events as they commit, in commit order.

    Where a stream is installed its order is read, and a running ingest is needed
    for news. Elsewhere a temporary slot and a publication are made; both are gone
    afterwards. With --json every event is a line that `walstream import` can read.
    """
    if start == 0:
        raise typer.BadParameter("offsets begin at 1", param_hint="--from")
    from .tail_sources import open_source

    chosen = _filter(session or (), agent or (), event_type or ())
    with unwinding(), open_source(settings, start) as source:
        _show_all(source, chosen, _as_json if as_json else Line().render, limit)


def _show_all(
    source: Source, chosen: Callable[[Event], bool], render: Callable[[Event], bytes], limit: int | None
) -> None:
    output = sys.stdout.buffer
    left = limit
    looked = time.monotonic()
    while left is None or left > 0:
        events = [event for event in source.read(_PATIENCE) if chosen(event)][:left]
        if events:
            output.write(b"".join(map(render, events)))
            output.flush()
            if left is not None:
                left -= len(events)
        elif time.monotonic() - looked > _PATIENCE:
            looked = time.monotonic()
            _check_reader()


def _filter(sessions: Sequence[str], agents: Sequence[str], types: Sequence[str]) -> Callable[[Event], bool]:
    prefixes = tuple(sessions)
    # fnmatch takes brackets for a set of characters; here they are characters of a name, as in worker[3].
    agents = [pattern.replace("[", "[[]") for pattern in agents]
    types = [pattern.replace("[", "[[]") for pattern in types]

    def chosen(event: Event) -> bool:
        return (
            (not prefixes or event.session_id.startswith(prefixes))
            and (not agents or any(fnmatchcase(event.agent_id, pattern) for pattern in agents))
            and (not types or any(fnmatchcase(event.event_type, pattern) for pattern in types))
        )

    return chosen


def _as_json(event: Event) -> bytes:
    from walstream.projectors.json_lines_file import event_line

    return event_line(event)


class Line:
    """Renders an event as one line of the terminal's width: offset, time of commit (UTC), session, agent, type, and
    what fits of the payload.

    Columns keep their place; a longer agent or type widens its column for what follows.
    """

    def __init__(self) -> None:
        from rich.cells import cell_len, set_cell_size

        self._length, self._cut = cell_len, set_cell_size
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._agent = 12
        self._type = 16

    def render(self, event: Event) -> bytes:
        """The line, with its end."""
        agent, kind = one_line(event.agent_id), one_line(event.event_type)
        self._agent = max(self._agent, min(len(agent), 24))
        self._type = max(self._type, min(len(kind), 24))
        at = event.committed_at
        place = f"{event.offset:>8} " if event.offset else ""
        head = (
            f"{place}{at.strftime('%H:%M:%S.%f')[:-3] if at else '--:--:--.---'} {one_line(event.session_id)[:8]:<8} "
            f"{agent[: self._agent]:<{self._agent}} "
        )
        name = f"{kind[: self._type]:<{self._type}} "
        width = shutil.get_terminal_size((160, 24)).columns
        room = max(20, width - len(head) - len(name))
        payload = one_line(event.payload_bytes[: room * 4].decode(errors="ignore"))
        if self._length(payload) > room:  # some characters are two cells wide
            payload = self._cut(payload, room - 1).rstrip() + "…"
        if self._colour:
            colour = _COLOURS.get(kind.partition(".")[0])
            head = f"\x1b[2m{head}\x1b[0m"
            name = f"\x1b[{colour}m{name}\x1b[0m" if colour else name
        return f"{head}{name}{payload}\n".encode()


def _check_reader() -> None:
    """Raise BrokenPipeError if nobody reads our output any more: a quiet ledger gives no write that would tell."""
    try:
        descriptor = sys.stdout.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return
    poll = select.poll()
    poll.register(descriptor, 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise BrokenPipeError
