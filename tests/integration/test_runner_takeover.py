"""One projector, several processes, lost connections, operators: whoever is not in charge writes nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from psycopg2.extensions import make_dsn

from tests.chaos.network import Network
from tests.conftest import Server
from tests.integration.test_runner_failures import Effect, effects
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.lanes import lane_of
from walstream.engine.projector import FunctionProjector
from walstream.errors import ConfigError
from walstream.event import Event
from walstream.postgres import PostgresServer
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute("CREATE TABLE public.effect (n bigserial, projector text, event_offset bigint)")
        yield made


def end_sessions(world: World, role: str) -> int:
    """End the server processes of one role; return how many there were."""
    rows = world.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = %s",
        f"walstream:walstream:{role}",
    )
    return len(rows)


def test_the_second_stands_by_and_takes_over(world: World) -> None:
    first, second = Effect("p"), Effect("p")
    last = world.add_many(10)
    one = world.start(first)
    eventually(lambda: world.reached("p", last))
    other = world.start(second)
    eventually(lambda: other.states()["p"][0] == "standby" and other.healthy)
    more = world.add_many(10)
    eventually(lambda: world.reached("p", more))
    assert second.tries == []
    one.stop(5)
    final = world.add_many(10)
    eventually(lambda: world.reached("p", final), timeout=1.9)  # at once, not when the lease runs out
    assert effects(world, "p") == list(range(1, final + 1))


def test_the_late_write_of_the_one_that_was_replaced_is_refused(world: World) -> None:
    """A stopped process: it has done its part of the transaction, and is gone for longer than its lease."""
    slow, quick = Effect("p"), Effect("p")
    held, release = threading.Event(), threading.Event()

    def hold(event: Event, ctx: Context) -> None:
        del event, ctx
        held.set()
        release.wait(60)

    slow.effect = hold  # type: ignore[method-assign]
    last = world.add_many(5)
    one = world.start(slow)
    assert held.wait(60)
    # What stops a whole process is played by keeping it from renewing, and its lease has run out.
    one._keeper._stopping.set()
    one._keeper._thread.join(60)
    world.start(quick)
    eventually(lambda: world.reached("p", last))
    release.set()
    eventually(lambda: one.states()["p"][0] == "standby")
    assert world.positions("p") == [last]
    assert effects(world, "p") == list(range(1, last + 1))


def test_an_external_one_that_was_replaced_redelivers_with_the_same_keys(world: World) -> None:
    slow, quick = FaultyProjector("p"), FaultyProjector("p")
    slow.open.clear()
    last = world.add_many(5)
    one = world.start(slow)
    eventually(lambda: slow.batches)
    one._keeper._stopping.set()
    one._keeper._thread.join(60)
    world.start(quick)
    eventually(lambda: world.reached("p", last))
    slow.open.set()
    eventually(lambda: one.states()["p"][0] == "standby")
    assert slow.keys == quick.keys
    assert world.positions("p") == [last]


@pytest.mark.parametrize("role", ["p", "projectors"])
def test_a_lost_connection_loses_and_doubles_nothing(world: World, role: str) -> None:
    projector = Effect("p", retry_first=0.01)
    group = world.start(projector)
    last = 0
    for _ in range(5):
        last = world.add_many(30)
        eventually(lambda: end_sessions(world, role))
    eventually(lambda: world.reached("p", last))
    assert effects(world, "p") == list(range(1, last + 1))
    assert world.parked("p") == []
    eventually(lambda: group.healthy)


def test_a_connection_lost_in_mid_transaction_is_not_the_events_fault(world: World) -> None:
    lost: list[int] = []

    def work(event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO effect (projector, event_offset) VALUES ('work', %s)", (event.offset,))
        if event.offset == 5 and len(lost) < 4:
            lost.append(end_sessions(world, "work"))

    last = world.add_many(10)
    world.start(FunctionProjector(work, transactional=True, max_attempts=1))
    eventually(lambda: world.reached("work", last))
    assert lost == [1, 1, 1, 1]
    assert world.parked("work") == []
    assert effects(world, "work") == list(range(1, last + 1))


def test_paused_it_reads_nothing_and_goes_on_where_it_was(world: World) -> None:
    projector = FaultyProjector("p")
    group = world.start(projector)
    last = world.add_many(5)
    eventually(lambda: world.reached("p", last))
    world.execute("UPDATE walstream.projectors SET desired = 'paused'")
    eventually(lambda: world.state("p") == "paused")
    more = world.add_many(5)
    with pytest.raises(AssertionError):
        eventually(lambda: len(projector.tries) > last, timeout=0.5)
    group.stop(5)
    again = FaultyProjector("p")
    world.start(again)
    eventually(lambda: world.state("p") == "paused")
    assert again.tries == []
    world.execute("UPDATE walstream.projectors SET desired = 'running'")
    eventually(lambda: world.reached("p", more))
    assert again.done == list(range(last + 1, more + 1))


def test_paused_in_the_middle_of_its_retries(world: World) -> None:
    world.add("x")
    group = world.start(FaultyProjector("p", lambda _e, _t: ValueError("no"), max_attempts=1000, retry_first=0.05))
    eventually(lambda: world.state("p") == "retrying")
    world.execute("UPDATE walstream.projectors SET desired = 'paused'")
    eventually(lambda: world.state("p") == "paused")
    assert world.parked("p") == []
    assert group.stop(2)


def test_a_cursor_that_an_operator_moved_is_read_again(world: World) -> None:
    projector = FaultyProjector("p")
    world.start(projector)
    last = world.add_many(5)
    eventually(lambda: world.reached("p", last))
    world.execute("UPDATE walstream.projectors SET generation = generation + 1")
    world.execute("UPDATE walstream.cursors SET position = 2")
    more = world.add_many(2)
    eventually(lambda: world.reached("p", more))
    assert projector.done[-5:] == [3, 4, 5, 6, 7]
    assert projector.keys[-5:-2] == projector.keys[2:5]


def test_a_projector_that_was_removed_while_it_ran_begins_anew(world: World) -> None:
    projector = FaultyProjector("p")
    world.start(projector)
    last = world.add_many(3)
    eventually(lambda: world.reached("p", last))
    world.execute("DELETE FROM walstream.projectors WHERE name = 'p'")
    eventually(lambda: projector.done == [1, 2, 3, 1, 2, 3] and world.reached("p", last))


def test_a_lane_whose_cursor_is_gone_stands_by(world: World) -> None:
    """Its rows were removed, or another process runs it with fewer lanes. The keeper may hear of it later than a lane
    that connects again."""
    projector = FaultyProjector("p")
    group = world.start(projector, lease_seconds=60, poll_seconds=20)
    last = world.add_many(3)
    eventually(lambda: world.reached("p", last))
    world.execute("DELETE FROM walstream.projectors WHERE name = 'p'")
    assert end_sessions(world, "p") == 1
    world.add("x")
    eventually(lambda: group.error is not None or group.states()["p"][0] == "standby")
    assert group.error is None


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_the_number_of_lanes_changes_at_a_common_offset(world: World, before: int, after: int) -> None:
    first = world.start(Effect("p", lanes=before))
    last = world.add_many(100, sessions=8)
    eventually(lambda: len(world.positions("p")) == before and world.reached("p", last))
    first.stop(5)
    world.add_many(100, sessions=8)
    if before > 1:  # as a crash leaves them: one lane far ahead, another behind
        world.execute("UPDATE walstream.cursors SET position = position + 60 WHERE lane = 1")
        lane_one = {event.offset for event in world.events() if _lane(event, before) == 1}
        for offset in sorted(lane_one & set(range(last + 1, last + 61))):
            world.execute("INSERT INTO public.effect (projector, event_offset) VALUES ('p', %s)", offset)
    final = world.add_many(100, sessions=8)
    world.start(Effect("p", lanes=after))
    eventually(lambda: len(world.positions("p")) == after and world.reached("p", final))
    seen = effects(world, "p")
    assert sorted(seen) == list(range(1, final + 1))
    by_session: dict[str, list[int]] = {}
    events = {event.offset: event for event in world.events()}
    for offset in seen:
        by_session.setdefault(events[offset].session_id, []).append(offset)
    assert all(offsets == sorted(offsets) for offsets in by_session.values())
    assert world.execute("SELECT lanes, target_lanes FROM walstream.projectors") == [(after, after)]


def _lane(event: Event, lanes: int) -> int:
    from walstream.engine.lanes import lane_of

    return lane_of(event.session_id.encode(), lanes)


def test_two_projectors_of_one_name_are_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="two projectors are called 'p'"):
        world.group(FaultyProjector("p"), FaultyProjector("p"))


def test_the_configuration_has_the_last_word(world: World) -> None:
    last = world.add_many(40)
    projector = FaultyProjector("p", batch=5)
    world.start(projector, projectors={"p": {"batch": 2, "start": 31}})
    eventually(lambda: world.reached("p", last))
    assert projector.done == list(range(31, last + 1))
    assert max(map(len, projector.batches)) == 2


@pytest.mark.parametrize("make", [Effect, FaultyProjector])
def test_a_takeover_ends_the_transaction_of_the_one_that_was_stopped(world: World, make: type[FaultyProjector]) -> None:
    """A stopped process can hold the lock on its cursor for as long as it is stopped."""
    last = world.add_many(5)
    group = world.start(make("p"))
    eventually(lambda: world.reached("p", last))
    group.stop(5)
    stopped, bystander = world.connect(), world.connect()
    with stopped.cursor() as cur:
        cur.execute("SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        pid, start = cur.fetchone() or (0, "")
        cur.execute("UPDATE walstream.cursors SET backend_pid = %s, backend_start = %s", (pid, start))
        stopped.commit()
        cur.execute("UPDATE walstream.cursors SET position = position + 1")
    with bystander.cursor() as cur:
        cur.execute("SELECT 1")
    more = world.add_many(5)
    world.start(make("p"))
    eventually(lambda: world.reached("p", more))
    assert not world.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)
    with bystander.cursor() as cur:
        cur.execute("SELECT 1")


def test_a_row_that_somebody_holds_locked_costs_no_other_projector_its_lease(world: World) -> None:
    world.start(FaultyProjector("locked"), FaultyProjector("other"))
    last = world.add("x")
    eventually(lambda: world.reached("locked", last) and world.reached("other", last))
    generation = "SELECT generation FROM walstream.projectors WHERE name = 'other'"
    before = world.execute(generation)
    holder = world.connect()
    with holder.cursor() as cur:
        cur.execute("SELECT 1 FROM walstream.projectors WHERE name = 'locked' FOR UPDATE")
        time.sleep(world.settings.lease_seconds + 1)
        more = world.add("x")
        eventually(lambda: world.reached("other", more))
    holder.rollback()
    assert world.execute(generation) == before
    final = world.add("x")
    eventually(lambda: world.reached("locked", final))


def test_a_lease_that_is_not_renewed_ends_here_too(world: World) -> None:
    """Nobody takes over, and nothing would fence it: but it cannot know that."""
    projector = FaultyProjector("p")
    group = world.start(projector)
    last = world.add("x")
    eventually(lambda: world.reached("p", last))
    group._keeper._stopping.set()
    group._keeper._thread.join(60)
    eventually(lambda: group.states()["p"][0] == "standby")
    world.add("x")
    with pytest.raises(AssertionError):
        eventually(lambda: len(projector.done) > 1, timeout=0.7)


@pytest.mark.parametrize("busy", [0, 1])
def test_lanes_that_left_come_back_though_one_never_noticed_why(world: World, busy: int) -> None:
    """A pause, or the lapse of a lease, that is over before a busy lane looks: the others have left by then. They were
    gone for good, and the projector went on with one lane, or none, and looked well."""
    session = next(each for each in SESSIONS if lane_of(each.encode(), 3) == busy)
    projector = FaultyProjector("p", lanes=3)
    world.start(projector)
    projector.open.clear()
    world.add("held", session=session)
    eventually(lambda: projector.batches, what="a lane that is busy")
    wish = "UPDATE walstream.projectors SET desired = %s WHERE name = 'p'"
    world.execute(wish, "paused")
    # Lane 0 runs in the projector's own thread, which waits for the others once its lane has ended.
    left = {"walstream-projector 'p', lane 1", "walstream-projector 'p', lane 2"} - {
        f"walstream-projector 'p', lane {busy}"
    }
    eventually(lambda: not left & running(), what="the idle lanes have left")
    world.execute(wish, "running")
    time.sleep(0.5)  # several looks of the keeper
    projector.open.set()
    last = 0
    for each in SESSIONS:
        last = world.add("more", session=each)
    eventually(lambda: world.reached("p", last), what="every lane goes on")
    assert sorted(set(projector.done)) == list(range(1, last + 1))


def test_a_transaction_that_only_the_server_still_knows_is_ended(server: Server) -> None:
    """The lane's connection is reset on our side alone, in mid-transaction. What the server kept of it held the slot's
    restart_lsn, and whoever wanted to make a slot, up until the deadline."""
    if not isinstance(server, PostgresServer):
        pytest.skip("needs a server that is reached by TCP on this machine")
    with Network(server.port) as network, world_on(server) as world:

        class Reset(FaultyProjector):
            transactional = True

            def effect(self, event: Event, ctx: Context) -> None:
                ctx.cursor.execute("SELECT pg_current_xact_id()")
                if event.offset == 1 and len(self.tries) == 1:
                    with socket.socket(fileno=os.dup(ctx.connection.fileno())) as ours:
                        assert network.half_open("client", client=ours.getsockname()[1]) == 1

        dsn = make_dsn(server.dsn(world.database.name, tcp=True), port=str(network.port))
        projector = Reset("p")
        world.start(projector, dsn=dsn)
        world.add("held")
        eventually(lambda: world.reached("p", 1), what="it goes on")
        assert projector.tries == [1, 1]
        open_ones = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walstream:walstream:p'"
            " AND xact_start IS NOT NULL"
        )
        eventually(lambda: world.execute(open_ones) == [(0,)], what="the end of the lost one")


def running() -> set[str]:
    """The names of this process's threads."""
    return {thread.name for thread in threading.enumerate()}
