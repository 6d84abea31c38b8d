"""A projector that is far behind: from the order and the table, beside draining the same through the slot.

    python -m tests.benchmarks catchup [--shapes A,B] [--events N] [--runs N] [--quick] [--json]

First `walstream run` drains the slot, which is timed. Then nobody ingests, the projector is new again, and `walstream
run --no-ingest` brings it up in a process of its own, in order, from `commit_order` and the ledger. Both take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from tests.benchmarks import document
from tests.benchmarks.draining import Drained, by_walstream, summary
from tests.benchmarks.filled_ledger import FilledLedger
from tests.benchmarks.shapes import SHAPES, Shape

THROUGH_SLOT: Final = "through the slot"
COLD: Final = "cold"


def measure(shape: Shape, events: int, runs: int) -> document.Figures:
    """Medians of both, and of their ratio."""
    found: dict[str, list[Drained]] = {THROUGH_SLOT: [], COLD: []}
    with FilledLedger(shape, events) as ledger:
        for number in range(runs):
            print(f"{shape.name}, run {number + 1} of {runs}", file=sys.stderr, flush=True)
            found[THROUGH_SLOT].append(by_walstream(ledger))
            found[COLD].append(by_walstream(ledger, cold=True))
    return summary(found, events, first=THROUGH_SLOT)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="catchup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="A,B")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="within a minute: 50,000 events")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    events = 50_000 if given.quick else given.events
    machine = document.machine()
    found = {name: measure(SHAPES[name], events, given.runs) for name in given.shapes.split(",")}
    if given.json:
        document.write("catchup", machine, {"shapes": found})
        return 0
    print(f"{'':40}{'through the slot':>18}{'cold':>10}{'ratio':>7}{'CPU us':>8}{'MB':>6}")
    for name, ways in found.items():
        cold = ways[COLD]
        print(
            f"{SHAPES[name].title:40}{ways[THROUGH_SLOT]['events_per_s']:>16,}/s{cold['events_per_s']:>8,}/s"
            f"{cold['ratio']:>7.2f}{cold['client_cpu_us']:>8.2f}{cold['rss_mb']:>6}"
        )
    print(document.described(machine))
    return 0
