"""The class Stream on a real slot: as a program, inside an application, with what it raises and returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import ok
from tests.conftest import Database
from tests.runner_world import eventually
from walstream import EventParked, Stream, subscribe
from walstream.errors import ConfigError, WalstreamError


class Ledger:
    """A ledger with a slot."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.slot = f"stream_{secrets.token_hex(4)}"
        ok("init", "--slot", self.slot, dsn=database.dsn)

    def stream(self, **settings: Any) -> Stream:
        return Stream(self.database.dsn, slot=self.slot, allow_unbounded_slot=True, poll_seconds=0.1, **settings)

    def insert(self, event_type: str = "x") -> int:
        rows = self.database.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " VALUES (gen_random_uuid(), 'a', %s, '{}') RETURNING seq",
            event_type,
        )
        return int(rows[0][0])

    def sessions(self) -> list[str]:
        rows = self.database.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'walstream%%'"
        )
        return [str(row[0]) for row in rows]


@pytest.fixture
def ledger(database: Database, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    for name in list(os.environ):
        if name.startswith("WALSTREAM_") and not name.startswith(("WALSTREAM_TEST", "WALSTREAM_PG")):
            monkeypatch.delenv(name)
    return Ledger(database)


def test_inside_an_application(ledger: Ledger) -> None:
    stream = ledger.stream()
    seen: list[int] = []

    @stream.on("x")
    async def note(event: Any) -> None:
        seen.append(event.seq)

    async def application() -> None:
        async with stream:
            seq = await asyncio.to_thread(ledger.insert)
            assert await stream.await_for("note", seq, timeout=60)
            assert seen == [seq]
            async with stream.subscribe(after=0) as events:
                async for event in events:
                    assert event.seq == seq
                    break
            other = await asyncio.to_thread(ledger.insert, "y")
            assert await stream.await_for("note", other, timeout=60)  # passed over is done, too
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.wait(), 0.5)

    asyncio.run(application())
    assert seen == [1]
    eventually(lambda: ledger.sessions() == [])
    with pytest.raises(ConfigError, match="not running"):
        asyncio.run(stream.wait())


def test_what_ends_the_stream_reaches_the_application(ledger: Ledger) -> None:
    stream = ledger.stream(recover_slot="never")

    async def application() -> None:
        async with stream:
            await asyncio.to_thread(_take_the_publication_away, ledger)
            await stream.wait()

    with pytest.raises(WalstreamError, match="publication"):
        asyncio.run(application())

    async def careless() -> None:
        async with stream:
            await asyncio.to_thread(eventually, lambda: stream._host is None or stream._host.wait(0.0))

    with pytest.raises(WalstreamError, match="publication"):
        asyncio.run(careless())


def _take_the_publication_away(ledger: Ledger) -> None:
    eventually(
        lambda: ledger.database.execute(
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", ledger.slot
        )
    )
    ledger.database.execute("DROP PUBLICATION walstream")
    ledger.database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", ledger.slot
    )


def test_waiting_and_subscribing_from_another_thread_of_the_program(ledger: Ledger) -> None:
    stream = ledger.stream()

    @stream.on(name="bad", max_attempts=1)
    def fail(event: Any) -> None:
        if event.event_type == "bad":
            raise ValueError

    async def application() -> None:
        async with stream:
            await asyncio.to_thread(work)

    def work() -> None:
        assert stream.wait_for("bad", ledger.insert(), timeout=60)
        parked = ledger.insert("bad")
        with pytest.raises(EventParked):
            stream.wait_for("bad", parked, timeout=60)
        with stream.subscribe("bad") as events:
            assert next(events).seq == parked
        assert [event.seq for event in subscribe(dsn=ledger.database.dsn, slot=ledger.slot, follow=False)] == [1, 2]

    asyncio.run(application())


PROGRAM = """
import sys
from walstream import Stream

stream = Stream(poll_seconds=0.1)

@stream.on("x", name="note", on_poison="halt", max_attempts=1)
def note(event):
    print("got", event.seq, flush=True)
    if {condition}:
        raise {raised}

if __name__ == "__main__":
    raise SystemExit(stream.run(ingest={ingest}))
"""


@contextlib.contextmanager
def program(ledger: Ledger, folder: Path, **parts: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "program.py").write_text(PROGRAM.format(**{"condition": "False", "ingest": "True", **parts}))
    running = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env={
            **os.environ,
            "WALSTREAM_DSN": ledger.database.dsn,
            "WALSTREAM_SLOT": ledger.slot,
            "WALSTREAM_ALLOW_UNBOUNDED_SLOT": "true",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(ledger: Ledger, tmp_path: Path, number: signal.Signals) -> None:
    ledger.insert()
    with program(ledger, tmp_path, raised="0") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "got 1\n"
        running.send_signal(number)
        assert running.wait(60) == 0
    assert ledger.database.execute("SELECT position FROM walstream.cursors") == [(1,)]
    assert ledger.database.execute("SELECT state FROM walstream.projectors") == [("stopped",)]


def test_a_halted_projector_is_exit_code_7_in_the_end(ledger: Ledger, tmp_path: Path) -> None:
    ledger.insert()
    with program(ledger, tmp_path, condition="True", raised="ValueError(event.seq)") as running:
        eventually(lambda: ledger.database.execute("SELECT 1 FROM walstream.projectors WHERE state = 'halted'"))
        assert running.poll() is None  # ingest goes on
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 7
    # Without ingest there is nothing left to do once all have halted.
    with program(ledger, tmp_path, condition="True", raised="ValueError(event.seq)", ingest="False") as running:
        assert running.wait(60) == 7
    assert ledger.database.execute("SELECT state FROM walstream.projectors") == [("halted",)]


def test_a_projector_can_end_the_process(ledger: Ledger, tmp_path: Path) -> None:
    ledger.insert()
    with program(ledger, tmp_path, condition="True", raised="SystemExit(0)") as running:
        assert running.wait(60) == 0
    assert ledger.database.execute("SELECT position FROM walstream.cursors") == [(0,)]
