"""``walstream doctor``: every precondition as a line, with its fix."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import typer

from walstream.errors import ExitCode

from . import console
from .options import Json, takes_settings
from .session import database

if TYPE_CHECKING:
    from walstream.config import Settings

    from .checks import Finding

_MARKS: Final = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failed": ("FAIL", "bold red")}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


@takes_settings
def doctor(settings: Settings, *, as_json: Json = False) -> None:
    """Check everything that a stream needs, and say how to mend what is missing. It changes nothing.

    Exit code 0: `walstream run` will work. 1: at least one line says FAIL. Without a connection, 3 or 4.
    """
    from .checks import examine, findings

    with database(settings, "doctor") as conn:
        exam = examine(settings, conn)
        found = list(findings(exam))
    failed = [finding for finding in found if finding.state == "failed"]
    if as_json:
        console.print_json(
            {
                "ok": not failed,
                "provider": exam.provider.key,
                "server_version": exam.server.version_text,
                "checks": [asdict(finding) for finding in found],
            }
        )
    else:
        _show(found)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _show(found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in found:
        word, style = _MARKS[finding.state]
        words = Text(finding.found)
        if finding.fix:
            words.append(f"\nfix: {finding.fix}", style="cyan")
        table.add_row(Text(word, style=style), finding.check, words)
    console.out().print(table)
    counts = {state: sum(finding.state == state for finding in found) for state in _MARKS}
    console.say(f"{counts['ok']} fine, {counts['warning']} to think about, {counts['failed']} to mend")
