"""``walstream demo``: the whole thing on a server of its own, with a proof at the end."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walstream.errors import ExitCode

from . import console
from .options import Json
from .signals import unwinding

if TYPE_CHECKING:
    from walstream.demo.screen import Kill
    from walstream.demo.supervisor import Demo, Outcome

_EVENTS = 4000
_RATE = 250.0
_REPLAY_RATE = 600.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    *,
    events: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Events written in all.", show_default=f"{_EVENTS}, or all recorded"),
    ] = None,
    agents: Annotated[
        int,
        typer.Option(min=1, max=60, metavar="N", help="Agents at work at the same time; at least one of each kind."),
    ] = 8,
    kills: Annotated[int, typer.Option(min=0, metavar="N", help="How often the consumer is killed with SIGKILL.")] = 3,
    worker_kills: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="How often a worker is, mostly in a turn. A replay has none."),
    ] = 3,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Events a second; 0: no limit.",
            show_default=f"{_RATE:g}, or {_REPLAY_RATE:g} of recorded",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Recorded runs (*.jsonl, as for import) instead of the simulation."),
    ] = None,
    copies: Annotated[int, typer.Option(min=1, metavar="N", help="With --replay: copies of each run.")] = 1,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="For the same scenario again.", show_default="a new one")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running and say what to try next.")] = False,
    as_json: Json = False,  # noqa: ARG001 (read where it is printed)
) -> None:
    """Show that nothing is lost: agents, processes that are killed, a proof.

    Starts a Postgres of its own, lets simulated agents write to the ledger in
    concurrent transactions, some of which are rolled back, and hand their sessions
    on: planners to researchers, to writers, to reviewers, each kind a worker in a
    process of its own. Kills the consumer and the workers with SIGKILL on the way.
    At the end the ledger is compared in SQL with every projector's effects and with
    what became of each handoff. Exit code 1 if anything is lost or doubled.
    """
    from walstream.demo.screen import Progress, screen_for
    from walstream.demo.supervisor import Demo, Plan

    if replay is None:
        events = events or _EVENTS
        if copies != 1:
            raise typer.BadParameter("makes copies of recorded runs: give --replay DIR", param_hint="--copies")
    if rate is not None and not (rate >= 0 and math.isfinite(rate)):
        raise typer.BadParameter("must be a number from 0 on", param_hint="--rate")
    if rate is None:
        rate = _RATE if replay is None else _REPLAY_RATE
    plan = Plan(
        events=events,
        agents=agents,
        kills=kills,
        worker_kills=worker_kills,
        rate=rate or None,
        seed=random.randrange(1 << 32) if seed is None else seed,
        replay=replay,
        copies=copies,
    )
    progress = Progress()
    quiet = console.json_wanted()  # asked here: the screen speaks from a thread of its own
    watched = screen_for(
        console.err(), progress, (lambda _text: None) if quiet else console.note, live=sys.stderr.isatty()
    )
    with unwinding(), watched as screen, Demo(plan, progress) as shown:
        screen.watch(lambda: shown.connect("screen"))
        outcome = shown.run()
        if keep:
            shown.keep()
    if console.json_wanted():
        where = {"dsn": shown.settings.dsn, "folder": str(shown.folder)} if keep else {}
        console.print_json(outcome.as_json() | where)
    else:
        _show(outcome)
        if keep:
            _say_what_to_try(shown)
    if not outcome.proof.holds:
        if outcome.gave_up:
            console.note("gave up waiting: nothing moved any more")
        console.note(f"the end of the logs:\n{outcome.logs}")
        raise typer.Exit(int(ExitCode.FAILED))


def _show(outcome: Outcome) -> None:
    from rich.table import Table

    proof = outcome.proof
    table = Table(title="The proof, from the ledger", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")

    def row(name: str, value: object, note: str = "", *, wrong: bool = False) -> None:
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(name, f"[bold red]{shown}[/]" if wrong else f"[bold]{shown}[/]", note)

    tally = outcome.tally
    handoffs = proof.handoffs
    row("written", proof.written, f"{proof.sessions:,} sessions, {proof.transactions:,} transactions")
    row("rolled back", tally.undone, f"{tally.rollbacks:,} transactions, {tally.savepoints:,} savepoints")
    row("offsets assigned", proof.offsets, f"gaps {proof.gaps:,}; {proof.late_seqs:,} committed after a higher seq")
    row("delivered", proof.delivered, f"out of order {proof.out_of_order:,}, altered {proof.altered:,}")
    if outcome.workers:
        row("handoffs", handoffs.emitted, f"jobs {handoffs.jobs:,}, received {handoffs.received:,}")
        row("run to completion", handoffs.completed, f"effects {handoffs.effects:,}; turns begun {handoffs.begun:,}")
    each = _each({name: c.lost for name, c in proof.comparisons.items()})
    row("lost", proof.lost, each, wrong=proof.lost > 0)
    each = _each({name: c.duplicated for name, c in proof.comparisons.items()})
    row("duplicated", proof.duplicated, each, wrong=proof.duplicated > 0)
    kills, note = outcome.kills_of(worker=False), ""
    if kills:
        note = "delivering again after " + _seconds(kills)
    row("kill -9 of the consumer", len(kills), note)
    if outcome.workers:
        kills, note = outcome.kills_of(worker=True), ""
        if kills:
            turns = sum(kill.turns for kill in kills)
            note = f"turns in hand {turns:,}; at work again after {_seconds(kills)}"
        row("kill -9 of workers", len(kills), note)
    latency, calm = proof.latency, proof.undisturbed
    met = latency.events - calm.events
    row("commit to projector, p50", _ms(latency.p50_ms), f"without the {met:,} that met a dead")
    row("commit to projector, p99", _ms(latency.p99_ms), f"consumer: p50 {_ms(calm.p50_ms)}, p99 {_ms(calm.p99_ms)}")
    if outcome.workers:
        latency, calm = handoffs.latency, handoffs.undisturbed
        met = latency.events - calm.events
        row("handoff to handler, p50", _ms(latency.p50_ms), f"without the {met:,} that met a dead consumer")
        note = f"or worker: p50 {_ms(calm.p50_ms)}, p99 {_ms(calm.p99_ms)}"
        row("handoff to handler, p99", _ms(latency.p99_ms), note)
    out = console.out()
    out.print(table)
    out.print(f"PostgreSQL {outcome.postgres}, {outcome.seconds:.0f} s, --seed {outcome.seed}", style="dim")
    if proof.holds:
        once = " Every handoff ran to completion once." if outcome.workers else ""
        out.print(f"[bold green]Every event was delivered once, in commit order.{once}[/]")
    else:
        out.print("[bold red]This is not what was promised.[/]")


def _each(counts: Mapping[str, int]) -> str:
    """What is wrong by name."""
    wrong = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return wrong or f"in none of {len(counts)} comparisons"


def _seconds(kills: Sequence[Kill]) -> str:
    return ", ".join(f"{kill.seconds:.1f} s" for kill in kills)


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f} ms"


def _say_what_to_try(shown: Demo) -> None:
    config = shown.config
    console.say(
        f"""
The server is still running. Its database:
  {shown.settings.dsn}
Try, in {shown.folder}:
  walstream status --config {config}
  walstream run walstream.demo.consumer:stream --config {config}
  walstream tail --config {config}                # in another terminal
  walstream import FILE.jsonl --config {config}   # and watch it arrive
  walstream jobs list --config {config}
  psql "{shown.settings.dsn}" -c "SELECT * FROM event_counts LIMIT 10"
Stop and remove it:
  {shown.stop_command}"""
    )
