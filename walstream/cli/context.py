"""``walstream context``: what an agent had before it at some point of its session."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import lines, moment, one_line, shortened

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from rich.console import RenderableType

    from walstream.config import Settings
    from walstream.ledger.fold import Context

_COLOURS: Final = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_LINES: Final = 12  # of a message
_ARGUMENTS: Final = 200  # characters

_ANY: Final = "SELECT EXISTS (SELECT FROM $table AS e WHERE e.$session_id = %s AND e.$seq <= %s)"
_SEQS: Final = """
SELECT e.$seq, CASE WHEN pg_catalog.isfinite(e.$created_at)
                    THEN ((extract(epoch FROM e.$created_at) - 946684800) * 1000000)::bigint END
  FROM $table AS e WHERE e.$session_id = %s ORDER BY e.$seq"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(context)


@takes_settings
def context(
    settings: Settings,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    *,
    at: Annotated[int | None, typer.Option("--at", metavar="SEQ", help="With its events up to this seq.")] = None,
    at_offset: Annotated[
        int | None, typer.Option("--at-offset", min=0, metavar="N", help="With those up to this offset.")
    ] = None,
    at_time: Annotated[
        str | None,
        typer.Option("--at-time", metavar="TIME", help="With those committed by then: 2026-02-03T04:05, or 15m (ago)."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole messages instead of their first lines.")] = False,
    as_json: Json = False,
) -> None:
    """Show the context of a session: the messages as a model would get them, and what is open.

    As it is now, or as it was. By offset and by time the order of commits counts, which is not always that of seq: an
    event counts if it was there by then. Where no time of commit is known (an event that is not in the commit order),
    created_at stands in for it. With --json the context is printed as the fold made it, numbers exact.
    """
    if sum(each is not None for each in (at, at_offset, at_time)) > 1:
        raise typer.BadParameter("give one of --at, --at-offset and --at-time", param_hint="--at")
    from walstream.ledger.inflight import known_session
    from walstream.ledger.rebuild import rebuild_context
    from walstream.ledger.schema import LEDGER_VERSION

    time = None if at_time is None else moment(at_time, "--at-time")
    with installed(settings, "context", LEDGER_VERSION, PATIENT) as conn:
        with conn.cursor() as cur:
            name = known_session(cur, settings, session)
        if at_offset is None and time is None:
            made = rebuild_context(conn, name, at, settings=settings)
            begun = at is None or _begun(conn, settings, name, at)
        else:
            made, begun = _at(conn, settings, name, at_offset, time)
    if as_json:
        from walstream.ledger.canonical import canonical

        console.say(canonical(made).decode())
    elif not begun:
        # It has events, later ones: that it is empty here says something else than that nothing was said in it.
        when = f"up to seq {at}" if at is not None else f"up to offset {at_offset}"
        console.say(f"session {name} has no event {when if time is None else f'by {time:%Y-%m-%d %H:%M:%S.%f %Z}'}")
    else:
        for part in _parts(made, None if full else _LINES):
            console.out().print(part)


def _begun(conn: Connection, settings: Settings, session: str, seq: int) -> bool:
    """Whether the session has an event up to ``seq``."""
    from walstream.ledger.stored_rows import statement

    with conn.cursor() as cur:
        cur.execute(statement(settings, _ANY), (session, seq))
        row = cur.fetchone()
    return row == (True,)


def _at(
    conn: Connection, settings: Settings, session: str, offset: int | None, time: datetime | None
) -> tuple[Context, bool]:
    """The fold of the events that were there at an offset or a time, in the order of seq; and whether any were."""
    from walstream.ledger.fold import load_fold
    from walstream.ledger.rebuild import rebuild_context
    from walstream.ledger.session_rows import read_session

    fold = load_fold(settings)
    there, later = _split(conn, settings, session, offset, time)
    if not there:
        return fold.empty(), False
    if not later or max(there) < min(later):
        return rebuild_context(conn, session, max(there), settings=settings, fold=fold), True
    # A lower seq was committed later than a higher one: no snapshot is the fold of this set.
    rows = read_session(conn, settings, session, upto_seq=max(there), fold=fold)
    return fold.fold(event for event in rows if event.seq in there), True


def _split(
    conn: Connection, settings: Settings, session: str, offset: int | None, time: datetime | None
) -> tuple[set[int], set[int]]:
    """The session's seqs that were there by then, and those that were not."""
    from walstream.event import POSTGRES_EPOCH
    from walstream.ledger.identity import read_identity
    from walstream.ledger.stored_rows import statement
    from walstream.order.places import places_of

    with conn.cursor() as cur:
        cur.execute(statement(settings, _SEQS), (session,))
        created: dict[int, int | None] = dict(cur.fetchall())
        identity = read_identity(cur, settings.namespace)
    floor = identity.floor_seq if identity is not None else None
    places = places_of(conn, settings.namespace, created)
    there = set()
    for seq, created_us in created.items():
        place = places.get(seq)
        if offset is not None:
            # Rows below the floor were there before the first offset was given.
            counts = place.offset <= offset if place is not None else floor is not None and seq <= floor
        else:
            assert time is not None
            by = place.commit_us if place is not None and place.commit_us else created_us
            counts = by is not None and by <= int((time - POSTGRES_EPOCH).total_seconds() * 1_000_000)
        if counts:
            there.add(seq)
    return there, created.keys() - there


def _parts(made: Context, most: int | None) -> Iterator[RenderableType]:
    from rich.text import Text

    messages = made.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else [], 1):
        yield from _message(number, message, most)
    if not messages:
        yield Text("no messages")
    yield Text("")
    for words, style in _standing(made):
        yield Text(words, style=style)


def _message(number: int, message: Any, most: int | None) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    if not isinstance(message, dict):
        message = {"role": "?", "content": message}
    role = str(message.get("role", "?"))
    answers = message.get("tool_call_id")
    head = f"{number}  {role}" + (f"  {answers}" if answers is not None else "")
    yield Text(one_line(head), style=f"bold {_COLOURS.get(role, '')}".strip())
    content = _words(message.get("content"))
    if content:
        yield Padding(Text(lines(content, most)), (0, 0, 0, 4))
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = str(function.get("arguments", ""))
            shown = one_line(arguments) if most is None else shortened(arguments, _ARGUMENTS)
            words = f"→ {one_line(str(function.get('name')))}({shown})  {one_line(str(call.get('id')))}"
            yield Padding(Text(words, style="blue"), (0, 0, 0, 4))


def _words(content: Any) -> str:
    """What a message says: a string, or the texts of its parts."""
    from walstream.ledger.messages import rendered

    if content is None:
        return ""
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, dict) else None for part in content)
        return "\n".join(
            text if isinstance(text, str) else rendered(part) for text, part in zip(texts, content, strict=True)
        )
    return rendered(content)


def _standing(made: Context) -> Iterator[tuple[str, str]]:
    """What else there is to know, a line each."""
    # A fold of the application may put anything in its place.
    forked = made.get("forked_from")
    if isinstance(forked, dict):
        yield one_line(f"forked from session {forked.get('session')} at seq {forked.get('at_seq')}"), ""
    pending = made.get("pending_tools")
    for call_id, call in pending.items() if isinstance(pending, dict) else ():
        name = call.get("name") if isinstance(call, dict) else None
        attempt = call.get("attempt") if isinstance(call, dict) else None
        yield one_line(f"in flight: {name}, call {call_id}, attempt {attempt}"), "yellow"
    if made.get("pending_model"):
        yield "the model was asked and has not answered", "yellow"
    for word, key in (("handed over", "handoffs"), ("received", "handoffs_received")):
        handoffs = made.get(key)
        for handoff in handoffs if isinstance(handoffs, list) else ():
            yield f"{word}: {shortened(_words(handoff), _ARGUMENTS)}", ""
    approvals = made.get("approvals")
    for request, approval in approvals.items() if isinstance(approvals, dict) else ():
        if isinstance(approval, dict):
            edit = approval.get("edit")
            words = shortened(_words(approval.get("action") if edit is None else edit), _ARGUMENTS)
            status = one_line(str(approval.get("status")))
            yield (
                f"approval {request} {status}{'' if edit is None else ', edited'}: {words}",
                "yellow" if status == "requested" else "",
            )
    aside = made.get("set_aside")
    if isinstance(aside, dict):
        yield f"{aside.get('count')} events have no place in the messages; --json names the last ones", "yellow"
    outcome = made.get("outcome")
    if isinstance(outcome, dict):
        yield (
            one_line(f"{outcome.get('status')} at seq {outcome.get('seq')}"),
            "green" if outcome.get("status") == "completed" else "red",
        )
