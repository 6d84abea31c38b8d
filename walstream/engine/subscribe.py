"""Events as an iterator, in any process: no slot, no cursor in the database, nothing to acknowledge.

A subscription reads the order and the ledger (the cold path) and is woken when there is more. Whoever wants to go on
after a restart keeps the offset of the last event it has dealt with, and passes it as ``after``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import psycopg2

from walstream.config import Settings, load
from walstream.errors import ConfigError, LedgerError, WalstreamError
from walstream.event import Event
from walstream.ledger.identity import check_identity
from walstream.ledger.schema import require_schema
from walstream.order.reader import ColdReader
from walstream.order.wake import Listener
from walstream.source.connection import connect
from walstream.source.failures import classify

from .retry import Backoff
from .source import EventBatch, StreamSource

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.subscribe")

_LIMIT = 1000  # events fetched at once
_PATIENCE = 1.0  # seconds between two looks at whether the subscription was closed
_AGAIN = Backoff(0.1, 30.0)


class Subscription:
    """An endless iterator over events, for ``for`` and for ``async for`` (one of them, and one thread or task).

    Made by :func:`subscribe`. A lost connection is made again; no event is lost or doubled by that.

    Args:
        settings: of the stream.
        event_types, sessions: which events; empty means all.
        after: see :func:`subscribe`.
        follow: whether to wait for more at the end of the order.

    Raises:
        ConfigError: ``after`` is neither an offset nor ``"latest"``, or a single string stands where several belong.
    """

    def __init__(
        self,
        settings: Settings,
        event_types: Collection[str] = (),
        *,
        sessions: Collection[str] = (),
        after: int | Literal["latest"] = 0,
        follow: bool = True,
    ) -> None:
        if after != "latest" and (isinstance(after, bool) or not isinstance(after, int) or after < 0):
            raise ConfigError(
                f"after={after!r} is no place to begin", hint='an offset (0 for the beginning), or "latest"'
            )
        for name, given in (("event_types", event_types), ("sessions", sessions)):
            if isinstance(given, str):  # a collection of its letters, and no event has one of those
                raise ConfigError(f"{name} is a single string", hint=f"{name}=[{given!r}]")
        self._settings = settings
        self._types = frozenset(name.encode() for name in event_types)
        self._sessions = frozenset(session.encode() for session in sessions)
        self._follow = follow
        self._after: int | None = None if after == "latest" else after
        self._last: tuple[int, int] | None = None
        self._verified = False
        self._source: StreamSource | None = None
        self._listener = Listener(lambda: self._connect("wake"), settings.namespace, settings.poll_seconds)
        self._ready: deque[Event] = deque()
        self._closed = threading.Event()
        self._reading = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    @property
    def position(self) -> int | Literal["latest"]:
        """Everything up to this offset was yielded, or was not asked for; pass it as ``after`` to go on later.
        ``"latest"``, if it was to begin there and where that is has not been read yet.
        """
        if self._ready:
            return self._ready[0].offset - 1
        return "latest" if self._after is None else self._after

    def close(self) -> None:
        """End the iteration, from any thread, and give the connections back."""
        self._closed.set()
        self._listener.wake()
        with self._reading:
            self._drop()
            self._listener.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    # -- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._ready:
            if not self._fetch():
                raise StopIteration
        return self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            if self._executor is None:  # one thread of its own: the default executor has few, and this one waits
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="walstream-subscription")
            try:
                more = await asyncio.get_running_loop().run_in_executor(self._executor, self._fetch)
            except RuntimeError:
                if not self._closed.is_set():
                    raise
                more = False
            if not more:
                raise StopAsyncIteration
        return self._ready.popleft()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _fetch(self) -> bool:
        """Wait for events and put them aside; ``False`` if there will be none."""
        attempt = 0
        with self._reading:
            while not self._closed.is_set():
                try:
                    batch = self._read()
                except (WalstreamError, psycopg2.Error) as raised:
                    self._drop()
                    error = classify(raised, doing="reading a subscription")
                    if not error.transient:
                        raise error from (None if error is raised else raised)
                    attempt += 1
                    pause = min(_AGAIN.pause(attempt), self._settings.retry_cap_seconds)
                    log.warning("the subscription reads again in %.1f s: %s", pause, error)
                    self._closed.wait(pause)
                    continue
                attempt = 0
                if batch is None:
                    continue
                before, self._after = self._after, batch.through
                if batch.events:
                    self._last = (batch.events[-1].offset, batch.events[-1].seq)
                self._ready.extend(self._wanted(batch.events))
                if self._ready:
                    return True
                if batch.through == before and not self._follow:
                    return False
        return False

    def _read(self) -> EventBatch | None:
        """One read; ``None`` if the order has not grown back to our position yet."""
        if self._source is None:
            self._source = self._open()
            self._verified = self._last is None
        if self._after is None:
            self._after = self._head()
        if not self._verified and not self._verify():
            self._listener.wait(_PATIENCE)
            return None
        timeout = _PATIENCE if self._follow else 0.0
        return self._source.read(self._after, limit=_LIMIT, timeout=timeout)

    def _wanted(self, events: Sequence[Event]) -> Sequence[Event]:
        types, sessions = self._types, self._sessions
        if types:
            events = [event for event in events if event.row[3] in types]
        if sessions:
            events = [event for event in events if event.row[1] in sessions]
        return events

    def _verify(self) -> bool:
        """Compare our end with the order after a connection was lost (rule 4).

        The order is written asynchronously: a crash of the server may have taken offsets that were yielded already.
        They are given again, and as a rule to the same events; if not, that must not pass silently.
        """
        assert self._last is not None
        assert self._source is not None
        offset, seq = self._last
        if self._head() < offset:
            return False
        event = self._source.event_at(offset)
        if event is not None and event.seq != seq:
            raise LedgerError(
                f"offset {offset} was yielded as seq {seq} and is seq {event.seq} now: the server lost the end of the"
                " order, and it was written differently",
                hint=f"start again before the events in doubt, such as after={max(0, offset - _LIMIT)}, and know those"
                " that were seen by their keys",
            )
        self._verified = True
        return True

    def _open(self) -> StreamSource:
        connection = self._connect("subscription")
        try:
            require_schema(connection, self._settings)
            prefix = check_identity(connection, self._settings).key_prefix
        finally:
            connection.close()
        settings = self._settings
        return StreamSource(
            None,
            lambda: self._connect("subscription"),
            lambda made: ColdReader(made, settings.namespace, settings.ledger, prefix),
            self._listener,
            poll_seconds=settings.poll_seconds,
            max_bytes=settings.chunk_bytes,
        )

    def _head(self) -> int:
        connection = self._connect("subscription")
        try:
            return ColdReader(connection, self._settings.namespace, self._settings.ledger, "").head()
        finally:
            connection.close()

    def _connect(self, role: str) -> Connection:
        settings = self._settings
        return connect(
            settings.require_dsn(),
            application_name=f"walstream:{settings.namespace}:{role}",
            connect_timeout=settings.connect_timeout,
        )

    def _drop(self) -> None:
        if self._source is not None:
            with contextlib.suppress(WalstreamError):
                self._source.close()
            self._source = None


def subscribe(
    *event_types: str,
    after: int | Literal["latest"] = 0,
    sessions: Collection[str] = (),
    follow: bool = True,
    dsn: str | None = None,
    **settings: Any,
) -> Subscription:
    """Events of the ledger in commit order, as an iterator that waits for more.

    Args:
        event_types: only these; none means all.
        after: begin after this offset: 0 for everything, the last event's ``offset`` to go on, ``"latest"`` for what
            is ordered from now on.
        sessions: only these session ids; empty means all.
        follow: ``False`` ends at the end of the order instead of waiting.
        dsn: the ledger's database; it and all other ``settings`` may come from the configuration instead.

    Raises:
        ConfigError: the configuration does not fit (while iterating: the ledger is not set up).
        LedgerError: while iterating: a row is gone and nobody declared that (:class:`~walstream.RowMissing`), or the
            server lost offsets that were yielded and gave them to other events.

    Example::

        from walstream import subscribe

        with subscribe("handoff.emitted", after="latest") as events:
            for event in events:
                print(event.offset, event.payload["to"])

    and in a coroutine::

        async with subscribe("handoff.emitted", after=last_seen) as events:
            async for event in events:
                await tell(event.session_id)
    """
    return Subscription(
        load(arguments={"dsn": dsn, **settings}), event_types, sessions=sessions, after=after, follow=follow
    )
