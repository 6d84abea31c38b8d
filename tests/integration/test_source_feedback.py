"""Rule 9 and its neighbours: who moves the slot, how often feedback leaves, what a stall does, and liveness.

The scenario of rule 9: T0 is confirmed; T1 is received but its order is not durable; T2 is long and began before both,
so its rows stand below T0's end. A keepalive that psycopg2 reads inside T2 must not confirm T1.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from tests.conftest import Database
from tests.integration.source_ledgers import Ledger, Reading, Relay, slot_name
from tests.stalls import Stalls
from walstream.errors import ConnectionLost, Stalled
from walstream.postgres import PostgresServer
from walstream.source import stream as stream_module
from walstream.source.connection import connect

LONG = 15_000  # rows of T2: more than fits into the buffers between server and client


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database.dsn, database.execute, slot_name(database.name)).make()


def short_timeout(monkeypatch: pytest.MonkeyPatch, ledger: Ledger, seconds: float) -> Ledger:
    """The same ledger, with a wal_sender_timeout that tests can wait for: production would raise it."""
    monkeypatch.setattr(stream_module, "MIN_TIMEOUT", seconds)
    dsn = make_dsn(ledger.settings.dsn, options=f"-c wal_sender_timeout={seconds * 1000:.0f}")
    ledger.settings = ledger.settings.model_copy(update={"dsn": dsn})
    return ledger


class Scenario:
    """T0 confirmed, T1 received, the first message of T2 read, the rest of T2 in the socket and behind it."""

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._ledger = ledger
        self._long = database.connect()
        with self._long.cursor() as cursor:
            cursor.execute(
                "INSERT INTO agent_events (event_type, payload)"
                f" SELECT 'T2', jsonb_build_object('x', repeat(md5(g::text), 30)) FROM generate_series(1, {LONG}) g"
            )
        ledger.insert("T0")

    def play(self, reading: Reading) -> int:
        """Return the end of T0, up to which the slot is confirmed."""
        ledger = self._ledger
        reading.until_rows(1)
        t0 = reading.commits[0]
        reading.stream.confirm(t0)
        reading.stream.feedback(force=True)
        reading.until(lambda: ledger.confirmed() == t0)
        ledger.insert("T1")
        reading.until_rows(2)
        self._long.commit()
        end = time.monotonic() + 60
        while not reading.stream.drain(reading.handle, 1):
            assert time.monotonic() < end
            reading.stream.feedback()
            reading.stream.wait(0.05)
        tag, begin, _ = reading.messages[-1]
        assert tag == "B"
        assert begin < t0 < reading.commits[1]
        return t0


def read_slowly(ledger: Ledger, reading: Reading) -> int:
    """Read T2 to its end, in small steps with feedback between; the highest position that the slot took meanwhile."""
    highest = 0
    while len(reading.commits) < 3:
        count = reading.stream.drain(reading.handle, 500)
        reading.stream.feedback(force=True)
        reading.stream.wait(0.0 if count else 0.05)
        highest = max(highest, ledger.confirmed())
    return highest


def sent_again(ledger: Ledger) -> set[str | None]:
    with ledger.reading() as reading:
        reading.until(lambda: len(reading.rows) >= LONG + 1)
        return set(reading.event_types)


def test_a_reply_inside_a_long_transaction_confirms_nothing(ledger: Ledger, database: Database) -> None:
    """Rule 9, variant "reply": even if a keepalive comes inside T2, the cursor that reads has flushed nothing."""
    scenario = Scenario(ledger, database)
    with ledger.reading() as reading:
        t0 = scenario.play(reading)
        reading.stream._reader.send_feedback(reply=True)  # what we never do: ask for a keepalive
        assert read_slowly(ledger, reading) == t0
    assert sent_again(ledger) == {"T1", "T2"}


def test_a_keepalive_after_a_stall_confirms_nothing_even_if_it_is_read(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 9, variant "stall", with the guard against it taken out: the two cursors alone hold."""
    scenario = Scenario(ledger, database)
    with short_timeout(monkeypatch, ledger, 9.0).reading() as reading:
        t0 = scenario.play(reading)
        reading.stream._stall_after = float("inf")
        time.sleep(5.0)  # the server asks after half of it
        assert read_slowly(ledger, reading) == t0
    assert sent_again(ledger) == {"T1", "T2"}


def test_after_a_stall_the_connection_is_dropped_unread(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 9, variant "stall": a third of the timeout is enough, nothing is read, T1 is sent again."""
    scenario = Scenario(ledger, database)
    with short_timeout(monkeypatch, ledger, 6.0).reading() as reading:
        t0 = scenario.play(reading)
        read = len(reading.messages)
        time.sleep(2.5)
        with pytest.raises(Stalled, match="stood still") as caught:
            reading.stream.drain(reading.handle, 1)
        assert len(reading.messages) == read
        assert caught.value.transient
        with pytest.raises(ConnectionLost, match="closed"):
            reading.stream.drain(reading.handle, 1)
    time.sleep(0.2)
    assert ledger.confirmed() == t0
    assert sent_again(ledger) == {"T1", "T2"}


def test_feedback_alone_does_not_hide_a_stall(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keepalive may lie in the socket already: late feedback would only take the evidence away."""
    with short_timeout(monkeypatch, ledger, 1.5).reading() as reading:
        reading.turn()
        time.sleep(0.7)
        with pytest.raises(Stalled):
            reading.stream.feedback()


@contextlib.contextmanager
def relayed(ledger: Ledger, database: Database) -> Iterator[Relay]:
    parameters = parse_dsn(database.server.dsn(database.name, tcp=True))
    with Relay(str(parameters["host"]), int(parameters["port"])) as relay:
        options: dict[str, Any] = {
            name: value for name, value in parse_dsn(ledger.settings.dsn).items() if name == "options"
        }
        dsn = make_dsn(**{**parameters, **options, "port": relay.port, "sslmode": "disable"})
        ledger.settings = ledger.settings.model_copy(update={"dsn": dsn})
        yield relay


def test_feedback_leaves_in_time_and_never_asks_for_a_reply(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C51: also while one long drain is handed over slowly; seen on the wire."""
    timeout = 3.0
    short_timeout(monkeypatch, ledger, timeout)
    ledger.insert(*["x"] * 100)
    with relayed(ledger, database) as relay, ledger.reading() as reading, Stalls() as stalls:

        def slowly(payload: bytes, data_start: int) -> bool:
            time.sleep(0.04)
            return reading.handle(payload, data_start)

        began = time.monotonic()
        reading.until(lambda: bool(reading.stream.drain(slowly, 10_000)))
        reading.until_rows(100)
        reading.stream.confirm(reading.commits[0])
        reading.for_a_while(1.5)
        ended = time.monotonic()
        sent = list(relay.feedback)
    assert reading.event_types == ["x"] * 100
    times = [began, *(at for at, *_ in sent), ended]
    # A process that stood still sends late: by as long for its own part, and again for that of the relay.
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < timeout / 3 + 2 * stalls.longest
    assert not any(reply for *_, reply in sent)
    assert {flush for _, _, flush, _, _ in sent} == {0, reading.commits[0]}
    assert all(flush <= write for _, write, flush, _, _ in sent if write)


def test_confirmations_are_sent_together(ledger: Ledger, database: Database) -> None:
    """At most one feedback a second or a hundred confirmations: forced ones cost a fifth of the throughput."""
    with relayed(ledger, database) as relay, ledger.reading() as reading:
        ledger.insert("x")
        reading.until_rows(1)
        end = reading.commits[0]
        reading.stream.feedback(force=True)
        before, began = len(relay.feedback), time.monotonic()
        reading.stream.passed = end  # so that every step below is a change
        for step in range(250):
            reading.stream.confirm(end - 250 + step)
            reading.stream.feedback()
        deadline = time.monotonic() + 60
        while len(relay.feedback) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 2 <= len(relay.feedback) - before <= 4 + (time.monotonic() - began)


def test_a_short_timeout_is_raised_for_the_session(ledger: Ledger) -> None:
    dsn = make_dsn(ledger.settings.dsn, options="-c wal_sender_timeout=2s")
    ledger.settings = ledger.settings.model_copy(update={"dsn": dsn})
    with ledger.reading() as reading:
        assert reading.stream._stall_after == pytest.approx(10.0)
        assert reading.stream._feedback_every == pytest.approx(5.0)
        time.sleep(2.5)
        ledger.insert("x")
        reading.until_rows(1)


def test_a_timeout_that_is_off_leaves_feedback_and_drops_nothing(ledger: Ledger) -> None:
    dsn = make_dsn(ledger.settings.dsn, options="-c wal_sender_timeout=0")
    ledger.settings = ledger.settings.model_copy(update={"dsn": dsn})
    with ledger.reading() as reading:
        assert reading.stream._stall_after == float("inf")
        assert reading.stream._feedback_every == pytest.approx(10.0)


def test_a_walsender_that_stands_still_is_seen_by_what_arrives(own_server: Callable[..., PostgresServer]) -> None:
    """C54: no error and no closed socket; only `last_heard` tells."""
    server = own_server()
    ledger = Ledger(server.dsn(tcp=True), server.execute, "s").make()
    ledger.insert("one")
    with ledger.reading() as reading:
        reading.until_rows(1)
        reading.for_a_while(0.3)
        conn = connect(server.dsn(), application_name="walstream:test")
        before = reading.stream.progress(conn)
        reading.stream.feedback(force=True)
        reading.until(lambda: reading.stream.progress(conn) != before)  # it looks at our feedback: it lives
        os.kill(reading.stream.backend_pid, signal.SIGSTOP)
        try:
            before = reading.stream.progress(conn)
            ledger.insert("silent")
            heard = reading.stream.last_heard
            reading.stream.confirm(reading.stream.passed)
            reading.for_a_while(1.5)  # our own feedback goes out, and counts for nothing
            assert reading.stream.last_heard == heard
            assert reading.event_types == ["one"]
            assert reading.stream.progress(conn) == before
        finally:
            os.kill(reading.stream.backend_pid, signal.SIGCONT)
        reading.until_rows(2)
        assert reading.stream.last_heard > heard
        assert reading.stream.progress(conn) != before
        reading.stream.close()
        end = time.monotonic() + 60
        while reading.stream.progress(conn) is not None:
            assert time.monotonic() < end
        conn.close()


def test_a_quiet_stream_hears_the_canary(ledger: Ledger) -> None:
    with ledger.reading() as reading:
        reading.for_a_while(0.3)
        heard = reading.stream.last_heard
        ledger.execute("SELECT pg_logical_emit_message(false, 'walstream', 'canary')")
        reading.until(lambda: bool(reading.messages) and reading.messages[-1][0] == "M")
        assert reading.stream.last_heard > heard


def test_a_network_that_swallows_everything_ends_the_connection(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is told to give up on unacknowledged bytes well before the server could send a keepalive."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("TCP_USER_TIMEOUT is Linux's")
    short_timeout(monkeypatch, ledger, 4.0)
    with (
        relayed(ledger, database),
        ledger.reading() as reading,
        socket.socket(fileno=os.dup(reading.stream._connection.fileno())) as shared,
    ):
        assert shared.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000


@pytest.mark.slow
def test_large_messages_over_tls_are_read_without_waiting_for_the_next(
    own_server: Callable[..., PostgresServer], tmp_path: Path
) -> None:
    """What OpenSSL still holds is not shown by poll() on the socket; libpq must have taken all of it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make a certificate")
    server = own_server()
    server.stop()
    key, certificate = server.data_dir / "server.key", server.data_dir / "server.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=x", "-keyout", "k", "-out", "c"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    owner = server.data_dir.stat()
    for source, target in ((tmp_path / "k", key), (tmp_path / "c", certificate)):
        shutil.copyfile(source, target)
        os.chmod(target, 0o600)
        if os.geteuid() == 0:
            os.chown(target, owner.st_uid, owner.st_gid)
    server.settings["ssl"] = True
    try:
        server.start()
    except Exception as error:
        pytest.skip(f"these Postgres programs have no TLS: {str(error)[-200:]}")
    ledger = Ledger(make_dsn(server.dsn(tcp=True), sslmode="require"), server.execute, "s").make()
    with ledger.reading() as reading:
        assert reading.stream._connection.info.ssl_in_use
        reading.stream._feedback_every = 600.0  # which would end a wait as well
        for size in (1, 9_000, 17_000, 100_000, 3_000_000):
            server.execute(
                "INSERT INTO agent_events (event_type, payload) SELECT 'big', jsonb_build_object('x',"
                " (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, %s)))",
                size // 32 + 1,
            )
            began = time.monotonic()
            count = len(reading.rows)
            while True:
                reading.stream.drain(reading.handle, 10_000)
                if len(reading.rows) > count and reading.messages[-1][0] == "C":
                    break
                reading.stream.wait(600)  # so long that a forgotten piece shows
                assert time.monotonic() - began < 300
