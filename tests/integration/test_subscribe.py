"""Subscriptions: events in any process, without slot or cursor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import Database, Server
from tests.runner_world import KEY_PREFIX, SESSIONS, World, eventually, world_on
from walstream.engine.subscribe import Subscription, subscribe
from walstream.errors import ConfigError, LedgerError, RowMissing
from walstream.event import Event


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


class Listening:
    """Reads a subscription in a thread."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.events.extend(event for event in self._each())
        except BaseException as error:
            self.error = error

    def _each(self) -> Iterator[Event]:
        for event in self.subscription:
            self.events.append(event)
        yield from ()

    @property
    def offsets(self) -> list[int]:
        return [event.offset for event in self.events]

    def close(self) -> None:
        self.subscription.close()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_everything_up_to_the_end(world: World) -> None:
    last = world.add_many(2500)
    with subscribe(dsn=world.settings.dsn, follow=False) as events:
        seen = list(events)
        assert events.position == last
    assert [event.offset for event in seen] == list(range(1, last + 1))
    assert seen[0].key == f"{KEY_PREFIX}:{seen[0].seq}"


def test_from_an_offset_and_only_what_is_asked_for(world: World) -> None:
    world.add("a", "b", session=SESSIONS[0])
    world.add("a", "b", session=SESSIONS[1])
    world.add("a", "b", session=SESSIONS[0])

    def offsets(*types: str, after: int = 0, sessions: tuple[str, ...] = ()) -> list[int]:
        dsn = world.settings.dsn
        return [event.offset for event in subscribe(*types, after=after, sessions=sessions, follow=False, dsn=dsn)]

    assert offsets(after=4) == [5, 6]
    assert offsets("a") == [1, 3, 5]
    assert offsets("a", "b", after=5) == [6]
    assert offsets("b", sessions=(SESSIONS[0],)) == [2, 6]
    assert offsets("c") == []


def test_the_position_is_where_to_go_on(world: World) -> None:
    world.add_many(10)
    seen: list[int] = []
    with subscribe(dsn=world.settings.dsn) as events:
        for event in events:
            seen.append(event.offset)
            if event.offset == 4:
                break
        assert events.position == 4
    with subscribe(dsn=world.settings.dsn, after=events.position, follow=False) as rest:
        seen += [event.offset for event in rest]
    assert seen == list(range(1, 11))


def test_the_position_before_the_first_read_is_where_it_was_to_begin(world: World) -> None:
    """A program that ends before the server answered must not begin with the whole history the next time."""
    last = world.add_many(3)
    for after in ("latest", 2, 0):
        with subscribe(dsn=world.settings.dsn, after=after) as events:
            assert events.position == after
    with subscribe(dsn=world.settings.dsn, after="latest", follow=False) as events:
        assert list(events) == []
        assert events.position == last


def test_it_follows_and_is_woken(world: World) -> None:
    world.add_many(3)
    listening = Listening(subscribe(dsn=world.settings.dsn, after="latest", poll_seconds=600.0))
    eventually(lambda: listening.subscription._listener.listening and listening.subscription.position == 3)
    for _ in range(3):
        seen = len(listening.offsets)
        world.add("x")
        eventually(lambda seen=seen: len(listening.offsets) > seen, timeout=60)  # type: ignore[misc]
    assert listening.offsets == [4, 5, 6]
    listening.close()
    assert listening.error is None


def test_async_for(world: World) -> None:
    last = world.add_many(30)

    async def read() -> list[int]:
        seen: list[int] = []
        async with subscribe(dsn=world.settings.dsn) as events:
            async for event in events:
                seen.append(event.offset)
                if event.offset == last:
                    break
        return seen

    assert asyncio.run(read()) == list(range(1, last + 1))


def test_async_iteration_can_be_cancelled(world: World) -> None:
    async def read() -> str:
        async with subscribe(dsn=world.settings.dsn) as events:
            try:
                async with asyncio.timeout(0.2):
                    async for event in events:
                        return f"got {event}"
            except TimeoutError:
                return "timeout"
        return "ended"

    world.execute("SELECT 1")
    assert asyncio.run(read()) == "timeout"


def test_lost_connections_lose_and_double_nothing(world: World) -> None:
    listening = Listening(subscribe(dsn=world.settings.dsn))
    last = 0
    for _ in range(4):
        last = world.add_many(50)
        eventually(
            lambda: world.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name IN ('walstream:walstream:subscription', 'walstream:walstream:wake')"
            )
        )
    eventually(lambda: len(listening.offsets) >= last)
    assert listening.offsets == list(range(1, last + 1))
    listening.close()


def _lose_the_end(world: World, offset: int) -> None:
    """What a crash does to an order that was written asynchronously, as far as a reader can tell."""
    world.execute("DELETE FROM walstream.commit_order WHERE first_offset > %s", offset)
    world.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'walstream:walstream:%%'"
    )


def test_a_lost_end_of_the_order_is_waited_for(world: World) -> None:
    """Rule 4: a tail ahead of the order waits for it to grow back, then compares."""
    seqs = [world.insert("x") for _ in range(4)]
    for seq in seqs:
        world.order(seq)
    listening = Listening(subscribe(dsn=world.settings.dsn))
    eventually(lambda: listening.offsets == [1, 2, 3, 4])
    _lose_the_end(world, 2)
    world.order(seqs[2])
    with pytest.raises(AssertionError):
        eventually(lambda: len(listening.offsets) > 4, timeout=0.5)
    world.order(seqs[3])
    world.add("y")
    eventually(lambda: listening.offsets == [1, 2, 3, 4, 5])
    listening.close()


def test_a_lost_end_that_grows_back_differently_is_an_error(world: World) -> None:
    seqs = [world.insert("x") for _ in range(4)]
    for seq in seqs:
        world.order(seq)
    listening = Listening(subscribe(dsn=world.settings.dsn))
    eventually(lambda: listening.offsets == [1, 2, 3, 4])
    _lose_the_end(world, 2)
    world.order(seqs[3])
    world.order(seqs[2])
    error = eventually(lambda: listening.error)
    assert isinstance(error, LedgerError)
    assert f"offset 4 was yielded as seq {seqs[3][0]}" in str(error)
    listening.subscription.close()


def test_a_missing_row_is_an_error(world: World) -> None:
    world.add_many(3)
    world.execute("DELETE FROM agent_events WHERE seq = %s", world.events()[1].seq)
    with subscribe(dsn=world.settings.dsn, follow=False) as events:
        assert next(events).offset == 1
        with pytest.raises(RowMissing):
            next(events)


def test_a_ledger_that_is_not_set_up_is_named(database: Database) -> None:
    with subscribe(dsn=database.dsn) as events, pytest.raises(ConfigError, match="not installed"):
        next(events)
    with pytest.raises(ConfigError):
        next(subscribe(environ_dsn="x"))
