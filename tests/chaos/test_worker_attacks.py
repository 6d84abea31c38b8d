"""What handlers, roles, locks and chance may do to a worker: no job is lost, done twice, or tried for ever."""

# ruff: noqa: ARG001, ARG002, ARG005 (a handler has three arguments, whatever it does with them)

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.handoffs import AGENT, Forks, Workers
from tests.conftest import Database
from tests.integration.streams import eventually
from walstream import ClaimedJob, ConfigError, Fenced, JobRefused, Jobs, TurnLedger, Worker
from walstream.errors import Unavailable
from walstream.order.wake import Listener
from walstream.worker.leases import Leases

Handler = Callable[[dict[str, Any], ClaimedJob, TurnLedger], Any]


class Attacked(Workers):
    """Workers in the test's own process."""

    def __init__(self, database: Database, folder: Path) -> None:
        super().__init__(Forks(), database, folder)
        self._made: list[Worker] = []

    def work(self, handler: Handler, dsn: str = "", **options: Any) -> Worker:
        """A worker that runs until the end of the test."""
        made = Worker(dsn or self.database.dsn, **self.options(lease_seconds=600.0, **options))
        made.handle(handler)
        made.start()
        self._made.append(made)
        return made

    def cut(self, role: str = "worker") -> None:
        """The server ends the connections of a role."""
        self.database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = %s",
            f"walstream:walstream:{role}",
        )

    def close(self) -> None:
        for each in self._made:
            each.stop()
        super().close()


@pytest.fixture
def attacked(database: Database, tmp_path: Path) -> Iterator[Attacked]:
    made = Attacked(database, tmp_path)
    try:
        yield made
    finally:
        made.close()


# -- handlers that go on after they returned -------------------------------------------------------------------------


def test_threads_that_a_handler_leaves_behind_disturb_no_claim(attacked: Attacked) -> None:
    threads: list[threading.Thread] = []
    turns: list[int] = []
    over = threading.Event()

    def leaves_a_thread(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        turns.append(job.job_id)

        def go_on() -> None:
            while not over.is_set():
                with contextlib.suppress(Fenced):
                    ledger.append_now("turn.late", {})

        if len(threads) < 3:
            threads.append(threading.Thread(target=go_on))
            threads[-1].start()

    attacked.work(leaves_a_thread)
    jobs = [attacked.hand_off() for _ in range(30)]
    try:
        for job in jobs:
            attacked.ends(job)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert sorted(turns) == jobs, "a claim was undone by what a thread rolled back"
    assert attacked.database.execute("SELECT count(*) FROM agent_jobs WHERE fencing_token <> 1") == [(0,)]


def test_what_is_appended_when_the_turn_is_over_is_not_swallowed(attacked: Attacked) -> None:
    ledgers: list[TurnLedger] = []
    inside: list[Exception] = []

    def turn(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        ledgers.append(ledger)

        def effect(cur: Any) -> None:
            try:
                ledger.append("note", {})
            except ConfigError as error:
                inside.append(error)

        ledger.on_completion(effect)

    attacked.work(turn)
    attacked.ends(attacked.hand_off())
    assert len(inside) == 1
    assert "the handler has returned" in str(inside[0])
    (ledger,) = ledgers
    late: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (ledger.append, ("note", {})),
        (ledger.hand_off, ("x",)),
        (ledger.on_completion, (print,)),
        (ledger.request_approval, ({"tool": "pay"},)),
    ]
    for call, arguments in late:
        with pytest.raises(ConfigError, match="the handler has returned"):
            call(*arguments)
    with pytest.raises(Fenced):
        ledger.append_now("note", {})


# -- one token, one turn ---------------------------------------------------------------------------------------------


def test_a_turn_that_was_given_up_is_not_begun_again_under_the_same_token(attacked: Attacked) -> None:
    """Its appends would be taken for those of the turn before, which have the same keys."""
    turns: list[tuple[int, int]] = []

    def too_long(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        turns.append((job.job_id, job.fencing_token))
        number = len(turns)
        assert ledger.append_now("turn.number", {"number": number}).appended
        if number == 1:
            time.sleep(0.5)  # past the timeout
            attacked.cut()

    made = Worker(attacked.database.dsn, **attacked.options(lease_seconds=1.5, timeout=0.3))
    made.handle(too_long)
    with made:
        attacked.ends(attacked.hand_off())
    assert len(set(turns)) == len(turns)
    numbers = attacked.database.execute(
        "SELECT (payload ->> 'number')::int FROM agent_events WHERE event_type = 'turn.number' ORDER BY seq"
    )
    assert numbers == [(n + 1,) for n in range(len(turns))]


# -- what cannot be begun, or completed ------------------------------------------------------------------------------


def test_a_job_that_cannot_be_begun_does_not_spin_though_it_is_retried_at_once(attacked: Attacked) -> None:
    bad = str(uuid.uuid4())
    attacked.database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.session_id::text = '{bad}' AND NEW.event_type = 'handoff.received' THEN RAISE 'no'; END IF;"
        " RETURN NEW; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON agent_events FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    stuck, good = attacked.hand_off(bad), attacked.hand_off()
    began = time.monotonic()
    worker = attacked.work(lambda context, job, ledger: None, retry_first=0.0, concurrency=1, drain_seconds=600.0)
    attacked.ends(good)
    time.sleep(1.0)
    # It is looked at once a second; one that spins has hundreds of claims.
    assert attacked.jobs.get(stuck, on=attacked.on).fencing_token <= 2 + (time.monotonic() - began)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive(), "it waits for a turn that cannot begin"


@pytest.mark.parametrize(
    "effect",
    [
        "SELECT pg_terminate_backend(pg_backend_pid())",
        "SET LOCAL statement_timeout = '20ms'; SELECT pg_sleep(1)",
        "SET LOCAL idle_in_transaction_session_timeout = '20ms'",
        "SET LOCAL lock_timeout = '20ms'; LOCK locked",
    ],
)
def test_a_completion_that_never_gets_through_is_a_failed_attempt(attacked: Attacked, effect: str) -> None:
    attacked.database.execute("CREATE TABLE locked ()")
    holder = attacked.database.connect()
    with holder.cursor() as cur:
        cur.execute("LOCK locked")

    def complete(cur: Any) -> None:
        cur.execute(effect)
        time.sleep(0.05)

    worker = attacked.work(lambda context, job, ledger: ledger.on_completion(complete), concurrency=1)
    failing = attacked.hand_off(attempts=1)
    attacked.ends(failing, "FAILED")
    assert worker.error is None
    assert attacked.jobs.get(failing, on=attacked.on).fencing_token == 1


@pytest.mark.parametrize("kind", [Fenced, JobRefused])
def test_what_a_handler_was_refused_elsewhere_is_a_failure_like_others(
    attacked: Attacked, kind: type[Exception]
) -> None:
    """Of another ledger, or of another job: the lease on this one is as good as before."""

    def refused(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        raise kind("job 4711: elsewhere")

    attacked.work(refused)
    job = attacked.hand_off(attempts=2)
    attacked.ends(job, "FAILED")
    assert "elsewhere" in str(attacked.jobs.get(job, on=attacked.on).error)


# -- stopping --------------------------------------------------------------------------------------------------------


def test_one_job_that_cannot_be_given_back_keeps_no_other_from_it(attacked: Attacked) -> None:
    over = threading.Event()

    def hold(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        over.wait(600)

    worker = attacked.work(hold, drain_seconds=0.1, concurrency=4)
    jobs = [attacked.hand_off() for _ in range(4)]
    eventually(lambda: all(attacked.status(job) == "IN_PROGRESS" for job in jobs), "all are at work")
    holder = attacked.database.connect()
    with holder.cursor() as cur:
        cur.execute("SELECT FROM agent_jobs WHERE job_id IN (%s, %s) FOR UPDATE", (jobs[0], jobs[2]))
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    try:
        free = (jobs[1], jobs[3])
        eventually(lambda: all(attacked.status(job) == "SUBMITTED" for job in free), "the others are given back")
    finally:
        over.set()
        holder.rollback()
        stopping.join(60)


# -- threads of the worker's own -------------------------------------------------------------------------------------


def test_leases_are_renewed_whatever_a_renewal_raises(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, calls = Jobs.renew, 0

    def odd(self: Jobs, *args: Any, **rest: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RuntimeError("can't start new thread")
        return renew(self, *args, **rest)

    monkeypatch.setattr(Jobs, "renew", odd)

    def long(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        time.sleep(1.5)

    made = Worker(attacked.database.dsn, **attacked.options(lease_seconds=0.9))
    made.handle(long)
    with made:
        job = attacked.hand_off()
        attacked.ends(job)
    assert calls >= 3


def test_workers_are_woken_whatever_listening_raises(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, calls = Listener.wait, 0

    def odd(self: Listener, timeout: float) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("too many open files")
        return wait(self, timeout)

    monkeypatch.setattr(Listener, "wait", odd)
    attacked.work(lambda context, job, ledger: None)
    eventually(lambda: calls >= 2, "it listens")
    for _ in range(3):
        attacked.ends(attacked.hand_off())


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_knock_is_lost_between_a_look_and_a_wait(attacked: Attacked, rounds: int) -> None:
    """Nobody looks by himself here: who is not woken sleeps for ten minutes."""
    chance = random.Random(53)

    def turn(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        time.sleep(chance.choice((0, 0.001, 0.005)))

    for _ in range(2):
        attacked.work(turn, poll_seconds=600.0, concurrency=3)
    for _ in range(rounds):
        for _ in range(chance.randrange(1, 4)):
            attacked.hand_off()
            attacked.jobs.wake(AGENT, on=attacked.on)
            time.sleep(chance.choice((0, 0, 0.002)))
        if chance.random() < 0.5:
            attacked.all_end()
    attacked.all_end()


def test_a_hand_that_waits_for_its_claim_is_stopped_and_leaves_no_job_behind(attacked: Attacked) -> None:
    held = str(uuid.uuid4())
    job = attacked.hand_off(held)
    holder = attacked.database.connect()
    with holder.cursor() as cur:
        cur.execute("SELECT pg_advisory_xact_lock(walstream.session_lock_key(%s))", (held,))
    worker = attacked.work(lambda context, job, ledger: None, drain_seconds=600.0)
    time.sleep(0.2)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive(), "it waits for the claim"
    holder.rollback()
    attacked.work(lambda context, job, ledger: None)
    attacked.ends(job)  # and not when a lease of ten minutes runs out


def test_a_completion_that_the_server_still_works_on_when_its_connection_is_gone(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    """It is sent again, waits for the first, and nothing is written twice."""
    attacked.database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NEW; END $$;"
        "CREATE TRIGGER slow BEFORE INSERT ON agent_events FOR EACH ROW WHEN (NEW.event_type = 'note')"
        " EXECUTE FUNCTION slow()"
    )

    def turn(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        ledger.append("note", {})

    parameters = parse_dsn(attacked.database.server.dsn(attacked.database.name, tcp=True))
    with CuttingProxy(int(parameters["port"])) as proxy:
        attacked.work(turn, dsn=str(make_dsn(**{**parameters, "port": proxy.port})))
        proxy.cut("(finish|complete)_job", heard=True, answered=False)
        job = attacked.hand_off()
        attacked.ends(job)
        time.sleep(1.5)
    assert attacked.database.execute("SELECT count(*) FROM agent_events WHERE event_type = 'note'") == [(1,)]
    assert attacked.jobs.get(job, on=attacked.on).fencing_token == 1


def test_a_job_that_has_just_been_completed_was_not_lost(caplog: pytest.LogCaptureFixture, attacked: Attacked) -> None:
    job = attacked.jobs.get(attacked.hand_off(), on=attacked.on)

    class Completed(Jobs):
        def renew(self, *args: Any, **rest: Any) -> bool:
            leases.let_go(lease)  # the turn ends while this is on its way
            return False

    leases = Leases(attacked.database.connect, Completed(attacked.settings), 0.3)
    lease = leases.hold(job, None)
    leases.start()
    eventually(lambda: not leases.held(), "it was to be renewed")
    leases.stop()
    assert lease.lost is None
    assert caplog.records == []


def test_a_renewal_whose_connection_was_cut_is_made_on_another_at_once(attacked: Attacked) -> None:
    """And not a third of a lease later: a second cut, or a slow connection, would then be one too many."""
    made: list[Any] = []
    asked: list[Any] = []

    def connect() -> Any:
        if len(made) == 2:
            raise Unavailable("the server is away")
        made.append(attacked.database.connect())
        made[-1].autocommit = True
        return made[-1]

    class Counting(Jobs):
        def renew(self, *args: Any, **rest: Any) -> bool:
            asked.append(rest["on"])
            return super().renew(*args, **rest)

    attacked.hand_off()
    job = attacked.jobs.claim(AGENT, "w", lease_seconds=600, on=attacked.on)
    assert job is not None
    leases = Leases(connect, Counting(attacked.settings), 1800)
    lease = leases.hold(job, None)

    def round_of_renewals(*, cut: bool) -> None:
        if cut:
            attacked.database.execute("SELECT pg_terminate_backend(%s)", made[-1].info.backend_pid)
        leases._renew(lease)

    round_of_renewals(cut=False)
    round_of_renewals(cut=True)
    assert asked == [made[0], made[0], made[1]]
    assert attacked.database.execute("SELECT lease_expires_at > now() + interval '20 min' FROM agent_jobs") == [(True,)]
    round_of_renewals(cut=True)
    round_of_renewals(cut=False)
    assert asked == [made[0], made[0], made[1], made[1]], "where no connection is to be had, the next round tries again"
    assert lease.lost is None


# -- rights and settings that change at run time ---------------------------------------------------------------------


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    name = f"worker_{uuid.uuid4().hex[:8]}"
    database.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    database.execute(f"DROP OWNED BY {name}")
    database.execute(f"DROP ROLE {name}")


def grant(attacked: Attacked, role: str) -> str:
    from walstream.ledger.grants import worker_statements

    for statement in worker_statements(attacked.settings, role):
        attacked.database.execute(statement)
    return str(make_dsn(attacked.database.dsn, user=role))


def test_a_role_that_loses_its_grants_ends_the_worker_and_says_which(attacked: Attacked, role: str) -> None:
    worker = attacked.work(lambda context, job, ledger: None, dsn=grant(attacked, role))
    attacked.ends(attacked.hand_off())
    attacked.database.execute(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA walstream FROM {role}")
    assert worker.wait(60)
    assert isinstance(worker.error, ConfigError)
    assert "permission denied for function" in str(worker.error)
    assert "walstream init --worker" in worker.error.hint


def test_a_role_whose_transactions_are_read_only_waits_and_goes_on(
    attacked: Attacked, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = grant(attacked, role)
    attacked.database.execute(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    job = attacked.hand_off()
    with caplog.at_level(logging.WARNING, "walstream.worker"):
        worker = attacked.work(lambda context, job, ledger: None, dsn=dsn)
        time.sleep(1.0)
    assert attacked.status(job) == "SUBMITTED"
    assert 2 <= len(caplog.records) <= 20, "it does not spin"
    assert worker.error is None
    attacked.database.execute(f"ALTER ROLE {role} RESET default_transaction_read_only")
    attacked.ends(job)


# -- locks -----------------------------------------------------------------------------------------------------------


def test_a_session_that_somebody_holds_does_not_stop_the_whole_agent(attacked: Attacked) -> None:
    """Its append lock is waited for inside of the claim, which holds the agent's lock when it is counted."""
    held = str(uuid.uuid4())
    attacked.hand_off(held)
    holder = attacked.database.connect()
    with holder.cursor() as cur:
        cur.execute("SELECT pg_advisory_xact_lock(walstream.session_lock_key(%s))", (held,))
    attacked.work(lambda context, job, ledger: None, agent_concurrency=2, concurrency=2)
    try:
        for _ in range(3):
            attacked.ends(attacked.hand_off())
    finally:
        holder.rollback()
    attacked.all_end()


def test_appends_over_sessions_in_every_order_beside_people_who_cancel(attacked: Attacked) -> None:
    sessions = [str(uuid.uuid4()) for _ in range(3)]

    def crosswise(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        for number in range(4):
            ledger.append("note", {}, session_id=sessions[(job.job_id + number) % 3])
            ledger.append("note", {"big": "x" * 400_000}, session_id=sessions[(job.job_id * 2 + number) % 3])
        ledger.append_now("note", {}, session_id=sessions[job.job_id % 3])

    attacked.work(crosswise, concurrency=8, per_session=False)
    attacked.work(crosswise, concurrency=4, per_session=False)
    jobs = [attacked.hand_off(sessions[n % 3]) for n in range(21)]
    canceled = 0
    for job in jobs[::5]:
        with contextlib.suppress(JobRefused):
            attacked.jobs.cancel(job, "enough", on=attacked.on)
            canceled += 1
    eventually(
        lambda: {attacked.status(job) for job in jobs} <= {"COMPLETED", "CANCELED"}, "all of them come to an end", 60
    )
    counts = dict(attacked.database.execute("SELECT status, count(*) FROM agent_jobs GROUP BY 1"))
    assert counts.get("CANCELED", 0) == canceled
    (notes,) = attacked.database.execute("SELECT count(*) FROM agent_events WHERE payload ? 'big'")
    assert notes == (4 * counts["COMPLETED"],)


# -- async handlers --------------------------------------------------------------------------------------------------


def test_a_coroutine_that_will_not_be_cancelled_disturbs_nobody(attacked: Attacked) -> None:
    refused: list[str] = []

    async def stubborn(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        if job.fencing_token > 1 or not (job.handoff and job.handoff.payload["message"].get("hold")):
            return
        for _ in range(400):
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
            try:
                ledger.append_now("note", {})
            except Fenced as error:
                refused.append(str(error))
                if len(refused) > 20:
                    return

    attacked.work(stubborn, timeout=0.3, concurrency=2)
    first = attacked.hand_off(hold=True)
    jobs = [attacked.hand_off() for _ in range(20)]
    for job in (first, *jobs):
        attacked.ends(job)
    eventually(lambda: len(refused) > 20, "what it appends is refused")
    assert attacked.database.execute(
        "SELECT count(*) FROM agent_jobs WHERE fencing_token <> 1 + (job_id = %s)::int", first
    ) == [(0,)]
