"""``walstream fold``: whether a fold is pure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walstream.errors import ExitCode

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import MOST

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.testing.purity_runs import Recorded

_BUILTIN: Final = "walstream.ledger.fold:BUILTIN"


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(help="The fold that makes a context of events.", no_args_is_help=True)
    group.command()(check)
    group.callback()(_group)
    app.add_typer(group, name="fold")


def _group() -> None:
    """The fold that makes a context of events."""


@takes_settings
def check(
    settings: Settings,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]…", help="JSON Lines, as for import, instead of the ledger.")
    ] = None,
    *,
    fold: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="The fold.", show_default="the one of the configuration, or ours"),
    ] = None,
    sessions: Annotated[
        list[str] | None, typer.Option("--sessions", metavar="ID", help="Only this session; can be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="So many of the newest sessions.")] = 20,
    as_json: Json = False,
) -> None:
    """Check that a fold is pure, over recorded sessions. Exit code 1 if it is not.

    It runs under traps (clock, random numbers, files, network, environment,
    processes, threads, id) in a process of its own, which also notices events and
    global state that it changes; then again in another order, with each context
    written down and read back, and with other hash seeds and time zones. The first
    event whose context differs is named, or the forbidden call with its place.
    """
    from walstream.testing.purity import HASH_SEEDS, check_fold

    name = fold or settings.fold or _BUILTIN
    if files:
        from .histories import from_file

        events = [event for file in files for event in from_file(file)]
        if sessions:
            events = [event for event in events if event.session_id in sessions]
    else:
        events = _from_ledger(settings, sessions or [], limit)
    findings = check_fold(name, events)
    count = len({event.session_id for event in events})
    if as_json:
        console.print_json(
            {
                "fold": name,
                "sessions": count,
                "events": len(events),
                "hash_seeds": list(HASH_SEEDS),
                "pure": not findings,
                "findings": [asdict(each) for each in findings],
            }
        )
    elif findings:
        for each in findings:
            console.say(str(each))
    else:
        extent = f"{len(events):,} events of {count:,} {'session' if count == 1 else 'sessions'}"
        console.say(f"pure: {name} over {extent}, hash seeds {', '.join(HASH_SEEDS)}")
    if not events:
        console.note("there was nothing to fold, which proves nothing")
    if findings:
        raise typer.Exit(int(ExitCode.FAILED))


def _from_ledger(settings: Settings, sessions: list[str], limit: int) -> list[Recorded]:
    from walstream.ledger.fold import BUILTIN
    from walstream.ledger.inflight import known_session
    from walstream.ledger.schema import LEDGER_VERSION
    from walstream.ledger.session_rows import read_session
    from walstream.ledger.sessions import newest_sessions
    from walstream.testing.purity_runs import recorded

    with installed(settings, "fold", LEDGER_VERSION, PATIENT) as conn:
        with conn.cursor() as cur:
            named = [known_session(cur, settings, each) for each in sessions]
            chosen = named or newest_sessions(cur, settings, limit)
        # A parent's context, which a fork begins with, is input here: our own fold makes it.
        return [e for each in chosen for e in recorded(read_session(conn, settings, each, fold=BUILTIN))]
