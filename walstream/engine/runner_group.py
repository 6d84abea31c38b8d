"""All projectors of a process: started, watched and stopped together, and otherwise independent of each other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from walstream.config import Settings
from walstream.errors import ConfigError, WalstreamError
from walstream.metrics import METRICS, Metrics
from walstream.order.buffer import HotBuffer

from .keeper import Keeper
from .leadership import owner_name
from .projector import Options, Projector
from .projector_runner import ProjectorRunner
from .supply import Supply

log = logging.getLogger("walstream.runner")

NOT_WELL: Final = frozenset({"halted", "hung", "stopped"})
"""States of a projector that makes no progress, and will not by itself."""


class RunnerGroup:
    """Runs projectors in this process.

    Args:
        settings: of the stream.
        projectors: to run.
        hot: the buffer that ingest fills in this process; ``None`` if it runs elsewhere.
        key_prefix: ``ledger:epoch`` of the ledger's identity.
        owner: this process's name; made up if absent.
        metrics: where numbers go.

    Raises:
        ConfigError: a projector's options make no sense, or two have one name.
    """

    def __init__(
        self,
        settings: Settings,
        projectors: Sequence[Projector],
        hot: HotBuffer | None,
        key_prefix: str,
        *,
        owner: str | None = None,
        metrics: Metrics = METRICS,
    ) -> None:
        self._error: WalstreamError | None = None
        self._ended = threading.Event()
        self._supply = Supply(settings, hot, key_prefix, metrics)
        self._runners = [
            ProjectorRunner(projector, options, self._supply, self._exit)
            for projector, options in resolve(projectors, settings)
        ]
        for runner in self._runners:
            for counter in ("projector_events_total", "projector_parked_total", "projector_unparked_total"):
                metrics.add(counter, 0, projector=runner.options.name)
        self._keeper = Keeper(
            settings.namespace,
            self._runners,
            owner=owner or owner_name(),
            lease_seconds=settings.lease_seconds,
            poll_seconds=settings.poll_seconds,
            connect=lambda: self._supply.connect(
                "projectors",
                statement_timeout="30s",
                lock_timeout=f"{round(min(1.0, settings.lease_seconds / 4) * 1000)}ms",
                # In a stricter isolation two processes that try for a lease would fail instead of one of them waiting.
                default_transaction_isolation="read committed",
            ),
            on_error=self._exit,
        )

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all of them; returns at once. What cannot be done yet (a server that is away) is tried again."""
        for runner in self._runners:
            runner.start()
        if self._runners:
            self._keeper.start()

    def stop(self, drain_seconds: float) -> bool:
        """Stop all of them: each may finish its batch within ``drain_seconds``; then what is left is cancelled.

        Returns:
            Whether all threads ended. One that hangs in Python cannot be ended; its transaction was, by the server.
        """
        for runner in self._runners:
            runner.request_stop()
        until = time.monotonic() + drain_seconds
        busy = [runner for runner in self._runners if not runner.join(until - time.monotonic())]
        for runner in busy:
            log.warning("projector %r did not finish its batch within %g s", runner.options.name, drain_seconds)
            runner.abort()
        until = time.monotonic() + 3.0
        hung = [runner.options.name for runner in busy if not runner.join(until - time.monotonic())]
        if hung:
            log.error("projectors hang and are left behind: %s", ", ".join(hung))
        self._keeper.stop()
        self._supply.stop()
        return not hung

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until something ends the process (see :attr:`error`); ``True`` if so."""
        return self._ended.wait(timeout)

    # -- how it goes -------------------------------------------------------------------------------------------------

    @property
    def error(self) -> WalstreamError | None:
        """What ends the process: a projector raised SystemExit or the like, or the set-up cannot work."""
        return self._error

    @property
    def halted(self) -> list[str]:
        """The projectors that halted (their policy is ``halt``, and an event could not be projected)."""
        return [runner.options.name for runner in self._runners if runner.halted is not None]

    @property
    def healthy(self) -> bool:
        """Nothing ended, halted or hangs, and the database answers."""
        return (
            self._error is None and self.connected and not any(state in NOT_WELL for state, _ in self.states().values())
        )

    @property
    def connected(self) -> bool:
        """Whether the database answered the keeper of the leases; it has nothing to ask if there are no projectors."""
        return self._keeper.connected or not self._runners

    def states(self) -> dict[str, tuple[str, str | None]]:
        """Projector -> its state here (also ``standby``), and why, if it is not well."""
        states = {runner.options.name: runner.state for runner in self._runners}
        return {name: (state, None if trouble is None else trouble.text) for name, (state, trouble) in states.items()}

    def _exit(self, error: WalstreamError) -> None:
        if self._error is None:
            self._error = error
        self._ended.set()


def resolve(projectors: Sequence[Projector], settings: Settings) -> list[tuple[Projector, Options]]:
    """Projectors with their options after the configuration has had its word.

    Raises:
        ConfigError: options make no sense, two projectors have one name.
    """
    found: dict[str, tuple[Projector, Options]] = {}
    for projector in projectors:
        options = Options.of(projector, settings.projectors.get(projector.name))
        if options.name in found:
            raise ConfigError(
                f"two projectors are called {options.name!r}",
                hint="a name identifies a cursor; give one of them another: `name=…`",
            )
        found[options.name] = (projector, options)
    return list(found.values())
