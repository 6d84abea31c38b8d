"""The worker: does the jobs of one agent, each of them once.

from walstream import Worker

worker = Worker("postgresql:///app", agent="researcher")


@worker.handle
def research(context, job, ledger):
    ledger.append("task.completed", {"result": f"looked into {job.handoff.payload['message']}"})


if __name__ == "__main__":
    raise SystemExit(worker.run())
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from walstream.config import Settings, load
from walstream.engine.retry import Backoff
from walstream.engine.waiting_for_server import identity_once_it_answers
from walstream.errors import ConfigError, ExitCode
from walstream.ledger.job import LEASE_SECONDS
from walstream.ledger.schema import APPROVALS_VERSION
from walstream.ledger.taxonomy import TAXONOMY
from walstream.monitoring.health import Health
from walstream.monitoring.reporting import reporting

from .shift import Options, Shift, connect_plainly
from .standing import begin_counting, worker_health, worker_samples

if TYPE_CHECKING:
    from types import FrameType, TracebackType

log = logging.getLogger("walstream.worker")

_Handler = TypeVar("_Handler", bound=Callable[..., Any])

_LOOK_SECONDS = 0.2


class Worker:
    """Claims the jobs of one agent and hands them to one function, :meth:`handle`.

    Args:
        dsn: the ledger's database. It, and every other setting, may come from the configuration instead, which wins
            over what is given here (docs/operations.md, "Configuration").
        agent: whose jobs.
        concurrency: how many of them this process works on at the same time, each in a thread with a connection of its
            own.
        agent_concurrency: how many may be at work in all processes together; any number if not given.
        per_session: work on one job of a session at a time, whoever's it is, in their order.
        lease_seconds: how long a worker that is gone keeps others from its job. Renewed while the handler runs.
        timeout: seconds that a turn may take; ``None`` for as long as it likes. After that an async handler is
            cancelled, and the lease of a plain one is no longer renewed.
        retry_first, retry_cap: seconds to wait after the first failed attempt, and at the most. The pause doubles.
        types: models of the payloads that are appended, as for :class:`walstream.Ledger`.
        settings: any field of :class:`walstream.config.Settings`. ``poll_seconds`` is how often it looks for jobs
            when nobody wakes it, ``drain_seconds`` how long turns may go on when it is told to stop.

    Raises:
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        agent: str,
        concurrency: int = 4,
        agent_concurrency: int | None = None,
        per_session: bool = True,
        lease_seconds: float = LEASE_SECONDS,
        timeout: float | None = None,
        retry_first: float = 1.0,
        retry_cap: float = 300.0,
        types: Mapping[str, type[BaseModel]] = TAXONOMY,
        **settings: Any,
    ) -> None:
        self._arguments = {"dsn": dsn, **settings}
        self.options = Options(
            agent=agent,
            concurrency=concurrency,
            agent_concurrency=agent_concurrency,
            per_session=per_session,
            lease_seconds=lease_seconds,
            timeout=timeout,
            retry=Backoff(retry_first, retry_cap),
            types=types,
        )
        self._handler: Callable[..., Any] | None = None
        self._shift: Shift | None = None
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        self._check()

    def _check(self) -> None:
        options = self.options
        sound = {
            "agent": isinstance(options.agent, str) and bool(options.agent),
            "concurrency": options.concurrency >= 1,
            "agent_concurrency": options.agent_concurrency is None or options.agent_concurrency >= 1,
            "lease_seconds": options.lease_seconds > 0,
            "timeout": options.timeout is None or options.timeout > 0,
            "retry_first and retry_cap": 0 <= options.retry.first <= options.retry.cap,
        }
        wrong = [name for name, fits in sound.items() if not fits]
        if wrong:
            raise ConfigError(
                f"the worker of {self.options.agent!r}: {', '.join(wrong)} cannot be what it is",
                hint="agent is a name; concurrency is at least 1; times are seconds, of more than 0",
            )

    def handle(self, function: _Handler) -> _Handler:
        """Decorate the function, plain or async, of ``(context, job, ledger)`` that does the work.

        ``context`` is the session as rebuilt from the ledger, ``job`` a :class:`walstream.ClaimedJob`, and ``ledger`` a
        :class:`walstream.TurnLedger`. When it returns, the job is completed, together with what it appended. If it
        raises, nothing of that was, and the job is tried again later (:class:`walstream.RetryLater` says when, and is
        not counted; :class:`walstream.GiveUp` ends it).

        Raises:
            ConfigError: there is a handler already, or it takes other arguments.
        """
        if self._handler is not None:
            raise ConfigError(
                f"the worker of {self.options.agent!r} has a handler already",
                hint="an agent has one; it can look at job.handoff and decide",
            )
        try:
            inspect.signature(function).bind(None, None, None)
        except TypeError as error:
            name = getattr(function, "__name__", repr(function))
            raise ConfigError(
                f"{name} cannot be called with (context, job, ledger)",
                hint=f"write `def {name}(context, job, ledger):`, below @worker.handle without parentheses",
            ) from error
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"{getattr(function, '__name__', function)} is a generator (it says `yield`): a call of it would run"
                " nothing",
                hint="write it as a plain or an async function",
            )
        self._handler = function
        return function

    def settings(self, flags: Mapping[str, Any] | None = None, *, file: Path | None = None) -> Settings:
        """The settings from all sources: flags, environment, file, and what this worker was made with.

        Raises:
            ConfigError: see :func:`walstream.config.load`.
        """
        return load(flags, file=file, arguments=self._arguments)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, settings: Settings | None = None) -> None:
        """Start working in threads; waits for a server that is away.

        Raises:
            WalstreamError: configuration or set-up that a retry cannot help.
        """
        if self._handler is None:
            raise ConfigError(
                f"the worker of {self.options.agent!r} has nothing to do its jobs with",
                hint="decorate a function with @worker.handle",
            )
        if self._shift is not None:
            raise ConfigError(f"the worker of {self.options.agent!r} runs already")
        chosen = settings or self.settings()
        self._stopping.clear()
        self.error = None
        found = identity_once_it_answers(
            chosen, lambda: connect_plainly(chosen, "worker"), self._stopping, log, version=APPROVALS_VERSION
        )
        if found is not None:
            begin_counting(self.options.agent)
            self._shift = Shift(self.options, chosen, self._handler, self._ended)
            self._shift.start()

    def request_stop(self) -> None:
        """End :meth:`wait` from any thread or a signal handler."""
        self._stopping.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker is told to stop or something ends it; ``False`` if ``timeout`` passed first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._stopping.is_set():
            left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return False
            self._stopping.wait(left)
        return True

    def stop(self) -> None:
        """Stop: no job is claimed any more, and turns may go on for ``drain_seconds``. What is not finished by then is
        given back, so that another worker has it at once."""
        self._stopping.set()
        shift, self._shift = self._shift, None
        if shift is not None:
            shift.stop()

    def run(self, settings: Settings | None = None) -> int:
        """Work until SIGINT or SIGTERM; return the exit code.

        Raises:
            WalstreamError: it cannot start, or what ended it.
            SystemExit: of a handler.
        """
        previous: dict[signal.Signals, Any] = {}

        def stop(_number: int, _frame: FrameType | None) -> None:
            self.request_stop()

        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        chosen = settings or self.settings()
        try:
            with reporting(chosen, self.health, lambda: worker_samples(self.options, self._shift)):
                self.start(chosen)
                self.wait()
                self.stop()
        finally:
            self.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.error is not None:
            raise self.error
        return int(ExitCode.OK)

    def health(self) -> Health:
        """How it is: alive while nothing has ended it, ready while its hands can claim jobs."""
        return worker_health(self.options, self._shift, ended=self.error is not None)

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _ended(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            log.error("the worker of %r ends: %s", self.options.agent, error)
        self._stopping.set()
