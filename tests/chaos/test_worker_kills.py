"""Workers die at every boundary of their turns, and each handoff runs to completion once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from tests.chaos.consumer import Consumer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.handoffs import AGENT, Forks, Workers
from tests.chaos.worker_process import Turns
from tests.conftest import Database
from tests.integration.streams import Installed, eventually
from walstream import ApprovalRefused, Approvals, Worker
from walstream.postgres import PostgresServer


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def workers(forks: Forks, database: Database, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(forks, database, tmp_path)
    try:
        yield made
    finally:
        made.close()


# -- at every step ---------------------------------------------------------------------------------------------------


def test_killed_at_twelve_steps_of_a_turn(workers: Workers) -> None:
    for plain in (False, True):
        steps = workers.steps(plain=plain)
        for number in range(6):
            workers.dies(1 + number * steps // 6 + plain, plain=plain)
    assert workers.kills == 12
    workers.start(concurrency=4)
    workers.all_end()
    workers.check()


@pytest.mark.slow
def test_a_hundred_kills_at_every_step_and_at_random(workers: Workers) -> None:
    """Each step of a turn, of one that ends in a single statement, and of one with an approval; then four at a time, at
    random steps of several turns."""
    for ask, plain in ((False, False), (False, True), (True, False)):
        for step in range(1, workers.steps(ask=ask, plain=plain) + 1):
            workers.dies(step, ask=ask, plain=plain)
    chance = random.Random(41)
    sessions = [str(uuid.uuid4()) for _ in range(12)]
    for _ in range(200):
        workers.hand_off(chance.choice(sessions), sleep=chance.choice((0, 0, 0.05)), plain=chance.random() < 0.5)
    doomed = [workers.start(kill_at=chance.randrange(1, 120), concurrency=2) for _ in range(4)]
    while workers.kills < 200 and workers.unfinished():
        workers.wait(doomed.pop(0))
        doomed.append(workers.start(kill_at=chance.randrange(1, 120), concurrency=2))
    assert workers.kills >= 100
    deciding = Decider(workers)
    workers.start(concurrency=4)
    workers.all_end(120)
    deciding.stop()
    workers.check()


def test_killed_while_its_claim_is_on_the_way(workers: Workers) -> None:
    """The server goes on with the statement of a worker that is gone, and commits it: nobody knows of that claim."""
    job = workers.hand_off()
    with workers.database.connect() as other, other.cursor() as cur:
        cur.execute("SELECT pg_advisory_xact_lock(walstream.session_lock_key(session_id::text)) FROM agent_jobs")
        pid = workers.start()
        eventually(lambda: _waiting(workers, "take_job"), "the claim waits")
        workers.kill(pid)
    eventually(lambda: workers.jobs.get(job, on=workers.on).fencing_token == 1, "the claim went through")
    workers.start(lease_seconds=600.0)
    workers.ends(job)
    assert workers.jobs.get(job, on=workers.on).fencing_token == 2
    workers.check()


def _waiting(workers: Workers, statement: str) -> bool:
    return workers.database.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND query LIKE %s",
        f"%{statement}%",
    ) != [(0,)]


# -- connections that are cut ----------------------------------------------------------------------------------------

_STATEMENTS = {
    "the claim": ("take_job",),
    "an append": ("turn.step", "COMMIT"),
    "an effect": ("INTO effects",),
    "the completion": ("(complete|finish)_job",),
    "the commit": ("(complete|finish)_job", "COMMIT"),
    "a request": ("request_approval", "COMMIT"),
    "a single statement": ("finish_job",),
}


def test_connections_cut_before_the_server_hears_and_before_the_worker_hears(workers: Workers) -> None:
    database = workers.database
    deciding = Decider(workers)
    parameters = parse_dsn(database.server.dsn(database.name, tcp=True))
    turns = Turns(workers.folder)
    with CuttingProxy(int(parameters["port"])) as proxy:
        worker = Worker(make_dsn(**{**parameters, "port": proxy.port}), **workers.options(lease_seconds=600.0))
        worker.handle(turns)
        with worker:
            for number, (words, heard) in enumerate(itertools.product(_STATEMENTS.values(), (False, True)), start=1):
                proxy.cut(*words, heard=heard)
                workers.ends(workers.hand_off(ask="request_approval" in words, plain=words == ("finish_job",)))
                assert proxy.cuts == number, (words, heard)
    deciding.stop()
    workers.check()
    # Nobody waited for a lease, and no turn was done anew: each job was claimed once, and once more after a decision.
    claims = database.execute("SELECT count(*) FROM claims GROUP BY job_id ORDER BY job_id")
    assert claims == [(1,)] * 10 + [(2,)] * 2 + [(1,)] * 2


def test_the_server_ends_every_connection_again_and_again(workers: Workers) -> None:
    """pg_terminate_backend, wherever the workers are."""
    pid = workers.start(concurrency=4)
    jobs = [workers.hand_off(sleep=0.02) for _ in range(40)]
    ended = 0
    while workers.unfinished() or ended < 10:
        if not workers.unfinished():
            jobs.append(workers.hand_off(sleep=0.02))
        ended += workers.database.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'walstream:%%'"
        )[0][0]
        time.sleep(0.15)
    assert ended >= 10
    assert workers.kill(pid, signal.SIGTERM)["code"] == 0
    workers.check()
    assert len(jobs) >= 40


# -- a worker that was asleep ----------------------------------------------------------------------------------------


def test_a_zombie_s_late_append_its_events_and_its_completion_are_refused_and_it_says_so(workers: Workers) -> None:
    job = workers.hand_off(hold=True)
    zombie = workers.start()
    workers.held(job)
    os.kill(zombie, signal.SIGSTOP)
    workers.start()
    workers.ends(job)
    workers.go(job)
    os.kill(zombie, signal.SIGCONT)
    eventually(lambda: "nothing was written" in workers.log(zombie), "it notices")
    assert f"WARNING the late append of job {job} was refused: " in workers.log(zombie)
    assert f"WARNING job {job} " in workers.log(zombie).partition("was refused")[2]
    workers.check()
    again = workers.hand_off()
    workers.ends(again)
    assert workers.kill(zombie, signal.SIGTERM)["code"] == 0  # it has gone on as a worker


def test_asleep_in_the_middle_of_the_completion(workers: Workers) -> None:
    """It holds the job's row: after a lease the server ends its transaction, and another worker does the job."""
    job = workers.hand_off(stop=True)
    zombie = workers.start()
    eventually(lambda: (workers.folder / f"stopped-{job}").exists(), "it has stopped in mid-transaction")
    workers.start()
    workers.ends(job)

    def notices() -> bool:
        os.kill(zombie, signal.SIGCONT)  # again and again: it says that it stops, and then it does
        return f"job {job} " in workers.log(zombie)

    eventually(notices, "it notices")
    workers.check()
    assert workers.kill(zombie, signal.SIGTERM)["code"] == 0


def test_asleep_and_nobody_else_there(workers: Workers) -> None:
    """A lease that ran out and that nobody took is still good."""
    job = workers.hand_off(hold=True)
    pid = workers.start()
    workers.held(job)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.7)
    workers.go(job)
    os.kill(pid, signal.SIGCONT)
    workers.ends(job)
    assert workers.jobs.get(job, on=workers.on).fencing_token == 1
    workers.check(but=("what a zombie wrote",))


# -- leases ----------------------------------------------------------------------------------------------------------


def test_a_turn_of_four_leases_keeps_its_job_although_its_renewals_are_cut(workers: Workers) -> None:
    job = workers.hand_off(sleep=8.0)
    pid = workers.start(lease_seconds=2.0)
    eventually(workers.begun, "it has begun")
    workers.start(concurrency=2)  # somebody waits for it
    for _ in range(6):
        time.sleep(1.0)
        workers.database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'walstream:walstream:leases'"
        )
    workers.ends(job)
    assert workers.jobs.get(job, on=workers.on).fencing_token == 1
    assert "was not renewed" in workers.log(pid)
    workers.check()


# -- the server ------------------------------------------------------------------------------------------------------


def crashed(workers: Workers, server: PostgresServer, times: int, jobs: int) -> None:
    """A server that crashes while workers claim, work and complete, and while somebody decides."""
    deciding = Decider(workers)
    sessions = [str(uuid.uuid4()) for _ in range(jobs // 3)]
    long = workers.hand_off(hold=True)
    for number in range(jobs):
        workers.hand_off(sessions[number % len(sessions)], sleep=0.02, ask=number % 5 == 0, plain=number % 2 == 0)
    pids = [workers.start(concurrency=4, lease_seconds=1.0) for _ in range(2)]
    workers.held(long)
    for _ in range(times):
        workers.get_on(3)
        server.restart("immediate")
    workers.go(long)
    workers.all_end(120)
    deciding.stop()
    for pid in pids:
        assert workers.kill(pid, signal.SIGTERM)["code"] == 0
    workers.check(but=("what a zombie wrote",))
    assert deciding.decided > 0


def test_the_server_crashes_while_jobs_are_claimed_and_completed(
    forks: Forks, own_server: Callable[..., PostgresServer], tmp_path: Path
) -> None:
    server = own_server()
    database = Database(server, "crashed")
    database.create()
    with contextlib.closing(Workers(forks, database, tmp_path)) as workers:
        crashed(workers, server, 2, 24)


@pytest.mark.slow
def test_the_server_crashes_many_times(forks: Forks, own_server: Callable[..., PostgresServer], tmp_path: Path) -> None:
    server = own_server()
    database = Database(server, "crashed")
    database.create()
    with contextlib.closing(Workers(forks, database, tmp_path)) as workers:
        crashed(workers, server, 15, 300)


# -- stopping --------------------------------------------------------------------------------------------------------


def test_told_to_stop_turns_end_and_what_takes_too_long_is_another_s_at_once(workers: Workers) -> None:
    long, short = workers.hand_off(hold=True), workers.hand_off(sleep=0.4)
    leaving = workers.start(concurrency=2, drain_seconds=3.0, lease_seconds=600.0)
    workers.held(long)
    eventually(lambda: len(workers.begun()) == 2, "both have begun")
    os.kill(leaving, signal.SIGTERM)
    workers.start(poll_seconds=600.0)  # it has to be told
    workers.ends(short)
    assert workers.jobs.get(short, on=workers.on).fencing_token == 1
    eventually(lambda: "are given back" in workers.log(leaving), "it gives back")
    workers.ends(long)  # neither a poll nor a lease ends in ten minutes
    job = workers.jobs.get(long, on=workers.on)
    assert (job.fencing_token, job.attempts) == (2, 1), "the first attempt is not counted"
    workers.go(long)
    end = workers.wait(leaving)
    assert end["code"] == 0
    assert f"the late append of job {long} was refused" in workers.log(leaving)
    workers.check()


# -- sessions and numbers --------------------------------------------------------------------------------------------


def in_order(workers: Workers, jobs: int, kills: int) -> None:
    chance = random.Random(43)
    sessions = [str(uuid.uuid4()) for _ in range(jobs // 8)]
    for _ in range(jobs):
        workers.hand_off(chance.choice(sessions), sleep=chance.choice((0.0, 0.01, 0.03)))
    few = functools.partial(workers.start, concurrency=10, agent_concurrency=6, lease_seconds=1.0)
    pids = [few(), few()]
    while workers.kills < kills:
        workers.get_on(4)
        workers.kill(pids.pop(0))
        pids.append(few())
    workers.all_end(120)
    workers.check()
    assert workers.database.execute("SELECT max(of_agent) FROM claims") == [(6,)]
    assert workers.database.execute("SELECT count(DISTINCT owner) > 6 FROM claims") == [(True,)]


def test_twenty_workers_do_a_session_s_jobs_one_by_one_and_no_more_at_once_than_allowed(workers: Workers) -> None:
    in_order(workers, 48, 2)


@pytest.mark.slow
def test_twenty_workers_of_whom_forty_are_killed(workers: Workers) -> None:
    in_order(workers, 600, 40)


# -- people ----------------------------------------------------------------------------------------------------------


class Decider:
    """A person who grants whatever is asked for, from a thread, and who tries it twice."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._over = threading.Event()
        self.decided = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        approvals = Approvals(self._workers.settings)
        while not self._over.wait(0.02):
            # A server that was away: the decision either stands or it does not, and what is open says which.
            with contextlib.suppress(psycopg2.Error, ApprovalRefused):
                conn = psycopg2.connect(self._workers.database.dsn)
                with contextlib.closing(conn):
                    conn.autocommit = True
                    for each in approvals.open(on=conn):
                        approvals.approve(each.request_seq, by="alice", on=conn)
                        self.decided += 1
                        with pytest.raises(ApprovalRefused):
                            approvals.reject(each.request_seq, by="bob", on=conn)


def test_killed_at_every_third_step_of_asking_and_of_going_on(workers: Workers) -> None:
    steps = workers.steps(ask=True)
    for step in range(2, steps, 3):
        workers.hand_off(ask=True)
        workers.wait(workers.start(kill_at=step, turns=1))
    assert workers.kills >= 8
    deciding = Decider(workers)
    doomed = [workers.start(kill_at=step) for step in (9, 14)]  # these die when they go on
    for pid in doomed:
        workers.wait(pid)
    workers.start(concurrency=4)
    workers.all_end()
    deciding.stop()
    workers.check()
    # Asked once by a turn that lived, whatever died before; decided once.
    assert workers.database.execute(
        "SELECT count(*), count(DISTINCT job_id), count(DISTINCT decision_seq) FROM walstream.approvals"
        " WHERE decision = 'granted'"
    ) == workers.database.execute(
        "SELECT count(*), count(*), count(*) FROM agent_events WHERE event_type = 'approval.requested'"
    )


def test_three_days_of_waiting_hold_nothing_and_many_deciders_are_one(workers: Workers) -> None:
    session = str(uuid.uuid4())
    job, behind = workers.hand_off(session, ask=True), workers.hand_off(session)
    workers.wait(workers.start(turns=1))  # who asked is gone
    workers.ends(job, "AWAITING_HUMAN")
    workers.database.execute(
        "UPDATE agent_jobs SET created_at = created_at - interval '3 days', updated_at = updated_at - interval '3 days'"
    )
    workers.database.execute("UPDATE walstream.approvals SET requested_at = requested_at - interval '3 days'")
    waiting = workers.jobs.get(job, on=workers.on)
    assert (waiting.lease_owner, waiting.lease_expires_at, waiting.next_try) == (None, None, None)
    assert workers.database.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'walstream:%%'"
        " AND datname = current_database()"
    ) == [(0,)]
    workers.start(poll_seconds=600.0)
    time.sleep(0.3)
    assert workers.status(behind) == "SUBMITTED", "the session's next job waits for the person too"
    ((request,),) = workers.database.execute("SELECT request_seq FROM walstream.approvals")
    refused: list[str] = []
    gate = threading.Barrier(6)

    def decide(number: int) -> None:
        with contextlib.closing(psycopg2.connect(workers.database.dsn)) as conn, conn:
            gate.wait()
            try:
                Approvals(workers.settings).approve(request, by=f"person {number}", on=conn)
            except ApprovalRefused as error:
                refused.append(str(error))

    deciders = [threading.Thread(target=decide, args=(number,)) for number in range(6)]
    for each in deciders:
        each.start()
    for each in deciders:
        each.join(60)
    workers.jobs.wake(AGENT, on=workers.on)
    workers.ends(job)
    workers.ends(behind)
    assert len(refused) == 5
    assert len({line.partition(" was ")[2] for line in refused}) == 1, "all are told the same name"
    workers.check()


def test_a_zombie_that_asks_with_a_stale_token_is_refused(workers: Workers) -> None:
    job = workers.hand_off(hold=True, ask_late=True)
    zombie = workers.start()
    workers.held(job)
    os.kill(zombie, signal.SIGSTOP)
    workers.start()
    workers.ends(job)
    workers.go(job)
    os.kill(zombie, signal.SIGCONT)
    eventually(lambda: "nothing was written" in workers.log(zombie), "it notices")
    assert workers.database.execute("SELECT count(*) FROM walstream.approvals") == [(0,)]
    assert workers.database.execute("SELECT count(*) FROM agent_events WHERE event_type LIKE 'approval.%%'") == [(0,)]
    workers.check()


# -- from the emitter to the effect ----------------------------------------------------------------------------------


def emitters(workers: Workers, sessions: int, keys: int) -> None:
    """Three at once, each of whom emits every handoff under its one key; half of what they begin they roll back."""

    def emit(seed: int) -> None:
        chance = random.Random(seed)
        with contextlib.closing(psycopg2.connect(workers.database.dsn)) as conn:
            for number in chance.sample(range(keys), keys):
                session = str(uuid.UUID(int=0x4000 + number % sessions))
                for again in (True, False):
                    payload = {"to": AGENT, "message": {"sleep": 0.01, "number": number}}
                    key = f"undone-{number}" if again and number % 3 == 0 else f"emit-{number}"
                    workers.ledger.append(session, "planner", "handoff.emitted", payload, key=key, on=conn)
                    if again and (number % 3 == 0 or chance.random() < 0.3):
                        conn.rollback()
                    else:
                        conn.commit()

    threads = [threading.Thread(target=emit, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)


# The router's jobs have five attempts, and more than five workers may be killed at one of them.
_MANY_ATTEMPTS = """
    CREATE FUNCTION many_attempts() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.max_delivery_attempts := 1000;
        RETURN NEW;
    END $$;
    CREATE TRIGGER many_attempts BEFORE INSERT ON agent_jobs FOR EACH ROW EXECUTE FUNCTION many_attempts()"""


def pipeline(workers: Workers, installed: Installed, handoffs: int, kills: int) -> None:
    """Two processes with two routers each, one of which stands by, and twenty workers; all of them are killed."""
    workers.database.execute(_MANY_ATTEMPTS)
    flags = {"SLOT": installed.settings.slot, "LEASE_SECONDS": "1", "POLL_SECONDS": "0.1"}
    target = "tests.chaos.handoff_routers:stream"
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(
                Consumer(workers.database.dsn, workers.folder / f"router-{n}", target=target, settings=flags)
            )
            for n in range(2)
        ]
        ten = functools.partial(workers.start, concurrency=10, lease_seconds=1.5)
        pids = [ten(), ten()]
        emitting = threading.Thread(target=emitters, args=(workers, 12, handoffs))
        emitting.start()
        chance = random.Random(47)

        def completed() -> int:
            return int(workers.database.execute("SELECT count(*) FROM effects")[0][0])

        for number in range(kills):
            wanted = 1 + number * handoffs // (kills + 1)
            eventually(lambda wanted=wanted: completed() >= wanted, "handoffs get through", 60)  # type: ignore[misc]
            consumers[number % 2].kill()
            workers.kill(pids.pop(chance.randrange(2)))
            consumers[number % 2].start()
            pids.append(ten())
        emitting.join(60)
        eventually(lambda: completed() >= handoffs and workers.unfinished() == 0, "every handoff ran", 120)
        # Both routers have passed by all of it, follow-ups included.
        eventually(
            lambda: workers.database.execute("SELECT count(*) FROM walstream.dead_letters") == [(handoffs,)],
            "what the workers handed off was routed too",
            60,
        )
        for consumer in consumers:  # one that was just started may not have got as far as to listen to signals
            assert consumer.terminate() in (0, -signal.SIGTERM), consumer.output
    workers.check()
    assert workers.database.execute("SELECT count(*), count(DISTINCT event_seq) FROM agent_jobs") == [
        (handoffs, handoffs)
    ]


def test_two_routers_twenty_workers_and_emitters_that_roll_back_and_repeat(
    forks: Forks, database: Database, tmp_path: Path
) -> None:
    installed = Installed(database)
    with contextlib.closing(Workers(forks, database, tmp_path, installed.settings)) as workers:
        pipeline(workers, installed, 40, 1)


@pytest.mark.slow
def test_two_routers_and_twenty_workers_killed_twenty_times(forks: Forks, database: Database, tmp_path: Path) -> None:
    installed = Installed(database)
    with contextlib.closing(Workers(forks, database, tmp_path, installed.settings)) as workers:
        pipeline(workers, installed, 400, 20)
