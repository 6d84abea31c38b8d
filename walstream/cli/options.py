"""Options that commands share, and the way they become :class:`walstream.config.Settings`.

A command that works on a stream takes ``settings`` first and is decorated::

    @app.command()
    @takes_settings
    def status(settings: Settings, *, watch: Annotated[bool, typer.Option(help="…")] = False, as_json: Json = False):

The decorator gives it ``--dsn``, ``--slot`` and the others and loads the settings from all their sources.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from . import console

if TYPE_CHECKING:
    from walstream.config import Settings

Json = Annotated[
    bool, typer.Option("--json", callback=console.ask_for_json, is_eager=True, help="Print JSON, errors included.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

MetricsListen = Annotated[
    str | None,
    typer.Option(
        "--metrics-listen", metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz there (metrics_listen)."
    ),
]

_PANEL: Final = "Which stream"


def _option(name: str, help_text: str, metavar: str) -> Any:
    return typer.Option(name, help=help_text, metavar=metavar, rich_help_panel=_PANEL, show_default=False)


# Field of Settings -> annotation. Every one defaults to None, which means "not given": the other sources decide.
_SHARED: Final[dict[str, Any]] = {
    "dsn": Annotated[str | None, _option("--dsn", "Database of the ledger: libpq connection string or URI.", "DSN")],
    "replication_dsn": Annotated[
        str | None,
        _option("--replication-dsn", "Another one for the replication connection, past a pooler.", "DSN"),
    ],
    "config": Annotated[Path | None, _option("--config", "Configuration file instead of walstream.toml.", "FILE")],
    "slot": Annotated[str | None, _option("--slot", "Replication slot.", "NAME")],
    "publication": Annotated[str | None, _option("--publication", "Publication.", "NAME")],
    "namespace": Annotated[str | None, _option("--namespace", "Schema of walstream's own tables.", "SCHEMA")],
    "table": Annotated[str | None, _option("--table", "The ledger's table.", "[SCHEMA.]TABLE")],
    "environment": Annotated[
        str | None, _option("--environment", "production, staging, …: a copy must not pass for it.", "NAME")
    ],
}


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose first parameter is ``settings``.

    Raises (when the command runs):
        ConfigError: what was given does not make valid settings.
    """
    signature = inspect.signature(command)
    own = dict(signature.parameters)
    del own["settings"]
    # `Settings` is not a type that typer knows, and pydantic is slow to import: it stays a name for the type checker.
    command.__annotations__ = {name: hint for name, hint in command.__annotations__.items() if name != "settings"}
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        shared = {name: values.pop(name) for name in _SHARED}
        command(load_settings(**shared), **values)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in own.items()
    ] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _SHARED.items()
    ]
    vars(wrapper)["__signature__"] = signature.replace(parameters=parameters)  # what typer reads
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def with_metrics(settings: Settings, listen: str | None) -> Settings:
    """These settings with what ``--metrics-listen`` said, if it was given."""
    return settings if listen is None else settings.model_copy(update={"metrics_listen": listen})


def load_settings(*, config: Path | None = None, table: str | None = None, **flags: Any) -> Settings:
    """Settings from these flags and, below them, from the environment and the configuration file.

    Args:
        config: the file, instead of ``walstream.toml``.
        table: ``table`` or ``schema.table``; a name with a dot in it has to come from the configuration.

    Raises:
        ConfigError: a source cannot be read, or a value does not fit.
    """
    from walstream.config import load

    if table is not None:
        namespace, dot, name = table.rpartition(".")
        flags["ledger"] = {"table": name, "namespace": namespace} if dot else {"table": name}
    return load(flags=flags, file=config)
