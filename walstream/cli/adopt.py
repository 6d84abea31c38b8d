"""``walstream adopt``: accept another history, environment or table, knowingly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from walstream.errors import ConfigError

from . import console
from .options import Json, Yes, takes_settings
from .session import installed

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.ledger.adoption import Adoption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(adopt)


@takes_settings
def adopt(
    settings: Settings,
    *,
    new_epoch: Annotated[
        bool | None,
        typer.Option(
            "--new-epoch/--same-epoch",
            help="Whether commits were lost on the way, so that a seq may be given a second time.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Accept that this ledger lives on under another identity.

    `walstream run` refuses to work when the cluster, its timeline, the environment or the table is not the recorded
    one. This command shows what differs, asks, and writes it down. Events keep their offsets, projectors their cursors.

    After a fail-over or a restore you have to say whether commits were lost (--new-epoch) or not (--same-epoch): the
    epoch is part of every event's key, and after a loss the same seq can be given to another event.
    """
    from walstream.ledger import adoption

    with installed(settings, "adopt") as conn:
        with conn.cursor() as cur:
            found = adoption.look(cur, settings, new_epoch=bool(new_epoch))
        if found.needs_epoch and new_epoch is None:
            raise ConfigError(
                "the ledger is in another history: " + _in_words(found),
                hint="say --new-epoch if commits were lost on the way (restore to an earlier point, fail-over to a"
                " standby that was behind), --same-epoch if none were (clean switch-over, complete copy)",
            )
        if not found.changes:
            _report(found, as_json, "nothing to adopt: the identity is the recorded one")
            return
        if not as_json:
            _show(found)
        console.confirm("Adopt this?", yes)
        done = adoption.adopt(conn, settings, new_epoch=bool(new_epoch))
    _report(done, as_json, f"adopted; ledger {done.before.ledger_id}")
    console.note("walstream run checks the slot next; where it did not come along, it makes a new one")


def _in_words(found: Adoption) -> str:
    return "; ".join(f"{change.what} {change.recorded} -> {change.found}" for change in found.changes)


def _show(found: Adoption) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "recorded", "found", title=f"ledger {found.before.ledger_id}", title_justify="left")
    for change in found.changes:
        table.add_row(change.what.replace("_", " "), Text(change.recorded), Text(change.found))  # no markup
    console.out().print(table)


def _report(done: Adoption, as_json: bool, words: str) -> None:
    if as_json:
        console.print_json(done.document())
    else:
        console.say(words)
