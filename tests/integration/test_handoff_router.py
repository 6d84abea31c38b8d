"""The handoff router: one job a handoff, and a dead letter for what has no way (case C55)."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import ok
from tests.conftest import Database, Server
from tests.integration.streams import Installed
from tests.integration.streams import eventually as until
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream import ConfigError, Context, Event, Ledger
from walstream.ledger.schema import install
from walstream.postgres import PostgresServer
from walstream.projectors.handoff_router import HandoffRouter, Routed, Unroutable
from walstream.testing import make_event

ROOT = Path(__file__).resolve().parents[2]
JOBS = "SELECT event_seq, agent_id, hops FROM agent_jobs ORDER BY job_id"
LETTERS = "SELECT event_seq, session_id, reason, rerouted_at IS NOT NULL FROM walstream.dead_letters ORDER BY event_seq"


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


class Driver:
    """Drives a router, without the engine, over what has an offset and was not driven yet."""

    def __init__(self, world: World, router: HandoffRouter, **context: Any) -> None:
        self.world = world
        self.router = router
        self.position = 0
        self.connection = world.connect()
        self.ctx = Context(router.name, connection=self.connection, settings=world.settings, **context)
        router.setup(self.ctx)

    def run(self, *, commit: bool = True) -> None:
        events = [
            event
            for event in self.world.events()
            if event.offset > self.position and event.event_type in self.router.events
        ]
        self.ctx.begin()
        self.router.project(events, self.ctx)
        if not commit:
            self.connection.rollback()
            return
        self.connection.commit()
        self.position = max((event.offset for event in events), default=self.position)


def emit(world: World, to: Any = "writer", session: str = SESSIONS[0], **payload: Any) -> int:
    """A handoff in a transaction of its own; its seq."""
    (seq,) = world.insert("handoff.emitted", session=session, payload={"to": to, **payload})
    world.order([seq])
    return seq


def take(world: World, job_id: int) -> None:
    """A worker takes the job, which is its agent's next one, and finishes it."""
    ((agent,),) = world.execute("SELECT agent_id FROM agent_jobs WHERE job_id = %s", job_id)
    ((taken, token),) = world.execute("SELECT job_id, fencing_token FROM walstream.claim_job(%s, 'w')", agent)
    assert taken == job_id
    world.execute("SELECT walstream.begin_job(%s, %s)", job_id, token)
    world.execute("SELECT walstream.complete_job(%s, %s)", job_id, token)


def reasons(world: World) -> list[str]:
    return [row[2] for row in world.execute(LETTERS)]


# -- one job a handoff -----------------------------------------------------------------------------------------------


def test_handoffs_of_a_mixed_transaction_are_routed_in_order_once_and_by_reference(world: World) -> None:
    first = world.insert("tool.observed", "handoff.emitted", "note", "handoff.emitted", payload={"to": "writer"})
    other = world.insert("handoff.emitted", "task.completed", payload={"to": "reader"}, session=SESSIONS[1])
    last = world.order(first, other)
    group = world.start(HandoffRouter())
    eventually(lambda: world.reached("handoff-router", last))
    group.stop(5)
    assert world.execute("SELECT event_seq, session_id::text, agent_id, status, hops FROM agent_jobs ORDER BY 1") == [
        (first[1], SESSIONS[0], "writer", "SUBMITTED", 1),
        (first[3], SESSIONS[0], "writer", "SUBMITTED", 1),
        (other[0], SESSIONS[1], "reader", "SUBMITTED", 1),
    ]
    assert world.execute("SELECT event_seq FROM agent_jobs ORDER BY created_at, job_id") == [
        (first[1],),
        (first[3],),
        (other[0],),
    ]
    assert world.execute(LETTERS) == []


def test_a_reset_makes_no_second_job_whatever_became_of_the_first_and_the_rules(world: World) -> None:
    seqs = [emit(world, to) for to in ("writer", "reader", "nobody")]
    group = world.start(HandoffRouter(agents=("writer", "reader")))
    eventually(lambda: world.reached("handoff-router", 3))
    group.stop(5)
    jobs = world.execute(JOBS)
    assert [job[0] for job in jobs] == seqs[:2]
    (job_id,) = world.execute("SELECT min(job_id) FROM agent_jobs")[0]
    take(world, job_id)
    ok("projectors", "reset", "handoff-router", "--to", "earliest", "--yes", dsn=world.database.dsn)
    # These rules know none of the three, and would bury all that is decided anew.
    again = world.start(HandoffRouter(agents=("stranger",)))
    eventually(lambda: world.reached("handoff-router", 3))
    again.stop(5)
    assert world.execute(JOBS) == jobs
    assert world.execute("SELECT status FROM agent_jobs WHERE job_id = %s", job_id) == [("COMPLETED",)]
    assert [row[0] for row in world.execute(LETTERS)] == seqs[2:]


def test_a_handoff_whose_job_is_forgotten_is_routed_by_nobody_any_more(world: World) -> None:
    seqs = [emit(world), emit(world, "ghost"), emit(world)]
    Driver(world, HandoffRouter(agents=("writer",))).run()
    # The dead letter got its job otherwise.
    world.execute("SELECT walstream.submit_job(%s, 'writer', %s)", SESSIONS[0], seqs[1])
    jobs = dict(world.execute("SELECT event_seq, job_id FROM agent_jobs"))
    for seq in (seqs[0], seqs[2], seqs[1]):
        take(world, jobs[seq])
    assert world.execute("SELECT walstream.prune_jobs('0')") == [(3,)]
    assert [row[3] for row in world.execute(LETTERS)] == [True]
    driver = Driver(world, HandoffRouter(agents=("stranger",)))
    driver.run()
    assert world.execute(JOBS) == []
    assert [row[0] for row in world.execute(LETTERS)] == [seqs[1]]
    routed = driver.router.route(world.events()[0], driver.ctx, to="writer")
    assert routed == Routed(seqs[0], job_id=jobs[seqs[0]])
    assert ok("handoffs", "dead", "--json", dsn=world.database.dsn).json["dead"] == 0


def test_a_reset_by_better_rules_routes_what_was_dead(world: World) -> None:
    seq = emit(world, "ghost")
    Driver(world, HandoffRouter(agents=("writer",))).run()
    assert [row[3] for row in world.execute(LETTERS)] == [False]
    Driver(world, HandoffRouter(agents=("writer",), routes={"ghost": "writer"})).run()
    assert world.execute(JOBS) == [(seq, "writer", 1)]
    assert [row[3] for row in world.execute(LETTERS)] == [True]
    Driver(world, HandoffRouter(agents=("writer",))).run()
    assert [row[3] for row in world.execute(LETTERS)] == [True]


def test_a_batch_that_fails_leaves_neither_job_nor_letter(world: World) -> None:
    seqs = [emit(world), emit(world, "nobody"), emit(world)]
    driver = Driver(world, HandoffRouter(agents=("writer",)))
    driver.run(commit=False)
    assert world.execute(JOBS) == world.execute(LETTERS) == []
    driver.run()
    driver.run()
    assert [row[0] for row in world.execute(JOBS)] == [seqs[0], seqs[2]]
    assert [row[0] for row in world.execute(LETTERS)] == [seqs[1]]


def test_nothing_is_submitted_while_it_is_rebuilt(world: World) -> None:
    emit(world)
    emit(world, 7)
    Driver(world, HandoffRouter(), rebuilding=True).run()
    assert world.execute(JOBS) == world.execute(LETTERS) == []


def test_two_routers_at_once_and_one_that_stands_by_make_one_job_each(world: World) -> None:
    class Second(HandoffRouter):
        name = "second-router"

    last = world.add_many(400, event_type="handoff.emitted", transaction=3)
    lanes = {"handoff-router": {"lanes": 2, "batch": 7}}
    groups = [
        world.start(HandoffRouter(default="writer"), Second(default="writer"), projectors=lanes),
        world.start(HandoffRouter(default="writer"), projectors=lanes),
    ]
    eventually(lambda: world.reached("handoff-router", last) and world.reached("second-router", last))
    for group in groups:
        group.stop(5)
    assert world.execute("SELECT count(*), count(DISTINCT event_seq) FROM agent_jobs") == [(400, 400)]
    assert world.execute("SELECT count(*) FROM walstream.dead_letters") == [(0,)]
    assert world.parked("handoff-router") == world.parked("second-router") == []


def test_what_is_rolled_back_is_not_routed_and_an_emit_with_one_key_is_routed_once(database: Database) -> None:
    """Through a real slot: emitters that roll back, in whole or to a savepoint, and one that says the same twice."""
    stream = Installed(database)
    ledger = Ledger(stream.settings)
    conn = database.connect()
    with stream.host(HandoffRouter()):
        seqs = []
        for n in range(3):
            with conn:
                kept = ledger.append(SESSIONS[0], "a", "handoff.emitted", {"to": f"b{n}"}, key=f"k{n}", on=conn)
                with conn.cursor() as cur:
                    cur.execute("SAVEPOINT s")
                    ledger.append(SESSIONS[0], "a", "handoff.emitted", {"to": "undone"}, key="undone", on=conn)
                    cur.execute("ROLLBACK TO s")
            seqs.append(kept.seq)
            ledger.append(SESSIONS[1], "a", "handoff.emitted", {"to": "undone"}, on=conn)
            conn.rollback()
            with conn:
                again = ledger.append(SESSIONS[0], "a", "handoff.emitted", {"to": f"b{n}"}, key=f"k{n}", on=conn)
            assert (again.seq, again.appended) == (kept.seq, False)
        stream.wait_ordered()
        until(lambda: database.execute("SELECT count(*) FROM agent_jobs") == [(3,)], "three jobs")
    assert database.execute("SELECT event_seq, agent_id FROM agent_jobs ORDER BY job_id") == [
        (seq, f"b{n}") for n, seq in enumerate(seqs)
    ]


@contextlib.contextmanager
def router_process(world: World) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the router; killed afterwards."""
    made = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.router_process", world.settings.dsn],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert made.stdout is not None
        assert made.stdout.readline() == "started\n"
        yield made
    finally:
        made.kill()
        made.wait(60)
        assert made.stdout is not None
        made.stdout.close()


def test_kill_9_between_job_and_cursor_neither_loses_nor_doubles_a_handoff(world: World) -> None:
    rng = random.Random(55)
    last = world.add_many(300, event_type="handoff.emitted", transaction=2)
    for _ in range(2):
        with router_process(world) as running:
            further = max(world.positions("handoff-router"), default=0) + 1
            eventually(functools.partial(world.reached, "handoff-router", min(further, last)))
            last = world.add_many(rng.randrange(50, 200), event_type="handoff.emitted", transaction=5)
            time.sleep(rng.uniform(0, 0.1))
            running.send_signal(signal.SIGKILL)
            running.wait(60)
    with router_process(world):
        eventually(lambda: world.reached("handoff-router", last), timeout=60)
    assert world.execute("SELECT count(*), count(DISTINCT event_seq) FROM agent_jobs") == [(last, last)]
    assert world.execute("SELECT count(*) FROM agent_events AS e JOIN agent_jobs AS j ON j.event_seq = e.seq") == [
        (last,)
    ]


class KilledBefore(HandoffRouter):
    """Crashes the server twice: when it has submitted jobs, and their transaction was not committed."""

    def __init__(self, server: PostgresServer) -> None:
        super().__init__(default="writer")
        self.server = server
        self.crashes = 0

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        super().project(events, ctx)
        if self.crashes < 2 and events[0].offset > 20 * self.crashes:
            self.crashes += 1
            self.server.restart("immediate")


def test_a_server_that_crashes_between_job_and_commit_costs_no_handoff_and_doubles_none(
    own_server: Callable[..., PostgresServer],
) -> None:
    server = own_server()
    database = Database(server, "crashed")
    database.create()
    with contextlib.closing(World(database, projectors={"handoff-router": {"batch": 10}})) as world:
        last = world.add_many(60, event_type="handoff.emitted", transaction=2)
        router = KilledBefore(server)
        group = world.start(router)

        def done() -> bool:
            with contextlib.suppress(psycopg2.OperationalError):  # the server is just starting
                return database.execute("SELECT position FROM walstream.cursors") == [(last,)]
            return False

        eventually(done, timeout=60)
        group.stop(5)
    assert router.crashes == 2
    assert database.execute("SELECT event_seq FROM agent_jobs ORDER BY 1") == database.execute(
        "SELECT seq FROM agent_events ORDER BY 1"
    )


# -- who gets it -----------------------------------------------------------------------------------------------------


def chosen(router: HandoffRouter, payload: Any, event_type: str = "handoff.emitted") -> str:
    try:
        return router.agent_for(make_event(1, event_type, payload=payload))
    except Unroutable as error:
        return f"- {error}"


def test_the_target_stands_under_one_of_three_names() -> None:
    router = HandoffRouter()
    assert chosen(router, {"to": "a", "target": "b", "agent": "c"}) == "a"
    assert chosen(router, {"to": None, "target": "b", "agent": "c"}) == "b"
    assert chosen(router, {"agent": "c"}) == "c"


def test_rules_in_their_order_and_names_exactly() -> None:
    router = HandoffRouter(
        agents=("writer", "reader", "clerk", "chief"),
        routes={"w": "writer", "clerk": "chief"},
        event_types={"review.requested": "reader"},
        default="clerk",
        rule=lambda event: "chief" if isinstance(event.payload, dict) and event.payload.get("urgent") else None,
    )
    assert router.events == ("handoff.emitted", "review.requested")
    assert chosen(router, {"to": "writer", "urgent": True}) == "chief"
    assert chosen(router, {"to": "w"}) == "writer"
    assert chosen(router, {"to": "clerk"}) == "chief"
    assert chosen(router, {"to": "reader"}) == "reader"
    assert chosen(router, {"to": "Reader"}, "review.requested") == "reader"
    for unknown in ("W", "writer ", "wri", "ｗriter"):
        assert chosen(router, {"to": unknown}) == "clerk"
    assert chosen(router, {}) == chosen(router, {"to": 7}) == chosen(router, []) == "clerk"
    lonely = HandoffRouter(agents=("a",), rule=lambda _: "b")
    assert chosen(lonely, {"to": "a"}) == "- the rule sends it to 'b', which nobody serves"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("{}", "names no agent under 'to', 'target' or 'agent'"),
        ("[1]", "names no agent under"),
        ('"writer"', "names no agent under"),
        ('{"to": 7}', "7 is no agent's name"),
        ('{"to": ""}', "'' is no agent's name"),
        ('{"to": ["writer"]}', "['writer'] is no agent's name"),
        ('{"to": "a\\nb"}', "is no agent's name"),
        ('{"to": "Writer"}', "nobody serves the agent 'Writer'"),
        ('{"to": "ghost"}', "nobody serves the agent 'ghost'"),
        (f'{{"to": "{"x" * 300}"}}', "is no agent's name"),
        (f'{{"to": "writer", "n": {"9" * 6000}}}', "payload cannot be read"),
        ('{"to": "writer", "session_id": "not a uuid"}', "the session 'not a uuid', which is no session's id"),
        ('{"to": "writer", "session_id": 12}', "the session 12, which is no text"),
    ],
)
def test_what_has_no_way_is_a_dead_letter_with_its_reason_and_holds_nobody_up(
    world: World, payload: str, reason: str
) -> None:
    (seq,) = world.insert("handoff.emitted", payload_text=payload)
    world.order([seq])
    behind = emit(world)
    Driver(world, HandoffRouter(agents=("writer",))).run()
    ((dead, session, said, rerouted),) = world.execute(LETTERS)
    assert (dead, session, rerouted) == (seq, SESSIONS[0], False)
    assert reason in said
    assert len(said) < 600
    assert world.execute(JOBS) == [(behind, "writer", 1)]


def test_a_nul_and_half_a_character_in_a_column_of_the_type_json_are_dead_letters(database: Database) -> None:
    database.execute(
        "CREATE TABLE agent_events (seq bigserial PRIMARY KEY, session_id text NOT NULL, agent_id text NOT NULL,"
        " event_type text NOT NULL, payload json NOT NULL, created_at timestamptz DEFAULT now())"
    )
    world = World(database)
    try:
        for payload in (r'{"to": "a\u0000b"}', r'{"to": "b", "session_id": "x\u0000"}', r'{"to": "\ud800"}'):
            world.order(
                [
                    seq
                    for (seq,) in world.execute(
                        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                        " VALUES ('s', 'a', 'handoff.emitted', %s) RETURNING seq",
                        payload,
                    )
                ]
            )
        Driver(world, HandoffRouter()).run()
        assert [seq for seq, *_ in world.execute(LETTERS)] == [1, 2, 3]
        assert world.execute(JOBS) == []
    finally:
        world.close()


def test_the_payload_may_say_how_urgent_it_is(world: World) -> None:
    said = {5: 5, -5: -5, 10**30: 2**31 - 1, -(10**30): -(2**31), "9": 0, 2.5: 0, True: 0, None: 0}
    for priority in said:
        emit(world, priority=priority)
    emit(world)
    Driver(world, HandoffRouter()).run()
    given = [priority for (priority,) in world.execute("SELECT priority FROM agent_jobs ORDER BY job_id")]
    assert given == [*said.values(), 0]
    claimed = "SELECT priority FROM walstream.claim_job('writer', 'w', per_session => false)"
    assert [world.execute(claimed)[0][0] for _ in range(3)] == [2**31 - 1, 5, 0]


def test_the_payload_may_name_another_session_and_the_chain_goes_on_there(world: World) -> None:
    driver = Driver(world, HandoffRouter(max_hops=2))
    emit(world, "b", session_id=SESSIONS[5].upper())
    driver.run()
    take(world, world.execute("SELECT job_id FROM agent_jobs")[0][0])
    emit(world, "c", session=SESSIONS[5])
    driver.run()
    take(world, world.execute("SELECT max(job_id) FROM agent_jobs")[0][0])
    assert world.execute("SELECT session_id::text, agent_id, hops FROM agent_jobs ORDER BY job_id") == [
        (SESSIONS[5], "b", 1),
        (SESSIONS[5], "c", 2),
    ]
    emit(world, "d", session=SESSIONS[5])
    driver.run()
    assert len(reasons(world)) == 1


# -- how often -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("a", "b"), ("a",)], ids=["a cycle", "to itself"])
def test_ping_pong_ends_at_the_limit_visibly(world: World, names: Sequence[str]) -> None:
    driver = Driver(world, HandoffRouter(max_hops=5))
    for n in range(5):
        emit(world, names[n % len(names)])
        driver.run()
        (job_id, hops) = world.execute("SELECT job_id, hops FROM agent_jobs ORDER BY job_id DESC LIMIT 1")[0]
        assert hops == n + 1
        take(world, job_id)
    last = emit(world, "a")
    driver.run()
    assert world.execute("SELECT count(*) FROM agent_jobs") == [(5,)]
    ((seq, _session, reason, _rerouted),) = world.execute(LETTERS)
    assert seq == last
    assert reason == "it would be handoff 6 in a row, and 5 are allowed: 'a' was to get it from 'agent'"
    # Somebody decides that it may go on: the count begins anew.
    event = world.events()[-1]
    routed = driver.router.route(event, driver.ctx, to="b")
    driver.connection.commit()
    assert (routed.agent, routed.created) == ("b", True)
    assert world.execute(JOBS)[-1] == (last, "b", 1)


def test_many_handoffs_side_by_side_are_no_chain_and_neither_is_who_begins_anew(world: World) -> None:
    driver = Driver(world, HandoffRouter(max_hops=3))
    world.order(world.insert(*["handoff.emitted"] * 10, payload={"to": "b"}))
    driver.run()
    assert {hops for _seq, _agent, hops in world.execute(JOBS)} == {1}
    for (job_id,) in world.execute("SELECT job_id FROM agent_jobs ORDER BY 1"):
        take(world, job_id)
    emit(world)
    driver.run()
    assert world.execute(JOBS)[-1][2] == 2
    take(world, world.execute("SELECT max(job_id) FROM agent_jobs")[0][0])
    # A person's next wish in the same session.
    world.execute("SELECT walstream.submit_job(%s, 'a')", SESSIONS[0])
    take(world, world.execute("SELECT max(job_id) FROM agent_jobs")[0][0])
    emit(world)
    driver.run()
    assert world.execute(JOBS)[-1][2] == 1


def test_the_payload_may_count_hops_too_and_zero_is_no_limit(world: World) -> None:
    driver = Driver(world, HandoffRouter(max_hops=4))
    for hops in (3, True, -1, "9", 2.5):
        emit(world, hops=hops)
    emit(world, hops=4)
    driver.run()
    assert [hops for _seq, _agent, hops in world.execute(JOBS)] == [4, 1, 1, 1, 1]
    assert len(reasons(world)) == 1
    Driver(world, HandoffRouter(max_hops=0)).run()
    assert [hops for _seq, _agent, hops in world.execute(JOBS)][-1] == 5
    emit(world, hops=10**30)
    Driver(world, HandoffRouter(max_hops=0)).run()
    assert [hops for _seq, _agent, hops in world.execute(JOBS)][-1] == 2**31 - 1


# -- what stands in its way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"agents": "writer"},
        {"agents": ("",)},
        {"agents": ("a",), "default": "b"},
        {"agents": ("a",), "routes": {"x": "b"}},
        {"agents": ("a",), "event_types": {"x": "b"}},
        {"routes": {"x": 7}},
        {"max_hops": -1},
        {"max_hops": True},
        {"rule": "a name"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="handoff-router: "):
        HandoffRouter(**options)


def test_an_older_schema_is_named_before_the_first_event(database: Database) -> None:
    installed = Installed(database)
    database.execute("DROP TABLE walstream.dead_letters")
    conn = database.connect()
    with pytest.raises(ConfigError, match="has not all that a router needs yet") as raised:
        HandoffRouter().setup(Context("handoff-router", connection=conn, settings=installed.settings))
    assert "walstream migrate" in raised.value.hint


def test_the_login_of_run_may_route_and_no_more(database: Database) -> None:
    role = f"router_{random.SystemRandom().randrange(10**9)}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        stream = Installed(database)
        conn = psycopg2.connect(make_dsn(database.dsn, user=role, password="irrelevant"))
        try:
            router, ctx = HandoffRouter(), Context("handoff-router", connection=conn, settings=stream.settings)
            database.execute(f"GRANT USAGE ON SCHEMA walstream TO {role}")
            with pytest.raises(ConfigError, match=f"{role} may not read jobs") as raised:
                router.setup(ctx)
            conn.rollback()
            assert f"walstream init --grants {role}" in raised.value.hint
            ok("init", "--slot", stream.settings.slot, "--grants", role, dsn=database.dsn)
            router.setup(ctx)
            router.project([make_event(1, "handoff.emitted", payload={"to": "b"}, session_id=SESSIONS[0])], ctx)
            router.project([make_event(2, "handoff.emitted", payload={}, session_id=SESSIONS[0])], ctx)
            conn.commit()
            with conn.cursor() as cur:
                for refused in (
                    "INSERT INTO agent_jobs (session_id) VALUES (gen_random_uuid())",
                    "UPDATE agent_jobs SET hops = 0",
                    "DELETE FROM agent_jobs",
                    "DELETE FROM walstream.dead_letters",
                ):
                    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                        cur.execute(refused)
                    conn.rollback()
        finally:
            conn.close()
        assert database.execute("SELECT count(*) FROM agent_jobs") == [(1,)]
    finally:
        database.execute(f"DROP OWNED BY {role}")
        database.execute(f"DROP ROLE {role}")


def test_what_a_session_has_behind_it_costs_nothing(world: World) -> None:
    """A million jobs would take too long here: the plan says that none of them is looked at."""
    world.execute(
        "INSERT INTO agent_jobs (session_id, agent_id, event_seq, status, fencing_token)"
        " SELECT gen_random_uuid(), 'a', -n, 'COMPLETED', 1 FROM generate_series(1, 20000) AS n"
    )
    world.execute("ANALYZE agent_jobs")
    driver = Driver(world, HandoffRouter())
    emit(world)
    emit(world)

    class Explained:
        """Stands before the cursor and asks for the plan of what reads the jobs."""

        plans: list[str] = []

        def __init__(self, cursor: Any) -> None:
            self._cursor = cursor

        def execute(self, sql: str, values: Any = None) -> None:
            if "j.hops" in sql:
                self._cursor.execute(f"EXPLAIN {sql}", values)
                self.plans.append("\n".join(row[0] for row in self._cursor.fetchall()))
            self._cursor.execute(sql, values)

        def fetchone(self) -> Any:
            return self._cursor.fetchone()

    class Watched(Context):
        @property
        def cursor(self) -> Any:
            return Explained(super().cursor)

    driver.ctx = Watched("handoff-router", connection=driver.connection, settings=world.settings)
    driver.run()
    assert len(Explained.plans) == 2
    assert all("Seq Scan" not in plan and plan.count("Index") >= 2 for plan in Explained.plans), Explained.plans[0]
    assert all("_taken on " in plan for plan in Explained.plans), Explained.plans[0]


def test_a_letter_that_two_routers_write_at_once_stands_once(world: World) -> None:
    seq = emit(world, "ghost")
    drivers = [Driver(world, HandoffRouter(agents=(name,))) for name in ("x", "y")]
    events: list[Event] = world.events()
    drivers[0].router.project(events, drivers[0].ctx)
    other = threading.Thread(target=drivers[1].run)
    other.start()
    time.sleep(0.2)
    drivers[0].connection.commit()
    other.join(60)
    assert [row[0] for row in world.execute(LETTERS)] == [seq]


def test_what_became_of_a_handoff_can_be_asked(world: World) -> None:
    seq = emit(world)
    driver = Driver(world, HandoffRouter())
    event = world.events()[0]
    made = driver.router.route(event, driver.ctx)
    assert made == Routed(seq, "writer", made.job_id, created=True)
    assert driver.router.route(event, driver.ctx) == Routed(seq, job_id=made.job_id)


def test_a_schema_of_another_name_with_odd_names(database: Database) -> None:
    world = World(database)
    world.close()
    settings = world.settings.model_copy(
        update={"namespace": 'odd "100%s" {x}', "ledger": world.settings.ledger.model_copy(update={"jobs": "jobs 5%"})}
    )
    conn = database.connect()
    install(conn, settings)
    router, ctx = HandoffRouter(), Context("handoff-router", connection=conn, settings=settings)
    router.setup(ctx)
    for n, payload in enumerate(({"to": "b"}, {}, {"to": "b", "session_id": "?"}), start=1):
        router.project([make_event(n, "handoff.emitted", payload=payload, session_id=SESSIONS[0])], ctx)
    conn.commit()
    assert database.execute('SELECT count(*) FROM "jobs 5%"') == [(1,)]
    assert database.execute('SELECT count(*) FROM "odd ""100%s"" {x}".dead_letters') == [(2,)]
