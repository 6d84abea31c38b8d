"""Who drains a backlog fastest: the server's own client that does nothing, or walstream that does everything.

    python -m tests.benchmarks drain [--shapes A,B,C,D,large] [--transport unix,tcp] [--runs N] [--quick] [--json]

Every contender drains the same WAL, from a copy of the same slot, in turns, on a server that this command makes and
removes. A run begins when the server logs START_REPLICATION and ends when the last event is handled (`pg_recvlogical`:
when it has exited). Contenders are `pg_recvlogical -f /dev/null` with our plugin options and with its own defaults (the
better one counts as 1), `walstream run` with one projector that does nothing, the same with three of which one parses
every payload, and other clients as far as they are installed. Figures are medians; ratios are those of the same round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tests.benchmarks import document, peers
from tests.benchmarks.draining import Drained, by_recvlogical, by_walstream, summary
from tests.benchmarks.filled_ledger import PUBLICATION, FilledLedger
from tests.benchmarks.shapes import SHAPES, Shape

FIRST: Final = "pg_recvlogical"
OURS: Final = "walstream"
_OPTIONS: Final = ["-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}"]
_SELDOM: Final = ["--status-interval=10", "--fsync-interval=10"]  # the defaults, said aloud

Run = Callable[[], Drained]
Figures = document.Figures


def contenders(ledger: FilledLedger, *, tcp: bool, others: bool) -> dict[str, Run]:
    """Who takes part, by name."""
    found: dict[str, Run] = {
        FIRST: partial(by_recvlogical, ledger, [*_OPTIONS, "--status-interval=60", "--fsync-interval=0"], tcp=tcp),
        f"{FIRST}, its defaults": partial(by_recvlogical, ledger, [*_OPTIONS, *_SELDOM], tcp=tcp),
        OURS: partial(by_walstream, ledger, tcp=tcp),
        f"{OURS}, three projectors, one parses": partial(by_walstream, ledger, tcp=tcp, projectors=3, parsing=1),
    }
    if others:
        found |= peers.contenders(ledger, tcp=tcp, tell=_tell)
    return found


def measure(shape: Shape, events: int, transports: Sequence[str], runs: int, *, others: bool) -> dict[str, Figures]:
    """All contenders in turns; by transport and name."""
    found: dict[str, Figures] = {}
    with FilledLedger(shape, events) as ledger:
        for transport in transports:
            taking_part = contenders(ledger, tcp=transport == "tcp", others=others)
            results: dict[str, list[Drained]] = {name: [] for name in taking_part}
            for number in range(runs):
                for name, run in taking_part.items():
                    _tell(f"{shape.name} over {transport}, run {number + 1} of {runs}: {name}")
                    results[name].append(run())
            found[transport] = summary(results, events, first=FIRST)
    return found


def show(found: Figures) -> None:
    """The figures as a table."""
    print(f"{'':44}{'events/s':>10}{'(least to greatest)':>22}{'ratio':>7}{'CPU us':>8}{'walsender':>11}{'MB':>6}")
    for shape, transports in found.items():
        for transport, names in transports.items():
            print(f"{SHAPES[shape].title}, {transport}")
            for name, each in names.items():
                low, high = each["spread"]
                sender = "" if each["walsender_cpu_us"] is None else f"{each['walsender_cpu_us']:.2f}"
                print(
                    f"  {name:42}{each['events_per_s']:>10,}{f'({low:,} to {high:,})':>22}{each['ratio']:>7.2f}"
                    f"{each['client_cpu_us']:>8.2f}{sender:>11}{each['rss_mb']:>6}"
                )


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="drain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="A,B,C,D", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--transport", default="unix", help="unix, tcp, or both with a comma")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--events", type=int, help="of each shape; its own number if not given")
    parser.add_argument("--without-others", action="store_true", help="leave the other clients out")
    parser.add_argument("--quick", action="store_true", help="within a minute: a tenth of the events, one run, A and B")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    names = ["A", "B"] if given.quick else given.shapes.split(",")
    machine = document.machine()
    shapes: Figures = {}
    for name in names:
        events = given.events or SHAPES[name].events // (10 if given.quick else 1)
        runs = 1 if given.quick else given.runs
        others = not (given.quick or given.without_others)
        shapes[name] = measure(SHAPES[name], events, given.transport.split(","), runs, others=others)
    if given.json:
        document.write("drain", machine, {"shapes": shapes})
    else:
        show(shapes)
        print(document.described(machine))
    return 0
