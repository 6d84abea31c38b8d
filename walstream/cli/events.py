"""``walstream events``: the events of one session, as they stand in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import MOST, cut_at_the_end, lines, one_line, shortened, time_of_day

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings
    from walstream.order.places import Place

_SHORT: Final = 120  # characters of a payload

_EVENTS: Final = """
SELECT e.$seq, e.$agent_id::text, e.$event_type::text, e.$created_at::text, $shown
  FROM $table AS e WHERE e.$session_id = %s$where ORDER BY e.$seq $way LIMIT %s"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(events)


@takes_settings
def events(
    settings: Settings,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    *,
    event_type: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only these event types; tool.* is possible.")
    ] = None,
    after: Annotated[int | None, typer.Option(metavar="SEQ", help="Only events with a higher seq.")] = None,
    last: Annotated[bool, typer.Option("--last", help="The last ones instead of the first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="How many at the most.")] = 100,
    full: Annotated[bool, typer.Option("--full", help="Whole payloads instead of their beginnings.")] = False,
    as_json: Json = False,
) -> None:
    """Show the events of a session in the order of seq, which is the order of its fold.

    An event without an offset is not in the commit order yet, or lies below the floor
    of `walstream init --from now`. Times are UTC. With --json payloads are whole.
    """
    from walstream.ledger.inflight import known_session
    from walstream.order.places import places_of

    with installed(settings, "events", options=PATIENT) as conn, conn.cursor() as cur:
        name = known_session(cur, settings, session)
        rows = _read(cur, settings, name, event_type or (), after, last, limit + 1, whole=full or as_json)
        more, rows = len(rows) > limit, rows[:limit]
        if last:
            rows.reverse()
        places = places_of(conn, settings.namespace, [row[0] for row in rows])
    if as_json:
        console.print_json({"session_id": name, "events": [_document(row, places) for row in rows], "more": more})
        return
    if not rows:
        console.say("no such event")
    elif full:
        _show_whole(rows, places)
    else:
        _show(rows, places)
    if more:
        way = "--limit shows more" if last else f"--after {rows[-1][0]} goes on"
        console.note(f"the {'last' if last else 'first'} {limit} are shown; {way}")


def _read(
    cur: Cursor,
    settings: Settings,
    session: str,
    types: Sequence[str],
    after: int | None,
    last: bool,
    limit: int,
    *,
    whole: bool,
) -> list[tuple[Any, ...]]:
    from walstream.ledger.stored_rows import statement

    where = ""
    values: list[object] = [session]
    if after is not None:
        where += " AND e.$seq > %s"
        values.append(after)
    if types:
        where += " AND e.$event_type LIKE ANY (%s)"
        values.append([_like(each) for each in types])
    shown = "e.$payload::text" if whole else f"left(e.$payload::text, {_SHORT + 1})"
    sql = _EVENTS.replace("$where", where).replace("$shown", shown).replace("$way", "DESC" if last else "ASC")
    cur.execute(statement(settings, sql), (*values, limit))
    return cur.fetchall()


def _like(pattern: str) -> str:
    """``tool.*`` as SQL's LIKE has it."""
    for letter in "\\%_":
        pattern = pattern.replace(letter, f"\\{letter}")
    return pattern.replace("*", "%").replace("?", "_")


def _committed(place: Place | None) -> str | None:
    from datetime import timedelta

    from walstream.event import POSTGRES_EPOCH

    if place is None or not place.commit_us:
        return None
    return (POSTGRES_EPOCH + timedelta(microseconds=place.commit_us)).isoformat(sep=" ")


def _document(row: tuple[Any, ...], places: dict[int, Place]) -> dict[str, Any]:
    import orjson

    seq, agent, event_type, created_at, payload = row
    place = places.get(seq)
    return {
        "offset": None if place is None else place.offset,
        "seq": seq,
        "agent_id": agent,
        "event_type": event_type,
        "created_at": created_at,
        "committed_at": _committed(place),
        # As it stands: a parser on the way could change a number, or refuse a payload.
        "payload": None if payload is None else orjson.Fragment(payload),
    }


def _heads(row: tuple[Any, ...], places: dict[int, Place]) -> tuple[str, str, str, str, str, str]:
    seq, agent, event_type, created_at, _ = row
    place = places.get(seq)
    committed = (_committed(place) or "").replace("+00:00", "+00")
    return (
        "" if place is None else str(place.offset),
        str(seq),
        time_of_day(created_at),
        time_of_day(committed or None),
        one_line(agent or ""),
        one_line(event_type or ""),
    )


def _show(rows: list[tuple[Any, ...]], places: dict[int, Place]) -> None:
    out = console.out()
    titles = ("offset", "seq", "created", "committed", "agent", "type", "payload")
    shown = [(*_heads(row, places), shortened(row[4] or "NULL", _SHORT)) for row in rows]
    out.print(cut_at_the_end(titles, shown, out.width, right=("offset", "seq")))


def _show_whole(rows: list[tuple[Any, ...]], places: dict[int, Place]) -> None:
    for row in rows:
        offset, seq, created, _, agent, event_type = _heads(row, places)
        place = f"offset {offset}" if offset else "no offset"
        console.say(f"{seq}  {event_type}  {agent}  {created}  {place}")
        console.say(f"    {lines(row[4] or 'NULL')}")
