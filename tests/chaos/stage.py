"""Where a chaos run takes place: a server of its own, a bad network before it, a small disk, and consumer processes as
somebody runs them who has a supervisor: what ends by itself is started again, and written down.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg2
from psycopg2.extensions import make_dsn

from walstream.audit.keys import generate
from walstream.config import Settings
from walstream.demo.orphans import PARENT_VARIABLE
from walstream.postgres import PostgresServer

from .consumer import Consumer
from .network import Network
from .plan import LEASE_SECONDS

SLOT: Final = "chaos"
APART: Final = ("far", "audit-sink")  # what runs in a process without ingest
WORKERS: Final = ("worker one", "worker two")
_DISK: Final = "1g"
_NO_LIMIT: Final = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended although nobody told it to."""

    who: str
    code: int
    said: str


class Stage:
    """Made by the block that uses it, and removed at its end.

    Args:
        folder: for logs and files; it is there.
        on_end: told of processes that ended by themselves.

    Attributes:
        server, network: which the consumers reach through it, and the load without.
    """

    def __init__(self, folder: Path, on_end: Callable[[Ended], None]) -> None:
        self.folder = folder
        self.audit = folder / "disk"
        self.server = PostgresServer(
            {
                "max_connections": 300,
                "max_slot_wal_keep_size": "96MB",
                "max_wal_size": "128MB",
                "min_wal_size": "32MB",
                "wal_writer_delay": "2s",  # the window in which an asynchronous commit is lost by a crash
                "wal_sender_timeout": "30s",
            },
            durable=False,
        )
        self._on_end = on_end
        self._exits = contextlib.ExitStack()
        self._mounted = False
        self._lock = threading.RLock()
        self._wanted: dict[str, Consumer] = {}
        self._closing = threading.Event()

    def __enter__(self) -> Stage:
        try:
            self._exits.enter_context(self.server)
            self.network = self._exits.enter_context(Network(self.server.port))
            self._make_disk()
            self.public_key, _ = generate(self.folder / "audit.key")
            (self.folder / "heads").mkdir()
            self.settings = Settings(dsn=self.server.dsn(), slot=SLOT, lease_seconds=LEASE_SECONDS)
            threading.Thread(target=self._supervise, daemon=True).start()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close_processes()
        self._exits.close()

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, who: str) -> None:
        """Start a process: ``consumer``, ``second`` (the same once more), ``reader`` (no slot, some projectors), or one
        of :data:`WORKERS`."""
        with self._lock:
            if who not in self._wanted:
                self._wanted[who] = self._made(who)
            if not self._wanted[who].running:
                self._wanted[who].start()

    def process(self, who: str) -> Consumer:
        """The process that is called so."""
        return self._wanted[who]

    def kill(self, who: str) -> None:
        """SIGKILL; it stays dead until it is started again."""
        with self._lock:
            self.process(who).kill()
            self.dismiss(who)

    def dismiss(self, who: str) -> Consumer:
        """From now on it may end; returns it."""
        with self._lock:
            return self._wanted.pop(who)

    def signal(self, who: str, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        with self._lock:
            consumer = self._wanted.get(who)
            if consumer is not None and consumer.running:
                consumer.signal(number)

    def promote_second(self) -> None:
        """The second one is the consumer from now on."""
        with self._lock:
            self._wanted["consumer"] = self._wanted.pop("second")

    def terminate(self) -> dict[str, int]:
        """SIGTERM to all; their exit codes."""
        with self._lock:
            leaving = {who: self.dismiss(who) for who in list(self._wanted)}
        codes = {}
        for who, consumer in leaving.items():
            try:
                codes[who] = consumer.terminate(60)
            except subprocess.TimeoutExpired:
                consumer.kill()
                codes[who] = -signal.SIGKILL
        return codes

    def close_processes(self) -> None:
        """Kill what still runs."""
        self._closing.set()
        with self._lock:
            for who in list(self._wanted):
                self.kill(who)

    def _made(self, who: str) -> Consumer:
        apart = [word for name in APART for word in (("--only" if who == "reader" else "--except"), name)]
        settings = {
            "SLOT": SLOT,
            "LEASE_SECONDS": str(LEASE_SECONDS),
            "RETRY_CAP_SECONDS": "1",
            "LIVENESS_SECONDS": "5",
            "POLL_SECONDS": "0.5",
            "CHUNK_BYTES": "65536",
            "PENDING_BYTES": "1048576",
            "BUFFER_BYTES": "1048576",
            "IDLE_PERSIST_SECONDS": "2",
        }
        works = who in WORKERS
        return Consumer(
            str(make_dsn(self.server.dsn(tcp=True), port=str(self.network.port))),
            self.folder / f"{who}.log",
            command="worker" if works else "run",
            target=f"tests.chaos.cast:{'worker' if works else 'stream'}",
            settings=settings,
            environ={
                "CHAOS_FOLDER": str(self.folder),
                "CHAOS_AUDIT": str(self.audit / "trail"),
                PARENT_VARIABLE: str(os.getpid()),
            },
            flags=() if works else (*(("--no-ingest",) if who == "reader" else ()), *apart),
        )

    def _supervise(self) -> None:
        while not self._closing.wait(0.1):
            with self._lock:
                for who, consumer in self._wanted.items():
                    code = consumer.exit_code
                    if code is not None and not self._closing.is_set():
                        self._on_end(Ended(who, code, consumer.output[-1500:]))
                        consumer.start()

    # -- the database --------------------------------------------------------------------------------------------------

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run SQL as superuser, past the bad network; waits while the server is away."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.server.execute(sql, *args)
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    # -- the disk ------------------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """From now on the audit trail cannot grow: no space is left where we may mount a disk, else files are limited
        to the size that they have (RLIMIT_FSIZE)."""
        if not self._mounted:
            size = max((path.stat().st_size for path in self.audit.rglob("*") if path.is_file()), default=0)
            self._limit_files(size)
            return
        descriptor = os.open(self.audit / "ballast", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(descriptor, bytes(1 << 20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(descriptor)

    def free_disk(self) -> None:
        """There is space again."""
        if self._mounted:
            (self.audit / "ballast").unlink(missing_ok=True)
        else:
            self._limit_files(_NO_LIMIT)

    def _limit_files(self, size: int) -> None:
        with self._lock:
            reader = self._wanted.get("reader")
            if reader is not None and reader.running:
                resource.prlimit(reader.pid, resource.RLIMIT_FSIZE, (size, _NO_LIMIT))

    def _make_disk(self) -> None:
        self.audit.mkdir()
        if os.getuid() != 0 or shutil.which("mount") is None:
            return
        words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(self.audit)]
        self._mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
        if self._mounted:
            self._exits.callback(subprocess.run, ["umount", "-l", str(self.audit)], check=False)

    # -- what is left of a failed run ----------------------------------------------------------------------------------

    def keep(self) -> None:
        """Put the server's data and the audit trail where they outlive the block."""
        self.close_processes()
        with contextlib.suppress(OSError):
            (self.folder / "server.log").write_text(self.server.log)
        self.server.stop("immediate")
        shutil.copytree(self.server.data_dir, self.folder / "data", dirs_exist_ok=True)
        if self._mounted:
            shutil.copytree(self.audit, self.folder / "audit", dirs_exist_ok=True)
