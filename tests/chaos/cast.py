"""The stream of a chaos run, and its worker: every kind of projector, each of which leaves behind what the oracle can
count.

Nothing here has a key or a constraint that would hide a double delivery. Where things are written comes from the
environment: ``CHAOS_FOLDER``, and ``CHAOS_AUDIT`` for the trail, which has a disk of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from walstream import ClaimedJob, Context, Event, Projector, Stream, TurnLedger, Worker
from walstream.demo.orphans import end_with_the_demo
from walstream.projectors.audit_sink import AuditSink
from walstream.projectors.handoff_router import HandoffRouter
from walstream.projectors.json_lines_file import JsonLinesFile
from walstream.projectors.snapshot_writer import SnapshotWriter

from .plan import LEASE_SECONDS

POISON = "chaos.poison"
MARK = "chaos.mark"
AGENT = "worker"
TURNS = "CREATE TABLE turns (job_id bigint NOT NULL, fencing_token bigint NOT NULL)"
"""What workers write in the transaction that completes a job: twice, if a job was completed twice."""


class Rows(Projector):
    """Transactional: a row an event, in a table that is called like the projector."""

    transactional = True
    batch = 200
    retry_first, retry_cap = 0.05, 0.5

    def __init__(self, name: str, lanes: int = 1) -> None:
        self.name = name
        self.lanes = lanes

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {self.name} (id bigserial, event_offset bigint NOT NULL, seq bigint NOT NULL,"
            " session_id text NOT NULL, recovered boolean NOT NULL)"
        )

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        ctx.cursor.execute(
            f"INSERT INTO {self.name} (event_offset, seq, session_id, recovered)"
            " SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::boolean[])",
            (
                [event.offset for event in events],
                [event.seq for event in events],
                [event.session_id for event in events],
                [event.recovered for event in events],
            ),
        )


class Poisoned(Rows):
    """The same, but it cannot stomach some events until an antidote is there, a file of that name."""

    max_attempts = 2
    park_first, park_cap = 2.0, 10.0

    def __init__(self, name: str, antidote: Path) -> None:
        super().__init__(name)
        self._antidote = antidote

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        super().project(events, ctx)
        if not self._antidote.exists() and any(event.event_type == POISON for event in events):
            raise ValueError("poison")


class Lines(Projector):
    """External, and it remembers nothing: a line an event, with its key. What is torn by a kill is no line.

    Args:
        nap: seconds that an event takes.
    """

    retry_first, retry_cap = 0.05, 0.5

    def __init__(self, name: str, path: Path, *, batch: int = 500, nap: float = 0.0) -> None:
        self.name = name
        self.batch = batch
        self._nap = nap
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        os.write(self._file, b"".join(map(line_of, events)))
        time.sleep(self._nap * len(events))


def line_of(event: Event) -> bytes:
    """Begins and ends with a line break, so that a torn one before it does not spoil it."""
    return f"\n{event.offset} {event.seq} {event.session_id} {event.key} {event.recovered:d} .\n".encode()


def _stream(folder: Path, audit: Path) -> Stream:
    made = Stream()
    made.add(Rows("plain"))
    made.add(Rows("laned", lanes=3))
    made.add(Rows("far"))  # in a process without ingest, so that it reads cold
    made.add(Poisoned("poisoned", folder / "antidote"))
    made.add(Lines("external", folder / "external"))
    made.add(Lines("slow", folder / "slow", batch=200, nap=0.0007))
    made.add(JsonLinesFile(folder / "events.jsonl"))
    made.add(HandoffRouter(agents=(AGENT,)))
    made.add(SnapshotWriter(every_events=20))
    made.add(
        AuditSink(
            audit,
            key=str(folder / "audit.key"),
            heads_to=str(folder / "heads"),
            head_every=500,
            head_seconds=2,
            roll_bytes=300_000,
        )
    )
    return made


def _worker() -> Worker:
    made = Worker(agent=AGENT, concurrency=2, lease_seconds=LEASE_SECONDS, retry_first=0.1, retry_cap=1.0)

    @made.handle
    def turn(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        del context
        ledger.append_now("turn.began", {"job": job.job_id, "token": job.fencing_token})
        time.sleep(0.05)
        ledger.append("task.completed", {"job": job.job_id, "token": job.fencing_token})
        ledger.on_completion(
            lambda cur: cur.execute("INSERT INTO turns VALUES (%s, %s)", (job.job_id, job.fencing_token))
        )

    return made


if "CHAOS_FOLDER" in os.environ:
    end_with_the_demo()
    stream = _stream(Path(os.environ["CHAOS_FOLDER"]), Path(os.environ["CHAOS_AUDIT"]))
    worker = _worker()
