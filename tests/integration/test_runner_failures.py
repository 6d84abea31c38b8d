"""What a failure costs (case C31): the bad event its own session, and nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import Server
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.lanes import lane_of
from walstream.engine.projector import FunctionProjector
from walstream.errors import RetryLater
from walstream.event import Event
from walstream.testing import FaultyProjector

QUICK: dict[str, Any] = {"retry_first": 0.01, "retry_cap": 0.05, "park_first": 600.0}


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute("CREATE TABLE public.effect (n bigserial, projector text, event_offset bigint)")
        yield made


class Effect(FaultyProjector):
    """Writes what it finishes into the table ``effect``."""

    transactional = True

    def effect(self, event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO effect (projector, event_offset) VALUES (%s, %s)", (self.name, event.offset))


def effects(world: World, name: str) -> list[int]:
    rows = world.execute("SELECT event_offset FROM public.effect WHERE projector = %s ORDER BY n", name)
    return [int(row[0]) for row in rows]


def bad(event: Event, _tries: int) -> BaseException | None:
    return ValueError(f"cannot project {event.offset}") if event.event_type == "bad" else None


def good_bad_good(world: World) -> tuple[int, int, int]:
    """Interleaved sessions 0 and 1; the bad event is of session 0. Returns its offset, the last one, and how many of
    session 0 come after it."""
    world.add_many(10, sessions=2)
    poison = world.add("bad", session=SESSIONS[0])
    last = world.add_many(10, sessions=2)
    return poison, last, 5


@pytest.mark.parametrize("transactional", [True, False])
def test_a_bad_event_parks_its_session_and_the_others_flow(
    world: World, transactional: bool, caplog: pytest.LogCaptureFixture
) -> None:
    poison, last, behind = good_bad_good(world)
    projector = Effect("p", bad, **QUICK) if transactional else FaultyProjector("p", bad, **QUICK)
    group = world.start(projector)
    eventually(lambda: world.reached("p", last))

    parked = world.parked("p")
    assert parked[0] == (poison, "failed", 3)
    assert len(parked) == 1 + behind
    assert all(state == "waiting" for _, state, _ in parked[1:])
    waiting = {offset for offset, _, _ in parked}
    expected = [offset for offset in range(1, last + 1) if offset not in waiting]
    finished = effects(world, "p") if transactional else list(dict.fromkeys(projector.done))
    assert sorted(finished) == expected
    assert group.halted == []

    error, trace, session, seq = world.execute(
        "SELECT error, traceback, session_id, seq FROM walstream.parked WHERE event_offset = %s", poison
    )[0]
    assert error == f"ValueError: cannot project {poison}"
    assert trace.startswith("Traceback")
    (told,) = [record.getMessage() for record in caplog.records if "parked session" in record.getMessage()]
    assert "\nTraceback (most recent call last):" in told
    assert told.endswith(f"ValueError: cannot project {poison}")
    assert session == SESSIONS[0]
    assert seq == world.events()[poison - 1].seq
    # What the others get is not touched by a session that is parked already.
    more = world.add("fine", session=SESSIONS[1])
    queued = world.add("fine", session=SESSIONS[0])
    eventually(lambda: world.reached("p", queued))
    assert more not in {offset for offset, _, _ in world.parked("p")}
    assert world.parked("p")[-1] == (queued, "waiting", 0)


@pytest.mark.parametrize("transactional", [True, False])
def test_a_parked_session_is_taken_up_again_in_order(world: World, transactional: bool) -> None:
    poison, last, _ = good_bad_good(world)
    cured: list[bool] = []

    def fault(event: Event, tries: int) -> BaseException | None:
        return None if cured else bad(event, tries)

    make = Effect if transactional else FaultyProjector
    projector = make("p", fault, **{**QUICK, "park_first": 0.2, "park_cap": 0.2})
    world.start(projector)
    eventually(lambda: world.reached("p", last) and world.parked("p")[0][2] > 4)  # tried again by itself, in vain
    cured.append(True)
    eventually(lambda: not world.parked("p"))
    final = world.add("fine", session=SESSIONS[0])
    eventually(lambda: world.reached("p", final))

    finished = effects(world, "p") if transactional else list(dict.fromkeys(projector.done))
    assert sorted(finished) == list(range(1, final + 1))
    session = [event.offset for event in world.events() if event.session_id == SESSIONS[0]]
    assert [offset for offset in finished if offset in session] == session
    assert poison in finished


def test_a_parked_session_is_taken_up_when_an_operator_says_so(world: World) -> None:
    _, last, _ = good_bad_good(world)
    cured: list[bool] = []
    projector = Effect("p", lambda event, tries: None if cured else bad(event, tries), **QUICK)
    world.start(projector)
    eventually(lambda: world.reached("p", last))
    cured.append(True)
    world.execute("UPDATE walstream.parked SET next_try = now() WHERE state = 'failed'")
    eventually(lambda: not world.parked("p"))
    assert sorted(effects(world, "p")) == list(range(1, last + 1))


def test_what_is_discarded_frees_what_waits_behind_it(world: World) -> None:
    poison, last, _ = good_bad_good(world)
    world.start(Effect("p", bad, **QUICK))
    eventually(lambda: world.reached("p", last))
    world.execute("DELETE FROM walstream.parked WHERE event_offset = %s", poison)
    eventually(lambda: not world.parked("p"))
    assert sorted(effects(world, "p")) == [offset for offset in range(1, last + 1) if offset != poison]


def test_a_parked_event_that_was_erased_is_let_go(world: World) -> None:
    poison, last, _ = good_bad_good(world)
    world.start(Effect("p", bad, **{**QUICK, "park_first": 0.3, "park_cap": 0.3}))
    eventually(lambda: world.reached("p", last))
    seq = world.execute("SELECT seq FROM walstream.parked WHERE event_offset = %s", poison)[0][0]
    world.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (%s, %s, 'test')", seq, seq)
    world.execute("DELETE FROM agent_events WHERE seq = %s", seq)
    eventually(lambda: not world.parked("p"))
    assert sorted(effects(world, "p")) == [offset for offset in range(1, last + 1) if offset != poison]


def test_a_parked_session_survives_the_process(world: World) -> None:
    _, last, behind = good_bad_good(world)
    first = world.start(Effect("p", bad, **QUICK))
    eventually(lambda: world.reached("p", last))
    first.stop(5)
    queued = world.add("fine", session=SESSIONS[0])
    world.start(Effect("p", bad, **QUICK))
    eventually(lambda: world.reached("p", queued))
    assert len(world.parked("p")) == 2 + behind
    assert queued not in effects(world, "p")


@pytest.mark.parametrize("transactional", [True, False])
def test_halt_stops_this_projector_alone(world: World, transactional: bool) -> None:
    poison, last, _ = good_bad_good(world)
    make = Effect if transactional else FaultyProjector
    halting = make("halting", bad, on_poison="halt", **QUICK)
    healthy = FaultyProjector("healthy")
    group = world.start(halting, healthy)
    eventually(lambda: group.halted == ["halting"] and world.reached("healthy", last))
    assert healthy.done == list(range(1, last + 1))
    assert world.positions("halting") == [poison - 1]
    state, error, offset = world.execute(
        "SELECT state, error, error_offset FROM walstream.projectors WHERE name = 'halting'"
    )[0]
    assert (state, offset) == ("halted", poison)
    assert f"cannot project {poison}" in error
    assert world.parked("halting") == []
    assert group.error is None
    assert not group.healthy
    done = effects(world, "halting") if transactional else sorted(set(halting.done))
    assert done == list(range(1, poison))
    more = world.add_many(5)
    eventually(lambda: world.reached("healthy", more))
    time.sleep(0.3)
    assert world.state("halting") == "halted"


def test_a_halted_projector_goes_on_when_it_is_told_to(world: World) -> None:
    _, last, _ = good_bad_good(world)
    cured: list[bool] = []
    projector = Effect("p", lambda e, t: None if cured else bad(e, t), on_poison="halt", **QUICK)
    group = world.start(projector)
    eventually(lambda: world.state("p") == "halted")
    cured.append(True)
    world.execute("UPDATE walstream.projectors SET state = 'new' WHERE name = 'p'")
    eventually(lambda: world.reached("p", last))
    assert effects(world, "p") == list(range(1, last + 1))
    assert group.halted == []


def test_retry_later_is_no_attempt_and_parks_nothing(world: World) -> None:
    away = [8]

    def fault(event: Event, _tries: int) -> BaseException | None:
        if event.offset == 5 and away[0]:
            away[0] -= 1
            return RetryLater("the target is away", delay=0.01)
        return None

    last = world.add_many(10)
    projector = FaultyProjector("p", fault, max_attempts=2, retry_first=0.01, retry_cap=0.02)
    world.start(projector)
    eventually(lambda: world.reached("p", last))
    assert away == [0]
    assert world.parked("p") == []


def test_while_it_waits_for_its_target_that_shows(world: World) -> None:
    world.add("x")
    world.start(FaultyProjector("p", lambda _e, _t: RetryLater("the mail server is away"), retry_first=0.1))
    eventually(lambda: world.state("p") == "retrying")
    error, offset = world.execute("SELECT error, error_offset FROM walstream.projectors")[0]
    assert "the mail server is away" in error
    assert offset == 1


def test_an_event_that_fails_once_is_not_parked(world: World) -> None:
    last = world.add_many(30)
    projector = Effect(
        "p", lambda e, tries: ValueError("first time") if e.offset == 9 and tries == 0 else None, **QUICK
    )
    world.start(projector)
    eventually(lambda: world.reached("p", last))
    assert effects(world, "p") == list(range(1, last + 1))
    assert world.parked("p") == []


def test_an_external_batch_that_fails_repeats_each_good_event_at_most_once(world: World) -> None:
    world.add_many(40)
    poison = world.add("bad", session=SESSIONS[7])
    last = world.add_many(40)
    projector = FaultyProjector("p", bad, **QUICK)
    world.start(projector)
    eventually(lambda: world.reached("p", last))
    assert set(projector.done) == set(range(1, last + 1)) - {poison}
    assert max(projector.done.count(offset) for offset in projector.done) <= 2
    assert projector.tries.count(poison) <= 4


def test_an_external_function_gets_no_finished_event_again(world: World) -> None:
    seen: list[int] = []

    def note(event: Event) -> None:
        seen.append(event.offset)
        if event.event_type == "bad":
            raise ValueError("bad")

    world.add_many(40)
    poison = world.add("bad", session=SESSIONS[7])
    last = world.add_many(40)
    world.start(FunctionProjector(note, **QUICK))
    eventually(lambda: world.reached("note", last))
    assert [offset for offset in seen if offset != poison] == [o for o in range(1, last + 1) if o != poison]


def test_a_failed_statement_that_the_projector_swallows_is_not_lost(world: World) -> None:
    class Swallower(Effect):
        def effect(self, event: Event, ctx: Context) -> None:
            super().effect(event, ctx)
            if event.event_type == "bad":
                try:
                    ctx.cursor.execute("SELECT 1/0")
                except Exception as error:
                    ctx.log.info("swallowed: %s", error)

    poison, last, _ = good_bad_good(world)
    world.start(Swallower("p", **QUICK))
    eventually(lambda: world.reached("p", last))
    assert world.parked("p")[0][:2] == (poison, "failed")
    assert poison not in effects(world, "p")


def test_a_constraint_that_fails_at_commit_is_the_events_fault(world: World) -> None:
    world.execute("CREATE TABLE public.once (k int UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    def once(event: Event, ctx: Context) -> None:
        ctx.cursor.execute("INSERT INTO once VALUES (%s)", (0 if event.event_type == "bad" else event.offset,))

    world.add("bad", session=SESSIONS[0])
    world.add_many(5)
    second = world.add("bad", session=SESSIONS[6])
    last = world.add_many(5)
    world.start(FunctionProjector(once, transactional=True, **QUICK))
    eventually(lambda: world.reached("once", last))
    assert [(offset, state) for offset, state, _ in world.parked("once")] == [(second, "failed")]
    assert world.execute("SELECT count(*) FROM public.once") == [(last - 1,)]


@pytest.mark.parametrize("how", ["connection.commit", "with connection", "COMMIT", "connection.rollback"])
def test_a_projector_that_ends_the_runners_transaction_is_halted_at_once(world: World, how: str) -> None:
    class Committer(Effect):
        def project(self, events: Sequence[Event], ctx: Context) -> None:
            super().project(events, ctx)
            if how == "connection.commit":
                ctx.connection.commit()
            elif how == "connection.rollback":
                ctx.connection.rollback()
            elif how == "COMMIT":
                ctx.cursor.execute("COMMIT")
            else:
                with ctx.connection, ctx.connection.cursor() as cur:
                    cur.execute("SELECT 1")

    world.add_many(5)
    projector = Committer("p", max_attempts=5)
    group = world.start(projector)
    eventually(lambda: group.halted == ["p"])
    assert world.positions("p") == [0]
    assert len(projector.batches) == 1
    assert "ended the transaction of the runner" in world.execute("SELECT error FROM walstream.projectors")[0][0]


def test_a_projector_that_ends_the_transaction_of_a_parked_event_is_halted(world: World) -> None:
    """Else its effect would be there without the entry's removal, and come a second time after a crash in between."""

    class Corrected(Effect):
        def effect(self, event: Event, ctx: Context) -> None:
            super().effect(event, ctx)
            if event.event_type == "bad":
                ctx.connection.commit()

    poison, last, waiting = good_bad_good(world)
    cured: list[bool] = []
    group = world.start(Corrected("p", lambda event, tries: None if cured else bad(event, tries), **QUICK))
    eventually(lambda: world.reached("p", last))
    cured.append(True)
    world.execute("UPDATE walstream.parked SET next_try = now() WHERE state = 'failed'")
    eventually(lambda: group.halted == ["p"])
    assert next(offset for offset, _, _ in world.parked("p")) == poison
    assert len(world.parked("p")) == 1 + waiting
    assert "ended the transaction of the runner" in world.execute("SELECT error FROM walstream.projectors")[0][0]


def test_a_deadlock_is_retried_without_counting(world: World) -> None:
    world.execute("CREATE TABLE public.acc (id int PRIMARY KEY, n int); INSERT INTO acc VALUES (1, 0), (2, 0)")
    conflicts = [4]

    def work(_event: Event, ctx: Context) -> None:
        if conflicts[0]:
            conflicts[0] -= 1
            ctx.cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = 'serialization_failure'; END $$")
        ctx.cursor.execute("UPDATE acc SET n = n + 1")

    last = world.add("x")
    world.start(FunctionProjector(work, transactional=True, max_attempts=1, retry_first=0.01, retry_cap=0.02))
    eventually(lambda: world.reached("work", last))
    assert conflicts == [0]
    assert world.execute("SELECT n FROM public.acc") == [(1,), (1,)]


def test_what_waits_is_lined_up_in_the_batch_that_parks_another_session(world: World) -> None:
    world.add("bad", session=SESSIONS[0])
    world.start(FaultyProjector("p", bad, **QUICK))
    eventually(lambda: world.parked("p") == [(1, "failed", 3)])
    last = world.order(world.insert("x", session=SESSIONS[0]), world.insert("bad", session=SESSIONS[1]))
    eventually(lambda: world.reached("p", last))
    assert world.parked("p") == [(1, "failed", 3), (2, "waiting", 0), (3, "failed", 3)]


def test_a_parked_session_is_taken_up_by_its_own_lane(world: World) -> None:
    tried: list[tuple[str, int]] = []

    def fail(event: Event, ctx: Context) -> None:
        tried.append((event.session_id, ctx.lane))
        raise ValueError

    world.order(*[world.insert("x", session=session) for session in SESSIONS])
    world.start(FunctionProjector(fail, lanes=3, max_attempts=1, retry_first=0.01, park_first=0.1, park_cap=0.1))
    eventually(lambda: len(tried) > 4 * len(SESSIONS))
    assert set(tried) == {(session, lane_of(session.encode(), 3)) for session in SESSIONS}
