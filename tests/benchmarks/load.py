"""Appends at a rate, by pgbench: it costs little processor time, and says of every transaction when it was sent, and
when its commit had returned."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from psycopg2.extensions import parse_dsn

_PAYLOAD: Final = 250
_SCRIPT: Final = f"""\\set n :n + 1
INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES
 (('00000000-0000-4000-8000-' || lpad((:client_id)::int::text, 12, '0'))::uuid, 'researcher-1', 'tool.invoked',
 jsonb_build_object('run', (:run)::int, 'client', (:client_id)::int, 'n', (:n)::int, 'text', repeat('x', {_PAYLOAD})));
"""

Place = tuple[int, int]
"""Client, and which of its transactions."""


class Sent(NamedTuple):
    """Microseconds since 1970."""

    sent: int
    committed: int


def append(bin_dir: Path, dsn: str, *, run: int, rate: float, seconds: float, clients: int) -> dict[Place, Sent]:
    """Insert one event a transaction, ``rate`` a second at random moments; return when each was sent and committed.

    Args:
        run: goes into the payloads, to tell several loads apart.
        rate: 0 for as many as possible.

    Raises:
        RuntimeError: pgbench failed.
    """
    words = parse_dsn(dsn)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "insert.sql"
        script.write_text(_SCRIPT)
        command = [
            str(bin_dir / "pgbench"), "-n", "-M", "prepared", "-f", str(script), "-c", str(clients), "-j", "1",
            "-T", str(max(1, round(seconds))), "-D", "n=0", "-D", f"run={run}", "-l", f"--log-prefix={folder}/log",
            *(["-R", f"{rate:g}"] if rate else []),
            "-h", words["host"], "-p", words["port"], "-U", words["user"], words["dbname"],
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        environment["PGOPTIONS"] = words.get("options", "")
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"pgbench ended with {done.returncode}: {done.stderr[-2000:]}")
        found: dict[Place, Sent] = {}
        for log in Path(folder).glob("log.*"):
            for line in log.read_text().splitlines():
                client, number, took, _, epoch, micros, *lag = line.split()
                committed = int(epoch) * 1_000_000 + int(micros)
                started = committed - int(took) + (int(lag[0]) if lag else 0)
                found[int(client), int(number)] = Sent(started, committed)
    return found
