"""The workers' processes: one for each kind of agent that takes handoffs, with as many hands as there are agents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .child import Child
from .workers import HANDS_VARIABLE

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

WORKERS: Final = "walstream.demo.workers"

# A hand connects before it looks for work, and keeps its connection.
_CONNECTED: Final = """\
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = %s AND backend_start > to_timestamp(%s)"""
_IN_HAND: Final = """\
SELECT count(*) FROM agent_jobs
 WHERE status IN ('DELIVERED', 'IN_PROGRESS') AND split_part(lease_owner, ':', 2) = %s::text"""


class Crew:
    """Starts and ends the workers.

    Args:
        config: the stream's ``walstream.toml``.
        hands: how many turns each kind of agent works on at the same time.
        module: where a worker of each kind is found under the kind's name.
        namespace: of the stream.
    """

    def __init__(self, config: Path, hands: Mapping[str, int], module: str, namespace: str) -> None:
        self._hands = dict(hands)
        self._name = f"walstream:{namespace}:worker"
        self._started = 0.0
        self._children = {role: Child(role, "worker", f"{module}:{role}", config) for role in hands}
        for role, child in self._children.items():
            child.environment[HANDS_VARIABLE] = str(self._hands[role])

    @property
    def roles(self) -> list[str]:
        """The kinds of agents."""
        return list(self._children)

    def start(self) -> None:
        """Start all of them."""
        self._started = time.time()
        for child in self._children.values():
            child.start()

    def ready(self, observer: Connection) -> bool:
        """Whether all are at work that :meth:`start` has started."""
        return self._connected(observer, self._started) >= sum(self._hands.values())

    def killed(self, role: str, observer: Connection) -> int:
        """End a worker with SIGKILL; return how many turns it had in hand."""
        child = self._children[role]
        pid = child.pid
        child.kill()
        return self._in_hand(pid, observer)

    def restart(self, role: str) -> None:
        """Start one again that was killed."""
        self._children[role].start()

    def back(self, role: str, since: float, observer: Connection) -> bool:
        """Whether a worker is at work that was started after ``since``, seconds since 1970."""
        return self._connected(observer, since) >= self._hands[role]

    def busy(self, role: str, observer: Connection) -> bool:
        """Whether a worker is in the middle of a turn."""
        return self._in_hand(self._children[role].pid, observer) > 0

    def check(self) -> None:
        """Raise if one ended by itself.

        Raises:
            WalstreamError: with what it said.
        """
        for child in self._children.values():
            child.check()

    def stop(self, timeout: float) -> None:
        """End all of them with SIGTERM, and what is left after ``timeout`` seconds with SIGKILL."""
        for child in self._children.values():
            child.ask_to_stop()
        deadline = time.monotonic() + timeout
        for child in self._children.values():
            child.stop(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """End all of them with SIGKILL."""
        for child in self._children.values():
            child.kill()

    @property
    def said(self) -> str:
        """The end of what they printed."""
        return "\n".join(f"{role}: {child.said}" for role, child in self._children.items())

    def _connected(self, observer: Connection, since: float) -> int:
        with observer.cursor() as cur:
            cur.execute(_CONNECTED, (self._name, since))
            (found,) = cur.fetchone() or (0,)
        return int(found)

    def _in_hand(self, pid: int | None, observer: Connection) -> int:
        with observer.cursor() as cur:
            cur.execute(_IN_HAND, (pid,))
            (found,) = cur.fetchone() or (0,)
        return int(found)
