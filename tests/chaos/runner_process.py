"""A process of projectors for the kill tests: ``python -m tests.chaos.runner_process DSN FILE``.

It counts per session in the ledger's database (transactional) and appends keys to a file (external).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.runner_world import KEY_PREFIX
from walstream.config import Settings
from walstream.engine.context import Context
from walstream.engine.projector import Projector
from walstream.engine.runner_group import RunnerGroup
from walstream.event import Event


class Counter(Projector):
    """Counts events and adds up offsets by session."""

    name = "counter"
    transactional = True
    batch = 20
    deadline = 20.0

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute("CREATE TABLE IF NOT EXISTS counter (session text PRIMARY KEY, n bigint, total bigint)")

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            ctx.cursor.execute(
                "INSERT INTO counter VALUES (%s, 1, %s) ON CONFLICT (session)"
                " DO UPDATE SET n = counter.n + 1, total = counter.total + excluded.total",
                (event.session_id, event.offset),
            )


class Keys(Projector):
    """Appends each event's key to a file, one write a line."""

    name = "keys"
    batch = 20

    def __init__(self, file: Path) -> None:
        self._file = file

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        with self._file.open("ab", buffering=0) as out:
            for event in events:
                out.write(f"{event.key}\n".encode())
                ctx.done(event)


def main(dsn: str, file: str) -> None:
    settings = Settings(dsn=dsn, lease_seconds=1.5, poll_seconds=0.1)
    group = RunnerGroup(settings, [Counter(), Keys(Path(file))], None, KEY_PREFIX)
    group.start()
    print("started", flush=True)
    while not group.wait(1.0):
        time.sleep(0)
    raise SystemExit(str(group.error))


if __name__ == "__main__":
    main(*sys.argv[1:])
