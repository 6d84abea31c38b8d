"""Workers: what a turn writes, when it writes nothing, and who has a job when."""

# ruff: noqa: ARG001, ARG005 (a handler has three arguments, whatever it does with them)

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from tests.cli_calls import call, set_up
from tests.conftest import Database
from tests.integration.streams import Installed, eventually
from walstream import (
    Approvals,
    ClaimedJob,
    ConfigError,
    Fenced,
    GiveUp,
    Jobs,
    Ledger,
    PayloadError,
    RetryLater,
    TurnLedger,
    Worker,
)
from walstream.config import Settings
from walstream.ledger.grants import worker_statements
from walstream.projectors.handoff_router import HandoffRouter

Handler = Callable[[dict[str, Any], ClaimedJob, TurnLedger], Any]


class Shop:
    """A ledger whose jobs workers do; jobs are submitted by hand, as a router would."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.settings = set_up(database)
        self.jobs = Jobs(self.settings)
        self.ledger = Ledger(self.settings)
        self.on = database.connect()
        self.on.autocommit = True
        self.workers: list[Worker] = []
        database.execute("CREATE TABLE effects (job_id bigint, note text)")

    def hand_off(self, payload: Any = None, *, session: str | None = None, to: str = "researcher", **job: Any) -> int:
        """Emit a handoff and submit its job, and wake who waits; the number of the job."""
        session = session or str(uuid.uuid4())
        emitted = self.ledger.append(session, "planner", "handoff.emitted", {"to": to, **(payload or {})}, on=self.on)
        number, _ = self.jobs.submit(session, to, event_seq=emitted.seq, on=self.on, **job)
        self.jobs.wake(to, on=self.on)
        return number

    def worker(self, handler: Handler, *, agent: str = "researcher", start: bool = True, **options: Any) -> Worker:
        """A worker that runs until the end of the test."""
        wanted = {"poll_seconds": 600.0, "drain_seconds": 5.0, "retry_first": 0.05, "retry_cap": 0.2, **options}
        made = Worker(self.database.dsn, agent=agent, **wanted)
        made.handle(handler)
        if start:
            self.workers.append(made)
            made.start()
        return made

    def status(self, job: int) -> str:
        return self.jobs.get(job, on=self.on).status

    def ends(self, job: int, status: str = "COMPLETED") -> None:
        eventually(lambda: self.status(job) == status, f"job {job} is {status}")

    def events(self, job: int) -> list[tuple[str, str, Any]]:
        """(agent, type, payload) of the job's session."""
        return [
            (agent, kind, payload)
            for agent, kind, payload in self.database.execute(
                "SELECT e.agent_id, e.event_type, e.payload FROM agent_events AS e JOIN agent_jobs AS j"
                " ON j.session_id::text = e.session_id::text WHERE j.job_id = %s ORDER BY e.seq",
                job,
            )
        ]

    def types(self, job: int) -> list[str]:
        return [kind for _, kind, _ in self.events(job)]

    def effects(self) -> list[tuple[int, str]]:
        return [
            (int(job), note) for job, note in self.database.execute("SELECT job_id, note FROM effects ORDER BY 1, 2")
        ]


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    made = Shop(database)
    try:
        yield made
    finally:
        for worker in made.workers:
            worker.stop()


def test_a_slot_that_is_being_made_keeps_no_worker_from_its_jobs(shop: Shop) -> None:
    """Ingest makes a lost slot anew, and a worker that starts meanwhile has nothing to do with that."""
    shop.database.execute("UPDATE walstream.identity SET slot_state = 'filling'")
    shop.database.execute("UPDATE walstream.ingest SET generation = 1")  # somebody has the lease for it, or had it
    shop.worker(lambda context, job, ledger: None)
    shop.ends(shop.hand_off({"message": "look"}))


def test_a_turn_and_its_completion_are_one_transaction(shop: Shop) -> None:
    seen: list[Any] = []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> str:
        assert job.handoff is not None
        seen.append((context["handoffs"], context["handoffs_received"], job.status, job.attempts, job.handoff.payload))
        payload = {"result": [1]}
        ledger.append("task.completed", payload)
        payload["result"].append(2)  # too late: it was written down when it was appended
        ledger.append("note", {"n": 0.1}, agent_id="somebody", key="k")
        ledger.hand_off("writer", "go on", priority=3, about="x")
        ledger.on_completion(lambda cur: cur.execute("INSERT INTO effects VALUES (%s, 'done')", (job.job_id,)))
        assert shop.types(job.job_id) == ["handoff.emitted", "handoff.received"], "nothing of it is there yet"
        return "what it returns means nothing"

    shop.worker(research)
    job = shop.hand_off({"message": "look", "hops": 1})
    shop.ends(job)
    seq = shop.jobs.get(job, on=shop.on).event_seq
    received = {"handoff": seq, "job_id": job, "from": "planner", "message": "look"}
    emitted = {"to": "researcher", "message": "look", "hops": 1}
    assert seen == [([emitted], [received], "IN_PROGRESS", 1, emitted)]
    assert shop.events(job)[1:] == [
        ("researcher", "handoff.received", received),
        ("researcher", "task.completed", {"result": [1]}),
        ("somebody", "note", {"n": 0.1}),
        ("researcher", "handoff.emitted", {"to": "writer", "message": "go on", "priority": 3, "about": "x"}),
    ]
    assert shop.effects() == [(job, "done")]
    assert shop.database.execute(
        "SELECT count(DISTINCT xmin)"
        " FROM (SELECT xmin::text FROM agent_events WHERE event_type IN ('note', 'task.completed')"
        " UNION ALL SELECT xmin::text FROM effects UNION ALL SELECT xmin::text FROM agent_jobs) AS t (xmin)"
    ) == [(1,)], "events, effect and completion were one transaction"


def test_an_async_handler_and_several_jobs_at_once(shop: Shop) -> None:
    inside: list[int] = []
    together = asyncio.Event()

    async def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        inside.append(job.job_id)
        if len(inside) == 3:
            together.set()
        await together.wait()
        ledger.append("task.completed", {})
        await asyncio.to_thread(ledger.append_now, "note", {})

    shop.worker(research, concurrency=3)
    jobs = [shop.hand_off() for _ in range(3)]
    for job in jobs:
        shop.ends(job)
        assert shop.types(job) == ["handoff.emitted", "handoff.received", "note", "task.completed"]


def test_what_fails_writes_nothing_and_is_tried_again(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[int] = []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        attempts.append(job.attempts)
        ledger.append_now("tool.invoked", {"call_id": f"c{job.attempts}"})
        ledger.append("note", {})
        ledger.on_completion(lambda cur: cur.execute("INSERT INTO effects VALUES (%s, 'x')", (job.job_id,)))
        if job.attempts < 3:
            raise ValueError("not today")
        assert sorted(context["pending_tools"]) == ["c1", "c2"], "what was appended at once stays"

    shop.worker(research)
    job = shop.hand_off()
    shop.ends(job)
    assert attempts == [1, 2, 3]
    assert shop.types(job) == ["handoff.emitted", "handoff.received", *["tool.invoked"] * 3, "note"]
    assert shop.effects() == [(job, "x")]
    assert "ValueError: not today" in caplog.text
    assert "attempt 2 of 5" in caplog.text


def test_attempts_end(shop: Shop) -> None:
    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        if job.handoff is not None and job.handoff.payload.get("hopeless"):
            raise GiveUp("there is no such thing")
        raise ValueError("no")

    shop.worker(research)
    hopeless = shop.hand_off({"hopeless": True})
    job = shop.hand_off(max_delivery_attempts=2)
    shop.ends(hopeless, "FAILED")
    shop.ends(job, "FAILED")
    told = shop.jobs.get(hopeless, on=shop.on)
    assert (told.attempts, told.error) == (1, "GiveUp: there is no such thing")
    told = shop.jobs.get(job, on=shop.on)
    assert (told.attempts, told.error) == (2, "ValueError: no")


def test_what_is_away_is_not_counted(shop: Shop) -> None:
    began: list[float] = []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        began.append(time.monotonic())
        assert job.attempts == 1
        if len(began) < 8:
            raise RetryLater("the model is away", delay=0.3 if len(began) == 1 else None)

    shop.worker(research)
    job = shop.hand_off(max_delivery_attempts=2)
    shop.ends(job)
    assert began[1] - began[0] > 0.29
    assert len(began) == 8


def test_a_job_that_was_canceled_in_mid_turn(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on, refused = threading.Event(), threading.Event(), []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        ledger.append("note", {})
        ledger.on_completion(lambda cur: cur.execute("INSERT INTO effects VALUES (1, 'x')"))
        begun.set()
        go_on.wait(60)
        eventually(lambda: ledger.lost, "the renewal notices")
        try:
            ledger.append_now("note", {})
        except Fenced as error:
            refused.append(str(error))

    shop.worker(research, lease_seconds=1)
    job = shop.hand_off()
    assert begun.wait(60)
    shop.jobs.cancel(job, "not needed", on=shop.on)
    go_on.set()
    eventually(lambda: "no longer this worker's" in caplog.text, "it is logged")
    assert shop.status(job) == "CANCELED"
    assert len(refused) == 1
    assert "stale" in refused[0]
    assert shop.types(job) == ["handoff.emitted", "handoff.received"]
    assert shop.effects() == []


def test_an_async_handler_is_cancelled_when_its_lease_is_lost(shop: Shop) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    shop.worker(research, lease_seconds=1)
    job = shop.hand_off()
    assert begun.wait(60)
    shop.jobs.cancel(job, on=shop.on)
    assert ended.wait(60)
    assert shop.status(job) == "CANCELED"


def test_a_lease_is_renewed_for_as_long_as_it_takes(shop: Shop) -> None:
    turns: list[int] = []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        turns.append(job.fencing_token)
        time.sleep(3.5)

    shop.worker(research, lease_seconds=1.5, poll_seconds=0.1)
    shop.worker(research, lease_seconds=1.5, poll_seconds=0.1)
    job = shop.hand_off()
    shop.ends(job)
    assert turns == [1]


def test_a_turn_that_takes_too_long(shop: Shop) -> None:
    attempts: list[int] = []

    async def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        attempts.append(job.attempts)
        if job.attempts == 1:
            await asyncio.sleep(60)

    shop.worker(research, timeout=0.3)
    job = shop.hand_off()
    shop.ends(job)
    assert attempts == [1, 2]


def test_a_stop_lets_turns_end_and_gives_back_the_rest(shop: Shop) -> None:
    begun, outcome = threading.Barrier(3), []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        begun.wait(60)
        assert job.handoff is not None
        if job.handoff.payload["long"]:
            eventually(lambda: ledger.lost, "it is told")
            try:
                ledger.append_now("note", {})
            except Fenced as error:
                outcome.append(str(error))
        else:
            time.sleep(0.3)

    worker = shop.worker(research, drain_seconds=3.0, concurrency=2)
    short, long = shop.hand_off({"long": False}), shop.hand_off({"long": True})
    waiting = shop.hand_off({"long": False}, session=str(uuid.uuid4()))
    begun.wait(60)
    worker.stop()
    assert shop.status(short) == "COMPLETED"
    given_back = shop.jobs.get(long, on=shop.on)
    assert (given_back.status, given_back.attempts, given_back.lease_owner) == ("SUBMITTED", 0, None)
    assert shop.status(waiting) == "SUBMITTED", "no job is taken after the stop"
    assert len(outcome) == 1
    assert "SUBMITTED" in outcome[0]


def test_woken_by_a_notification_or_by_the_poll(shop: Shop) -> None:
    def quick(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        pass

    shop.worker(quick)
    shop.ends(shop.hand_off())  # its first look; from here on only notifications help
    time.sleep(0.3)
    shop.ends(shop.hand_off())  # long before the next poll

    shop.worker(quick, agent="other", poll_seconds=0.2)
    time.sleep(0.5)
    session = str(uuid.uuid4())
    job, _ = shop.jobs.submit(session, "other", on=shop.on)  # without waking anybody, and from no event
    shop.ends(job)
    assert shop.events(job) == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_job_of_a_session_is_woken_whoever_s_it_is(shop: Shop, fails: bool) -> None:
    order: list[str] = []
    release = threading.Event()

    def first(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        release.wait(60)
        order.append("first")
        if fails:
            raise GiveUp("no")

    def second(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        order.append("second")

    shop.worker(first, agent="first")
    shop.worker(second, agent="second")
    session = str(uuid.uuid4())
    shop.hand_off(session=session, to="first")
    job = shop.hand_off(session=session, to="second")
    time.sleep(0.5)
    assert order == []
    release.set()
    shop.ends(job)  # although both poll every ten minutes
    assert order == ["first", "second"]


def test_a_connection_that_is_cut_in_mid_turn(shop: Shop) -> None:
    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        _cut(shop, "walstream:walstream:worker")
        ledger.append_now("note", {"n": 1})
        _cut(shop, "walstream:walstream:worker")
        ledger.append("note", {"n": 2})
        ledger.on_completion(lambda cur: cur.execute("INSERT INTO effects VALUES (%s, 'x')", (job.job_id,)))

    shop.worker(research, concurrency=1)
    job = shop.hand_off()
    shop.ends(job)
    assert shop.jobs.get(job, on=shop.on).fencing_token == 1
    assert shop.types(job) == ["handoff.emitted", "handoff.received", "note", "note"]
    assert shop.effects() == [(job, "x")]


@pytest.mark.parametrize("what", ["SELECT", "COMMIT", "one statement"])
def test_an_answer_that_never_came(shop: Shop, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The server has done it, and the connection breaks before the worker hears of it: a claim, and a completion."""
    from walstream.worker import claims, hand

    cut: list[str] = []
    take, transaction = claims.Claims.next, claims.transaction

    def take_and_lose(self: claims.Claims, conn: Any, pause: float) -> Any:
        taken = take(self, conn, pause)
        if taken is not None and what == "SELECT" and not cut:
            cut.append(what)
            conn.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")
        return taken

    completed: list[bool] = []
    complete = TurnLedger.complete

    def noted(self: TurnLedger, cur: Any) -> str | None:
        woken = complete(self, cur)
        completed.append(True)
        return woken

    @contextlib.contextmanager
    def commit_and_lose(conn: Any, **options: Any) -> Iterator[Any]:
        with transaction(conn, **options) as cur:
            yield cur
        if completed and what != "SELECT" and not cut:
            cut.append(what)
            conn.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(TurnLedger, "complete", noted)
    monkeypatch.setattr(claims.Claims, "next", take_and_lose)
    monkeypatch.setattr(hand, "transaction", commit_and_lose)
    turns: list[int] = []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        turns.append(job.fencing_token)
        assert job.handoff is not None
        assert job.handoff.payload == {"to": "researcher"}
        ledger.append("note", {})
        if what != "one statement":
            ledger.on_completion(lambda cur: cur.execute("INSERT INTO effects VALUES (%s, 'x')", (job.job_id,)))

    shop.worker(research)
    job = shop.hand_off()
    shop.ends(job)
    eventually(lambda: cut, "the connection was lost")
    time.sleep(0.5)
    assert turns == [1], "the lease was not waited for, and the turn was not done twice"
    assert shop.types(job) == ["handoff.emitted", "handoff.received", "note"]
    assert shop.effects() == ([] if what == "one statement" else [(job, "x")])


def test_what_a_function_of_the_completion_must_not_do(shop: Shop) -> None:
    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        def function(cur: Any) -> None:
            cur.execute("INSERT INTO effects VALUES (%s, 'x')", (job.job_id,))
            assert job.handoff is not None
            if job.handoff.payload["does"] == "commit":
                cur.execute("ROLLBACK; BEGIN")
            else:
                ledger.append_now("note", {})

        ledger.on_completion(function)

    shop.worker(research)
    commits = shop.hand_off({"does": "commit"}, max_delivery_attempts=1)
    appends = shop.hand_off({"does": "append"}, max_delivery_attempts=1)
    shop.ends(commits, "FAILED")
    shop.ends(appends, "FAILED")
    assert "committed, or rolled back" in (shop.jobs.get(commits, on=shop.on).error or "")
    assert "append_now was called from within" in (shop.jobs.get(appends, on=shop.on).error or "")
    assert shop.effects() == []


def test_payloads_are_checked_when_they_are_appended(shop: Shop) -> None:
    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        with pytest.raises(PayloadError, match="call_id"):
            ledger.append("tool.observed", {"result": 1})
        with pytest.raises(PayloadError):
            ledger.append("note", {"bad": "\0"})
        ledger.append("note", {"big": 2**70, "exact": 1})

    shop.worker(research)
    job = shop.hand_off()
    shop.ends(job)
    assert shop.types(job)[2:] == ["note"]
    assert shop.database.execute("SELECT payload->>'big' FROM agent_events WHERE event_type = 'note'") == [
        (str(2**70),)
    ]


def test_a_job_that_cannot_be_begun_lets_others_pass(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.database.execute(
        "CREATE FUNCTION no_such() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.event_type = 'handoff.received' AND NEW.payload->>'message' = 'bad' THEN"
        " RAISE 'the ledger does not take it'; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER no_such BEFORE INSERT ON agent_events FOR EACH ROW EXECUTE FUNCTION no_such()"
    )
    bad = shop.hand_off({"message": "bad"})
    good = shop.hand_off({"message": "good"})
    shop.worker(lambda context, job, ledger: None)
    shop.ends(good)
    told = shop.jobs.get(bad, on=shop.on)
    assert (told.status, told.attempts, told.error) == ("SUBMITTED", 0, "the ledger does not take it")
    assert "cannot be begun" in caplog.text


def test_a_handoff_that_is_gone_and_one_that_cannot_be_parsed(shop: Shop) -> None:
    seen: list[Any] = []

    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        seen.append(job.handoff)
        if job.handoff is not None:
            seen.append(job.handoff.payload)

    gone = shop.hand_off()
    shop.database.execute("DELETE FROM agent_events")
    deep = shop.hand_off({"deep": "x"}, max_delivery_attempts=1)
    shop.database.execute(
        "UPDATE agent_events SET payload = (repeat('[', 2000) || repeat(']', 2000))::jsonb"
        " WHERE event_type = 'handoff.emitted'"
    )
    shop.worker(research, concurrency=1)
    shop.ends(gone)
    shop.ends(deep, "FAILED")
    assert seen[0] is None
    assert len(seen) <= 2


def test_an_approval_parks_the_job_and_the_decision_comes_with_it(shop: Shop) -> None:
    turns: list[Any] = []

    def buy(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        decided = ledger.approval
        turns.append(None if decided is None else (decided.decision, decided.approved_action))
        if decided is None:
            ledger.append("note", {"n": 1})
            ledger.request_approval({"pay": 10**30}, deadline=timedelta(days=3), reason="dear")
            with pytest.raises(ValueError, match="already"):
                ledger.request_approval({})
        else:
            assert [each["status"] for each in context["approvals"].values()] == ["granted"]
            ledger.append("task.completed", {"result": decided.approved_action})

    worker = shop.worker(buy)
    job = shop.hand_off()
    shop.ends(job, "AWAITING_HUMAN")
    worker.stop()
    parked = shop.jobs.get(job, on=shop.on)
    assert (parked.lease_owner, parked.lease_expires_at) == (None, None)
    approvals = Approvals(shop.settings)
    (request,) = approvals.open(on=shop.on)
    assert (request.action, request.request_reason) == ({"pay": 10**30}, "dear")
    approvals.approve(request.request_seq, by="ann", edit={"pay": 5}, on=shop.on)
    shop.worker(buy)
    shop.ends(job)
    assert turns == [None, ("granted", {"pay": 5})]
    assert shop.types(job)[2:] == ["note", "approval.requested", "approval.granted", "task.completed"]


def test_a_deadline_that_passes_rejects_and_the_job_goes_on(shop: Shop) -> None:
    turns: list[Any] = []

    def buy(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        decided = ledger.approval
        turns.append(None if decided is None else (decided.decision, decided.decided_by))
        if decided is None:
            ledger.request_approval({"pay": 1}, deadline=timedelta(milliseconds=200))

    shop.worker(buy, poll_seconds=0.1)
    shop.ends(shop.hand_off())
    assert turns == [None, ("rejected", "deadline")]


def test_with_the_rights_of_a_worker_s_role_alone(shop: Shop) -> None:
    role = f"agent_{uuid.uuid4().hex[:12]}"
    shop.database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        for statement in worker_statements(shop.settings, role):
            shop.database.execute(statement)
        shop.database.execute(f"GRANT INSERT ON effects TO {role}")

        def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
            ledger.append_now("note", {})
            ledger.append("note", {})
            ledger.on_completion(lambda cur: cur.execute("INSERT INTO effects VALUES (1, current_user)"))
            if ledger.approval is None:
                ledger.request_approval({"do": 1})

        made = Worker(shop.database.server.dsn(shop.database.name, role), agent="researcher", poll_seconds=0.1)
        made.handle(research)
        shop.workers.append(made)
        made.start()
        job = shop.hand_off()
        shop.ends(job, "AWAITING_HUMAN")
        (request,) = Approvals(shop.settings).open(on=shop.on)
        Approvals(shop.settings).reject(request.request_seq, by="ann", on=shop.on)
        shop.ends(job)
        assert shop.effects() == [(1, role), (1, role)]
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            shop.database.server.execute(
                "SET ROLE " + role + "; INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
                " VALUES (gen_random_uuid(), 'a', 'b', '{}')",
                dbname=shop.database.name,
            )
    finally:
        for worker in shop.workers:
            worker.stop()
        shop.database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_copy_s_worker_does_not_do_the_original_s_jobs(shop: Shop) -> None:
    with pytest.raises(ConfigError, match="environment"):
        shop.worker(lambda context, job, ledger: None, environment="staging")


def test_a_worker_that_cannot_work_ends(shop: Shop) -> None:
    worker = shop.worker(lambda context, job, ledger: None, poll_seconds=0.1)
    shop.database.execute("DROP FUNCTION walstream.take_job")
    assert worker.wait(60)
    assert isinstance(worker.error, ConfigError)
    assert "walstream migrate" in worker.error.hint


def test_system_exit_in_a_handler_ends_the_worker_and_is_an_attempt(shop: Shop) -> None:
    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        raise SystemExit(3)

    worker = shop.worker(research, start=False)
    job = shop.hand_off(max_delivery_attempts=2)
    for attempts, status in ((1, "SUBMITTED"), (2, "FAILED")):
        with pytest.raises(SystemExit, match="3"):
            worker.run()
        told = shop.jobs.get(job, on=shop.on)
        assert (told.status, told.attempts) == (status, attempts), "it does not end one worker after the other for ever"


def test_what_makes_no_worker() -> None:
    worker = Worker(agent="a")
    with pytest.raises(ConfigError, match="nothing to do"):
        worker.start()
    with pytest.raises(ConfigError, match="context, job, ledger"):

        @worker.handle
        def two(context: Any, job: Any) -> None: ...

    with pytest.raises(ConfigError, match="generator"):

        @worker.handle
        def three(context: Any, job: Any, ledger: Any) -> Iterator[None]:
            yield

    worker.handle(lambda context, job, ledger: None)
    with pytest.raises(ConfigError, match="already"):
        worker.handle(lambda context, job, ledger: None)
    for wrong in ({"concurrency": 0}, {"lease_seconds": 0}, {"timeout": -1}, {"agent_concurrency": 0}, {"agent": ""}):
        with pytest.raises(ConfigError, match="cannot be what it is"):
            Worker(**{"agent": "a", **wrong})  # type: ignore[arg-type]


MODULE = """
import time
from walstream import Worker

worker = Worker(agent="researcher", poll_seconds=0.1)
other = 7

@worker.handle
def research(context, job, ledger):
    ledger.append_now("note", {})
    time.sleep(job.handoff.payload["seconds"])
    ledger.append("task.completed", {})
"""


def test_the_command(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(MODULE)
    command = [sys.executable, "-m", "walstream", "worker", "agents:worker", "--dsn", shop.database.dsn]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ}, text=True)
    try:
        job = shop.hand_off({"seconds": 1.0})
        eventually(lambda: shop.types(job)[-1] == "note", "the turn has begun")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert shop.status(job) == "COMPLETED", "a turn that has begun may end"
    finally:
        process.kill()
    for target, word in (("agents", "names no worker"), ("no_such_module:worker", "there is no module")):
        called = call("worker", target, dsn=shop.database.dsn)
        assert called.exit_code == 3
        assert word in called.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("impor os", ("SyntaxError", "line 1")),
        ("import os\nimport not_there", ("ModuleNotFoundError: No module named 'not_there'", "broken.py, line 2")),
        ("raise KeyError('colour')", ("KeyError: 'colour'", "broken.py, line 1")),
        ("import walstream\nwalstream.Worker(agent='')", ("cannot be what it is",)),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_in_a_sentence(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for command in ("worker", "run"):
        monkeypatch.delitem(sys.modules, "broken", raising=False)
        called = call(command, "broken:it", dsn=database.dsn)
        assert called.exit_code == 3
        for word in words:
            assert word in called.stderr
        assert "Traceback" not in called.stderr


def test_from_the_event_to_the_next_agent(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Through the stream and the router: one handler hands on to the other."""
    caplog.set_level(logging.ERROR)
    stream = Installed(database)
    seen: list[Any] = []
    researcher, writer = (
        Worker(database.dsn, agent=name, slot=stream.settings.slot, poll_seconds=600.0)
        for name in ("researcher", "writer")
    )

    @researcher.handle
    def research(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        ledger.hand_off("writer", {"found": context["handoffs"][0]["message"]})

    @writer.handle
    async def write(context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        assert job.handoff is not None
        seen.append((job.handoff.payload["message"], job.hops, len(context["handoffs_received"])))
        ledger.append("task.completed", {})

    with stream.host(HandoffRouter(agents=("researcher", "writer"))), researcher, writer:
        time.sleep(0.5)
        conn = database.connect()
        with conn:
            Ledger(stream.settings).append(
                uuid.uuid4(), "planner", "handoff.emitted", {"to": "researcher", "message": "x"}, on=conn
            )
        done = "SELECT 1 FROM agent_events WHERE event_type = 'task.completed'"
        eventually(lambda: database.execute(done), "both have worked, and nobody waited for a poll of ten minutes")
    assert seen == [({"found": "x"}, 2, 2)]
    assert database.execute("SELECT status, count(*) FROM agent_jobs GROUP BY 1") == [("COMPLETED", 2)]


def _cut(shop: Shop, application: str) -> None:
    shop.database.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE application_name = %s AND datname = current_database()",
        application,
    )


def test_settings_come_from_the_configuration_too(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALSTREAM_DSN", shop.database.dsn)
    worker = Worker(agent="researcher", drain_seconds=1)
    assert worker.settings().dsn == shop.database.dsn
    assert worker.settings({"namespace": "other"}).namespace == "other"
    assert isinstance(worker.settings(), Settings)
