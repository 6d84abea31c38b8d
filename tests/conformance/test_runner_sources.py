"""What every event source does, whichever it is: in memory, hot, cold, or changing between the two."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from tests.conftest import Server
from tests.runner_world import KEY_PREFIX, World, eventually, world_on
from walstream.engine.doorbell import Doorbell
from walstream.engine.read_ahead import WORTH
from walstream.engine.source import EventSource, Reset, StreamSource
from walstream.errors import ConnectionLost, RowMissing
from walstream.event import Commit, Event
from walstream.order.reader import ColdReader
from walstream.order.wake import Listener
from walstream.source.connection import connect
from walstream.testing import MemoryOrder, make_event


class Rig(Protocol):
    """An order to read from, and the source under test."""

    source: EventSource
    keeps_removed: bool
    """What it holds in memory it delivers, whatever became of the row."""

    def add(self, *transactions: int) -> int:
        """Add transactions of so many events each; return the last offset."""

    def remove(self, offset: int, declared: bool) -> None:
        """Let a row vanish."""


class MemoryRig:
    keeps_removed = False

    def __init__(self) -> None:
        self._order = MemoryOrder()
        self.source: EventSource = self._order.source()

    def add(self, *transactions: int) -> int:
        for size in transactions:
            first = self._order.head + 1
            commit = Commit(first * 64, 0, 0, KEY_PREFIX)
            self._order.append([make_event(offset, commit=commit) for offset in range(first, first + size)])
        return self._order.head

    def remove(self, offset: int, declared: bool) -> None:
        self._order.remove(offset, declared=declared)


class StreamRig:
    """The real one: ``hot_bytes`` of hot buffer, or none."""

    def __init__(self, world: World, hot_bytes: int | None) -> None:
        self._world = world
        self.keeps_removed = hot_bytes is not None and hot_bytes > 100_000
        if hot_bytes is not None:
            world.make_hot(hot_bytes)
        settings = world.settings

        def sql(role: str) -> Callable[[], object]:
            return lambda: connect(settings.dsn, application_name=role)

        self._bell = Doorbell(lambda: Listener(sql("wake"), settings.namespace, 600.0), 600.0)  # type: ignore[arg-type]
        self.source: EventSource = StreamSource(
            world.hot,
            sql("cold"),  # type: ignore[arg-type]
            lambda connection: ColdReader(connection, settings.namespace, settings.ledger, KEY_PREFIX),
            self._bell.waiter(),
            poll_seconds=600.0,
            max_bytes=1 << 20,
        )

    def add(self, *transactions: int) -> int:
        return self._world.order(*[self._world.insert(*["t"] * size) for size in transactions])

    def remove(self, offset: int, declared: bool) -> None:
        seq = self._world.events()[offset - 1].seq
        if declared:
            self._world.execute("INSERT INTO walstream.erasures VALUES (%s, %s, 'test')", seq, seq)
        self._world.execute("DELETE FROM agent_events WHERE seq = %s", seq)

    def close(self) -> None:
        self.source.close()
        self._bell.stop()


@pytest.fixture(params=["memory", "cold", "hot", "hot and cold"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "memory":
        yield MemoryRig()
        return
    server: Server = request.getfixturevalue("server")
    with world_on(server) as world:
        # 2,000 bytes are four events: whatever is older is read cold.
        made = StreamRig(world, {"cold": None, "hot": 1 << 20, "hot and cold": 2000}[request.param])
        yield made
        made.close()


def offsets(events: object) -> list[int]:
    assert isinstance(events, (list, tuple))
    return [event.offset for event in events if isinstance(event, Event)]


def test_an_empty_order_yields_nothing_within_the_timeout(rig: Rig) -> None:
    batch = rig.source.read(0, limit=10, timeout=0.05)
    assert (list(batch.events), batch.through) == ([], 0)


def test_everything_after_a_position_in_order(rig: Rig) -> None:
    last = rig.add(1, 1, 1, 1, 1, 1, 1)
    batch = rig.source.read(0, limit=100, timeout=0)
    seen = offsets(batch.events)
    while batch.through < last:
        batch = rig.source.read(batch.through, limit=100, timeout=0)
        seen += offsets(batch.events)
    assert seen == list(range(1, 8))
    batch = rig.source.read(5, limit=100, timeout=0)
    assert (offsets(batch.events), batch.through) == ([6, 7], 7)
    assert rig.source.read(7, limit=100, timeout=0).through == 7


def test_no_more_than_the_limit_and_no_transaction_split(rig: Rig) -> None:
    rig.add(2, 3, 4)
    assert offsets(rig.source.read(0, limit=6, timeout=0).events) == [1, 2, 3, 4, 5]
    assert offsets(rig.source.read(5, limit=4, timeout=0).events) == [6, 7, 8, 9]


def test_a_transaction_larger_than_the_limit_is_split(rig: Rig) -> None:
    last = rig.add(1, 7, 1)
    seen: list[int] = []
    sizes: list[int] = []
    while not seen or seen[-1] < last:
        batch = rig.source.read(seen[-1] if seen else 0, limit=3, timeout=0)
        seen += offsets(batch.events)
        sizes.append(len(batch.events))
    assert seen == list(range(1, last + 1))
    assert max(sizes) == 3


def test_events_of_one_transaction_share_their_commit(rig: Rig) -> None:
    rig.add(2, 2)
    batch = rig.source.read(0, limit=10, timeout=0)
    commits = [event.commit for event in batch.events]
    assert commits[0] is commits[1]
    assert commits[1] is not commits[2]


def test_the_same_event_is_the_same_on_every_read(rig: Rig) -> None:
    rig.add(1, 1)
    first, again = (rig.source.read(0, limit=1, timeout=0).events[0] for _ in range(2))
    alone = rig.source.event_at(1)
    assert alone is not None
    for event in (again, alone):
        assert (event.offset, event.key, event.row) == (first.offset, first.key, first.row)


def test_a_reader_that_waits_is_woken(rig: Rig) -> None:
    last = rig.add(1)
    waiting = threading.Event()
    got: list[int] = []

    def read() -> None:
        after = rig.source.read(0, limit=10, timeout=0).through
        waiting.set()
        while not got:
            got.extend(offsets(rig.source.read(after, limit=10, timeout=300).events))

    thread = threading.Thread(target=read)
    thread.start()
    waiting.wait(60)
    rig.add(1)
    thread.join(60)  # far less than any poll
    assert got == [last + 1]


def test_events_that_come_while_reading_are_neither_lost_nor_doubled(rig: Rig) -> None:
    total = 120
    seen: list[int] = []

    def read() -> None:
        after = 0
        while after < total:
            batch = rig.source.read(after, limit=7, timeout=5)
            seen.extend(offsets(batch.events))
            after = batch.through

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(total // 3):
        rig.add(2, 1)
    thread.join(60)
    assert seen == list(range(1, total + 1))


def test_a_connection_that_ends_while_it_reads_ahead(server: Server) -> None:
    """Who starts over from his position gets what comes after it, once and in order."""
    with world_on(server) as world:
        rig = StreamRig(world, None)
        last = rig.add(*[WORTH // 2] * 12)
        seen: list[int] = []
        lost = 0
        for number in itertools.count():
            try:
                batch = rig.source.read(seen[-1] if seen else 0, limit=WORTH, timeout=0)
            except ConnectionLost:
                lost += 1
                rig.source.close()
                continue
            seen += offsets(batch.events)
            if batch.through == last:
                break
            if number % 3 == 0:
                world.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name = 'cold'"
                )
        assert seen == list(range(1, last + 1))
        assert lost
        rig.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "walstream-read-ahead"]


def test_a_declared_erasure_is_passed_over(rig: Rig) -> None:
    last = [rig.add(1) for _ in range(12)][-1]
    rig.remove(2, declared=True)
    seen: list[int] = []
    after = 0
    while after < last:
        batch = rig.source.read(after, limit=100, timeout=0)
        seen += offsets(batch.events)
        after = batch.through
    assert seen == ([1, 2] if rig.keeps_removed else [1]) + list(range(3, last + 1))
    assert rig.source.event_at(2) is None


def test_a_row_that_is_gone_undeclared_is_an_error_that_names_it(rig: Rig) -> None:
    for _ in range(12):
        rig.add(1)
    rig.remove(3, declared=False)
    if not rig.keeps_removed:
        assert offsets(rig.source.read(0, limit=100, timeout=0).events) == [1, 2]
        with pytest.raises(RowMissing, match="offset 3"):
            rig.source.read(2, limit=100, timeout=0)
    with pytest.raises(RowMissing, match="offset 3"):
        rig.source.event_at(3)


def test_a_new_incarnation_is_noticed(server: Server) -> None:
    """Rule 4, for the two that have one."""
    order = MemoryOrder()
    order.append([make_event(1), make_event(2)])
    source: EventSource = order.source()
    order.lose_after(1)
    with pytest.raises(Reset):
        source.read(2, limit=10, timeout=5)
    assert source.read(1, limit=10, timeout=0).through == 1

    with world_on(server) as world:
        rig = StreamRig(world, 1 << 20)
        last = rig.add(1, 1)
        assert rig.source.read(0, limit=10, timeout=0).through == last
        assert world.hot is not None
        noticed: list[bool] = []

        def read() -> None:
            try:
                rig.source.read(last, limit=10, timeout=300)
            except Reset:
                noticed.append(True)

        waiting = threading.Thread(target=read)
        waiting.start()
        world.hot.reset(last + 1)
        waiting.join(60)
        assert noticed == [True]
        rig.add(1)
        eventually(lambda: rig.source.read(last, limit=10, timeout=0).through == last + 1)
        rig.close()
