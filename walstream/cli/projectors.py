"""``walstream projectors``: look at projectors, pause and resume them, and set their cursors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from walstream.errors import ConfigError

from . import console
from .options import Json, Yes, takes_settings
from .rebuild import rebuild
from .session import installed

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings

Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of projectors.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the projector.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="Look at projectors, pause and resume them, set their cursors.", no_args_is_help=True)
    group.command("list")(list_projectors)
    group.command()(pause)
    group.command()(resume)
    group.command()(reset)
    group.command()(rebuild)
    group.command()(remove)
    app.add_typer(group, name="projectors")


@takes_settings
def list_projectors(settings: Settings, *, as_json: Json = False) -> None:
    """List them: state, offset, lag, parked events."""
    from .status import projector_table, read

    with installed(settings, "projectors") as conn:
        standing = read(conn, settings)
    if as_json:
        console.print_json(standing.document()["projectors"])
    elif standing.projectors:
        console.out().print(projector_table(standing.projectors))
    else:
        console.say("no projector has run on this ledger yet")


@takes_settings
def pause(settings: Settings, names: Names, *, as_json: Json = False) -> None:
    """Let them finish their batch and stop, wherever they run. They hold no WAL while they stand."""
    _desire(settings, names, "paused", as_json)


@takes_settings
def resume(settings: Settings, names: Names, *, as_json: Json = False) -> None:
    """Let them go on from where they stopped, paused or halted."""
    _desire(settings, names, "running", as_json)


def _desire(settings: Settings, names: list[str], desired: str, as_json: bool) -> None:
    from walstream.config import quote

    with installed(settings, "projectors") as conn:
        conn.autocommit = False
        with conn, conn.cursor() as cur:
            for name in names:
                require(cur, settings, name)
            cur.execute(
                f"UPDATE {quote(settings.namespace)}.projectors SET desired = %s, updated_at = now(),"
                # A halted one is to try its event again; its runner sees that the state is no longer its own.
                " state = CASE WHEN state = 'halted' AND %s = 'running' THEN 'new' ELSE state END"
                " WHERE name = ANY (%s)",
                (desired, desired, names),
            )
    if as_json:
        console.print_json({"projectors": names, "desired": desired})
    else:
        console.say(f"{', '.join(names)}: {'to be paused' if desired == 'paused' else 'to run'}")


@takes_settings
def reset(
    settings: Settings,
    name: Name,
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="earliest|latest|OFFSET",
            help="The first event it shall receive next; latest: what is ordered from now on.",
            show_default=False,
        ),
    ],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Set its cursor. Events that it gets a second time carry the same key; what it did is not undone.

    Refused while a process runs it, unless it is paused. Parked events behind the new position are taken from the
    parking: they come again.
    """
    from walstream.config import quote

    schema = quote(settings.namespace)
    with installed(settings, "projectors") as conn:
        conn.autocommit = False
        with conn, conn.cursor() as cur:
            require(cur, settings, name)
            target = _position(to, _head(cur, settings))
            cur.execute(f"SELECT min(position) FROM {schema}.cursors WHERE projector = %s", (name,))
            before = _one(cur)[0]
            conn.rollback()  # no lock is held while a person thinks
            console.confirm(f"Set projector {name} from offset {before} to {target}?", yes)
            row = require(cur, settings, name, lock=True)
            if row["alive"] and row["desired"] != "paused":
                raise ConfigError(
                    f"projector {name!r} is run by {row['owner']} at this moment",
                    hint=f"`walstream projectors pause {name}`, then reset it, then `resume`",
                )
            # A new generation first: whoever still runs it is refused at its next step, and reads the cursor again.
            cur.execute(
                f"UPDATE {schema}.projectors SET generation = generation + 1, error = NULL, error_offset = NULL,"
                " state = CASE WHEN state = 'halted' THEN 'new' ELSE state END, updated_at = now() WHERE name = %s",
                (name,),
            )
            cur.execute(
                f"UPDATE {schema}.cursors SET position = %s, updated_at = now() WHERE projector = %s", (target, name)
            )
            cur.execute(f"DELETE FROM {schema}.parked WHERE projector = %s AND event_offset > %s", (name, target))
            unparked = cur.rowcount
    if as_json:
        console.print_json({"projector": name, "before": before, "offset": target, "unparked": unparked})
    else:
        console.say(
            f"{name}: goes on after offset {target} (it stood at {before}); {unparked} parked events come again"
        )


@takes_settings
def remove(settings: Settings, name: Name, *, yes: Yes = False, as_json: Json = False) -> None:
    """Forget a projector that no longer exists: its cursors and its parked entries. Its own tables stay."""
    from walstream.config import quote

    with installed(settings, "projectors") as conn:
        conn.autocommit = False
        with conn, conn.cursor() as cur:
            require(cur, settings, name)
            conn.rollback()
            console.confirm(f"Forget projector {name}, its position and what it parked?", yes)
            row = require(cur, settings, name, lock=True)
            if row["alive"]:
                raise ConfigError(
                    f"projector {name!r} is run by {row['owner']} at this moment", hint="stop that process first"
                )
            cur.execute(f"DELETE FROM {quote(settings.namespace)}.projectors WHERE name = %s", (name,))
    if as_json:
        console.print_json({"projector": name, "removed": True})
    else:
        console.say(f"{name}: forgotten")


def require(cur: Cursor, settings: Settings, name: str, *, lock: bool = False) -> dict[str, Any]:
    """The projector's ``desired``, ``owner`` and whether it is ``alive``.

    Raises:
        ConfigError: there is none of that name.
    """
    from walstream.config import quote

    from .standing import ALIVE

    table = f"{quote(settings.namespace)}.projectors"
    cur.execute(
        f"SELECT p.desired, p.owner, {ALIVE.format(row='p')} FROM {table} AS p WHERE p.name = %s"
        + (" FOR UPDATE" if lock else ""),
        (name,),
    )
    row = cur.fetchone()
    if row is not None:
        return dict(zip(("desired", "owner", "alive"), row, strict=True))
    cur.execute(f"SELECT name FROM {table} ORDER BY name")
    known = ", ".join(each for (each,) in cur.fetchall())
    raise ConfigError(
        f"no projector {name!r} has run on this ledger",
        hint=f"known: {known}" if known else "a projector is known from its first start on",
    )


def _position(to: str, head: int) -> int:
    """The cursor's value so that the next event is the one meant by ``to``."""
    if to == "earliest":
        return 0
    if to == "latest":
        return head
    if not (to.isascii() and to.isdigit()) or not 1 <= int(to) <= head + 1:
        raise ConfigError(
            f"{to!r} is no place in the order, which ends at offset {head}",
            hint=f"earliest, latest, or an offset from 1 to {head + 1}",
        )
    return int(to) - 1


def _head(cur: Cursor, settings: Settings) -> int:
    from walstream.engine.cursors import Cursors

    return Cursors(settings.namespace, "").head(cur)


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
