"""The one statement that moves a cursor, and everything that it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from psycopg2.extensions import cursor as Cursor

from tests.conftest import Server
from tests.runner_world import SESSIONS, World, world_on
from walstream.engine.cursors import Cursors, StaleCursor, TransactionEnded
from walstream.engine.projector import Options
from walstream.engine.trouble import Trouble
from walstream.errors import ConfigError, Fenced
from walstream.event import ERASED_ERROR
from walstream.testing import FaultyProjector

BAD = Trouble("bad", 3, (3,))


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
    cursors.halt(cur, BAD)
    cursors.set_state(cur, "hot")
    row = cursors.row(cur)
    assert row is not None
    assert row.state == "halted"
    cursors.set_state(cur, "starting", force=True)
    row = cursors.row(cur)
    assert row is not None
    assert row.state == "starting"
    with pytest.raises(Fenced):
        Cursors("walstream", "p", 4).halt(cur, BAD)


ERASE = "SELECT * FROM walstream.erase_session(%s, 'asked for')"
SHOWN = "SELECT error, error_offset, error_seqs FROM walstream.projectors WHERE name = 'p'"


def test_an_error_is_kept_with_the_events_that_it_may_tell_of(world: World, cur: Cursor) -> None:
    cursors = Cursors("walstream", "p", 5)
    for seqs, kept in (((3, 4), [3, 4]), ((), []), (None, None), (tuple(range(1001)), None)):
        cursors.set_state(cur, "retrying", Trouble("bad", 3, seqs))
        cur.connection.commit()
        assert world.execute(SHOWN) == [("bad", 3, kept)]
    with world.at_version(8):  # a schema that has not got the column yet
        cursors.set_state(cur, "retrying", Trouble("worse", 4, (1,)))
        cur.connection.commit()
    assert world.execute(SHOWN) == [("worse", 4, None)]


def test_what_was_erased_meanwhile_is_not_told(world: World, cur: Cursor) -> None:
    """A lane tries again what it has in memory, for hours if a disk is full."""
    seq = world.insert("note", session=SESSIONS[1])[0]
    world.execute(ERASE, SESSIONS[1])
    cursors = Cursors("walstream", "p", 5)
    for cursor in (cur, world.connection.cursor()):  # in a transaction of the runner, and in none
        cursors.halt(cursor, Trouble("KeyError: Ada", 3, (1, seq)))
        cur.connection.commit()
        assert world.execute(SHOWN)[0][0] == ERASED_ERROR


@pytest.mark.parametrize("first", ["erasure", "error"])
def test_an_error_at_the_same_time_is_scrubbed_or_not_told(world: World, cur: Cursor, first: str) -> None:
    seq = world.insert("note", session=SESSIONS[1])[0]
    cursors, other = Cursors("walstream", "p", 5), world.connect()

    def erase() -> None:
        with other, other.cursor() as erasing:
            erasing.execute(ERASE, (SESSIONS[1],))

    def halt() -> None:
        cursors.halt(cur, Trouble("KeyError: Ada", 3, (seq,)))
        cur.connection.commit()

    if first == "error":
        cursors.halt(cur, Trouble("KeyError: Ada", 3, (seq,)))
        second, finish = threading.Thread(target=erase), cur.connection.commit
    else:
        with other.cursor() as erasing:
            erasing.execute(ERASE, (SESSIONS[1],))
        second, finish = threading.Thread(target=halt), other.commit
    second.start()
    second.join(0.3)
    assert second.is_alive()  # it waits for the one that was first
    finish()
    second.join(60)
    assert world.execute(SHOWN)[0][0] == ERASED_ERROR
