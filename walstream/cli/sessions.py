"""``walstream sessions``: which sessions there are and how they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import MOST, moment, one_line, time_of_day

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.ledger.sessions import SessionSummary

_COLOURS: Final = {"running": "green", "in flight": "yellow", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sessions)


@takes_settings
def sessions(
    settings: Settings,
    *,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Only those in which this agent took part.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only those with an event since then: 2026-02-03T04:05, or 15m.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="How many at the most.")] = 20,
    as_json: Json = False,
) -> None:
    """List sessions, those with the newest events first.

    State: running, in flight (a tool call has no answer), completed or failed. The newest sessions are found from the
    end of the ledger, whatever its size; counting the events of those that are shown costs a pass over each of them.
    """
    since_time = None if since is None else moment(since, "--since")
    with installed(settings, "sessions", options=PATIENT) as conn, conn.cursor() as cur:
        from walstream.ledger.sessions import newest_sessions, summary

        ids = newest_sessions(cur, settings, limit, agent_id=agent, since=since_time)
        found = [summary(cur, settings, session) for session in ids]
    if as_json:
        console.print_json([_document(each) for each in found])
    elif not found:
        console.say("no session")
    else:
        _show(found)
        if len(found) == limit:
            console.note(f"the newest {limit} are shown; --limit shows more")


def _document(each: SessionSummary) -> dict[str, Any]:
    return {name: getattr(each, name) for name in each.__dataclass_fields__}


def _show(found: list[SessionSummary]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("session", no_wrap=True)  # it is there to be copied, so the others give way
    table.add_column("agents")
    for name in ("events", "first", "last", "state", "in flight", "forked from"):
        table.add_column(name, justify="right" if name in ("events", "in flight") else "left")
    for each in found:
        fork = each.forked_from
        table.add_row(
            Text(one_line(each.session_id)),
            Text(", ".join(map(one_line, each.agents))),
            f"{each.events:,}",
            time_of_day(each.first_at),
            time_of_day(each.last_at),
            Text(each.state, style=_COLOURS.get(each.state, "")),
            Text(str(each.in_flight or ""), style="yellow"),
            Text("" if fork is None else f"{one_line(fork['session_id'])} at {fork['at_seq']}"),
        )
    console.out().print(table)
