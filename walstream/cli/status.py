"""``walstream status``: slot, ingest, order and projectors at a glance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from walstream.errors import ConfigError, ExitCode, WalstreamError
from walstream.figures import duration, size

from . import console
from .jobs import in_words
from .options import Json, takes_settings
from .session import installed

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from rich.console import RenderableType
    from rich.table import Table

    from walstream.config import Settings

    from .standing import ProjectorStanding, Standing


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


@takes_settings
def status(
    settings: Settings,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.", metavar="SECONDS")] = 2.0,
    as_json: Json = False,
) -> None:
    """Show how the stream stands.

    Exit code 0: nothing needs a person. 1: something does (a slot that is missing, lost or about to be, no ingest, a
    projector that halted or that no process runs); it is named in the last lines, and in "problems" with --json.
    """
    if watch:
        _watch(settings, interval, as_json)
        return
    with installed(settings, "status") as conn:
        standing = read(conn, settings)
    if as_json:
        console.print_json(standing.document())
    else:
        console.out().print(render(standing))
    if standing.problems:
        raise typer.Exit(ExitCode.FAILED)


def _watch(settings: Settings, interval: float, as_json: bool) -> None:
    """Look again and again. A server that is away is shown as such and asked again; anything else ends it."""
    out = console.out()
    if as_json:
        for found in _looks(settings, interval):
            if isinstance(found, WalstreamError):
                raise found
            console.print_json(found.document())
    elif not out.is_terminal:
        for found in _looks(settings, interval):
            out.print(_render_look(found))
    else:
        from rich.live import Live

        with Live(console=out, auto_refresh=False, screen=True) as live:
            for found in _looks(settings, interval):
                live.update(_render_look(found), refresh=True)


def _looks(settings: Settings, interval: float) -> Iterator[Standing | WalstreamError]:
    from walstream.source.failures import classify

    while True:
        try:
            with installed(settings, "status") as conn:
                while True:
                    yield read(conn, settings)
                    time.sleep(interval)
        except Exception as raised:
            error = raised if isinstance(raised, WalstreamError) else classify(raised, doing="walstream status")
            if not error.transient:
                raise error from raised
            yield error
            time.sleep(interval)


def _render_look(found: Standing | WalstreamError) -> RenderableType:
    from rich.text import Text

    if isinstance(found, WalstreamError):
        return Text(console.redact(f"waiting for the server: {found}"), style="yellow")
    return render(found)


def read(conn: Connection, settings: Settings) -> Standing:
    """How the stream stands.

    Raises:
        ConfigError: it was never set up.
    """
    from . import standing

    found = standing.read(conn, settings)
    if found is None:
        raise ConfigError(
            f"the stream in schema {settings.namespace!r} has not been set up", hint="run `walstream init`"
        )
    return found


def render(standing: Standing) -> RenderableType:
    """The standing for a person."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    identity, slot, ingest = standing.identity, standing.slot, standing.ingest
    head = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    head.add_column(style="bold")
    head.add_column(overflow="fold")

    def line(title: str, words: str) -> None:
        head.add_row(title, Text(words))  # not markup: a name may hold brackets

    floor = f", rows up to seq {identity.floor_seq} are not events" if identity.floor_seq is not None else ""
    line(
        "ledger",
        f"{identity.table_namespace}.{identity.table_name}, environment {identity.environment},"
        f" epoch {identity.epoch}{floor}",
    )
    if slot.exists:
        safe = "no limit" if slot.limit == "-1" else f"{size(slot.safe_bytes)} of {slot.limit} left"
        line(
            "slot",
            f"{slot.name}: {slot.state} ({slot.wal_status}), {size(slot.retained_bytes)} retained, confirmed"
            f" {size(slot.distance_bytes)} behind the WAL, {safe}",
        )
    else:
        line("slot", f"{slot.name}: does not exist")
    beat = "never" if ingest.heartbeat_age is None else f"{duration(ingest.heartbeat_age)} ago"
    line("ingest", f"{ingest.state}, owner {ingest.owner or 'none'}, heartbeat {beat}")
    line(
        "",
        f"confirmed {ingest.confirmed_lsn or 'nothing'}, {ingest.events:,} events, {ingest.recovered:,} recovered,"
        f" {ingest.violations:,} violations",
    )
    if standing.recoveries:
        last = standing.recoveries[0]
        line("recovery", f"{last.ended_at:%Y-%m-%d %H:%M:%S%z}, {last.kind}, {last.filled}: {last.cause}")
    line("order", f"head at offset {standing.head:,}")
    if standing.jobs:
        line("jobs", in_words(standing.jobs))
    if (oldest := standing.approvals.oldest_seconds) is not None:
        line("approvals", f"{standing.approvals.count:,} to be decided (the oldest for {duration(oldest)})")

    parts: list[RenderableType] = [head]
    if standing.projectors:
        parts.append(projector_table(standing.projectors))
    parts += [
        Text(console.redact(f"~ projector {each.name} is retrying: {each.error}"), style="yellow")
        for each in standing.projectors
        if each.state == "retrying" and each.error
    ]
    parts += [Text(f"! {console.redact(problem)}", style="red") for problem in standing.problems]
    return Group(*parts)


def projector_table(projectors: Sequence[ProjectorStanding]) -> Table:
    """The projectors for a person."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("projector", "kind", "state"):
        table.add_column(column, overflow="fold")  # cut off, a name could not be given to the next command
    for column in ("offset", "lag", "seconds", "parked"):
        table.add_column(column, justify="right", overflow="fold")
    colours = {"hot": "green", "halted": "red", "hung": "red", "not running": "red"}
    colours |= dict.fromkeys(("paused", "retrying"), "yellow")
    for each in projectors:
        state = each.state if each.desired == "running" or each.state == "paused" else f"{each.state}, to be paused"
        table.add_row(
            Text(each.name),
            each.kind,
            Text(state, style=colours.get(each.state, "")),
            f"{each.offset:,}",
            f"{each.lag_events:,}",
            "?" if each.lag_seconds is None else f"{each.lag_seconds:,.1f}",
            Text(f"{each.parked:,}", style="yellow" if each.parked else ""),
        )
    return table
