"""``walstream parked``: events that a projector could not project, and what waits behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ExitCode

from . import console
from .options import Json, Yes, takes_settings
from .projectors import Name, require
from .session import installed

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings

Session = Annotated[str | None, typer.Option("--session", metavar="ID", help="Only this session.", show_default=False)]

_COLUMNS: Final = (
    "projector",
    "event_offset",
    "seq",
    "session_id",
    "event_type",
    "state",
    "attempts",
    "error",
    "traceback",
    "parked_at",
    "next_try",
)


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="Events that a projector could not project.", no_args_is_help=True)
    group.command("list")(list_parked)
    group.command()(retry)
    group.command()(discard)
    app.add_typer(group, name="parked")


@takes_settings
def list_parked(
    settings: Settings,
    projector: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only of this projector.")] = None,
    *,
    session: Session = None,
    limit: Annotated[int, typer.Option(min=1, help="How many entries at the most.", metavar="N")] = 100,
    as_json: Json = False,
) -> None:
    """List parked events: the first of a session failed, the others wait behind it in order.

    The traceback of a failure is part of the JSON.
    """
    from walstream.config import quote

    schema = quote(settings.namespace)
    where = "(%s::text IS NULL OR projector = %s) AND (%s::text IS NULL OR session_id = %s)"
    values = (projector, projector, session, session)
    with installed(settings, "parked") as conn, conn.cursor() as cur:
        if projector is not None:
            require(cur, settings, projector)
        cur.execute(
            f"SELECT count(*), count(DISTINCT (projector, session_id)) FROM {schema}.parked WHERE {where}", values
        )
        events, sessions = _one(cur)
        cur.execute(
            f"SELECT {', '.join(_COLUMNS)}, greatest(0, extract(epoch FROM next_try - clock_timestamp()))::float8"
            f" FROM {schema}.parked WHERE {where} ORDER BY projector, event_offset LIMIT %s",
            (*values, limit),
        )
        rows = cur.fetchall()
    if as_json:
        entries = [dict(zip((*_COLUMNS, "next_try_in"), row, strict=True)) for row in rows]
        console.print_json({"events": events, "sessions": sessions, "entries": entries})
    elif not rows:
        console.say("nothing is parked")
    else:
        _show(rows)
        more = f"; the first {len(rows)} are shown" if len(rows) < events else ""
        console.say(f"{events} events of {sessions} sessions are parked{more}")


def _show(rows: list[tuple[Any, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from walstream.figures import duration

    table = Table()
    for title in ("projector", "offset", "seq", "session", "type", "state", "tries", "next try", "error"):
        table.add_column(title, overflow="fold")  # cut off, a name could not be given to the next command
    for name, offset, seq, session_id, event_type, state, attempts, error, _trace, _at, _next, pause in rows:
        when = "" if state == "waiting" else "now" if not pause else f"in {duration(pause)}"
        cells = (name, str(offset), str(seq), session_id, event_type, state, str(attempts), when, error or "")
        table.add_row(*(Text(cell) for cell in cells))
    console.out().print(table)


@takes_settings
def retry(settings: Settings, projector: Name, *, session: Session = None, as_json: Json = False) -> None:
    """Make parked sessions due at once, instead of at their next try."""
    from walstream.engine.parking import Parking

    with installed(settings, "parked") as conn, conn.cursor() as cur:
        require(cur, settings, projector)
        count = Parking(settings.namespace, projector).retry_now(cur, session)
    if as_json:
        console.print_json({"projector": projector, "sessions": count})
    else:
        console.say(
            f"{count} parked sessions of {projector} are due: the process that runs it tries them at once"
            if count
            else f"no session of {projector} is parked"
        )


@takes_settings
def discard(
    settings: Settings,
    projector: Name,
    offsets: Annotated[list[int], typer.Argument(metavar="OFFSET…", help="Offsets of parked events.", min=1)],
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Give parked events up, for this projector only. What waits behind them is tried next.

    The events stay in the ledger, and every other projector has them. Exit code 1 if one of them was not parked.
    """
    from walstream.engine.parking import Parking

    with installed(settings, "parked") as conn, conn.cursor() as cur:
        require(cur, settings, projector)
        console.confirm(f"Give up {', '.join(map(str, offsets))} for projector {projector}?", yes)
        parking = Parking(settings.namespace, projector)
        gone = [offset for offset in offsets if parking.discard(cur, offset)]
    missing = sorted(set(offsets) - set(gone))
    if as_json:
        console.print_json({"projector": projector, "discarded": gone, "not_parked": missing})
    else:
        console.say(f"{projector}: discarded {', '.join(map(str, gone)) or 'nothing'}")
        if missing:
            console.note(f"not parked: {', '.join(map(str, missing))}")
    if missing:
        raise typer.Exit(ExitCode.FAILED)


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
