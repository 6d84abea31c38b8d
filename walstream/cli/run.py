"""``walstream run``: the consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .logs import Form, LogFormat, log_to_stderr
from .options import MetricsListen, takes_settings, with_metrics

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.engine.projector import Projector


def register(app: typer.Typer) -> None:
    app.command(name="run")(run)


@takes_settings
def run(
    settings: Settings,
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            help="A stream in Python, as package.module:name. Without it: the projectors of the configuration."
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Run only this projector (repeatable).")] = None,
    without: Annotated[
        list[str] | None, typer.Option("--except", help="Do not run this projector (repeatable).")
    ] = None,
    no_ingest: Annotated[
        bool, typer.Option("--no-ingest", help="Only projectors; ingest runs in another process.")
    ] = False,
    ingest_only: Annotated[bool, typer.Option("--ingest-only", help="Only ingest, no projectors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    metrics_listen: MetricsListen = None,
    log_format: LogFormat = Form.TEXT,
) -> None:
    """Tail the ledger: read the slot, write the order, drive projectors.

    Runs until SIGTERM or Ctrl-C. A second one for the same ledger stands by and takes over when the first is gone.
    Exit code 7: a projector with the policy "halt" stopped.
    """
    from walstream.errors import ConfigError
    from walstream.plugins import configured_projectors, load_target
    from walstream.stream import run_host
    from walstream.wiring import make_host

    if no_ingest and ingest_only:
        raise ConfigError("--no-ingest and --ingest-only leave nothing to run", hint="give one of them")
    log_to_stderr(verbose, log_format)
    projectors: Sequence[Projector] = ()
    if target is not None:
        stream = load_target(target)
        settings = stream.settings(settings.model_dump(exclude_unset=True))
        projectors = stream.projectors
    settings = with_metrics(settings, metrics_listen)
    projectors = (*projectors, *configured_projectors(settings, beside=projectors))
    chosen = [] if ingest_only else _choose(projectors, only or (), without or ())
    if no_ingest and not chosen:
        raise ConfigError("there is no projector to run", hint="name a target, or [projectors.NAME] in walstream.toml")
    raise typer.Exit(run_host(make_host(settings, chosen, ingest=not no_ingest)))


def _choose(projectors: Sequence[Projector], only: Sequence[str], without: Sequence[str]) -> list[Projector]:
    from walstream.errors import ConfigError

    names = [projector.name for projector in projectors]
    unknown = [name for name in (*only, *without) if name not in names]
    if unknown:
        raise ConfigError(
            f"there is no projector {', '.join(map(repr, unknown))} here",
            hint=f"there are: {', '.join(names) or 'none'}",
        )
    return [
        projector for projector in projectors if (not only or projector.name in only) and projector.name not in without
    ]
