"""A projector that is far behind: from the order and the table, beside draining the same through the slot.

    python -m tests.benchmarks catchup [--shapes A,B] [--events N] [--runs N] [--quick] [--json]

First `walstream run` drains the slot, which is timed. Then nobody ingests, the projector is new again, and `walstream
run --no-ingest` brings it up in a process of its own, in order, from `commit_order` and the ledger. Both take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.draining import by_walstream
from tests.benchmarks.filled_ledger import FilledLedger
from tests.benchmarks.shapes import SHAPES, Shape


def measure(shape: Shape, events: int, runs: int) -> dict[str, Any]:
    """Medians of both, and of their ratio."""
    through_slot, cold = [], []
    with FilledLedger(shape, events) as ledger:
        for number in range(runs):
            print(f"{shape.name}, run {number + 1} of {runs}", file=sys.stderr, flush=True)
            through_slot.append(by_walstream(ledger))
            cold.append(by_walstream(ledger, cold=True))
    return {
        "events": events,
        "slot_events_per_s": round(statistics.median(events / run.seconds for run in through_slot)),
        "cold_events_per_s": round(statistics.median(events / run.seconds for run in cold)),
        "ratio": round(
            statistics.median(slow.seconds / fast.seconds for slow, fast in zip(through_slot, cold, strict=True)), 2
        ),
        "cold_client_cpu_us": round(statistics.median(run.client_cpu for run in cold) / events * 1e6, 2),
        "cold_rss_mb": round(max(run.rss_mb for run in cold)),
        "runs": runs,
    }


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
    found = {name: measure(SHAPES[name], events, given.runs) for name in given.shapes.split(",")}
    if given.json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return 0
    print(f"{'':40}{'through the slot':>18}{'cold':>10}{'ratio':>7}{'CPU us':>8}{'MB':>6}")
    for name, each in found.items():
        print(
            f"{SHAPES[name].title:40}{each['slot_events_per_s']:>16,}/s{each['cold_events_per_s']:>8,}/s"
            f"{each['ratio']:>7.2f}{each['cold_client_cpu_us']:>8.2f}{each['cold_rss_mb']:>6}"
        )
    return 0
