"""``walstream worker``: does the jobs of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .logs import Form, LogFormat, log_to_stderr
from .options import MetricsListen, takes_settings, with_metrics

if TYPE_CHECKING:
    from walstream.config import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="worker")(worker)


@takes_settings
def worker(
    settings: Settings,
    *,
    target: Annotated[str, typer.Argument(help="A worker in Python, as package.module:name.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    metrics_listen: MetricsListen = None,
    log_format: LogFormat = Form.TEXT,
) -> None:
    """Do an agent's jobs: claim, run the handler, complete.

    Runs until SIGTERM or Ctrl-C. Turns may then go on for drain_seconds; what is not finished is given back. Start as
    many as there is work for: a job is done by one of them.
    """
    from walstream.plugins import load_worker

    log_to_stderr(verbose, log_format)
    found = load_worker(target)
    chosen = found.settings(settings.model_dump(exclude_unset=True))
    raise typer.Exit(found.run(with_metrics(chosen, metrics_listen)))
