"""From an insert to its handler: in the process that ingests, in another process, and by polling.

    python -m tests.benchmarks latency [--rates 200,1000,5000] [--seconds N] [--runs N] [--quick] [--json]

pgbench inserts one event a transaction, each durable, at random moments with the given rate. Latency is told from the
moment at which the insert was sent, and from the one at which its commit had returned, to the entry of the handler.
With the visibility gate: when the handler is entered, everybody sees the row. The ways take turns on one server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.benchmarks import document, load, noted
from tests.benchmarks.filled_ledger import FilledLedger
from tests.benchmarks.processes import Processes
from tests.benchmarks.shapes import SHAPES

_TARGET: Final = "tests.benchmarks.latency_stream:stream"
WAYS: Final[dict[str, list[list[str]]]] = {
    "in process": [["walstream", "run", _TARGET]],
    "another process": [["walstream", "run", "--ingest-only"], ["walstream", "run", _TARGET, "--no-ingest"]],
    "polling every 100 ms": [["tests.benchmarks.latency_polling"]],
}
_CLIENTS: Final = 8
_PATIENCE: Final = 30.0
_POINTS: Final = (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))

Figures = document.Figures


class Measuring:
    """Several runs on one server."""

    def __init__(self, ledger: FilledLedger) -> None:
        self._ledger = ledger
        self._run = 0

    def once(self, way: str, rate: float, seconds: float) -> Figures:
        """One way at one rate."""
        ledger = self._ledger
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "notes"
            environment = {**ledger.environment(), noted.FILE: str(file), noted.DSN: ledger.dsn()}
            processes = Processes(Path(folder) / "log", environment)
            try:
                for words in WAYS[way]:
                    processes.start(*words)
                self._append(way, file, processes, 50, 2)
                self._append(way, file, processes, rate, 1)
                cpu = processes.cpu_seconds() or 0.0
                sent = self._append(way, file, processes, rate, seconds)
                cpu = (processes.cpu_seconds() or 0.0) - cpu
                rss = processes.rss_mb()
            finally:
                processes.stop()
            entered = noted.read(file, self._run)
        found = [place for place in sent if place in entered]
        return {
            **_points([(entered[place] - sent[place].sent) / 1000 for place in found]),
            "from_commit": _points([(entered[place] - sent[place].committed) / 1000 for place in found]),
            "missing": len(sent) - len(found),
            "held_per_second": round(len(sent) / seconds),
            "client_cpu_us": round(cpu / len(sent) * 1e6, 1),
            "rss_mb": round(rss),
        }

    def _append(
        self, way: str, file: Path, processes: Processes, rate: float, seconds: float
    ) -> dict[load.Place, load.Sent]:
        """Insert, and wait until all of it was handled (by polling: until nothing more comes)."""
        ledger = self._ledger
        self._run += 1
        before = noted.count(file)
        sent = load.append(
            ledger.server.bin_dir, ledger.dsn(), run=self._run, rate=rate, seconds=seconds, clients=_CLIENTS
        )
        until = time.monotonic() + (1.0 if way.startswith("polling") else _PATIENCE)
        while noted.count(file) < before + len(sent):
            processes.check()
            if time.monotonic() > until:
                if way.startswith("polling"):
                    break
                raise RuntimeError(f"{way}: {len(sent)} events were not handled within {_PATIENCE:.0f} s")
            time.sleep(0.02)
        return sent


def _points(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2) for name, share in _POINTS}


def measure(rates: Sequence[float], seconds: float, runs: int) -> Figures:
    """Every way at every rate, in turns; medians."""
    results: dict[str, dict[str, list[Figures]]] = {}
    with FilledLedger(SHAPES["A"], 0) as ledger:
        ledger.reset()
        measuring = Measuring(ledger)
        for number in range(runs):
            for rate in rates:
                for way in WAYS:
                    print(f"{way} at {rate:g} a second, run {number + 1} of {runs}", file=sys.stderr, flush=True)
                    results.setdefault(way, {}).setdefault(f"{rate:g}", []).append(measuring.once(way, rate, seconds))
    return {
        way: {rate: {**_median(several), "runs": len(several)} for rate, several in by_rate.items()}
        for way, by_rate in results.items()
    }


def _median(runs: Sequence[Figures]) -> Figures:
    return {
        name: _median([run[name] for run in runs])
        if isinstance(value, dict)
        else round(statistics.median(run[name] for run in runs), 2)
        for name, value in runs[0].items()
    }


def show(found: Figures) -> None:
    """The figures as a table."""
    print(f"milliseconds to the handler{'':13}{'a second':>10}{'sent: p50':>11}{'p99':>8}{'p99.9':>8}", end="")
    print(f"{'returned: p50':>16}{'p99':>8}{'p99.9':>8}{'CPU us':>9}{'MB':>6}{'missing':>9}")
    for way, by_rate in found.items():
        for rate, each in by_rate.items():
            later = each["from_commit"]
            print(
                f"{way:40}{rate:>10}{each['p50']:>11.2f}{each['p99']:>8.2f}{each['p999']:>8.2f}"
                f"{later['p50']:>16.2f}{later['p99']:>8.2f}{later['p999']:>8.2f}"
                f"{each['client_cpu_us']:>9.1f}{each['rss_mb']:>6.0f}{each['missing']:>9.0f}"
                + ("" if each["held_per_second"] > 0.95 * float(rate) else f"  only {each['held_per_second']:g} sent")
            )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="200,1000,5000", help="events a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each is held")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="within a minute: two seconds at each rate")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    rates = [float(rate) for rate in given.rates.split(",")]
    machine = document.machine()
    found = measure(rates, 2.0 if given.quick else given.seconds, 1 if given.quick else given.runs)
    if given.json:
        document.write("latency", machine, {"ways": found})
    else:
        show(found)
        print(document.described(machine))
    return 0
