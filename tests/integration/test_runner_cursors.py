"""The one statement that moves a cursor, and everything that it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2.extensions import cursor as Cursor

from tests.conftest import Server
from tests.runner_world import World, world_on
from walstream.engine.cursors import Cursors, StaleCursor, TransactionEnded
from walstream.engine.projector import Options
from walstream.errors import ConfigError, Fenced
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.add_many(10)
        yield made


@pytest.fixture
def cur(world: World) -> Iterator[Cursor]:
    connection = world.connect()
    with connection.cursor() as made:
        Cursors("walstream", "p").register(made, Options.of(FaultyProjector("p", lanes=2)))
        made.execute("UPDATE walstream.projectors SET generation = 5")
        connection.commit()
        yield made
    connection.rollback()


def stored(cur: Cursor) -> dict[int, int]:
    return Cursors("walstream", "p").positions(cur)


def test_it_moves_one_lane_from_where_it_stands(cur: Cursor) -> None:
    Cursors("walstream", "p", 5).step(cur, 1, 0, 7)
    assert stored(cur) == {0: 0, 1: 7}


def test_another_generation_is_refused(cur: Cursor) -> None:
    for generation in (4, 6):
        with pytest.raises(Fenced, match="'p'"):
            Cursors("walstream", "p", generation).step(cur, 0, 0, 7)
    assert stored(cur) == {0: 0, 1: 0}


def test_another_position_is_refused(cur: Cursor) -> None:
    cursors = Cursors("walstream", "p", 5)
    cursors.step(cur, 0, 0, 7)
    with pytest.raises(StaleCursor, match="moved from 0 to 7"):
        cursors.step(cur, 0, 0, 9)
    assert stored(cur)[0] == 7


def test_a_step_beyond_the_end_of_the_order_is_refused(cur: Cursor) -> None:
    """The order was written asynchronously and went down with the server; what was read of it is worth nothing."""
    with pytest.raises(StaleCursor, match="ends at 10"):
        Cursors("walstream", "p", 5).step(cur, 0, 0, 11)
    Cursors("walstream", "p", 5).step(cur, 0, 0, 10)


def test_a_transaction_that_somebody_ended_is_refused(cur: Cursor) -> None:
    cursors = Cursors("walstream", "p", 5)
    cursors.mark_batch(cur, "mine")
    cursors.step(cur, 0, 0, 3, "mine")
    cur.connection.commit()
    with pytest.raises(TransactionEnded, match="ended the transaction"):
        cursors.step(cur, 0, 3, 4, "mine")


def test_a_takeover_waits_for_no_lane_and_wins(world: World, cur: Cursor) -> None:
    """The zombie has done its work and is about to step when another process takes over, and even steps."""
    cursors = Cursors("walstream", "p", 5)
    cursors.mark_batch(cur, "mine")
    world.execute("UPDATE walstream.projectors SET generation = 6")
    world.execute("UPDATE walstream.cursors SET position = 4 WHERE lane = 0")
    with pytest.raises(Fenced):
        cursors.step(cur, 0, 0, 4, "mine")


def test_a_projector_is_registered_once(cur: Cursor) -> None:
    assert not Cursors("walstream", "p").register(cur, Options.of(FaultyProjector("p", start="latest")))
    assert stored(cur) == {0: 0, 1: 0}
    assert Cursors("walstream", "q").register(cur, Options.of(FaultyProjector("q", start="latest")))
    assert Cursors("walstream", "q").positions(cur) == {0: 10}


def test_the_number_of_lanes_is_only_changed_by_whoever_runs_it(cur: Cursor) -> None:
    with pytest.raises(Fenced):
        Cursors("walstream", "p", 4).rewrite_lanes(cur, 3, 2)
    Cursors("walstream", "p", 5).rewrite_lanes(cur, 3, 2)
    assert stored(cur) == {0: 2, 1: 2, 2: 2}


def test_a_cursor_that_is_gone_is_named(cur: Cursor) -> None:
    with pytest.raises(ConfigError, match="no cursor for lane 7"):
        Cursors("walstream", "p", 5).position(cur, 7)


def test_a_halt_stays_until_it_is_lifted(cur: Cursor) -> None:
    cursors = Cursors("walstream", "p", 5)
    cursors.halt(cur, "bad", 3)
    cursors.set_state(cur, "hot", None, None)
    row = cursors.row(cur)
    assert row is not None
    assert row.state == "halted"
    cursors.set_state(cur, "starting", None, None, force=True)
    row = cursors.row(cur)
    assert row is not None
    assert row.state == "starting"
    with pytest.raises(Fenced):
        Cursors("walstream", "p", 4).halt(cur, "bad", 3)
