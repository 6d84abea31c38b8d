"""A projector that hangs: the server is free again after the deadline, and nobody else notices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.integration.test_runner_failures import Effect, effects
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.deadline import Watchdog
from walstream.engine.leadership import Backend
from walstream.engine.projector import FunctionProjector
from walstream.event import Event
from walstream.source.connection import connect
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute("CREATE TABLE public.effect (n bigserial, projector text, event_offset bigint)")
        yield made


def open_transactions(world: World) -> int:
    """Sessions of projectors whose transaction pins something: they have an xid."""
    rows = world.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL"
        " AND pid <> pg_backend_pid()"
    )
    return int(rows[0][0])


def test_a_projector_that_hangs_in_python_in_mid_transaction(world: World) -> None:
    class Hanging(Effect):
        def effect(self, event: Event, ctx: Context) -> None:
            super().effect(event, ctx)
            if event.offset == 3 and self.tries.count(3) == 1:
                stuck.set()
                release.wait(60)

    stuck, release = threading.Event(), threading.Event()
    last = world.add_many(10)
    healthy = FaultyProjector("healthy")
    group = world.start(Hanging("hanging", deadline=0.7, retry_first=0.01), healthy)
    assert stuck.wait(60)
    assert open_transactions(world) == 1
    eventually(lambda: open_transactions(world) == 0)  # what it pinned is free, although it hangs still
    eventually(lambda: world.state("hanging") == "hung")
    more = world.add_many(10)
    eventually(lambda: world.reached("healthy", more))
    assert world.positions("hanging") == [0]
    assert effects(world, "hanging") == []
    assert not group.healthy

    release.set()
    eventually(lambda: world.reached("hanging", more))
    assert effects(world, "hanging") == list(range(1, more + 1))
    assert last < more
    eventually(lambda: group.healthy)


def test_a_statement_that_never_ends(world: World) -> None:
    def slow(event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO effect (projector, event_offset) VALUES ('slow', %s)", (event.offset,))
        if event.event_type == "bad":
            ctx.cursor.execute("SELECT pg_sleep(120)")

    world.add_many(4, sessions=2)
    bad = world.add("bad", session=SESSIONS[5])
    last = world.add_many(4, sessions=2)
    world.start(FunctionProjector(slow, transactional=True, deadline=0.4, max_attempts=2, retry_first=0.01))
    eventually(lambda: world.reached("slow", last))
    assert [(offset, state) for offset, state, _ in world.parked("slow")] == [(bad, "failed")]
    assert "deadline of 0.4 s" in world.execute("SELECT error FROM walstream.parked")[0][0]
    assert effects(world, "slow") == [offset for offset in range(1, last + 1) if offset != bad]


def test_what_is_async_is_cancelled_at_its_deadline(world: World) -> None:
    async def slow(event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO effect (projector, event_offset) VALUES ('slow', %s)", (event.offset,))
        if event.event_type == "bad":
            await asyncio.sleep(120)

    bad = world.add("bad", session=SESSIONS[5])
    last = world.add_many(4, sessions=2)
    world.start(FunctionProjector(slow, transactional=True, deadline=0.4, max_attempts=1))
    eventually(lambda: world.reached("slow", last))
    assert [(offset, state) for offset, state, _ in world.parked("slow")] == [(bad, "failed")]
    assert effects(world, "slow") == list(range(2, last + 1))


def test_an_external_projector_has_no_transaction_to_end(world: World) -> None:
    projector = FaultyProjector("p", deadline=0.3)
    projector.open.clear()
    last = world.add("x")
    world.start(projector)
    eventually(lambda: world.state("p") == "hung")
    assert open_transactions(world) == 0
    projector.open.set()
    eventually(lambda: world.reached("p", last) and world.state("p") != "hung")
    assert projector.done == [last]


def test_a_stop_ends_the_transaction_of_what_hangs(world: World) -> None:
    class Hanging(Effect):
        def effect(self, event: Event, ctx: Context) -> None:
            super().effect(event, ctx)
            stuck.set()
            release.wait(60)

    stuck, release = threading.Event(), threading.Event()
    world.add("x")
    group = world.start(Hanging("p", deadline=300.0))
    assert stuck.wait(60)
    assert not group.stop(0.2)
    eventually(lambda: open_transactions(world) == 0)  # the signal is sent; the server process ends a moment later
    release.set()


def test_only_the_recorded_server_process_is_ended(world: World) -> None:
    """A process id is used again; the start time tells."""
    victim = world.connect()
    with victim.cursor() as cur:
        cur.execute("SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        pid, start = cur.fetchone() or (0, "")
    watchdog = Watchdog(lambda: connect(world.settings.dsn, application_name="watchdog"))
    with watchdog.watch("another", 0.0, Backend(pid, "2001-01-01 00:00:00+00")) as ticket:
        eventually(lambda: ticket.ended)
    with victim.cursor() as cur:
        cur.execute("SELECT 1")
    with watchdog.watch("the one", 0.0, Backend(pid, start)) as ticket:
        eventually(lambda: ticket.ended)
    eventually(lambda: not world.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))
    watchdog.stop()


def test_a_server_that_is_away_does_not_stop_the_watchdog(world: World) -> None:
    tries: list[int] = []

    def unreachable() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("no route to host")
        return connect(world.settings.dsn, application_name="watchdog")  # type: ignore[return-value]

    watchdog = Watchdog(unreachable)  # type: ignore[arg-type]
    with watchdog.watch("it", 0.0, Backend(0, "2001-01-01 00:00:00+00")) as ticket:
        eventually(lambda: ticket.ended)
    assert len(tries) == 3
    watchdog.stop()
