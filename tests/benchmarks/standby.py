"""How long events wait when the first consumer is gone, until the stand-by has taken over.

    python -m tests.benchmarks standby [--rounds N] [--lease SECONDS] [--quick] [--json]

Two consumers on a server of one's own, and a writer of 100 events a second. The one that ingests is killed (-9),
stopped (SIGSTOP), or cut off from the network without a word to either side, and the time is taken from that moment
until an event that was written afterwards has an offset: detection, take-over and the first flush. Default settings,
but for ``--lease``.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import psycopg2
from psycopg2.extensions import make_dsn

from tests.benchmarks import document
from tests.chaos.consumer import Consumer, eventually
from tests.chaos.network import Network
from tests.integration.streams import Installed
from walstream.postgres import PostgresServer

KINDS: Final = ("killed", "stopped", "cut off")
_RATE: Final = 100.0
_CONTROLS: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walstream:walstream:ingest'"
    " AND datname = current_database()"
)


class Place:
    """A database on a server of one's own."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server, self.name = server, name
        server.execute(f"CREATE DATABASE {name}")

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    def execute(self, sql: str, *args: object) -> list[tuple[object, ...]]:
        return self.server.execute(sql, *args, dbname=self.name)


class Writer:
    """Appends one event after the other, and knows when each had committed."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)

    def _write(self) -> None:
        connection = psycopg2.connect(self._dsn)
        connection.autocommit = True
        with connection.cursor() as cur:
            while not self._stopping.wait(1 / _RATE):
                cur.execute(
                    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                    " VALUES (gen_random_uuid(), 'a', 't', '{}')"
                )
        connection.close()


def one_round(server: PostgresServer, kind: str, lease: float, folder: Path, number: int) -> float:
    """Seconds without an event, from the fault on."""
    place = Place(server, f"round_{KINDS.index(kind)}_{number}")
    stream = Installed(place)
    connection = psycopg2.connect(place.dsn)
    connection.autocommit = True

    def ask(sql: str) -> int:
        with connection.cursor() as cur:
            cur.execute(sql)
            row = cur.fetchone()
        return 0 if row is None or row[0] is None else int(row[0])

    with Network(server.port) as network:
        through = make_dsn(server.dsn(place.name, tcp=True), port=network.port)
        settings = {"SLOT": stream.settings.slot, "LEASE_SECONDS": str(lease), "RETRY_CAP_SECONDS": "30"}
        first, second = (
            Consumer(dsn, folder / f"{place.name}.{name}", settings=settings, flags=("--ingest-only",))
            for dsn, name in ((through, "first"), (place.dsn, "second"))
        )
        writer = Writer(place.dsn)
        try:
            with first:
                eventually(lambda: ask("SELECT max(max_seq) FROM walstream.commit_order"), 60, what="the first works")
                with second:
                    eventually(lambda: ask(_CONTROLS) == 2, 60, what="the second stands by")
                    time.sleep(1.0)
                    began = time.monotonic()
                    if kind == "killed":
                        first.signal(signal.SIGKILL)
                    elif kind == "stopped":
                        first.signal(signal.SIGSTOP)
                    else:
                        network.half_open("both")  # neither is told
                        network.stall()  # and no new connection gets through
                    time.sleep(0.02)  # what was on its way already does not count
                    with connection.cursor() as cur:
                        cur.execute("SELECT max(seq) FROM agent_events")
                        row = cur.fetchone()
                        assert row is not None
                    wanted = int(row[0]) + 1
                    eventually(
                        lambda: ask("SELECT max(max_seq) FROM walstream.commit_order") >= wanted,
                        120,
                        pause=0.005,
                        what="the stand-by works",
                    )
                    found = time.monotonic() - began
                    if first.running:
                        first.kill()
                    return found
        finally:
            writer.stop()
            connection.close()


def measure(rounds: int, lease: float) -> dict[str, list[float]]:
    """Seconds of each round, by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, PostgresServer(durable=False) as server:
        for number in range(rounds):
            for kind in KINDS:
                found[kind].append(one_round(server, kind, lease, Path(folder), number))
                print(f"{kind}: {found[kind][-1]:.2f} s", file=sys.stderr)
    return found


def main() -> int:
    words = argparse.ArgumentParser(prog="python -m tests.benchmarks standby", description=__doc__)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--lease", type=float, default=10.0, help="lease_seconds (10, as by default)")
    words.add_argument("--quick", action="store_true", help="within a minute: one round, and a lease of two seconds")
    words.add_argument("--json", action="store_true", help="one JSON document")
    given = words.parse_args()
    rounds, lease = (1, 2.0) if given.quick else (given.rounds, given.lease)
    machine = document.machine()
    found = measure(rounds, lease)
    if given.json:
        document.write("standby", machine, {"lease_seconds": lease, "seconds": found})
        return 0
    print(f"{'':10} {'median':>8} {'shortest':>9} {'longest':>8}")
    for kind, seconds in found.items():
        print(f"{kind:10} {statistics.median(seconds):>6.2f} s {min(seconds):>7.2f} s {max(seconds):>6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
