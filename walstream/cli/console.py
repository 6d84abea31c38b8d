"""What the reader sees: tables for a person, JSON for a script, errors for both; never a password."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TextIO

import typer

from walstream.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from walstream.errors import WalstreamError

_json: ContextVar[bool] = ContextVar("walstream_json", default=False)

PIPE_WIDTH: Final = 160

# A last net under everything that is printed about an error. Messages are written without the DSN in the first place,
# but a driver quotes what it could not parse. In a URI the password stands between the first colon and the last @ of
# the authority; elsewhere it is a keyword (documentation, 34.1.1 "Connection Strings").
_SECRETS: Final = (
    (re.compile(r"(\w+://[^\s:/@]*:)[^\s/]*@"), r"\1***@"),
    (
        re.compile(r"(?i)\b((?:ssl)?password|passfile|oauth_client_secret)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&'\"]+)"),
        r"\1\2***",
    ),
)


def begin() -> None:
    """Forget what an earlier command in this process asked for (tests, embedding)."""
    _json.set(False)


def ask_for_json(wanted: bool) -> bool:
    """Callback of ``--json``: remembered, because an error raised anywhere has to know the form it is wanted in."""
    if wanted:
        _json.set(True)
    return wanted


def json_wanted() -> bool:
    """Whether the command at work was given ``--json``."""
    return _json.get()


def out() -> Console:
    """Console on standard output. Asked for anew each time, because tests and pipes exchange ``sys.stdout``."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with 1, which says that something was found

    return Output(highlight=False, width=_width(sys.stdout))


def err() -> Console:
    """Console on standard error: progress, notes, questions."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=_width(sys.stderr))


def _width(stream: TextIO) -> int | None:
    """A pipe has no width of its own; rich would take 80 and break what a script or a pager wants whole."""
    return None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH


def person_reads() -> bool:
    """Whether progress bars and questions reach a person: standard error is a terminal and JSON was not asked for."""
    return sys.stderr.isatty() and not json_wanted()


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document on one line of standard output."""
    import orjson

    typer.echo(orjson.dumps(value, default=str).decode())


def say(text: str = "") -> None:
    """Print a line as it is: no markup, no wrapping, so that it can be copied."""
    typer.echo(text)


def note(text: str) -> None:
    """A line for the person at the terminal, on standard error, so that it never mixes with output that is piped on."""
    if not json_wanted():
        typer.echo(text, err=True)


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone; return only if it may be done.

    Raises:
        ConfigError: nobody is there to ask, and ``--yes`` was not given.
        typer.Abort: the answer was no.
    """
    if yes:
        return
    if json_wanted() or not sys.stdin.isatty():
        raise ConfigError("this needs a confirmation, and nobody is there to give it", hint="add --yes if you mean it")
    typer.confirm(question, abort=True, err=True)


def redact(text: str) -> str:
    """``text`` without the passwords that a connection string in it may hold."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def show_error(error: WalstreamError) -> None:
    """Print ``error`` with its hint on standard error, as JSON where that was asked for."""
    message, hint = redact(str(error)), redact(error.hint)
    if json_wanted():
        import orjson

        document = {
            "error": type(error).__name__,
            "message": message,
            "hint": hint or None,
            "exit_code": int(error.exit_code),
            "transient": error.transient,
        }
        typer.echo(orjson.dumps(document).decode(), err=True)
        return
    colour = typer.colors.RED if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else None
    typer.echo(typer.style("error: ", fg=colour, bold=True) + message if colour else f"error: {message}", err=True)
    if hint:
        typer.echo(typer.style(" hint: ", bold=True) + hint if colour else f" hint: {hint}", err=True)
