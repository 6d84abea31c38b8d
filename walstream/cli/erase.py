"""``walstream erase``: take a session's payloads out of the ledger, by declaration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from walstream.errors import ConfigError, ExitCode

from . import console
from .options import Json, Yes, takes_settings
from .session import PATIENT, installed

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.ledger.erasing import Reach


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(erase)


@takes_settings
def erase(
    settings: Settings,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session to erase.")],
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Why. It is declared, and goes on record: no personal data here.")
    ],
    mode: Annotated[
        Literal["redact", "remove"],
        typer.Option(help="redact: the events stay, without their payloads. remove: the rows go."),
    ] = "redact",
    forks: Annotated[
        Literal["erase", "keep"] | None,
        typer.Option(help="What becomes of sessions that go on from it. Has to be said if there are any."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Cancel jobs that are at work, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Take a session's payloads out of the ledger and of wherever walstream keeps them, in one transaction.

    The transaction declares it (`erasures`): consumers, rebuilds and the audit trail then know that it is gone on
    purpose. What cannot be reached from here is named. There is no way back.
    """
    from walstream.ledger.erasing import erase_session, look
    from walstream.ledger.schema import ERASURES_VERSION

    from .progress import counting

    if not reason.strip():
        raise typer.BadParameter("say why", param_hint="--reason")
    with installed(settings, "erase", ERASURES_VERSION, PATIENT) as conn:
        reach = look(conn, settings, session, mode=mode, with_forks=forks == "erase")
        if dry_run:
            _report(reach, reach.touched, mode, done=False)
            return
        if reach.forks and forks is None:
            raise ConfigError(
                f"{len(reach.forks)} sessions go on from session {reach.session_id}, and their contexts hold what it"
                f" had: {', '.join(reach.forks[:5])}{', …' if len(reach.forks) > 5 else ''}",
                hint="say --forks erase to erase them as well, or --forks keep to leave their own events as they are",
            )
        sessions = reach.touched["sessions"]
        also = f", and of {sessions - 1} that go on from it," if sessions > 1 else ""
        if not as_json:
            _say_reach(reach)
        console.confirm(f"Erase the payloads of session {reach.session_id}{also} for good?", yes)
        conn.autocommit = False
        with conn, counting(f"erasing {reach.events:,} events", None):
            touched = erase_session(conn, settings, reach.session_id, reason, mode=mode, forks=forks, force=force)
        conn.autocommit = True
        left = look(conn, settings, session, mode=mode, with_forks=forks == "erase").events
    _report(reach, touched, mode, done=True, left=left)
    if left:
        raise typer.Exit(int(ExitCode.FAILED))


def _say_reach(reach: Reach) -> None:
    counts = ", ".join(f"{count:,} {place}" for place, count in reach.touched.items() if count and place != "sessions")
    console.note(f"session {reach.session_id}: {counts or 'nothing is left of it'}")


def _report(reach: Reach, touched: dict[str, int], mode: str, *, done: bool, left: int = 0) -> None:
    if console.json_wanted():
        document: dict[str, Any] = {
            "done": done,
            "session_id": reach.session_id,
            "mode": mode,
            "touched": touched,
            "forks": list(reach.forks),
            "left": left,
            "not_reached": list(reach.beyond),
        }
        console.print_json(document)
        return
    word = "erased" if done else "would be erased"
    console.say(f"{word} ({'redacted' if mode == 'redact' else 'removed'}): session {reach.session_id}")
    for place, count in touched.items():
        if count and place not in ("sessions", "forks"):
            console.say(f"  {place}: {count:,}")
    if touched["sessions"] > 1:
        console.say(f"  with {touched['sessions'] - 1:,} sessions that go on from it")
    elif reach.forks:
        console.say(f"  without the sessions that go on from it: {', '.join(reach.forks)}")
    if left:
        console.say(f"{left:,} events came meanwhile, past walstream's functions: run it again")
    console.say("not reached:")
    for each in reach.beyond:
        console.say(f"  {each}")
