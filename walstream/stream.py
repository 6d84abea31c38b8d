"""The stream as a program sees it: projectors are added, then it runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from walstream.config import Settings, load
from walstream.engine.duty import ExitRequested
from walstream.engine.projector import FunctionProjector, Projector
from walstream.engine.subscribe import Subscription
from walstream.engine.waiting import ProgressWatch
from walstream.errors import ConfigError
from walstream.interpreter import tuned

if TYPE_CHECKING:
    from walstream.engine.host import Host

_LOOK_SECONDS = 0.2

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Projector = TypeVar("_Projector", bound=Projector)


class Stream:
    """One ledger's stream: its settings, and the projectors that this program runs on it.

    Args:
        dsn: the ledger's database. It, and every other setting, may come from the configuration instead, which wins
            over what is given here (docs/operations.md, "Configuration").
        settings: any field of :class:`walstream.config.Settings`.

    Example::

        from walstream import Stream

        stream = Stream("postgresql:///app")

        @stream.on("handoff.emitted")
        def route(event):
            print(event.payload["to"])

        if __name__ == "__main__":
            raise SystemExit(stream.run())
    """

    def __init__(self, dsn: str | None = None, **settings: Any) -> None:
        self._arguments = {"dsn": dsn, **settings}
        self._projectors: list[Projector] = []
        self._host: Host | None = None
        self._watch: ProgressWatch | None = None

    @property
    def projectors(self) -> Sequence[Projector]:
        """What was added, in that order."""
        return tuple(self._projectors)

    def on(self, *event_types: str, **options: Any) -> Callable[[_Function], _Function]:
        """Decorate a function, plain or async, of ``(event)`` or ``(event, ctx)``, to be called for each event.

        Args:
            event_types: which ones; none means all.
            options: of the projector that it becomes (``name``, ``transactional``, ``start``, …; see
                :class:`walstream.Projector`). Its name is the function's unless given.

        Raises:
            ConfigError: an option is unknown, the function takes other arguments, or the parentheses were forgotten.

        >>> stream = Stream()
        >>> @stream.on("task.completed", "task.failed", name="report", lanes=2)
        ... async def report(event, ctx):
        ...     ctx.log.info("%s: %s", event.session_id, event.payload)
        >>> [(projector.name, projector.events) for projector in stream.projectors]
        [('report', ('task.completed', 'task.failed'))]
        """
        if not all(isinstance(each, str) for each in event_types):  # nothing would run, and nobody would notice
            raise ConfigError(
                "@stream.on takes event types, and was given something else",
                hint="write @stream.on() for all of them, with the parentheses",
            )

        def add(function: _Function) -> _Function:
            self.add(FunctionProjector(function, event_types, **options))
            return function

        return add

    def add(self, projector: _Projector) -> _Projector:
        """Run ``projector`` with this stream; returns it.

        Raises:
            ConfigError: it is none; a class, for one, and not an object of it.
        """
        given: object = projector  # whatever the program really gave
        if not isinstance(given, Projector):
            name = getattr(given, "__name__", type(given).__name__)
            raise ConfigError(
                f"stream.add takes a projector, and {name} is none",
                hint=f"of a class that derives from walstream.Projector: stream.add({name}())",
            )
        self._projectors.append(projector)
        return projector

    def settings(self, flags: Mapping[str, Any] | None = None, *, file: Path | None = None) -> Settings:
        """The settings from all sources: flags, environment, file, and what this stream was made with.

        Raises:
            ConfigError: see :func:`walstream.config.load`.
        """
        return load(flags, file=file, arguments=self._arguments)

    def run(self, *, ingest: bool = True) -> int:
        """Run until SIGINT or SIGTERM, or until something ends it; return the exit code (see ``ExitCode``).

        Args:
            ingest: ``False`` only runs the projectors; ingest then runs in another process.

        Raises:
            WalstreamError: it cannot start, or what ended it.
        """
        from walstream.wiring import make_host

        host = make_host(self.settings(), self._projectors, ingest=ingest)
        return run_host(host)

    def subscribe(
        self,
        *event_types: str,
        after: int | Literal["latest"] = 0,
        sessions: Collection[str] = (),
        follow: bool = True,
    ) -> Subscription:
        """Events of this stream as an iterator, in any process; see :func:`walstream.subscribe`."""
        return Subscription(self.settings(), event_types, sessions=sessions, after=after, follow=follow)

    def wait_for(self, projector: str, seq: int, timeout: float = 30.0) -> bool:
        """Block until a projector is done with the event ``seq``: what was just written can then be read from what it
        derives. Works from any process, wherever the projector runs.

        Args:
            projector: its name.
            seq: of the ledger's row, as ``INSERT … RETURNING seq`` gives it.
            timeout: seconds.

        Returns:
            Whether it happened in time.

        Raises:
            EventParked: it will not happen by itself: the event's session is parked for this projector.
            ProjectorHalted: nor will it here.
            ConfigError: nobody has ever run a projector of that name.

        Example (``token-usage`` runs anywhere; whole in docs/examples/read_your_writes.py)::

            with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                    " VALUES (gen_random_uuid(), 'writer', 'model.responded', '{\"tokens\": 100}') RETURNING seq"
                )
                (seq,) = cursor.fetchone()
            if Stream(dsn).wait_for("token-usage", seq, timeout=5):
                print("what token-usage makes of it can be read now")
        """
        return self._progress().wait_for(projector, seq, timeout)

    async def await_for(self, projector: str, seq: int, timeout: float = 30.0) -> bool:
        """:meth:`wait_for` for a coroutine: the event loop goes on meanwhile."""
        return await self._progress().await_for(projector, seq, timeout)

    def _progress(self) -> ProgressWatch:
        if self._watch is None:
            self._watch = ProgressWatch(self.settings())
        return self._watch

    async def __aenter__(self) -> Stream:
        """Start ingest and projectors in threads of their own, inside an application with its own event loop.

        Raises:
            WalstreamError: it cannot start.

        Example::

            async def main():
                async with Stream("postgresql:///app") as stream:
                    await stream.wait()  # or the application's own work

            asyncio.run(main())
        """
        from walstream.wiring import make_host

        host = make_host(self.settings(), self._projectors)
        starting = asyncio.ensure_future(asyncio.to_thread(host.start))
        try:
            await asyncio.shield(starting)
        except BaseException:
            # Cancelled, for one: the thread waits for a server that is away, and the program could not end before it.
            host.request_stop()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.to_thread(host.stop)
            raise
        self._host = host
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        host, self._host = self._host, None
        if host is not None:
            await asyncio.to_thread(host.stop)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if host is not None and error is None:
            _raise_what_ended(host)

    async def wait(self) -> int:
        """Inside ``async with stream``: wait until the stream ends by itself, and return the exit code for it.

        Raises:
            WalstreamError: what ended it. (The end of the ``async with`` raises it too, if nobody waited.)
            ConfigError: outside of ``async with``.
        """
        host = self._host
        if host is None:
            raise ConfigError("the stream is not running here", hint="async with stream: await stream.wait()")
        while not host.wait(0.0):
            await asyncio.sleep(_LOOK_SECONDS)
        _raise_what_ended(host)
        return int(host.exit_code)


def run_host(host: Host) -> int:
    """Run a host in the foreground until a signal or its own end; return its exit code.

    Raises:
        WalstreamError: what ended it.
    """
    previous: dict[signal.Signals, Any] = {}

    def stop(_number: int, _frame: FrameType | None) -> None:
        host.request_stop()

    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with tuned():
            host.start()
            host.wait()
    finally:
        host.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    _raise_what_ended(host)
    return int(host.exit_code)


def _raise_what_ended(host: Host) -> None:
    # A projector that raised SystemExit wanted just that: an exit code, no error.
    if host.error is not None and not isinstance(host.error, ExitRequested):
        raise host.error
