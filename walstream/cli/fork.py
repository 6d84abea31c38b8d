"""``walstream fork``: a new session that goes on from a point of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import console
from .options import Json, takes_settings
from .session import installed

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(fork)


@takes_settings
def fork(
    settings: Settings,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session to go on from.")],
    *,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", help="Its last event that counts; its newest if not given.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who begins it; the agent of that event if not given.")
    ] = None,
    new: Annotated[
        str | None, typer.Option("--as", metavar="ID", help="The new session's id; a UUID is drawn if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Begin a new session whose context goes on from a point of another one; print its id.

    No event is copied: the new session's first event names the parent, and a rebuild follows it. The parent goes on
    undisturbed. Tool calls that it had in flight at that point are in flight in the new session, too, with the same
    idempotency keys.
    """
    from walstream.ledger.inflight import known_session
    from walstream.ledger.ledger import Ledger
    from walstream.ledger.schema import LEDGER_VERSION

    with installed(settings, "fork", LEDGER_VERSION) as conn, conn.cursor() as cur:
        parent = known_session(cur, settings, session)
        seq, writer = _point(cur, settings, parent, at)
        made = Ledger(settings).fork(parent, seq, agent or writer, new_session=new, on=conn)
    if as_json:
        console.print_json({"session_id": made.session, "seq": made.seq, "parent": parent, "at_seq": seq})
    else:
        console.say(str(made.session))
        console.note(f"goes on from session {parent} after seq {seq}")


def _point(cur: Cursor, settings: Settings, parent: str, at: int | None) -> tuple[int, str]:
    """The last event of the parent that counts: its seq, and who wrote it.

    Raises:
        ConfigError: there is none.
    """
    from walstream.errors import ConfigError
    from walstream.ledger.stored_rows import statement

    upto = "" if at is None else " AND e.$seq <= %s"
    sql = f"SELECT e.$seq, e.$agent_id FROM $table AS e WHERE e.$session_id = %s{upto} ORDER BY e.$seq DESC LIMIT 1"
    cur.execute(statement(settings, sql), (parent, *(() if at is None else (at,))))
    row = cur.fetchone()
    if row is None:
        raise ConfigError(
            f"session {parent} has no event up to seq {at}", hint=f"`walstream events {parent}` shows its seqs"
        )
    return int(row[0]), str(row[1])
