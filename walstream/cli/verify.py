"""``walstream verify``: compare what is derived with what it was derived from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from walstream.errors import ExitCode

from . import console
from .options import Json, takes_settings

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.ledger.verifying import Verified


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)


@takes_settings
def verify(
    settings: Settings,
    *,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="The snapshots: fold every session that has some from zero again.")
    ] = False,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Only this session.", show_default=False)
    ] = None,
    fold: Annotated[
        str | None,
        typer.Option("--fold", metavar="MODULE:NAME", help="The application's fold.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare what is derived from the ledger with the ledger.

    A snapshot that says something else than its session's events is put away (quarantined): no rebuild uses it, and it
    stays for a person to look at. One that another version of the fold made is made again. Exit code 1 if one was put
    away, or could not be verified.
    """
    from walstream.ledger.fold import import_fold, load_fold
    from walstream.ledger.schema import LEDGER_VERSION
    from walstream.ledger.verifying import Verification

    from .progress import FillBar
    from .session import PATIENT, installed

    if not snapshots:
        raise typer.BadParameter("say what to verify: --snapshots")
    made = load_fold(settings) if fold is None else import_fold(fold)
    with installed(settings, "verify", LEDGER_VERSION, PATIENT) as conn, FillBar() as bar:
        verification = Verification(conn, settings, made)
        bar.begin("sessions", verification.sessions() if session is None else 1)
        found = verification.run(session, on_progress=lambda _done: bar.advance(1))
    if as_json:
        console.print_json({"fold_version": made.version, **asdict(found)})
    else:
        _show(found)
    if found.quarantined or found.failed:
        raise typer.Exit(ExitCode.FAILED)


def _show(found: Verified) -> None:
    for finding in found.quarantined:
        console.say(f"quarantined: session {finding.session_id}, seq {finding.seq}: {finding.why}")
    for finding in found.failed:
        where = "" if finding.seq is None else f", seq {finding.seq}"
        console.say(f"not verified: session {finding.session_id}{where}: {finding.why}")
    console.say(
        f"{found.sessions:,} sessions: {found.right:,} snapshots are right, {found.rebuilt:,} of another version of the"
        f" fold were made again, {found.superseded:,} are superseded by an event that came later,"
        f" {len(found.quarantined):,} were put away"
    )
    if found.erased:
        console.say(f"{found.erased:,} cannot be judged: events up to there are declared gone")
