"""The event loop of an async projector: a thread of its own, so that neither it nor anybody else's loop is blocked."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any


class LoopThread:
    """An event loop in a thread, started when it is first needed.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Awaitable[Any], *, abandoned: Callable[[], bool]) -> None:
        """Run ``work`` to its end; called from any other thread.

        Args:
            work: a coroutine or another awaitable.
            abandoned: asked a few times a second; once it is true ``work`` is cancelled.

        Raises:
            concurrent.futures.CancelledError: it was cancelled.
            BaseException: whatever ``work`` raised.
        """
        future = asyncio.run_coroutine_threadsafe(_outcome(work), self._started())
        cancelled = False
        while True:
            try:
                raised = future.result(timeout=0.25)
            except concurrent.futures.TimeoutError:
                if not cancelled and abandoned():
                    cancelled = future.cancel()
                continue
            if raised is not None:
                raise raised
            return

    def stop(self) -> None:
        """Cancel what still runs and end the thread; gives up on code that does not yield after two seconds."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        thread.join(2.0)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop


async def _outcome(work: Awaitable[Any]) -> BaseException | None:
    """What ``work`` raised. As a value, because SystemExit or KeyboardInterrupt out of a task would end the loop's
    thread before anybody heard of it."""
    try:
        await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
