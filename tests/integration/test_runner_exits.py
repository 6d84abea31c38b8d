"""How a projector's code can go wrong: exits, shutdowns, errors that cannot be stored, payloads nobody can parse."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import Server
from tests.integration.test_runner_failures import QUICK, Effect, effects
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.lanes import lane_of
from walstream.engine.projector import FunctionProjector, Projector
from walstream.errors import ExitCode
from walstream.event import Event
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute("CREATE TABLE public.effect (n bigserial, projector text, event_offset bigint)")
        yield made


@pytest.mark.parametrize(("raised", "code"), [(SystemExit(0), ExitCode.OK), (KeyboardInterrupt(), ExitCode.FAILED)])
def test_an_exit_from_a_projector_ends_the_process_and_acknowledges_nothing(
    world: World, raised: BaseException, code: ExitCode
) -> None:
    last = world.add_many(3)
    group = world.start(Effect("p", lambda e, _t: raised if e.offset == 2 else None), FaultyProjector("other"))
    assert group.wait(60)
    assert group.error is not None
    assert group.error.exit_code == code
    assert group.stop(5)
    assert world.positions("p") == [0]
    assert effects(world, "p") == []
    world.start(Effect("p"))
    eventually(lambda: world.reached("p", last))
    assert effects(world, "p") == [1, 2, 3]


def test_a_shutdown_is_no_failure(world: World) -> None:
    started: list[int] = []

    async def slow(event: Event) -> None:
        started.append(event.offset)
        await asyncio.sleep(60)

    world.add("x")
    group = world.start(FunctionProjector(slow, max_attempts=1))
    eventually(lambda: started)
    assert group.stop(0.2)
    assert world.parked("slow") == []
    assert world.positions("slow") == [0]
    assert world.state("slow") == "stopped"


def test_an_error_text_that_postgres_cannot_hold_does_not_lose_the_entry(world: World) -> None:
    world.add("bad")
    world.start(FaultyProjector("p", lambda _e, _t: ValueError("nul \0, lone \ud800, long " + "x" * 9000), **QUICK))
    eventually(lambda: world.parked("p"))
    error, trace = world.execute("SELECT error, traceback FROM walstream.parked")[0]
    assert error.startswith("ValueError: nul \\0, lone ")
    assert len(error.encode()) <= 1000
    assert len(trace.encode()) <= 4096


class Payload(Projector):
    """Reads the payload, or its text."""

    def __init__(self, name: str, attribute: str) -> None:
        self.name = name
        self.attribute = attribute
        self.retry_first = 0.01
        self.seen: dict[int, Any] = {}

    def project(self, events: Sequence[Event], _ctx: Context) -> None:
        for event in events:
            self.seen[event.offset] = getattr(event, self.attribute)


def test_a_payload_that_python_cannot_parse_is_the_readers_trouble_alone(world: World) -> None:
    """Case C06: 7000 levels deep, an integer of 5001 digits."""
    deep = world.add("deep", session=SESSIONS[0], payload_text="[" * 7000 + "]" * 7000)
    long = world.add("long", session=SESSIONS[1], payload_text='{"n": 1' + "0" * 5000 + "}")
    last = world.add("fine", session=SESSIONS[2], payload={"n": 1})
    parsed, text = Payload("parsed", "payload"), Payload("text", "payload_text")
    world.start(parsed, text)
    eventually(lambda: world.reached("parsed", last) and world.reached("text", last))
    assert parsed.seen == {last: {"n": 1}}
    assert [offset for offset, state, _ in world.parked("parsed") if state == "failed"] == [deep, long]
    assert "PayloadError" in world.execute("SELECT error FROM walstream.parked")[0][0]
    assert set(text.seen) == {deep, long, last}
    assert text.seen[deep] == "[" * 7000 + "]" * 7000
    assert world.parked("text") == []


def test_what_is_done_is_done_although_the_projector_fails_after_it(world: World) -> None:
    class Late(FaultyProjector):
        def project(self, events: Sequence[Event], ctx: Context) -> None:
            for event in events:
                super().project([event], ctx)
                ctx.done(event)
            raise ValueError("while cleaning up")

    last = world.add_many(10)
    projector = Late("p", max_attempts=1)
    world.start(projector)
    eventually(lambda: world.reached("p", last))
    assert projector.done == list(range(1, last + 1))
    assert world.parked("p") == []


def test_an_exit_is_not_held_up_by_another_lane(world: World) -> None:
    release = threading.Event()

    def work(event: Event) -> None:
        if event.event_type == "exit":
            raise SystemExit(0)
        release.wait(60)

    by_lane = {lane_of(session.encode(), 2): session for session in SESSIONS}
    world.add("slow", session=by_lane[0])
    world.add("exit", session=by_lane[1])
    group = world.start(FunctionProjector(work, lanes=2))
    assert group.wait(60)
    release.set()
    assert group.stop(5)
