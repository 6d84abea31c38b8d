"""procrastinate as a contender: its worker as documented, LISTEN/NOTIFY included, with an async task."""

from __future__ import annotations

import os

from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

from tests.benchmarks.handoff_receipts import DSN, HANDS, Receipts


def main() -> None:
    """Work until a signal comes."""
    receipts, hands = Receipts(), int(os.environ[HANDS])
    # A connection for each job at work, and one that listens: the pool's default of four would be short.
    app = App(connector=PsycopgConnector(conninfo=os.environ[DSN], min_size=hands + 1, max_size=hands + 1))

    @app.task(name="receive")
    async def receive(number: int) -> None:
        receipts.note(number)

    app.run_worker(concurrency=hands)


def emitting(dsn: str) -> App:
    """The app of who defers."""
    return App(connector=SyncPsycopgConnector(conninfo=dsn, min_size=1, max_size=1))


if __name__ == "__main__":
    main()
