"""Two projectors, and tests that kill them again and again: pytest rehearsed_projector.py

The external one sends orders to a warehouse that knows idempotency keys; the transactional one counts them in a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psycopg2

from walstream import Context, Event, Projector
from walstream.testing import make_event, rehearse


class Warehouse:
    """The other system: it keeps what it got under a key, and does nothing if that comes again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def order(self, key: str, item: str) -> None:
        (self.folder / key).write_text(item)

    def orders(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.iterdir()}

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


class Orders(Projector):
    name = "orders"
    events = ("task.completed",)
    outward = True

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        ctx.log.info("%d orders", len(events))
        for event in events:
            self._warehouse.order(event.key, event.payload["item"])


class ItemCounter(Projector):
    name = "item-counter"
    transactional = True
    tables = ("item_counts",)

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute("CREATE TABLE IF NOT EXISTS item_counts (item text PRIMARY KEY, n bigint NOT NULL)")

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            ctx.cursor.execute(
                "INSERT INTO item_counts VALUES (%s, 1) ON CONFLICT (item) DO UPDATE SET n = item_counts.n + 1",
                (event.payload["item"],),
            )


EVENTS = [make_event(n, "task.completed", payload={"item": f"item {n % 7}"}) for n in range(1, 61)]


def test_every_order_arrives_whatever_is_killed(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path / "warehouse")
    rehearse(lambda: Orders(warehouse), EVENTS, warehouse.orders, reset=warehouse.clear, rounds=5)


def test_the_counts_are_right_whatever_is_killed() -> None:
    dsn = os.environ["WALSTREAM_DSN"]

    def execute(sql: str) -> list[tuple[str, int]]:
        with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cur:
            cur.execute(sql)
            return cur.fetchall() if cur.description else []

    rehearse(
        ItemCounter,
        EVENTS,
        outcome=lambda: execute("SELECT item, n FROM item_counts ORDER BY item"),
        reset=lambda: execute("DROP TABLE IF EXISTS item_counts"),
        connect=lambda: psycopg2.connect(dsn),
        rounds=5,
    )
