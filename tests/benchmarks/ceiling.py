"""What an event costs the client alone: a mock walsender plays recorded frames, everything else is real.

    python -m tests.benchmarks ceiling [--shapes A,B,C,D] [--events N] [--runs N] [--quick] [--json] [--limit RATIO]

The client is `walstream run` as it is shipped, with one projector that does nothing: its messages come through the
driver from a socket, its order and its cursor are written to a real server. Processor time is told in microseconds and,
because a machine is fast one day and slow the next, as a ratio to a loop in Python that is timed before and after.
With --limit the exit code is 1 if the ratio of any shape is above it: a guard for CI that needs no quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psycopg2.extensions import make_dsn, parse_dsn

from tests.benchmarks import document, mock_walsender
from tests.benchmarks.draining import Drained, by_walstream
from tests.benchmarks.filled_ledger import FilledLedger
from tests.benchmarks.processes import Processes
from tests.benchmarks.shapes import SHAPES, Shape

Figures = document.Figures

GOALS: Final = {"A": 5.0, "B": 3.0}
"""Microseconds an event."""

_ROUNDS: Final = 5
_STEPS: Final = 100_000


def calibration() -> float:
    """Microseconds of processor time that one step of a loop takes that does what a decoder does: the best of a few."""
    unpack, message = struct.Struct(">BIQ").unpack_from, b"x" * 64
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.process_time()
        kept = []
        for number in range(_STEPS):
            tag, length, value = unpack(message, 8)
            kept.append((tag, length, value, message[16:32], number))
        best = min(best, time.process_time() - began)
    return best / _STEPS * 1e6


def once(ledger: FilledLedger, recording: Path) -> tuple[Drained, float]:
    """One run, with the calibration around it."""
    before = calibration()
    real = ledger.server.socket_dir
    with tempfile.TemporaryDirectory() as folder:
        port = str(ledger.server.port)
        processes = Processes(Path(folder) / "log", {})
        own = Path(folder) / f".s.PGSQL.{port}"
        processes.start("tests.benchmarks.mock_walsender", str(recording), folder, port, str(real), ledger.dsn())
        try:
            while not own.exists():
                processes.check()
                time.sleep(0.02)
            played = make_dsn(**{**parse_dsn(ledger.dsn()), "host": folder})
            found = by_walstream(ledger, walsender=False, environment={"WALSTREAM_REPLICATION_DSN": played})
        finally:
            processes.stop()
    return found, (before + calibration()) / 2


def measure(shape: Shape, events: int, runs: int) -> Figures:
    """The median of several runs."""
    with FilledLedger(shape, events) as ledger, tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording"
        ledger.reset()
        messages = mock_walsender.record(ledger, recording)
        found = [once(ledger, recording) for _ in range(runs)]
    cpu = [run.client_cpu / events * 1e6 for run, _ in found]
    ratios = [each / step for each, (_, step) in zip(cpu, found, strict=True)]
    middle = sorted(range(runs), key=lambda index: cpu[index])[runs // 2]
    return {
        "client_cpu_us": round(statistics.median(cpu), 2),
        "spread": [round(min(cpu), 2), round(max(cpu), 2)],
        "ratio_to_loop": round(statistics.median(ratios), 1),
        "loop_us": round(statistics.median(step for _, step in found), 3),
        "rss_mb": round(max(run.rss_mb for run, _ in found), 1),
        "threads_us": {
            name: round(seconds / events * 1e6, 2)
            for name, seconds in found[middle][0].threads.items()
            if seconds / events * 1e6 >= 0.05
        },
        "events": events,
        "messages": messages,
        "runs": runs,
    }


def show(found: Figures) -> None:
    print("client only, microseconds of processor time an event; the loop's step; their ratio; peak memory")
    for name, each in found.items():
        goal = f"  (goal {GOALS[name]:g})" if name in GOALS else ""
        low, high = each["spread"]
        print(
            f"{SHAPES[name].title:40}{each['client_cpu_us']:7.2f} ({low:.2f} to {high:.2f})"
            f"{each['loop_us']:8.3f}{each['ratio_to_loop']:8.1f}{each['rss_mb']:8.0f} MB{goal}"
        )
        print(f"{'':8}" + ", ".join(f"{thread} {us}" for thread, us in each["threads_us"].items()))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ceiling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="A,B,C,D")
    parser.add_argument("--events", type=int, help="of each shape; its own number if not given")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="within a minute: fewer events, one run")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--limit", type=float, help="exit with 1 if a ratio to the loop is above it")
    given = parser.parse_args(words)
    machine = document.machine()
    found = {}
    for name in given.shapes.split(","):
        shape = SHAPES[name]
        events = given.events or (shape.events // 5 if given.quick else shape.events)
        found[name] = measure(shape, events, 1 if given.quick else given.runs)
    if given.json:
        document.write("ceiling", machine, {"shapes": found})
    else:
        show(found)
        print(document.described(machine))
    above = [name for name, each in found.items() if given.limit and each["ratio_to_loop"] > given.limit]
    if above:
        print(f"above the limit of {given.limit:g}: {', '.join(above)}", file=sys.stderr)
    return 1 if above else 0
