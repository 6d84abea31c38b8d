"""The frame of the command line: which commands there are, and how an error reaches the reader.

A command raises; it never prints an error and never exits by itself for one. What is raised on purpose
(:class:`walstream.errors.WalstreamError`) is shown as message and hint, with the exit code it carries. Anything else is
a fault of walstream and keeps its traceback, because that is what a report needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from walstream.errors import ExitCode, WalstreamError

from . import console

if TYPE_CHECKING:
    from types import ModuleType

# Each exposes `register(app: typer.Typer) -> None`, which adds one command or one group of them, called like the module
# but for an underscore at its end. The order is the order of `walstream --help`.
COMMANDS: Final[tuple[str, ...]] = (
    "init",
    "migrate",
    "partitions",
    "doctor",
    "run",
    "worker",
    "status",
    "guard",
    "slot",
    "import_",
    "tail",
    "sessions",
    "context",
    "events",
    "inflight",
    "fork",
    "erase",
    "diff",
    "fold",
    "verify",
    "audit",
    "demo",
    "projectors",
    "parked",
    "jobs",
    "approvals",
    "handoffs",
    "adopt",
    "teardown",
)

INTERRUPTED: Final = 130
"""128 + SIGINT, what a shell reports for Ctrl-C."""
BROKEN_PIPE: Final = 141
"""128 + SIGPIPE, what a shell reports for `command | head`."""


_WRONG_WORDS: Final = typer.BadParameter.__mro__[1]
"""What the parser raises for a call that it cannot read. Its class has no public name in every release of typer."""


class UsageError(WalstreamError):
    """The words of the call are off: the form of it for a script that asked for JSON."""

    exit_code = ExitCode.USAGE


class Commands(TyperGroup):
    """Turns what a command raises into one message and one exit code."""

    def invoke(self, ctx: Any) -> Any:
        console.begin()
        words = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            # The reader went away: nothing to say, and nobody to say it to. Python would complain once more when it
            # flushes stdout at exit, so let it flush into nothing.
            _discard_stdout()
            code = BROKEN_PIPE
        except WalstreamError as error:
            console.show_error(error)
            code = int(error.exit_code)
        except Exception as error:
            if isinstance(error, _WRONG_WORDS):
                _as_usage(error, "--json" in words)
            if not type(error).__module__.startswith("psycopg2"):
                raise
            from walstream.source.failures import classify

            known = classify(error, doing=f"walstream {ctx.invoked_subcommand}")
            console.show_error(known)
            code = int(known.exit_code)
        raise typer.Exit(code)


_FORM: Final[dict[str, Any]] = {
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,  # they print local variables, and a DSN with its password can be one
}


class LoadedWhenAsked(Commands):
    """The commands of walstream. Only the module of the one that is called is imported, a third of a start less."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all, in the order of the help."""
        del ctx
        return [name.rstrip("_") for name in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command or group called ``cmd_name``; ``None`` if there is none."""
        if cmd_name not in self.commands:
            # All of them for a name that nobody has: the parser proposes those that are like it.
            called = [name for name in COMMANDS if name.rstrip("_") == cmd_name]
            for name in called or COMMANDS:
                self.commands.setdefault(name.rstrip("_"), _load(name))
        return super().get_command(ctx, cmd_name)


def _load(name: str) -> Any:
    module: ModuleType = importlib.import_module(f".{name}", __package__)
    alone = typer.Typer(**_FORM)
    module.register(alone)
    return typer.main.get_group(alone).commands[name.rstrip("_")]


app = typer.Typer(
    name="walstream",
    cls=LoadedWhenAsked,
    help="Tail an append-only Postgres ledger of agent events, in commit order, and drive projectors.",
    epilog="Settings come from flags, WALSTREAM_… variables and walstream.toml, in that order.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    **_FORM,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"walstream {version('walstream')}")
        raise typer.Exit


@app.callback()
def _frame(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of walstream itself."""


def _as_usage(error: Any, json: bool) -> None:
    """Take passwords out of the parser's complaint, which quotes the words of the call; with JSON, show it and exit."""
    error.message = console.redact(error.message)
    if json or console.json_wanted():
        console.ask_for_json(True)
        console.show_error(UsageError(error.format_message(), hint="--help shows the options"))
        raise typer.Exit(int(ExitCode.USAGE))


def _discard_stdout() -> None:
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def main() -> None:
    """Entry point of the console script."""
    app()
