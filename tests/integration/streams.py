"""A stream that is set up as `walstream init` does it, and hosts that run on it inside the test's process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from typer.testing import CliRunner

from walstream import Context, Event, Projector
from walstream.cli.app import app
from walstream.config import Settings
from walstream.engine.host import Host
from walstream.order.table import COLUMNS, segment_of
from walstream.wiring import make_host

INSERT = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (gen_random_uuid(), 'a', %s, '{}')"
)


class Place(Protocol):
    """A database with a name, as the fixture ``database`` is one."""

    name: str

    @property
    def dsn(self) -> str: ...
    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]: ...


class Recorder(Projector):
    """Keeps what it is given."""

    name = "recorder"

    def __init__(self) -> None:
        self.got: list[Event] = []

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        self.got += events

    @property
    def types(self) -> list[str]:
        return [event.event_type for event in self.got]


class Installed:
    """A stream in a database.

    Args:
        place: the database; the slot is called like it.
        init: further words for `walstream init`.
        settings: of the stream.
    """

    def __init__(self, place: Place, *init: str, **settings: Any) -> None:
        self.place = place
        self.settings = Settings(
            dsn=place.dsn,
            slot=place.name[:60],
            retry_cap_seconds=0.5,
            drain_seconds=5,
            **{"lease_seconds": 2, "poll_seconds": 0.2, **settings},
        )
        words = ["init", "--dsn", place.dsn, "--slot", self.settings.slot, *init]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output

    @contextlib.contextmanager
    def host(self, *projectors: Projector, ingest: bool = True, **settings: Any) -> Iterator[Host]:
        """A running host."""
        host = make_host(self.settings.model_copy(update=settings), projectors, ingest=ingest)
        host.start()
        try:
            yield host
        finally:
            host.stop()

    def insert(self, *event_types: str) -> None:
        """A transaction for each."""
        for event_type in event_types:
            self.place.execute(INSERT, event_type)

    def segments(self) -> list[Any]:
        return [
            segment_of(row)
            for row in self.place.execute(f"SELECT {COLUMNS} FROM walstream.commit_order ORDER BY first_offset")
        ]

    def ordered(self) -> list[int]:
        """The seqs by offset; checks that offsets are dense."""
        seqs: list[int] = []
        for segment in self.segments():
            assert segment.first_offset == len(seqs) + 1, "offsets are dense"
            seqs += segment.seqs
        return seqs

    def ledger(self) -> list[int]:
        return [seq for (seq,) in self.place.execute("SELECT seq FROM agent_events ORDER BY seq")]

    def confirmed(self) -> int:
        """The slot's confirmed position."""
        rows = self.place.execute(
            "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s", self.settings.slot
        )
        return int(rows[0][0])

    def wait_ordered(self, timeout: float = 60) -> list[int]:
        """Until every row has an offset; the seqs by offset."""
        eventually(lambda: sorted(self.ordered()) == self.ledger(), "every row has an offset", timeout)
        return self.ordered()


def eventually(condition: Callable[[], object], what: str, timeout: float = 60) -> None:
    """Poll until ``condition`` is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.03)
