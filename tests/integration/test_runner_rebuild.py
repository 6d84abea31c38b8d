"""A rebuild beside the live projector: compared, and put in place at one offset."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Server
from tests.runner_world import KEY_PREFIX, SESSIONS, World, eventually, world_on
from walstream.engine.context import Context
from walstream.engine.lanes import lane_of
from walstream.engine.projector import Projector
from walstream.engine.rebuild import Outcome, Rebuild
from walstream.errors import ConfigError, ProjectorHalted
from walstream.event import Event
from walstream.testing import FaultyProjector


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        made.execute(
            "CREATE TABLE public.totals (session text PRIMARY KEY, n bigint, noted timestamptz DEFAULT now());"
            "CREATE TABLE public.lines (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_offset bigint,"
            " doc json);"
            "CREATE VIEW public.seen AS SELECT count(*) AS n FROM lines"
        )
        yield made


class Totals(Projector):
    """Counts by session and keeps a line an event; ``wrong`` makes it count every event of a type twice."""

    name = "totals"
    transactional = True
    tables = ("totals", "public.lines")
    retry_first = 0.01
    park_first = 600.0

    def __init__(self, wrong: str = "", bad: str = "", **options: Any) -> None:
        self._wrong = wrong
        self._bad = bad
        self.outward_acts: list[int] = []
        for option, value in options.items():
            setattr(self, option, value)

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            if event.event_type == self._bad:
                raise ValueError("bad")
            ctx.cursor.execute(
                "INSERT INTO totals (session, n) VALUES (%s, %s) ON CONFLICT (session)"
                " DO UPDATE SET n = totals.n + excluded.n",
                (event.session_id, 2 if event.event_type == self._wrong else 1),
            )
            ctx.cursor.execute("INSERT INTO lines (event_offset, doc) VALUES (%s, '{}')", (event.offset,))
            if not ctx.rebuilding:
                self.outward_acts.append(event.offset)


def rebuild(world: World, projector: Projector, *, compare_only: bool = False, **settings: Any) -> Outcome:
    merged = world.settings.model_copy(update=settings)
    return Rebuild(merged, projector, KEY_PREFIX).run(compare_only=compare_only)


def totals(world: World) -> dict[str, int]:
    return {session: int(n) for session, n in world.execute("SELECT session, n FROM public.totals")}


def expected(world: World) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in world.events():
        counts[event.session_id] = counts.get(event.session_id, 0) + 1
    return counts


def leftovers(world: World) -> list[Any]:
    return [
        *world.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE '%%rebuild%%'"),
        *world.execute("SELECT name FROM walstream.projectors WHERE name LIKE '%%rebuild%%'"),
    ]


def test_the_same_code_gives_the_same_tables(world: World) -> None:
    last = world.add_many(300, sessions=8)
    world.start(Totals())
    eventually(lambda: world.reached("totals", last))
    before = world.execute("SELECT xmin::text, * FROM public.totals ORDER BY session")
    again = Totals()
    outcome = rebuild(world, again)
    assert outcome.offset == last
    assert [(found.rows, found.missing, found.surplus) for found in outcome.differences] == [(8, 0, 0), (300, 0, 0)]
    assert world.execute("SELECT xmin::text, * FROM public.totals ORDER BY session") == before  # no row was touched
    assert again.outward_acts == []
    assert leftovers(world) == []
    more = world.add_many(50)
    eventually(lambda: world.reached("totals", more))
    assert totals(world) == expected(world)
    assert world.execute("SELECT n FROM public.seen") == [(more,)]


def test_corrected_code_takes_its_place_while_events_come_in(world: World) -> None:
    """Under load, with the live one running in another version until the swap."""
    world.add_many(300, sessions=4, event_type="odd")
    last = world.add_many(300, sessions=4)
    wrong = world.start(Totals(wrong="odd"))
    eventually(lambda: world.reached("totals", last))
    assert totals(world) != expected(world)

    with load(world):
        outcome = rebuild(world, Totals())
        assert outcome.swapped
        assert outcome.differences[0].any
        wrong.stop(5)  # the release with the corrected code takes over
        world.start(Totals())
    last = len(world.events())
    eventually(lambda: world.reached("totals", last))
    # (What the old code still did after the swap was right: it only counts "odd" events twice, and none came.)
    assert totals(world) == expected(world)
    assert world.execute("SELECT count(*), count(DISTINCT event_offset) FROM public.lines") == [(last, last)]
    assert leftovers(world) == []


@contextlib.contextmanager
def load(world: World) -> Iterator[None]:
    """Adds events in a thread."""
    stop = threading.Event()

    def add() -> None:
        while not stop.wait(0.02):
            other.add_many(10, sessions=4)

    other = world.beside()
    thread = threading.Thread(target=add)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        other.connection.close()


def test_only_compared_nothing_changes(world: World) -> None:
    last = world.add_many(100)
    world.start(Totals())
    eventually(lambda: world.reached("totals", last))
    world.execute(
        "UPDATE public.totals SET n = n + 1 WHERE session = %s; DELETE FROM lines WHERE event_offset = 7", SESSIONS[0]
    )
    before = totals(world)
    outcome = rebuild(world, Totals(), compare_only=True)
    assert not outcome.swapped
    assert [(found.missing, found.surplus) for found in outcome.differences] == [(1, 1), (1, 0)]
    assert totals(world) == before
    assert leftovers(world) == []
    eventually(lambda: world.execute("SELECT desired FROM walstream.projectors") == [("running",)])
    assert rebuild(world, Totals()).swapped
    assert totals(world) == expected(world)


def test_what_was_parked_is_projected_if_it_can_be_now(world: World) -> None:
    world.add_many(10, sessions=2)
    world.add("bad", session=SESSIONS[0])
    last = world.add_many(10, sessions=2)
    old = world.start(Totals(bad="bad"))
    eventually(lambda: world.reached("totals", last))
    assert len(world.parked("totals")) == 6
    outcome = rebuild(world, Totals())
    assert outcome.parked == 0
    assert world.parked("totals") == []
    assert totals(world) == expected(world)
    old.stop(5)
    # And what cannot be, is parked in the rebuilt one.
    outcome = rebuild(world, Totals(bad="bad"))
    assert outcome.parked == 6
    assert [state for _, state, _ in world.parked("totals")] == ["failed", *["waiting"] * 5]


def test_with_lanes_each_is_compared_where_it_stands(world: World) -> None:
    """Lanes are rarely at one offset. What the hindmost has not reached yet is no difference."""
    last = world.add_many(200, sessions=8)
    group = world.start(Totals(lanes=3))
    eventually(lambda: len(world.positions("totals")) == 3 and world.reached("totals", last))
    group.stop(5)
    behind = [e for e in world.events() if e.offset > 150 and lane_of(e.session_id.encode(), 3) == 1]
    assert behind
    world.execute("UPDATE walstream.cursors SET position = 150 WHERE lane = 1")
    for event in behind:
        world.execute("DELETE FROM public.lines WHERE event_offset = %s", event.offset)
        world.execute("UPDATE public.totals SET n = n - 1 WHERE session = %s", event.session_id)
    outcome = rebuild(world, Totals(lanes=3), compare_only=True)
    assert not any(found.any for found in outcome.differences)
    assert outcome.offset == last
    world.execute("UPDATE public.totals SET n = n + 1000; DELETE FROM public.lines WHERE event_offset < 100")
    assert rebuild(world, Totals(lanes=3)).swapped
    assert world.positions("totals") == [last, 150, last]
    world.start(Totals(lanes=3))
    eventually(lambda: world.reached("totals", last))
    assert totals(world) == expected(world)
    assert world.execute("SELECT count(*), count(DISTINCT event_offset) FROM public.lines") == [(last, last)]


def test_the_counter_of_an_identity_column_goes_on(world: World) -> None:
    last = world.add_many(20)
    world.start(Totals(bad="none"))
    eventually(lambda: world.reached("totals", last))
    world.execute("DELETE FROM public.lines")
    world.execute("ALTER TABLE public.lines ALTER COLUMN id RESTART WITH 1")
    rebuild(world, Totals())
    more = world.add_many(20)
    eventually(lambda: world.reached("totals", more))
    assert world.parked("totals") == []
    assert world.execute("SELECT count(*) FROM public.lines") == [(more,)]


def test_a_projector_that_names_its_schema_is_found_out(world: World) -> None:
    class Qualified(Totals):
        def project(self, events: Sequence[Event], ctx: Context) -> None:
            super().project(events, ctx)
            ctx.cursor.execute("UPDATE public.totals SET n = n + 1")

    last = world.add_many(20)
    world.start(Qualified())
    eventually(lambda: world.reached("totals", last))
    before = totals(world)
    with pytest.raises(ProjectorHalted, match=r'wrote to "public"."totals"'):
        rebuild(world, Qualified())
    assert totals(world) == before
    assert leftovers(world) == []


def test_what_cannot_be_rebuilt_is_told(world: World) -> None:
    with pytest.raises(ConfigError, match="external"):
        rebuild(world, FaultyProjector("p", tables=("totals",)))
    with pytest.raises(ConfigError, match="declares no"):
        rebuild(world, FaultyProjector("p", transactional=True))
    with pytest.raises(ConfigError, match="latest"):
        rebuild(world, Totals(start="latest"))
    with pytest.raises(ConfigError, match="never run"):
        rebuild(world, Totals())
    world.start(FaultyProjector("p", transactional=True))
    eventually(lambda: world.state("p") == "cold")
    with pytest.raises(ConfigError, match="'nowhere', which does not exist"):
        rebuild(world, FaultyProjector("p", transactional=True, tables=("nowhere",)))
    assert leftovers(world) == []


def test_a_second_rebuild_is_refused(world: World) -> None:
    class Slow(Totals):
        def project(self, events: Sequence[Event], ctx: Context) -> None:
            if ctx.rebuilding:
                started.set()
                release.wait(60)
            super().project(events, ctx)

    started, release = threading.Event(), threading.Event()
    last = world.add_many(10)
    world.start(Totals())
    eventually(lambda: world.reached("totals", last))
    outcomes: list[Outcome] = []
    first = threading.Thread(target=lambda: outcomes.append(rebuild(world, Slow())))
    first.start()
    assert started.wait(60)
    with pytest.raises(ConfigError, match="another rebuild"):
        rebuild(world, Totals())
    release.set()
    first.join(60)
    assert outcomes[0].swapped


PROGRAM = """
from walstream import Projector, Stream

class Totals(Projector):
    name = "totals"
    transactional = True
    tables = ("totals",)

    def project(self, events, ctx):
        for event in events:
            ctx.cursor.execute(
                "INSERT INTO totals VALUES (%s, 1) ON CONFLICT (session) DO UPDATE SET n = totals.n + 1",
                (event.session_id,),
            )

stream = Stream()
stream.add(Totals())
"""


def test_the_command(world: World, tmp_path: Path) -> None:
    (tmp_path / "corrected.py").write_text(PROGRAM)
    world.add_many(100, event_type="odd")
    last = world.add_many(100)
    group = world.start(Totals(wrong="odd"))
    eventually(lambda: world.reached("totals", last))
    group.stop(5)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "walstream", "projectors", "rebuild", *arguments, "--json"],
            cwd=tmp_path,
            env={**os.environ, "WALSTREAM_DSN": world.settings.dsn},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, json.loads(done.stdout or done.stderr)

    assert run("nobody", "corrected:stream")[0] == 3
    code, found = run("totals", "corrected:stream", "--compare")
    assert (code, found["swapped"]) == (1, False)
    assert found["differences"] == [{"table": '"public"."totals"', "rows": 5, "missing": 5, "surplus": 5}]
    code, found = run("totals", "corrected:stream", "--yes")
    assert (code, found["swapped"], found["offset"]) == (0, True, last)
    assert totals(world) == expected(world)
    code, found = run("totals", "corrected:stream", "--compare")
    assert code == 0
