"""How fast events are put on record, and verified.

    python -m tests.benchmarks audit [EVENTS] [--quick] [--json]

Records a second, made and followed in memory (the best of many rounds), then a whole trail on disk; then the sink on a
stream (500 events a transaction), against `pg_recvlogical -f FILE`, which writes the raw stream to the same disk with a
flush a second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.audit_files import SETTINGS, settle
from tests.benchmarks import document
from tests.benchmarks.draining import Drained, drained_in, summary
from tests.benchmarks.peak_memory import peak_mb
from walstream.audit.chain import Link
from walstream.audit.record import Pen
from walstream.audit.trail import AuditTrail
from walstream.audit.verifying import verify
from walstream.event import Commit, Event
from walstream.postgres import PostgresServer

_ROUND = 1000
_ROUNDS = 300
_BATCH = 5000
_RAW = "pg_recvlogical -f FILE"
_TARGET = "tests.benchmarks.audit_stream:stream"
_INSERT = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
    " SELECT md5((n % 50)::text)::uuid, 'researcher-1', 'tool.invoked',"
    " jsonb_build_object('text', repeat('x', 180), 'n', n) FROM generate_series(1, 500) AS n"
)


def events(count: int) -> list[Event]:
    """Events of about 290 bytes, 500 a transaction."""
    made: list[Event] = []
    commit = Commit(0, 0, 0, "")
    for n in range(1, count + 1):
        if n % 500 == 1:
            commit = Commit(n * 64, 820_000_000_000_000 + n, n, "11111111-2222-3333-4444-555555555555:1")
        session = b"00000000-0000-4000-8000-%012d" % (n % 50)
        payload = b'{"text": "%b", "n": %d}' % (b"x" * 180, n)
        row = (n, session, b"researcher-1", b"tool.invoked", payload, b"2026-01-02 03:04:05.678901+00", None)
        made.append(Event(n, row, commit))
    return made


def best(call: Callable[[], object], count: int, rounds: int) -> int:
    """Records a second, in the best round."""
    shortest = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - began)
    return round(count / shortest)


def in_memory(rounds: int) -> dict[str, int]:
    """Records a second on one core: made, and followed link by link."""
    some = events(_ROUND)

    def make() -> bytes:
        pen = Pen()
        return b"".join([pen.event(event, b'"2026-01-02T03:04:05.678+00:00"') for event in some])

    data = make()
    return {
        "made in memory": best(make, _ROUND, rounds),
        "followed in memory": best(lambda: Link(offset=0).follow(data.split(b"\n")[:-1]), _ROUND, rounds),
    }


def on_disk(folder: Path, count: int) -> dict[str, int]:
    """Records a second of a whole trail: put there, and verified."""
    some = events(count)
    directory = folder / "audit"
    trail = AuditTrail(directory)
    began = time.perf_counter()
    for start in range(0, count, _BATCH):
        trail.record(some[start : start + _BATCH], SETTINGS)
    recorded = count / (time.perf_counter() - began)
    trail.close()
    settle(directory, some[-1])
    began = time.perf_counter()
    report = verify(directory)
    verified = report.records / (time.perf_counter() - began)
    assert report.findings == []
    assert report.events == count
    return {f"put on disk, flushed every {_BATCH:,}": round(recorded), "verified": round(verified)}


def on_a_stream(folder: Path, count: int) -> document.Figures:
    """The sink beside the server's own client, by contender."""
    with PostgresServer(durable=False) as server:
        dsn = server.dsn()
        environ = {**os.environ, "WALSTREAM_DSN": dsn}
        walstream = [sys.executable, "-m", "walstream"]
        subprocess.run([*walstream, "init"], env=environ, check=True, stdout=subprocess.DEVNULL)
        receive = [str(server.bin_dir / "pg_recvlogical"), "-d", dsn, "-S", "raw"]
        subprocess.run([*receive, "--create-slot", "-P", "pgoutput"], check=True)
        for _ in range(count // 500):
            server.execute(_INSERT)
        options = ("-o", "proto_version=1", "-o", "publication_names=walstream")
        end = server.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0]
        command = [*receive, "--start", "-f", str(folder / "raw"), "-F", "1", "-n", "-E", str(end), *options]
        runs = {_RAW: [_received(command)]}
        for flags, what in (((), "ingest and sink in one process"), (("--no-ingest",), "the sink alone, read cold")):
            server.execute("DELETE FROM walstream.cursors; DELETE FROM walstream.projectors")
            environ["BENCHMARK_AUDIT"] = str(folder / f"streamed{len(flags)}")
            runs[what] = [_streamed([*walstream, "run", _TARGET, *flags], environ, server, count)]
    return summary(runs, count, first=_RAW)


def _received(command: list[str]) -> Drained:
    began = time.perf_counter()
    process = subprocess.Popen(command)
    rss: float | None = None
    ended, status, used = 0, 0, None
    while not ended:
        rss = peak_mb(process.pid) or rss
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        time.sleep(0 if ended else 0.005)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0 or used is None:
        raise subprocess.CalledProcessError(process.returncode, command)
    return drained_in(seconds, used, rss)


def _streamed(command: list[str], environ: dict[str, str], server: PostgresServer, count: int) -> Drained:
    """The sink, from the moment that the trail is begun."""
    directory = Path(environ["BENCHMARK_AUDIT"])
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        while not directory.exists():
            time.sleep(0.001)
        began = time.perf_counter()
        while server.execute("SELECT coalesce(max(position), 0) FROM walstream.cursors")[0][0] < count:
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        rss = peak_mb(process.pid)
    finally:
        process.terminate()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # it was waited for just now
    return drained_in(seconds, used, rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", nargs="?", type=int, default=200_000, metavar="EVENTS")
    parser.add_argument("--quick", action="store_true", help="within a minute: 10,000 events, a few rounds")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    count = 10_000 if given.quick else given.events
    machine = document.machine()
    with tempfile.TemporaryDirectory() as folder:
        records = in_memory(10 if given.quick else _ROUNDS) | on_disk(Path(folder), count)
        stream = on_a_stream(Path(folder), count)
    if given.json:
        document.write("audit", machine, {"records_per_s": records, "stream": stream})
        return
    for name, rate in records.items():
        print(f"{name:34}{rate:>12,} records/s")
    print(f"\n{'':34}{'events/s':>12}{'ratio':>7}{'CPU us':>8}{'MB':>6}")
    for name, each in stream.items():
        print(
            f"{name:34}{each['events_per_s']:>12,}{each['ratio']:>7.2f}{each['client_cpu_us']:>8.2f}{each['rss_mb']:>6}"
        )
    print(document.described(machine))


if __name__ == "__main__":
    main()
