"""What the slot keeps (from restart_lsn on) stays small: on an idle ledger in a busy database, and whatever projectors
do (C44). A server of one's own, because any open transaction of a cluster holds every slot's WAL."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.conftest import Database
from tests.integration.streams import Installed, Recorder, eventually
from walstream.config import MiB
from walstream.postgres import PostgresServer
from walstream.testing import FaultyProjector

from .test_runner_isolation import Hanging, insert

SEGMENT = 16 * MiB
FEW = 3 * SEGMENT


@pytest.fixture
def stream(own_server: Callable[..., PostgresServer]) -> Installed:
    server = own_server(wal_writer_delay="50ms")
    server.execute("CREATE DATABASE ledger")
    server.execute("CREATE DATABASE busy")
    server.execute("CREATE TABLE elsewhere (t text)", dbname="busy")
    return Installed(Database(server, "ledger", made=True), idle_persist_seconds=0.5)


class Busy:
    """Writes WAL in another database, and watches what the slot keeps."""

    def __init__(self, stream: Installed) -> None:
        self._stream = stream
        self.most = 0
        self.written = 0
        self._began = self._position()

    def turn(self, *, checkpoint: bool, rows: int = 6000) -> None:
        server = self._stream.place.server  # type: ignore[attr-defined]
        server.execute(f"INSERT INTO elsewhere SELECT repeat('x', 900) FROM generate_series(1, {rows})", dbname="busy")
        if checkpoint:
            server.execute("CHECKPOINT")  # which logs the running transactions; by itself the server does every 15 s
        self.written = self._position() - self._began

    def kept(self) -> int:
        """Bytes from the slot's restart_lsn to the end of the WAL."""
        rows = self._stream.place.execute("SELECT pg_current_wal_lsn() - restart_lsn FROM pg_replication_slots")
        return int(rows[0][0])

    def _position(self) -> int:
        return int(self._stream.place.execute("SELECT pg_current_wal_lsn() - '0/0'")[0][0])


def idle(stream: Installed, seconds: float, *, checkpoint: bool) -> None:
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one")
        eventually(lambda: recorder.got, "one event")
        busy = Busy(stream)
        end = time.monotonic() + seconds
        while time.monotonic() < end or busy.written < 6 * SEGMENT:
            busy.turn(checkpoint=checkpoint)

        def small() -> bool:
            # Little at a time: the server logs its running transactions every 15 s, and all that is written in between
            # is kept.
            busy.turn(checkpoint=checkpoint, rows=10)
            return busy.kept() < FEW

        eventually(small, "what is kept is small", timeout=60)
        assert len(stream.segments()) == 1
    print(f"idle ledger: {busy.written / MiB:.0f} MiB were written elsewhere, {busy.kept() / MiB:.0f} MiB are kept")


def test_an_idle_ledger_in_a_busy_database(stream: Installed) -> None:
    idle(stream, 1.0, checkpoint=True)


@pytest.mark.slow
def test_an_idle_ledger_for_two_minutes(stream: Installed) -> None:
    """Without a checkpoint of ours: as the server does it by itself."""
    idle(stream, 120.0, checkpoint=False)


def burdened(stream: Installed, seconds: float, *, checkpoint: bool) -> None:
    """One projector is dead, one hangs in the middle of its transaction, again and again; the others go on."""
    with stream.host(FaultyProjector("dead")):
        insert(stream, 1)
        stream.wait_ordered()
    recorder = Recorder()
    hanging = Hanging("hanging", deadline=1.0)
    with stream.host(recorder, hanging):
        insert(stream, 5)
        eventually(hanging.stuck.is_set, "it hangs")
        busy = Busy(stream)
        end = time.monotonic() + seconds
        late: list[int] = []
        while time.monotonic() < end or busy.written < 6 * SEGMENT:
            insert(stream, 3)
            busy.turn(checkpoint=checkpoint)
            if time.monotonic() > end - seconds / 2:
                late.append(busy.kept())
        eventually(lambda: len(recorder.got) == len(stream.ledger()), "the healthy one has everything")

        def small() -> bool:
            # Little at a time: the server logs its running transactions every 15 s, and all that is written in between
            # is kept.
            busy.turn(checkpoint=checkpoint, rows=10)
            return busy.kept() < FEW

        eventually(small, "what is kept is small", timeout=60)
        hanging.release.set()
    dead = stream.place.execute("SELECT min(position) FROM walstream.cursors WHERE projector = 'dead'")
    assert dead[0][0] <= 1
    print(
        f"a dead and a hung projector: {busy.written / MiB:.0f} MiB of WAL written, {min(late) / MiB:.0f} to"
        f" {max(late) / MiB:.0f} MiB kept in the second half, {busy.kept() / MiB:.0f} MiB at the end"
    )


def test_a_dead_projector_and_one_hung_in_its_transaction(stream: Installed) -> None:
    burdened(stream, 2.0, checkpoint=True)


@pytest.mark.slow
def test_a_dead_and_a_hung_projector_for_two_minutes(stream: Installed) -> None:
    burdened(stream, 120.0, checkpoint=False)
