"""How fast events are put on record, and verified.

    python -m tests.benchmarks.audit [EVENTS]

Prints the best of many rounds for making and following records in memory; then a whole trail on disk; then the sink on
a stream (500 events a transaction), against `pg_recvlogical -f FILE`, which writes the raw stream to the same disk
with a flush a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.audit_files import SETTINGS, settle
from walstream.audit.chain import Link
from walstream.audit.record import Pen
from walstream.audit.trail import AuditTrail
from walstream.audit.verifying import verify
from walstream.event import Commit, Event
from walstream.postgres import PostgresServer

_ROUND = 1000
_ROUNDS = 300
_BATCH = 5000
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


def best(call: Callable[[], object], count: int) -> float:
    """Records a second, in the best round."""
    shortest = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - began)
    return count / shortest


def in_memory() -> None:
    some = events(_ROUND)

    def make() -> bytes:
        pen = Pen()
        return b"".join([pen.event(event, b'"2026-01-02T03:04:05.678+00:00"') for event in some])

    data = make()
    print(f"made in memory          {best(make, _ROUND):12,.0f} records/s")
    follow = best(lambda: Link(offset=0).follow(data.split(b"\n")[:-1]), _ROUND)
    print(f"followed in memory      {follow:12,.0f} records/s (one core)")


def on_disk(folder: Path, count: int) -> None:
    some = events(count)
    directory = folder / "audit"
    trail = AuditTrail(directory)
    began = time.perf_counter()
    for start in range(0, count, _BATCH):
        trail.record(some[start : start + _BATCH], SETTINGS)
    print(f"put on record           {count / (time.perf_counter() - began):12,.0f} events/s, flushed every {_BATCH:,}")
    trail.close()
    settle(directory, some[-1])
    began = time.perf_counter()
    report = verify(directory)
    print(f"verified                {report.records / (time.perf_counter() - began):12,.0f} records/s")
    assert report.findings == []
    assert report.events == count


def on_a_stream(folder: Path, count: int) -> None:
    with PostgresServer(durable=False) as server:
        dsn = server.dsn()
        environ = {**os.environ, "WALSTREAM_DSN": dsn, "BENCHMARK_AUDIT": str(folder / "streamed")}
        walstream = [sys.executable, "-m", "walstream"]
        subprocess.run([*walstream, "init"], env=environ, check=True, stdout=subprocess.DEVNULL)
        receive = [str(server.bin_dir / "pg_recvlogical"), "-d", dsn, "-S", "raw"]
        subprocess.run([*receive, "--create-slot", "-P", "pgoutput"], check=True)
        for _ in range(count // 500):
            server.execute(_INSERT)
        options = ("-o", "proto_version=1", "-o", "publication_names=walstream")
        end = server.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0]
        began = time.perf_counter()
        subprocess.run(
            [*receive, "--start", "-f", str(folder / "raw"), "-F", "1", "-n", "-E", str(end), *options],
            check=True,
        )
        raw = count / (time.perf_counter() - began)
        print(f"pg_recvlogical -f       {raw:12,.0f} events/s")
        for flags, what in (((), "ingest and sink in one process"), (("--no-ingest",), "the sink alone, read cold")):
            server.execute("DELETE FROM walstream.cursors; DELETE FROM walstream.projectors")
            environ["BENCHMARK_AUDIT"] = str(folder / f"streamed{len(flags)}")
            rate, cpu = _streamed([*walstream, "run", _TARGET, *flags], environ, server, count)
            print(
                f"the sink                {rate:12,.0f} events/s, {rate / raw:.2f} of that,"
                f" {cpu / count * 1e6:.1f} µs of processor an event: {what}"
            )


def _streamed(command: list[str], environ: dict[str, str], server: PostgresServer, count: int) -> tuple[float, float]:
    """Events a second from the moment that the trail is begun, and the process's time on a processor in seconds."""
    directory = Path(environ["BENCHMARK_AUDIT"])
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        while not directory.exists():
            time.sleep(0.001)
        began = time.perf_counter()
        while server.execute("SELECT coalesce(max(position), 0) FROM walstream.cursors")[0][0] < count:
            time.sleep(0.02)
        rate = count / (time.perf_counter() - began)
    finally:
        process.terminate()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # it was waited for just now
    return rate, used.ru_utime + used.ru_stime


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    with tempfile.TemporaryDirectory() as folder:
        in_memory()
        on_disk(Path(folder), count)
        on_a_stream(Path(folder), count)


if __name__ == "__main__":
    main()
