"""One contender drains a filled ledger once: how long it took, and what it cost."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.benchmarks import document, drained_receipt
from tests.benchmarks.filled_ledger import SLOT, FilledLedger
from tests.benchmarks.peak_memory import peak_mb, peak_mb_in
from tests.benchmarks.processes import Processes, cpu_seconds_of

_PATIENCE: Final = 300.0
_LOOK: Final = 0.02


@dataclass(frozen=True, slots=True)
class Drained:
    """What one run took.

    Attributes:
        seconds: from the moment at which the slot began to be read until the last event was handled.
        client_cpu: seconds of processor time of the client, without its start.
        walsender_cpu: the same of the server process that sends; ``None`` where there is no /proc.
        rss_mb: the client's peak.
        threads: seconds of processor time by thread, where the client tells.
        share: of the events that were there; a slow client need not drain them all.
    """

    seconds: float
    client_cpu: float
    walsender_cpu: float | None
    rss_mb: float
    threads: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0


def by_walstream(
    ledger: FilledLedger,
    *,
    tcp: bool = False,
    projectors: int = 1,
    parsing: int = 0,
    walsender: bool = True,
    cold: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Drained:
    """`walstream run` as it is shipped.

    Args:
        projectors: how many.
        parsing: how many of them look into every payload.
        walsender: whether the slot is read at all (a played stream begins when the projector was set up).
        cold: nobody ingests; what is in the order already is read from there and from the table.
        environment: further settings.

    Raises:
        RuntimeError: it ended, or takes too long.
    """
    if cold:
        ledger.forget_cursors()
    else:
        ledger.reset()
    with tempfile.TemporaryDirectory() as folder:
        receipt = Path(folder) / "receipt.json"
        wanted = {
            **ledger.environment(tcp=tcp),
            drained_receipt.EVENTS: str(ledger.events),
            drained_receipt.RECEIPT: str(receipt),
            drained_receipt.PROJECTORS: str(projectors),
            drained_receipt.PARSING: str(parsing),
            **(environment or {}),
        }
        processes = Processes(Path(folder) / "log", wanted)
        target = "tests.benchmarks.drained_stream:stream"
        processes.start("walstream", "run", target, *(["--no-ingest"] if cold else []))
        cpu: float | None = None
        try:
            began: float | None = None
            if walsender and not cold:
                began, sender = ledger.started()
            until = time.monotonic() + _PATIENCE
            while not receipt.exists():
                processes.check()
                if time.monotonic() > until:
                    raise RuntimeError(f"walstream has not drained {ledger.events} events in {_PATIENCE:.0f} s")
                time.sleep(_LOOK)
            if began is not None:
                cpu = cpu_seconds_of(sender)
        finally:
            processes.stop()
        found = json.loads(receipt.read_text())
    return Drained(found["ended"] - (began or found["began"]), found["cpu"], cpu, found["rss_mb"], found["threads"])


def by_recvlogical(ledger: FilledLedger, options: Sequence[str], *, tcp: bool = False) -> Drained:
    """`pg_recvlogical -f /dev/null`, which does nothing with what it receives.

    Args:
        options: of the plugin, and its own.

    Raises:
        RuntimeError: it failed.
    """
    ledger.reset()
    command = [
        str(ledger.recvlogical), "-d", ledger.dsn(tcp=tcp), "--slot", SLOT, "--start", "-f", os.devnull,
        "--endpos", ledger.end, "--no-loop", *options,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    began, sender = ledger.started()
    cpu: float | None = None
    rss: float | None = None
    while True:
        rss = peak_mb(process.pid) or rss
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        cpu = cpu_seconds_of(sender) or cpu
        time.sleep(_LOOK)
    process.returncode = os.waitstatus_to_exitcode(status)
    moment = time.time()
    assert process.stderr is not None
    with process.stderr as pipe:
        said = pipe.read().decode(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"pg_recvlogical ended with {process.returncode}: {said}")
    return drained_in(moment - began, usage, rss, cpu)


def drained_in(
    seconds: float,
    usage: resource.struct_rusage,
    rss_mb: float | None,
    walsender_cpu: float | None = None,
    *,
    share: float = 1.0,
) -> Drained:
    """What a client took that has ended; its start is in it.

    Args:
        seconds: from beginning to end.
        usage: what `os.wait4` says of it.
        rss_mb: its peak while it ran, where that is known.
        walsender_cpu: of the process that sent.
        share: of the events.
    """
    rss_mb = rss_mb or peak_mb_in(usage)
    return Drained(seconds, usage.ru_utime + usage.ru_stime, walsender_cpu, rss_mb, share=share)


def summary(results: Mapping[str, Sequence[Drained]], events: int, *, first: str) -> document.Figures:
    """Medians by contender, and ratios of events a second, each within its own round.

    Args:
        results: a run in each round, by contender.
        first: ratios are to the contenders whose names begin so, and to the fastest of them.
    """
    of_first = [runs for name, runs in results.items() if name.startswith(first)]
    best = [min(run.seconds for run in each) for each in zip(*of_first, strict=True)]
    found: document.Figures = {}
    for name, drained in results.items():
        counts = [events * run.share for run in drained]
        rates = [count / run.seconds for count, run in zip(counts, drained, strict=True)]
        ratios = [quickest * run.share / run.seconds for quickest, run in zip(best, drained, strict=True)]
        clients = [run.client_cpu / count for count, run in zip(counts, drained, strict=True)]
        senders = [
            run.walsender_cpu / count
            for count, run in zip(counts, drained, strict=True)
            if run.walsender_cpu is not None
        ]
        found[name] = {
            "events": round(max(counts)),
            "events_per_s": round(statistics.median(rates)),
            "spread": [round(min(rates)), round(max(rates))],
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "client_cpu_us": round(statistics.median(clients) * 1e6, 2),
            "walsender_cpu_us": round(statistics.median(senders) * 1e6, 2) if senders else None,
            "rss_mb": round(max(run.rss_mb for run in drained)),
            "runs": len(drained),
        }
    return found
