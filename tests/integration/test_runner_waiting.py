"""Waiting for a projector to have dealt with an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream.engine.waiting import EventParked, ProgressWatch
from walstream.errors import ConfigError, ProjectorHalted
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


@pytest.fixture
def watch(world: World) -> Iterator[ProgressWatch]:
    made = ProgressWatch(world.settings)
    yield made
    made.close()


def test_it_returns_when_the_effect_is_there(world: World, watch: ProgressWatch) -> None:
    projector = FaultyProjector("p")
    projector.open.clear()
    world.start(projector)
    (seq,) = world.insert("x")
    eventually(lambda: world.state("p"))
    assert not watch.wait_for("p", seq, 0.1)  # it has no offset yet
    world.order([seq])
    assert not watch.wait_for("p", seq, 0.1)
    threading.Timer(0.1, projector.open.set).start()
    assert watch.wait_for("p", seq, 60)
    assert projector.done == [1]
    assert asyncio.run(watch.await_for("p", seq, 60))
    assert not asyncio.run(watch.await_for("p", seq + 1, 0.05))


def test_only_the_lane_of_the_event_counts(world: World, watch: ProgressWatch) -> None:
    world.start(FaultyProjector("p", lanes=4))
    last = world.add_many(40, sessions=8)
    eventually(lambda: world.reached("p", last))
    event = world.events()[-1]
    lane = world.execute("SELECT lane FROM walstream.cursors WHERE projector = 'p' AND position >= %s", event.offset)
    assert lane
    assert watch.wait_for("p", event.seq, 60)


def test_a_parked_event_is_an_error_at_once(world: World, watch: ProgressWatch) -> None:
    world.start(FaultyProjector("p", lambda e, _t: ValueError("bad") if e.offset == 1 else None, max_attempts=1))
    (first,), (behind,), (other,) = world.insert("x"), world.insert("x"), world.insert("x", session=SESSIONS[1])
    world.order([first], [behind], [other])
    assert watch.wait_for("p", other, 60)
    with pytest.raises(EventParked, match="ValueError: bad"):
        watch.wait_for("p", first, 60)
    with pytest.raises(EventParked, match="waits behind"):
        watch.wait_for("p", behind, 60)


def test_a_halted_projector_is_an_error_at_once(world: World, watch: ProgressWatch) -> None:
    world.start(FaultyProjector("p", lambda _e, _t: ValueError("bad"), max_attempts=1, on_poison="halt"))
    (seq,) = world.insert("x")
    world.order([seq])
    with pytest.raises(ProjectorHalted, match="ValueError: bad"):
        watch.wait_for("p", seq, 60)


def test_an_unknown_projector_is_an_error(world: World, watch: ProgressWatch) -> None:
    (seq,) = world.insert("x")
    world.order([seq])
    with pytest.raises(ConfigError, match="'nobody'"):
        watch.wait_for("nobody", seq, 0.2)


def test_a_lost_connection_is_made_again(world: World, watch: ProgressWatch) -> None:
    world.start(FaultyProjector("p"))
    seqs = world.insert("x", "x")
    world.order(seqs)
    assert watch.wait_for("p", seqs[0], 60)
    ended = world.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'walstream:walstream:wait'"
        " AND datname = current_database()"
    )
    assert ended
    assert watch.wait_for("p", seqs[1], 60)
