"""The stream inside an asyncio application.

``async with stream`` starts ingest and projectors in threads of their own, so a busy application does not slow them and
they do not block it. An async handler runs on an event loop of its own; what it has for the application it hands over
with ``call_soon_threadsafe``.

    python inside_an_app.py
"""

import asyncio
import contextlib
import signal

from walstream import Event, Stream


async def main() -> None:
    stream = Stream()
    loop = asyncio.get_running_loop()
    finished: asyncio.Queue[Event] = asyncio.Queue()

    @stream.on("task.completed", name="dashboard", start="latest")
    async def show(event: Event) -> None:
        loop.call_soon_threadsafe(finished.put_nowait, event)

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)

    async with stream:
        print("ready", flush=True)
        ended = asyncio.create_task(stream.wait())  # by itself, for what no retry can help
        work = [ended, asyncio.create_task(stopping.wait()), asyncio.create_task(print_all(finished))]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended  # raises what ended it


async def print_all(finished: asyncio.Queue[Event]) -> None:
    while True:
        event = await finished.get()
        print(f"{event.session_id} is done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
