"""How many appends a second the consumer keeps up with; and with --for, whether it does so for hours.

    python -m tests.benchmarks sustained [--rates 1000,2000,4000,8000] [--seconds N] [--quick] [--json]
    python -m tests.benchmarks sustained --rates 200 --for 3600          # soak: one rate, a line every --seconds

pgbench appends one event a transaction from eight connections, without waiting for the disk (the disk would bound the
rate). Order and cursors are written to the same server. Lag is the time from a commit to its handler, for the last
tenth of each stretch; the order's bytes are those of an event, compacted as far as it is by then. The same load beside
`pg_recvlogical`, which writes nothing, shows what that costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psycopg2.extensions import make_dsn

from tests.benchmarks import document, load, noted
from tests.benchmarks.filled_ledger import PUBLICATION, SLOT, FilledLedger
from tests.benchmarks.processes import Processes
from tests.benchmarks.shapes import SHAPES

Figures = document.Figures

_TARGET: Final = "tests.benchmarks.latency_stream:stream"
_CLIENTS: Final = 8
_PATIENCE: Final = 60.0
_BOUNDED: Final = 1.0
"""Seconds: with less lag than this at the end, the consumer kept up."""


def stretch(ledger: FilledLedger, processes: Processes, notes: Path, run: int, rate: float, seconds: float) -> Figures:
    """Append for a while; how far behind the consumer was at the end.

    Raises:
        RuntimeError: it does not come to the end.
    """
    before, cpu = noted.count(notes), processes.cpu_seconds() or 0.0
    sent = _append(ledger, run, rate, seconds)
    until = time.monotonic() + _PATIENCE
    while noted.count(notes) < before + len(sent):
        processes.check()
        if time.monotonic() > until:
            raise RuntimeError(f"{len(sent)} events were not handled {_PATIENCE:.0f} s after the last one")
        time.sleep(0.02)
    entered = noted.read(notes, run)
    by_commit = sorted(sent, key=lambda place: sent[place].committed)
    last = by_commit[-max(1, len(by_commit) // 10) :]
    lag = statistics.median(max(0, entered[place] - sent[place].committed) for place in last) / 1e6
    return {
        "rate": rate,
        "held_per_second": round(len(sent) / seconds),
        "lag_s": round(lag, 4),
        "kept_up": lag < _BOUNDED,
        "client_cpu_us": round(((processes.cpu_seconds() or 0.0) - cpu) / len(sent) * 1e6, 1),
        "rss_mb": round(processes.rss_mb()),
    }


def order_bytes(ledger: FilledLedger) -> float:
    """Bytes of `commit_order` an event, as far as it is compacted by now."""
    ((found,),) = ledger.execute(
        "SELECT sum(pg_column_size(c.*))::float8 / sum(c.events) FROM walstream.commit_order AS c"
    )
    return round(float(str(found)), 2)


def beside_recvlogical(ledger: FilledLedger, rate: float, seconds: float) -> int:
    """How many a second are appended while `pg_recvlogical` reads the slot."""
    ledger.reset()
    command = [
        str(ledger.recvlogical), "-d", ledger.dsn(), "--slot", SLOT, "--start", "-f", os.devnull,
        "-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}",
    ]  # fmt: skip
    reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        sent = _append(ledger, 0, rate, seconds)
    finally:
        reader.terminate()
        reader.wait()
    return round(len(sent) / seconds)


def _append(ledger: FilledLedger, run: int, rate: float, seconds: float) -> dict[load.Place, load.Sent]:
    dsn = make_dsn(ledger.dsn(), options="-c synchronous_commit=off")
    return load.append(ledger.server.bin_dir, dsn, run=run, rate=rate, seconds=seconds, clients=_CLIENTS)


def measure(rates: Sequence[float], seconds: float, lasting: float) -> Figures:
    """Every rate once; with ``lasting`` (seconds) the first one again and again."""
    results: list[Figures] = []
    with FilledLedger(SHAPES["A"], 0) as ledger, tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        ledger.reset()
        processes = Processes(Path(folder) / "log", {**ledger.environment(), noted.FILE: str(notes)})
        processes.start("walstream", "run", _TARGET)
        try:
            stretch(ledger, processes, notes, 1, 100, 2)
            began = time.monotonic()
            run = 1
            while True:
                for rate in rates:
                    run += 1
                    found = stretch(ledger, processes, notes, run, rate, seconds)
                    found["after_s"] = round(time.monotonic() - began, 1)
                    found["order_bytes"] = order_bytes(ledger)
                    results.append(found)
                    print(_line(found), file=sys.stderr, flush=True)
                if time.monotonic() >= began + lasting:
                    break
                notes.write_bytes(b"")
        finally:
            processes.stop()
        if not lasting:
            for found in results:
                found["beside_recvlogical"] = beside_recvlogical(ledger, found["rate"], seconds)
    kept = [found["held_per_second"] for found in results if found["kept_up"]]
    return {
        "lasting_s": lasting,
        "bound_s": _BOUNDED,
        "stretches": results,
        "sustained_per_second": max(kept, default=0),
    }


def _line(found: Figures) -> str:
    wanted = f"{found['rate']:,.0f}" if found["rate"] else "all"
    beside = f"{found['beside_recvlogical']:>16,}" if "beside_recvlogical" in found else ""
    return (
        f"{wanted:>10}{found['held_per_second']:>10,}{found['lag_s']:>10.4f} s{found['client_cpu_us']:>10.1f}"
        f"{found['rss_mb']:>8} MB{found['order_bytes']:>12.2f}{beside}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sustained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1000,2000,4000,8000,0", help="appends a second; 0: as many as there can be")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stretch")
    parser.add_argument("--for", dest="lasting", type=float, default=0.0, help="go on for so many seconds (soak)")
    parser.add_argument("--quick", action="store_true", help="within a minute: three seconds each")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    rates = [float(rate) for rate in given.rates.split(",")]
    machine = document.machine()
    found = measure(rates, 3.0 if given.quick else given.seconds, given.lasting)
    if given.json:
        document.write("sustained", machine, found)
        return 0
    print(f"{'wanted':>10}{'a second':>10}{'lag':>12}{'CPU us':>10}{'memory':>11}{'order':>12}{'pg_recvlogical':>16}")
    for each in found["stretches"]:
        print(_line(each))
    print(f"sustained with less than {_BOUNDED:g} s of lag: {found['sustained_per_second']:,} a second")
    print(document.described(machine))
    return 0
