"""``python -m tests.chaos``: faults at random, for some minutes, and the proof that nothing was lost.

    python -m tests.chaos --minutes 10
    python -m tests.chaos --minutes 10 --seed 7 --faults kill,crash --json

Exit code 1 if anything was lost, doubled, out of order or stuck. Then the folder with logs, files and the server's data
is kept, and the report says where.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .plan import KINDS
from .run import Report, Run


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    kinds = [kind for kind in (options.faults or "").split(",") if kind]
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        print(f"there is no fault {', '.join(unknown)}; there are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    run = Run(seed, options.minutes, kinds, writers=options.writers)
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    report = _shown(run, console)
    again = f"python -m tests.chaos --minutes {options.minutes:g} --seed {seed}"
    if options.faults:
        again += f" --faults {options.faults}"
    if options.json:
        print(json.dumps(report.document(), ensure_ascii=False))
    else:
        _print(report, Console())
    if not report.clean:
        print(f"kept in {report.kept}; to see it again: {again}", file=sys.stderr)
    return 0 if report.clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Inject faults at random and compare what was delivered with the ledger.",
        epilog="faults: " + "; ".join(f"{kind}: {text}" for kind, text in KINDS.items()),
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; without it one is drawn, and told")
    parser.add_argument("--faults", help="some kinds only, separated by commas")
    parser.add_argument("--writers", type=int, default=4, help="sessions that write at once")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


def _shown(run: Run, console: Console) -> Report:
    """Run, with a bar where a person watches, else with a line for each phase."""
    ended = threading.Event()
    screen = threading.Thread(target=_show, args=(run, console, ended))
    screen.start()
    try:
        return run.run()
    finally:
        ended.set()
        screen.join()


def _show(run: Run, console: Console, ended: threading.Event) -> None:
    state = run.progress
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0, told="")
        phase = ""
        while not ended.wait(0.25):
            if not console.is_terminal and state.phase != phase:
                phase = state.phase
                console.print(phase)
            told = f"{state.faults} faults, {state.events:,} events, {state.delivered:,} everywhere  {state.fault}"
            bar.update(task, completed=state.share, description=state.phase, told=told)


def _print(report: Report, console: Console) -> None:
    table = Table(title=f"chaos, seed {report.seed}, {report.minutes:g} minutes, PostgreSQL {report.postgres}")
    for column in ("fault", "times", "recovery p50", "max"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    by_kind = report.recovery.get("by_kind", {})
    for kind, times in sorted(report.faults.items()):
        figures = by_kind.get(kind, {})
        table.add_row(kind, str(times), *(_seconds(figures.get(name)) for name in ("p50", "max")))
    table.add_section()
    total = sum(report.faults.values())
    table.add_row("all", str(total), *(_seconds(report.recovery.get(name)) for name in ("p50", "max")))
    console.print(table)
    verdict = report.verdict
    console.print(
        f"{verdict.events:,} events: lost {verdict.lost}, doubled {verdict.doubled}, out of order "
        f"{verdict.out_of_order}, {'dense' if verdict.dense else 'NOT DENSE'}; {verdict.recovered} recovered from the "
        f"ledger, {verdict.redelivered} delivered again with the same key, {verdict.parked} were parked"
    )
    for each in (*verdict.findings, *(f"stuck: {each}" for each in report.stuck), *report.ended):
        console.print(each, style="red", markup=False)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
