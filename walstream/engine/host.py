"""The host: one ingest and any number of projectors in one process, started, watched and stopped together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from walstream.config import Settings
from walstream.errors import ExitCode, WalstreamError
from walstream.order.buffer import HotBuffer
from walstream.source.connection import connect, watch_answers

from .ingest_supervisor import IngestSupervisor, Ports
from .leadership import owner_name
from .projector import Projector
from .runner_group import RunnerGroup
from .waiting_for_server import identity_once_it_answers

log = logging.getLogger("walstream.host")


class Companion(Protocol):
    """Something that watches a host, or tells others how it is, for as long as the host runs."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Host:
    """Runs ingest and projectors until it is stopped or something ends it.

    Args:
        settings: of the stream.
        projectors: to run here.
        ports: preflight and stream, for ingest.
        ingest: ``False`` for a process that only runs projectors (it reads cold, woken by the ingest elsewhere).

    Attributes:
        runners: the projectors' side; ``None`` before :meth:`start`.
        ingest: ingest's side; ``None`` without it, or before :meth:`start`.
        error: what ended the host.
    """

    def __init__(
        self, settings: Settings, projectors: Sequence[Projector], ports: Ports, *, ingest: bool = True
    ) -> None:
        self._settings = settings
        self._projectors = tuple(projectors)
        self._ports = ports
        self._with_ingest = ingest
        self._stopping = threading.Event()
        self._buffer: HotBuffer | None = None
        self._companions: list[Companion] = []
        self.runners: RunnerGroup | None = None
        self.ingest: IngestSupervisor | None = None
        self.error: WalstreamError | None = None

    def accompany(self, companion: Companion) -> None:
        """Start and stop ``companion`` together with the host: before everything else, and after."""
        self._companions.append(companion)

    def start(self) -> None:
        """Check that the stream is set up, then start everything; waits for a server that is away.

        Raises:
            WalstreamError: configuration, identity or set-up that a retry cannot help.
        """
        watch_answers()
        try:
            for companion in self._companions:
                companion.start()
            self._start()
        except BaseException:
            self._dismiss()
            raise

    def _start(self) -> None:
        settings = self._settings
        identity = identity_once_it_answers(
            settings,
            lambda: connect(
                settings.require_dsn(),
                application_name=f"walstream:{settings.namespace}:host",
                connect_timeout=settings.connect_timeout,
            ),
            self._stopping,
            log,
        )
        if identity is None:
            return
        owner = owner_name()
        if self._with_ingest:
            self._buffer = HotBuffer(self._settings.buffer_bytes)
            self.ingest = IngestSupervisor(self._settings, self._ports, self._buffer, owner)
        self.runners = RunnerGroup(self._settings, self._projectors, self._buffer, identity.key_prefix, owner=owner)
        if self.ingest is not None:
            self.ingest.start()
        self.runners.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the host ended by itself or was told to stop; ``False`` if ``timeout`` seconds passed first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._over():
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                return False
            self._stopping.wait(left)
        return True

    def request_stop(self) -> None:
        """End :meth:`wait` from any thread or a signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop within about ``drain_seconds``: ingest orders what it has, projectors finish their batch. Idempotent."""
        self._stopping.set()
        if self.ingest is not None and not self.ingest.stop(self._settings.drain_seconds + 5.0):
            log.error("ingest did not end in time; what it held is streamed again at the next start")
        if self.runners is not None:
            self.runners.stop(self._settings.drain_seconds)
        if self._buffer is not None:
            self._buffer.close()
        self._dismiss()

    def _dismiss(self) -> None:
        while self._companions:
            self._companions.pop().stop()

    @property
    def with_ingest(self) -> bool:
        """Whether ingest runs here, or stands by."""
        return self._with_ingest

    @property
    def head(self) -> int | None:
        """The last offset, as ingest of this process knows it; ``None`` where it does not stream."""
        ingest, buffer = self.ingest, self._buffer
        return buffer.head if buffer is not None and ingest is not None and ingest.state.state == "streaming" else None

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes in the hot buffer."""
        return None if self._buffer is None else self._buffer.nbytes

    @property
    def exit_code(self) -> ExitCode:
        """What the process should end with."""
        if self.error is not None:
            return self.error.exit_code
        if self.runners is not None and self.runners.halted:
            return ExitCode.HALTED
        return ExitCode.OK

    def _over(self) -> bool:
        if self._stopping.is_set():
            return True
        for side in (self.ingest, self.runners):
            if side is not None and side.error is not None:
                self.error = side.error
                return True
        # Without ingest nothing is left to do once every projector here has halted.
        runners = self.runners
        return (
            not self._with_ingest
            and runners is not None
            and bool(self._projectors)
            and len(runners.halted) == len(self._projectors)
        )
