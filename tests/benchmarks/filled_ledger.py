"""A server of one's own with a stream that was set up and never read: whoever drains it drains the same WAL.

The slot of the set-up is kept as it is; each run gets a copy of it, and an order and cursors that are empty again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from typer.testing import CliRunner

from tests.benchmarks.shapes import Shape, filling
from walstream.cli.app import app
from walstream.lsn import parse_lsn
from walstream.postgres import PostgresServer
from walstream.postgres.server import Setting, execute

SLOT: Final = "bench"
PUBLICATION: Final = "walstream"
_KEPT: Final = "bench_kept"
_DATABASE: Final = "bench"
_PATIENCE: Final = 30.0
_STARTED: Final = re.compile(r"^(\S+ \S+) UTC \[(\d+)\] .*START_REPLICATION", re.MULTILINE)
_SETTINGS: Final[Mapping[str, Setting]] = {
    "log_replication_commands": True,  # the moment at which a contender begins, by the same clock for all of them
    "checkpoint_timeout": "30min",
    "max_wal_size": "16GB",
    "max_slot_wal_keep_size": "50GB",
    "shared_buffers": "256MB",
    "autovacuum": False,
}


class FilledLedger:
    """A server, a stream on it, and ``events`` of a shape that nobody has read yet.

    Attributes:
        server: running.
        events: how many there are.
        end: WAL position behind the last of them, as text.
    """

    def __init__(self, shape: Shape, events: int | None = None, *, sessions: int = 1000) -> None:
        self._shape = shape
        self._sessions = sessions
        self.events = shape.events if events is None else events
        self.server = PostgresServer(_SETTINGS, durable=True)
        self.end = "0/0"
        self._logged = 0

    def __enter__(self) -> Self:
        self.server.__enter__()
        try:
            self._fill()
        except BaseException:
            self.server.destroy()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.server.destroy()

    def dsn(self, *, tcp: bool = False) -> str:
        """Of the database."""
        return self.server.dsn(_DATABASE, tcp=tcp)

    def execute(self, *sql: str) -> list[tuple[object, ...]]:
        """Run statements one after the other; the rows of the last one."""
        found: list[tuple[object, ...]] = []
        for each in sql:
            found = execute(self.dsn(), each)
        return found

    def environment(self, *, tcp: bool = False) -> dict[str, str]:
        """What `walstream` is to find in its environment."""
        return {"WALSTREAM_DSN": self.dsn(tcp=tcp), "WALSTREAM_SLOT": SLOT}

    def reset(self, plugin: str = "pgoutput") -> None:
        """A slot, an order and cursors as they were before anybody read.

        Args:
            plugin: of the slot, for clients that read another one's output.
        """
        until = time.monotonic() + _PATIENCE
        while self.execute("SELECT FROM pg_replication_slots WHERE slot_name = 'bench' AND active"):
            if time.monotonic() > until:
                raise RuntimeError("the slot of the run before is still being read")
            time.sleep(0.02)
        self.execute(
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{SLOT}'",
            f"SELECT pg_copy_logical_replication_slot('{_KEPT}', '{SLOT}', false, '{plugin}')",
            "TRUNCATE walstream.commit_order",
            "DELETE FROM walstream.projectors",
            "UPDATE walstream.ingest SET state = 'stopped', lease_until = NULL, owner = NULL, proven_seq = NULL,"
            " events = 0, recovered = 0, violations = 0, confirmed_lsn = (SELECT confirmed_flush_lsn"
            f" FROM pg_replication_slots WHERE slot_name = '{SLOT}')",
            "CHECKPOINT",  # what the run before wrote is on the disk, so that this one is not disturbed by it
        )
        self._logged = len(self.server.log)

    def forget_cursors(self) -> None:
        """Projectors are new again; the order stays."""
        self.execute("DELETE FROM walstream.projectors", "CHECKPOINT")

    def started(self) -> tuple[float, int]:
        """When the slot of the run began to be read (seconds since 1970), and by which server process.

        Raises:
            RuntimeError: nobody has begun for a long time.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            found = _STARTED.search(self.server.log[self._logged :])
            if found:
                moment, walsender = found.groups()
                return datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp(), int(walsender)
            if time.monotonic() > until:
                raise RuntimeError("nobody began to read the slot")
            time.sleep(0.02)

    def wal_bytes(self) -> int:
        """How long the WAL has become."""
        return parse_lsn(str(self.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0]))

    @property
    def recvlogical(self) -> Path:
        """The server's own client."""
        return self.server.bin_dir / "pg_recvlogical"

    def _fill(self) -> None:
        execute(self.server.dsn(), f"CREATE DATABASE {_DATABASE}")
        result = CliRunner().invoke(app, ["init", "--dsn", self.dsn(), "--slot", SLOT])
        if result.exit_code != 0:
            raise RuntimeError(f"walstream init failed: {result.output}")
        self.execute(f"SELECT pg_copy_logical_replication_slot('{SLOT}', '{_KEPT}')")
        self.execute(
            filling(self._shape, self.events, sessions=self._sessions),
            "SELECT count(*) FROM agent_events",  # whoever reads rows first marks them, and writes WAL with that
            "CHECKPOINT",
        )
        self.end = str(self.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0])
