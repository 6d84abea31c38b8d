"""``walstream inflight``: tool calls that have no answer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import MOST, cut_at_the_end, moment, one_line, shortened

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings
    from walstream.ledger.inflight import InFlightCall


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inflight)


@takes_settings
def inflight(
    settings: Settings,
    session: Annotated[str | None, typer.Argument(metavar="[SESSION]", help="Only of this session.")] = None,
    *,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Only those that this agent began.")] = None,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only those begun before: 2026-02-03T04:05, or 15m (ago).")
    ] = None,
    newest: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            metavar="N",
            help="Look at the N sessions with the newest events only, instead of reading the whole ledger.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List tool calls that were invoked and have no answer yet.

    They run right now, or were running when their worker died. A worker resolves them with walstream.recover.
    """
    before_time = None if before is None else moment(before, "--before")
    if session is not None and newest is not None:
        raise typer.BadParameter("give a session or --newest, not both", param_hint="--newest")
    with installed(settings, "inflight", options=PATIENT) as conn, conn.cursor() as cur:
        calls = _calls(cur, settings, session, newest)
    found = [
        call
        for call in calls
        if (agent is None or call.agent_id == agent)
        and (before_time is None or (call.since is not None and call.since < before_time))
    ]
    if as_json:
        console.print_json([_document(call) for call in found])
    elif not found:
        console.say("no tool call is in flight")
    else:
        _show(found)


def _calls(cur: Cursor, settings: Settings, session: str | None, newest: int | None) -> list[InFlightCall]:
    from walstream.ledger.inflight import calls_of, inflight
    from walstream.ledger.sessions import newest_sessions

    if session is not None:
        return calls_of(cur, settings, session)
    if newest is None:
        return inflight(cur.connection, settings=settings)
    ids = newest_sessions(cur, settings, newest)
    return sorted((call for each in ids for call in calls_of(cur, settings, each)), key=lambda call: call.seq)


def _document(call: InFlightCall) -> dict[str, Any]:
    import orjson

    document = {name: getattr(call, name) for name in call.__dataclass_fields__}
    text = document.pop("arguments_text")
    document["arguments"] = None if text is None else orjson.Fragment(text)
    document["since"] = None if call.since is None else call.since.isoformat(sep=" ")
    return document


def _show(found: list[InFlightCall]) -> None:
    from walstream.figures import duration

    now = datetime.now(UTC)
    rows = [
        (
            *(one_line(each or "") for each in (call.session_id, call.agent_id, call.call_id, call.name)),
            str(call.seq),
            str(call.attempt),
            "" if call.since is None else duration(max(0.0, (now - call.since).total_seconds())),
            shortened(call.arguments_text or "", 80),
        )
        for call in found
    ]
    out = console.out()
    titles = ("session", "agent", "call", "tool", "seq", "attempt", "for", "arguments")
    out.print(cut_at_the_end(titles, rows, out.width, right=("seq", "attempt", "for")))
    console.say(f"{len(found)} tool {'call is' if len(found) == 1 else 'calls are'} in flight")
