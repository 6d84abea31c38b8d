"""A Postgres server of one's own: made, started, stopped and removed by this process.

For the demo and for tests. It keeps its data in a temp directory, listens on a Unix socket that only its owner (and
root) can reach, and on 127.0.0.1 with a random password, because on a machine with several users the loopback
interface belongs to all of them.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psycopg2
from psycopg2.extensions import make_dsn

from walstream.errors import ConfigError, Unavailable

from .binaries import find_binaries, runnable, server_account, version_of
from .workspace import Workspace, forget_dead_postmaster, postmaster_pid, run_as

Mode = Literal["smart", "fast", "immediate"]
Setting = str | int | float | bool

SUPERUSER: Final = "postgres"

# Below the range that Linux (32768) and macOS (49152) draw from for outgoing connections, so that nobody else's
# connection takes the port while the server is down.
_PORTS: Final = range(15_000, 32_000)
_START_SECONDS: Final = 60
_STOP_SECONDS: Final = 30

_DEFAULTS: Final[Mapping[str, Setting]] = {
    "wal_level": "logical",
    "max_connections": 100,
    "max_replication_slots": 40,
    "max_wal_senders": 40,
    "max_prepared_transactions": 20,
    "max_slot_wal_keep_size": "8GB",
    "max_wal_size": "1GB",
    "shared_buffers": "64MB",
    "listen_addresses": "127.0.0.1",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %a ",
    "password_encryption": "scram-sha-256",
    "jit": False,
}
# Nobody needs the data after a power cut. Commits still reach the operating system before they are acknowledged, so
# that a killed server loses nothing.
_VOLATILE: Final[Mapping[str, Setting]] = {"fsync": False, "full_page_writes": False}

_HBA: Final = """\
local all         all              trust
local replication all              trust
host  all         all 127.0.0.1/32 scram-sha-256
host  replication all 127.0.0.1/32 scram-sha-256
"""


class PostgresServer:
    """A server with a data directory of its own. As a context manager it is made, started, and removed at the end.

    Attributes:
        settings: what its configuration file says; changes take effect at the next start (or :meth:`reload`).
        bin_dir: the folder of its programs.
        version: such as ``18.6``.
        major: such as ``18``.
        port: on 127.0.0.1; stays the same over restarts.
        password: of the superuser, for connections over TCP.
    """

    def __init__(
        self, settings: Mapping[str, Setting] | None = None, *, bin_dir: Path | None = None, durable: bool = True
    ) -> None:
        """Look for the programs; nothing is made before :meth:`init`.

        Args:
            settings: server settings that win over the defaults above.
            bin_dir: the folder of the programs, instead of what :func:`find_binaries` finds.
            durable: ``False`` trades the data's survival of a power cut for speed (``fsync`` off).

        Raises:
            ConfigError: there are no programs, or no account to run them.
        """
        self._account = server_account()
        self.bin_dir = runnable(bin_dir or find_binaries(), self._account)
        self.version = version_of(self.bin_dir)
        self.major = int(self.version.partition(".")[0])
        self.settings: dict[str, Setting] = {**_DEFAULTS, **({} if durable else _VOLATILE), **(settings or {})}
        self.port = 0
        self.password = secrets.token_hex(16)
        self._durable = durable
        self._workspace: Workspace | None = None

    def __enter__(self) -> Self:
        try:
            self.init()
            self.start()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()

    @property
    def data_dir(self) -> Path:
        """The data directory; its ``pg_hba.conf`` is there for tests to change."""
        return self._place.data

    @property
    def socket_dir(self) -> Path:
        """The folder of the Unix socket."""
        return self._place.sockets

    @property
    def log(self) -> str:
        """Everything that the server has reported so far."""
        try:
            return self._place.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def pid(self) -> int | None:
        """The postmaster's process id; ``None`` while the server does not run."""
        return None if self._workspace is None else postmaster_pid(self._workspace.data)

    def init(self) -> None:
        """Make the data directory.

        Raises:
            ConfigError: ``initdb`` failed; the message holds what it said.
        """
        self._workspace = place = Workspace(self._account)
        words = ["-U", SUPERUSER, "--encoding=UTF8", "--no-locale", "--auth=trust"]
        made = self._run("initdb", "-D", place.data, *words, *([] if self._durable else ["--no-sync"]), timeout=300)
        if made.returncode != 0:
            raise ConfigError(f"initdb failed: {made.stderr.strip() or made.stdout.strip()}")
        (place.data / "pg_hba.conf").write_text(_HBA)
        with (place.data / "postgresql.conf").open("a") as file:
            file.write("include 'walstream.conf'\n")

    def start(self) -> None:
        """Start the server and wait until it takes connections. Does nothing if it runs.

        Raises:
            Unavailable: it did not start; the message holds the end of its log.
        """
        if self.pid is not None:
            return
        first = self.port == 0
        forget_dead_postmaster(self._place.data, self._place.sockets)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if first:
                self.port = _free_port()
            self._write_settings()
            logged = len(self.log)
            done = self._run("pg_ctl", *self._on_data("start", _START_SECONDS), "-l", self._place.log, timeout=90)
            if done.returncode == 0:
                break
            told = self.log[logged:]
            # Another process took the port in between; or a child of a killed postmaster still winds up.
            again = (first and "Address already in use" in told) or "shared memory block" in told
            if not again or time.monotonic() > deadline:
                self.kill()
                raise Unavailable(
                    f"Postgres {self.version} did not start: {told[-2000:].strip() or done.stderr.strip()}"
                )
            time.sleep(0.1)
        if first:
            self.execute(f"ALTER ROLE {SUPERUSER} PASSWORD '{self.password}'")

    def stop(self, mode: Mode = "fast", *, timeout: float = _STOP_SECONDS) -> None:
        """Stop the server; ``immediate`` is a crash, from which the next start recovers.

        A fast stop waits for walsenders, and they wait for their clients: after ``timeout`` seconds it becomes an
        immediate one, and at last the processes are killed. So this returns within about twice ``timeout``.
        """
        if self.pid is None:
            return
        for how in dict.fromkeys((mode, "immediate")):
            done = self._run("pg_ctl", *self._on_data("stop", timeout), "-m", how, timeout=timeout + 10)
            if done.returncode == 0:
                return
        self.kill()

    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start; the port stays."""
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        """Make the running server read :attr:`settings` and ``pg_hba.conf`` again."""
        self._write_settings()
        self.execute("SELECT pg_catalog.pg_reload_conf()")

    def kill(self) -> None:
        """End the postmaster with SIGKILL, as a machine out of memory would; its children notice and end."""
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self.pid == pid:
            time.sleep(0.02)

    def destroy(self) -> None:
        """Stop the server and remove everything of it. May be called at any time, more than once."""
        if self._workspace is None:
            return
        self.stop("immediate")
        self._workspace.remove()
        self._workspace = None

    def keep(self) -> None:
        """Leave the server running when this process ends."""
        self._place.keep()

    def dsn(self, dbname: str = "postgres", user: str = SUPERUSER, *, tcp: bool = False) -> str:
        """Return a connection string: over the Unix socket, or over 127.0.0.1 with the superuser's password in it."""
        where: dict[str, str] = {"host": str(self.socket_dir)}
        if tcp:
            where = {"host": "127.0.0.1"}
            if user == SUPERUSER:
                where["password"] = self.password
        return str(make_dsn(**where, port=str(self.port), dbname=dbname, user=user))

    def execute(self, sql: str, *args: Any, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Run ``sql`` as superuser on a connection of its own, in autocommit; return the rows, if it gives any."""
        return execute(self.dsn(dbname), sql, *args)

    @property
    def _place(self) -> Workspace:
        if self._workspace is None:
            raise RuntimeError("the server was not made yet, or is removed: call init()")
        return self._workspace

    def _on_data(self, verb: str, timeout: float) -> list[str | Path]:
        return [verb, "-D", self._place.data, "-w", "-t", str(max(1, round(timeout)))]

    def _run(self, program: str, *words: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
        # Without PG* of ours, and in English: messages are compared. LC_ALL also keeps macOS from making the
        # postmaster multithreaded.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        environment |= {"LC_ALL": "C"}
        command = [self.bin_dir / program, *words]
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                cwd="/",  # the account may not be able to enter ours
                env=environment,
                timeout=timeout,
                check=False,
                **run_as(self._account),
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"{program} did not end within {timeout:.0f} s")

    def _write_settings(self) -> None:
        place = self._place
        settings = {**self.settings, "port": self.port, "unix_socket_directories": str(place.sockets)}
        lines = [f"{name} = {_literal(value)}\n" for name, value in settings.items()]
        file = place.data / "walstream.conf"
        file.write_text("".join(lines))
        file.chmod(0o644)  # the account reads it, whatever our umask; nobody else can enter the folder


def execute(dsn: str, sql: str, *args: Any) -> list[tuple[Any, ...]]:
    """Run ``sql`` on a connection of its own, in autocommit; return the rows, if it gives any."""
    connection = psycopg2.connect(dsn)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql, args or None)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def _literal(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"


def _free_port() -> int:
    for port in random.sample(_PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable("no free port was found on 127.0.0.1")
