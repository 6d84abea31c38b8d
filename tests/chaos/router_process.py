"""A process with the handoff router for the kill tests: ``python -m tests.chaos.router_process DSN``."""

from __future__ import annotations

import sys

from tests.runner_world import KEY_PREFIX
from walstream.config import ProjectorSettings, Settings
from walstream.engine.runner_group import RunnerGroup
from walstream.projectors.handoff_router import HandoffRouter


def main(dsn: str) -> None:
    small = {"handoff-router": ProjectorSettings(batch=10)}
    settings = Settings(dsn=dsn, lease_seconds=1, poll_seconds=0.1, projectors=small)
    group = RunnerGroup(settings, [HandoffRouter(default="writer")], None, KEY_PREFIX)
    group.start()
    print("started", flush=True)
    while not group.wait(1.0):
        pass
    raise SystemExit(str(group.error))


if __name__ == "__main__":
    main(*sys.argv[1:])
