"""The SQL functions of jobs, called as any language would call them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import ISOLATION_LEVEL_REPEATABLE_READ, connection

from tests.conftest import Database
from tests.integration.test_append_sql import ODD, A, B, Ledger
from walstream.config import Settings
from walstream.ledger import schema

C = A[:-1] + "9"
STALE, UNKNOWN, REFUSED = "WS001", "WS002", "WS004"


class Jobs:
    """Jobs of a ledger, by calls on one connection in autocommit."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.table = ledger.settings.ledger.beside(ledger.settings.ledger.jobs).replace("%", "%%")
        self.conn = self.connect()

    def connect(self) -> connection:
        conn = self.ledger.database.connect()
        conn.autocommit = True
        return conn

    def call(self, function: str, *values: Any, on: connection | None = None, **named: Any) -> list[dict[str, Any]]:
        places = [*("%s" for _ in values), *(f"{name} => %s" for name in named)]
        home = self.ledger.home.replace("%", "%%")
        with (on or self.conn).cursor() as cur:
            cur.execute(f"SELECT * FROM {home}.{function}({', '.join(places)})", (*values, *named.values()))
            assert cur.description
            return [dict(zip([c.name for c in cur.description], row, strict=True)) for row in cur.fetchall()]

    def submit(self, session: str = A, agent: str = "a", **named: Any) -> int:
        (row,) = self.call("submit_job", session, agent, **named)
        return int(row["job_id"])

    def claim(self, agent: str = "a", owner: str = "worker", **named: Any) -> dict[str, Any] | None:
        rows = self.call("claim_job", agent, owner, **named)
        return rows[0] if rows else None

    def claimed(self, agent: str = "a", **named: Any) -> dict[str, Any]:
        job = self.claim(agent, **named)
        assert job is not None
        return job

    def begun(self, agent: str = "a", **named: Any) -> dict[str, Any]:
        job = self.claimed(agent, **named)
        self.call("begin_job", job["job_id"], job["fencing_token"])
        return job

    def complete(self, job: dict[str, Any]) -> None:
        self.call("begin_job", job["job_id"], job["fencing_token"])
        self.call("complete_job", job["job_id"], job["fencing_token"])

    def row(self, job_id: int) -> dict[str, Any]:
        return self.sql(f"SELECT * FROM {self.table} WHERE job_id = %s", job_id)[0]

    def sql(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        with self.conn.cursor() as cur:
            cur.execute(statement, values)
            if cur.description is None:
                return []
            return [dict(zip([c.name for c in cur.description], row, strict=True)) for row in cur.fetchall()]

    def expire(self, job_id: int) -> None:
        self.sql(
            f"UPDATE {self.table} SET lease_expires_at = clock_timestamp() - interval '1 ms' WHERE job_id = %s", job_id
        )

    def refused(self, code: str, function: str, *values: Any) -> str:
        with pytest.raises(psycopg2.Error) as caught:
            self.call(function, *values)
        assert caught.value.pgcode == code, caught.value
        return str(caught.value)


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(Ledger(database))


# -- submitting ----------------------------------------------------------------------------------------------


def test_a_job_from_submission_to_completion(jobs: Jobs) -> None:
    job = jobs.submit(A, "researcher", event_seq=7, priority=2, hops=3, max_delivery_attempts=4)
    row = jobs.row(job)
    assert (row["session_id"], row["agent_id"], row["event_seq"], row["priority"], row["hops"]) == (
        A,
        "researcher",
        7,
        2,
        3,
    )
    assert (row["status"], row["attempts"], row["max_delivery_attempts"]) == ("SUBMITTED", 0, 4)

    claimed = jobs.claimed("researcher", owner="host:1", lease_seconds=30)
    assert (claimed["job_id"], claimed["session_id"], claimed["agent_id"], claimed["event_seq"], claimed["hops"]) == (
        job,
        A,
        "researcher",
        7,
        3,
    )
    assert (claimed["status"], claimed["attempts"], claimed["fencing_token"]) == ("DELIVERED", 1, 1)
    assert claimed["lease_owner"] == "host:1"
    (left,) = jobs.sql(
        f"SELECT lease_expires_at - clock_timestamp() BETWEEN '25 s' AND '30 s' AS fits FROM {jobs.table}"
    )
    assert left["fits"]
    jobs.call("begin_job", job, 1)
    assert jobs.row(job)["status"] == "IN_PROGRESS"
    jobs.call("complete_job", job, 1)
    done = jobs.row(job)
    assert (done["status"], done["lease_owner"], done["lease_expires_at"]) == ("COMPLETED", None, None)
    assert done["finished_at"] is not None
    assert jobs.claim("researcher") is None


def test_the_job_of_an_event_is_made_once(jobs: Jobs) -> None:
    first = jobs.call("submit_job", A, "a", event_seq=5)
    assert first[0]["created"]
    assert jobs.call("submit_job", A, "another", event_seq=5) == [{"job_id": first[0]["job_id"], "created": False}]
    assert jobs.submit() != jobs.submit()  # without an event each is one of its own
    assert jobs.row(first[0]["job_id"])["agent_id"] == "a"


def test_many_submit_the_job_of_one_event_at_once(jobs: Jobs) -> None:
    found: list[tuple[int, bool]] = []
    connections = [jobs.connect() for _ in range(8)]

    def submit(conn: connection) -> None:
        for seq in range(20):
            (row,) = jobs.call("submit_job", A, "a", event_seq=seq, on=conn)
            found.append((row["job_id"], row["created"]))

    _at_once([partial(submit, conn) for conn in connections])
    assert len(found) == 160
    assert len({job for job, _ in found}) == 20
    assert sum(created for _, created in found) == 20


def test_a_job_of_a_transaction_that_is_rolled_back_is_none(jobs: Jobs) -> None:
    jobs.conn.autocommit = False
    jobs.submit(event_seq=3)
    jobs.conn.rollback()
    jobs.conn.autocommit = True
    assert jobs.call("submit_job", A, "a", event_seq=3)[0]["created"]


def test_what_no_job_can_be_made_of(jobs: Jobs) -> None:
    for values in ((None, "a"), (A, None), (A, ""), (A, "a", None, 0, 0, 0)):
        jobs.refused("22023", "submit_job", *values)
    jobs.refused("22P02", "submit_job", "no uuid", "a")
    jobs.refused("22023", "claim_job", "a", "w", 0)
    jobs.refused("22023", "claim_job", "a", None)
    jobs.refused("22023", "renew_job", 1, 1, -1)


# -- claiming ------------------------------------------------------------------------------------------------


def test_twenty_claimers_share_the_jobs(jobs: Jobs) -> None:
    """Each job goes to one of them, and none is left while somebody still asks."""
    ids = {jobs.submit(f"00000000-0000-4000-8000-{number:012}") for number in range(200)}
    got: list[int] = []

    def work(conn: connection, owner: str) -> None:
        while rows := jobs.call("claim_job", "a", owner, on=conn):
            (job,) = rows
            got.append(job["job_id"])
            jobs.call("begin_job", job["job_id"], job["fencing_token"], on=conn)
            jobs.call("complete_job", job["job_id"], job["fencing_token"], on=conn)

    workers = [(jobs.connect(), f"w{number}") for number in range(20)]
    _at_once([partial(work, conn, owner) for conn, owner in workers])
    assert sorted(got) == sorted(ids)
    assert jobs.sql(f"SELECT status, attempts, count(*) FROM {jobs.table} GROUP BY 1, 2") == [
        {"status": "COMPLETED", "attempts": 1, "count": 200}
    ]


def test_a_claim_that_is_not_committed_keeps_nobody_from_the_next_job(jobs: Jobs) -> None:
    first, second = jobs.submit(A), jobs.submit(B)
    other = jobs.ledger.database.connect()
    assert jobs.call("claim_job", "a", "dies", on=other)[0]["job_id"] == first
    assert jobs.claimed()["job_id"] == second
    assert jobs.claim() is None
    other.rollback()
    assert jobs.claimed()["job_id"] == first


def test_priority_goes_before_age_and_agents_have_their_own(jobs: Jobs) -> None:
    low = jobs.submit(A)
    middle = jobs.submit(B, priority=1)
    high = jobs.submit(C, priority=9)
    other = jobs.submit("00000000-0000-4000-8000-00000000000b", "b", priority=99)
    assert [jobs.claimed()["job_id"] for _ in range(3)] == [high, middle, low]
    assert jobs.claim() is None
    assert jobs.claimed("b")["job_id"] == other


def test_a_job_waits_for_its_time(jobs: Jobs) -> None:
    (later,) = jobs.sql("SELECT clock_timestamp() + interval '0.4 s' AS at")
    job = jobs.submit(not_before=later["at"])
    assert jobs.claim() is None
    deadline = time.monotonic() + 60
    while (claimed := jobs.claim()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert claimed is not None
    assert claimed["job_id"] == job
    assert jobs.sql("SELECT clock_timestamp() >= %s AS due", later["at"])[0]["due"]


def test_the_jobs_of_a_session_go_one_at_a_time_and_in_order(jobs: Jobs) -> None:
    first, second = jobs.submit(A), jobs.submit(A, "b", priority=5)
    assert jobs.claim("b") is None  # the older one waits, whatever the priority and the agent
    running = jobs.begun()
    assert running["job_id"] == first
    assert jobs.claim("b") is None
    jobs.call("await_human", first, running["fencing_token"])
    assert jobs.claim("b") is None
    jobs.call("resume_job", first)
    assert jobs.claim("b") is None
    again = jobs.begun()
    assert jobs.call("fail_job", first, again["fencing_token"], "later", 60)[0]["fail_job"] == "SUBMITTED"
    assert jobs.claim("b") is None  # it still waits
    assert jobs.claimed("b", per_session=False)["job_id"] == second
    jobs.call("cancel_job", second)
    third = jobs.submit(A, "b")
    jobs.call("cancel_job", first)
    assert jobs.claimed("b")["job_id"] == third


def test_a_session_whose_begun_job_expired_is_not_stuck(jobs: Jobs) -> None:
    """An older job came back while a younger one was at work, whose worker died: the begun one goes first."""
    old, young = jobs.submit(A), jobs.submit(A)
    jobs.call("cancel_job", old)
    assert jobs.begun()["job_id"] == young
    jobs.call("retry_job", old)
    assert jobs.claim() is None
    jobs.expire(young)
    again = jobs.claimed()
    assert again["job_id"] == young
    jobs.complete(again)
    assert jobs.claimed()["job_id"] == old


def test_no_session_has_two_jobs_at_work_whatever_comes_back(jobs: Jobs) -> None:
    """Claimers of one session who do not see each other yet, with older jobs that come back all the time."""
    mine = [jobs.submit(A) for _ in range(6)]
    seen: list[int] = []
    stop = time.monotonic() + 1.5

    def work(conn: connection) -> None:
        while time.monotonic() < stop:
            for job in jobs.call("claim_job", "a", "w", on=conn):
                with conn.cursor() as cur:
                    cur.execute(f"SELECT count(*) FROM {jobs.table} WHERE status IN ('DELIVERED', 'IN_PROGRESS')")
                    seen.append(cur.fetchall()[0][0])
                jobs.call("fail_job", job["job_id"], job["fencing_token"], "on purpose", on=conn)

    def bring_back(conn: connection) -> None:
        while time.monotonic() < stop:
            with conn.cursor() as cur:
                cur.execute(f"SELECT job_id FROM {jobs.table} WHERE status = 'FAILED' ORDER BY random() LIMIT 1")
                for (job,) in cur.fetchall():
                    jobs.call("retry_job", job, on=conn)

    _at_once([partial(bring_back, jobs.connect()), *(partial(work, jobs.connect()) for _ in range(6))])
    assert len(seen) > len(mine)
    assert set(seen) == {1}


def test_so_many_jobs_of_an_agent_at_once(jobs: Jobs) -> None:
    for number in range(30):
        jobs.submit(f"00000000-0000-4000-8000-{number:012}")
    claimed: list[dict[str, Any]] = []

    def claim(conn: connection) -> None:
        for _ in range(3):
            claimed.extend(jobs.call("claim_job", "a", "w", concurrency=4, on=conn))

    _at_once([partial(claim, jobs.connect()) for _ in range(8)])
    assert len(claimed) == 4
    jobs.complete(claimed[0])
    jobs.expire(claimed[1]["job_id"])  # a dead lease is not counted, and its job is the oldest
    assert jobs.claim(concurrency=2) is None
    assert jobs.claimed(concurrency=3)["job_id"] == claimed[1]["job_id"]
    assert jobs.claim(concurrency=3) is None
    assert jobs.claimed(concurrency=4)["attempts"] == 1


def test_jobs_are_claimed_under_read_committed_only(jobs: Jobs) -> None:
    jobs.submit()
    conn = jobs.ledger.database.connect()
    conn.set_isolation_level(ISOLATION_LEVEL_REPEATABLE_READ)
    with pytest.raises(psycopg2.Error, match="READ COMMITTED, and this transaction is REPEATABLE READ"):
        jobs.call("claim_job", "a", "w", on=conn)


# -- leases and tokens ---------------------------------------------------------------------------------------


def test_an_expired_lease_goes_to_another_and_the_zombie_writes_nothing(jobs: Jobs) -> None:
    job = jobs.submit()
    zombie = jobs.begun(owner="zombie")
    assert jobs.claim(owner="heir") is None
    assert jobs.call("renew_job", job, zombie["fencing_token"], 60)[0]["renew_job"] is True
    jobs.expire(job)
    heir = jobs.claimed(owner="heir")
    assert (heir["job_id"], heir["attempts"], heir["fencing_token"]) == (job, 2, zombie["fencing_token"] + 1)
    stale = zombie["fencing_token"]
    for function, *more in (
        ("begin_job",),
        ("complete_job",),
        ("fail_job", "late"),
        ("fail_job", "late", 1.0),
        ("release_job",),
        ("await_human",),
    ):
        assert "stale" in jobs.refused(STALE, function, job, stale, *more)
    assert jobs.call("renew_job", job, stale, 60)[0]["renew_job"] is False
    with pytest.raises(psycopg2.Error) as caught:
        jobs.ledger.append(jobs.conn, A, job_id=job, fencing_token=stale)
    assert caught.value.pgcode == STALE
    row = jobs.row(job)
    assert (row["status"], row["lease_owner"], row["fencing_token"]) == ("DELIVERED", "heir", heir["fencing_token"])
    jobs.ledger.append(jobs.conn, A, job_id=job, fencing_token=heir["fencing_token"])
    assert len(jobs.ledger.rows()) == 1


def test_a_lease_that_expired_and_was_not_taken_is_still_good(jobs: Jobs) -> None:
    job = jobs.submit()
    token = jobs.begun()["fencing_token"]
    jobs.expire(job)
    assert jobs.call("renew_job", job, token)[0]["renew_job"] is True
    jobs.expire(job)
    jobs.call("complete_job", job, token)
    assert jobs.row(job)["status"] == "COMPLETED"


def test_a_renewal_waits_for_the_turns_transaction_and_hinders_nobody(jobs: Jobs) -> None:
    """The turn holds its job while it appends; the renewal comes from another connection, and the turn completes."""
    job = jobs.submit()
    token = jobs.begun()["fencing_token"]
    turn = jobs.ledger.database.connect()
    jobs.ledger.append(turn, A, job_id=job, fencing_token=token)
    renewed: list[bool] = []
    other = jobs.connect()
    thread = threading.Thread(
        target=lambda: renewed.append(jobs.call("renew_job", job, token, on=other)[0]["renew_job"])
    )
    thread.start()
    _wait_for_a_lock(jobs)
    jobs.call("complete_job", job, token, on=turn)
    turn.commit()
    thread.join(60)
    assert renewed == [False]  # it is over
    assert jobs.row(job)["status"] == "COMPLETED"


def test_the_last_attempt_that_expires_fails_and_its_session_goes_on(jobs: Jobs) -> None:
    job = jobs.submit(max_delivery_attempts=2)
    following = jobs.submit()
    for attempt in (1, 2):
        assert jobs.claimed(owner=f"w{attempt}")["attempts"] == attempt
        jobs.expire(job)
    assert jobs.claimed()["job_id"] == following
    row = jobs.row(job)
    assert (row["status"], row["fencing_token"], row["lease_owner"]) == ("FAILED", 3, None)
    assert row["error"] == "the lease of w2 expired at its last attempt, number 2"
    assert row["finished_at"] is not None
    jobs.refused(STALE, "begin_job", job, 2)


def test_a_failed_attempt_is_tried_again_until_none_is_left(jobs: Jobs) -> None:
    job = jobs.submit(max_delivery_attempts=2)
    first = jobs.begun()
    assert jobs.call("fail_job", job, first["fencing_token"], "no network", 30)[0]["fail_job"] == "SUBMITTED"
    row = jobs.row(job)
    assert (row["status"], row["error"], row["lease_owner"], row["finished_at"]) == (
        "SUBMITTED",
        "no network",
        None,
        None,
    )
    assert jobs.sql(f"SELECT next_try - clock_timestamp() BETWEEN '25 s' AND '30 s' AS fits FROM {jobs.table}")[0][
        "fits"
    ]
    assert jobs.claim() is None
    jobs.sql(f"UPDATE {jobs.table} SET next_try = clock_timestamp()")
    second = jobs.claimed()
    assert (second["attempts"], second["next_try"]) == (2, None)
    assert jobs.call("fail_job", job, second["fencing_token"], "again", 0)[0]["fail_job"] == "FAILED"
    assert jobs.row(job)["finished_at"] is not None
    jobs.call("retry_job", job)
    third = jobs.claimed()
    assert third["attempts"] == 1
    assert jobs.call("fail_job", job, third["fencing_token"], "for good")[0]["fail_job"] == "FAILED"


def test_a_worker_that_stops_gives_its_job_back_without_an_attempt(jobs: Jobs) -> None:
    job = jobs.submit(max_delivery_attempts=1)
    for token in (1, 2, 3):
        assert jobs.claimed()["fencing_token"] == token
        jobs.call("release_job", job, token)
        assert jobs.row(job)["attempts"] == 0


def test_a_person_may_take_as_long_as_they_like(jobs: Jobs) -> None:
    job = jobs.submit(max_delivery_attempts=1)
    token = jobs.begun()["fencing_token"]
    jobs.call("await_human", job, token)
    row = jobs.row(job)
    assert (row["status"], row["lease_owner"], row["lease_expires_at"]) == ("AWAITING_HUMAN", None, None)
    assert jobs.claim() is None
    assert jobs.call("renew_job", job, token)[0]["renew_job"] is False
    jobs.call("resume_job", job)
    again = jobs.begun()
    assert (again["job_id"], again["attempts"], again["fencing_token"]) == (job, 1, token + 1)


def test_a_canceled_job_is_taken_from_its_worker(jobs: Jobs) -> None:
    job = jobs.submit()
    token = jobs.begun()["fencing_token"]
    jobs.call("cancel_job", job, "no longer wanted")
    row = jobs.row(job)
    assert (row["status"], row["error"]) == ("CANCELED", "no longer wanted")
    jobs.refused(STALE, "complete_job", job, token)
    with pytest.raises(psycopg2.Error) as caught:
        jobs.ledger.append(jobs.conn, A, job_id=job, fencing_token=token)
    assert caught.value.pgcode == STALE
    jobs.call("retry_job", job)
    assert jobs.claimed()["fencing_token"] == token + 2
    untouched = jobs.submit(B)
    jobs.call("cancel_job", untouched)
    assert jobs.row(untouched)["fencing_token"] == 0  # nobody ever had it


def test_a_job_that_is_not_there(jobs: Jobs) -> None:
    for function, *more in (
        ("begin_job", 1),
        ("complete_job", 1),
        ("fail_job", 1, "x"),
        ("release_job", 1),
        ("await_human", 1),
        ("resume_job",),
        ("cancel_job",),
        ("retry_job",),
    ):
        assert "no job 4711" in jobs.refused(UNKNOWN, function, 4711, *more)


# -- the state machine ---------------------------------------------------------------------------------------

STATUSES = ("CREATED", "SUBMITTED", "DELIVERED", "IN_PROGRESS", "AWAITING_HUMAN", "COMPLETED", "FAILED", "CANCELED")
TARGETS = {
    "submit_job": "SUBMITTED",
    "claim_job": "DELIVERED",
    "begin_job": "IN_PROGRESS",
    "complete_job": "COMPLETED",
    "fail_job": "FAILED",
    "release_job": "SUBMITTED",
    "await_human": "AWAITING_HUMAN",
    "resume_job": "SUBMITTED",
    "cancel_job": "CANCELED",
    "retry_job": "SUBMITTED",
}


def _transitions(jobs: Jobs) -> dict[tuple[str, str], str]:
    rows = jobs.sql("SELECT * FROM walstream.job_transitions")
    return {(row["from_status"], row["to_status"]): row["what"] for row in rows}


def _put(jobs: Jobs, status: str) -> int:
    """A job of a session of its own with that status, its lease expired if it has one."""
    (row,) = jobs.sql(
        f"INSERT INTO {jobs.table} (session_id, agent_id, event_seq, status, fencing_token, attempts)"
        f" VALUES (gen_random_uuid(), 'a', (SELECT coalesce(max(event_seq), 0) + 1 FROM {jobs.table}), %s, 1, 1)"
        " RETURNING job_id",
        status,
    )
    return int(row["job_id"])


def test_nobody_changes_a_status_but_as_the_table_says(jobs: Jobs) -> None:
    known = _transitions(jobs)
    assert {status for pair in known for status in pair} == set(STATUSES)
    for before in STATUSES:
        for after in STATUSES:
            job = _put(jobs, before)
            change = f"UPDATE {jobs.table} SET status = %s WHERE job_id = %s"
            if before == after or (before, after) in known:
                jobs.sql(change, after, job)
                assert jobs.row(job)["status"] == after
            else:
                with pytest.raises(psycopg2.Error, match=f"is {before}, and cannot become {after}") as caught:
                    jobs.sql(change, after, job)
                assert caught.value.pgcode == REFUSED
                assert jobs.row(job)["status"] == before


def test_each_function_makes_its_own_transitions_and_no_other(jobs: Jobs) -> None:
    known = _transitions(jobs)
    made: set[tuple[str, str]] = set()
    calls: dict[str, tuple[Any, ...]] = {"fail_job": (1, "x"), "resume_job": (), "cancel_job": (), "retry_job": ()}
    for before in STATUSES:
        for function, after in TARGETS.items():
            if function in ("submit_job", "claim_job"):
                continue
            job = _put(jobs, before)
            allowed = function in known.get((before, after), "").replace(",", "").split()
            if allowed:
                jobs.call(function, job, *calls.get(function, (1,)))
                assert jobs.row(job)["status"] == after
                made.add((before, after))
            else:
                said = jobs.refused(REFUSED, function, job, *calls.get(function, (1,)))
                assert f"is {before}, and {function} cannot" in said
                assert jobs.row(job)["status"] == before
        # What is claimed, or submitted, can be seen of the jobs that are left alone.
        job = _put(jobs, before)
        event = jobs.row(job)["event_seq"]
        assert jobs.call("submit_job", A, "a", event_seq=event) == [{"job_id": job, "created": False}]
        if jobs.row(job)["status"] != before:
            made.add((before, jobs.row(job)["status"]))
    for before in STATUSES:
        for attempts in (1, 5):
            jobs.sql(f"DELETE FROM {jobs.table}")
            job = _put(jobs, before)
            jobs.sql(f"UPDATE {jobs.table} SET attempts = %s", attempts)
            claimed = jobs.claim()
            after = jobs.row(job)["status"]
            assert (claimed is not None) == (after == "DELIVERED" and jobs.row(job)["fencing_token"] == 2)
            if claimed is not None or after != before:
                made.add((before, after))
    for before in ("DELIVERED", "IN_PROGRESS"):
        job = _put(jobs, before)
        jobs.call("fail_job", job, 1, "x", 0)
        made.add((before, jobs.row(job)["status"]))
    assert made == set(known)


def test_a_status_that_there_is_not(jobs: Jobs) -> None:
    insert = f"INSERT INTO {jobs.table} (session_id, status) VALUES (%s, %s) RETURNING status"
    with pytest.raises(psycopg2.Error, match="no status RUNNING"):
        jobs.sql(insert, A, "RUNNING")
    with pytest.raises(psycopg2.Error, match="no status NULL"):
        jobs.sql(insert, A, None)
    assert jobs.sql(insert, A, "PENDING") == [{"status": "SUBMITTED"}]  # as the source design calls it
    assert jobs.sql(f"INSERT INTO {jobs.table} (session_id) VALUES (%s) RETURNING status", A) == [
        {"status": "SUBMITTED"}
    ]


def test_jobs_of_the_release_before_are_taken_over(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    conn = database.connect()
    schema.install(conn, Settings(), upto=2)
    database.execute(
        "INSERT INTO agent_jobs (session_id, status) VALUES (gen_random_uuid(), 'PENDING'),"
        " (gen_random_uuid(), 'IN_PROGRESS'), (gen_random_uuid(), 'mine')"
    )
    with pytest.raises(psycopg2.Error, match="none of the state machine's: mine"):
        schema.install(conn, Settings())
    database.execute("UPDATE agent_jobs SET status = 'COMPLETED' WHERE status = 'mine'")
    schema.install(conn, Settings())
    assert database.execute("SELECT status, attempts FROM agent_jobs ORDER BY job_id") == [
        ("SUBMITTED", 0),
        ("IN_PROGRESS", 0),
        ("COMPLETED", 0),
    ]


def test_under_names_that_need_quotes(database: Database) -> None:
    jobs = Jobs(Ledger(database, ODD))
    job = jobs.submit(event_seq=1)
    first = jobs.begun(concurrency=1)
    assert (first["job_id"], first["session_id"]) == (job, A)
    assert jobs.call("fail_job", job, 1, "100% \"odd\" 'text' $seq", 0)[0]["fail_job"] == "SUBMITTED"
    jobs.complete(jobs.claimed())
    jobs.refused(REFUSED, "cancel_job", job)
    jobs.refused(STALE, "complete_job", job, 1)


# -- a million finished jobs ---------------------------------------------------------------------------------


def _finished(jobs: Jobs, count: int) -> None:
    jobs.sql(
        f"INSERT INTO {jobs.table} (session_id, agent_id, event_seq, status, created_at, finished_at)"
        " SELECT ('00000000-0000-4000-8000-' || lpad((n %% 1000)::text, 12, '0'))::uuid, 'a', n,"
        " (ARRAY['COMPLETED', 'COMPLETED', 'COMPLETED', 'FAILED', 'CANCELED'])[n %% 5 + 1], now() - interval '1 d',"
        f" now() FROM generate_series(1, {count}) AS n"
    )
    jobs.sql(f"ANALYZE {jobs.table}")


def _buffers(jobs: Jobs, statement: str) -> int:
    """Pages that a call looks at, those of the statements inside it as well."""
    (plan,) = jobs.sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")
    (root,) = plan["QUERY PLAN"]
    return int(root["Plan"]["Shared Hit Blocks"] + root["Plan"]["Shared Read Blocks"])


def _claims_stay_quick(jobs: Jobs, finished: int) -> None:
    _finished(jobs, finished)
    for number in range(50):
        jobs.submit(f"00000000-0000-4000-8000-{number:012}", event_seq=finished + 1 + number)
    for _ in range(20):  # past the first plans of the connection, with whatever it remembers
        jobs.complete(jobs.claimed(concurrency=5))
    assert _buffers(jobs, "SELECT * FROM walstream.claim_job('a', 'w', concurrency => 5)") < 200
    for _ in range(29):
        jobs.claimed()
    assert jobs.claim() is None
    # With nothing to be had it looks at the fifty that were there, and at none of the finished ones.
    assert _buffers(jobs, "SELECT * FROM walstream.claim_job('a', 'w')") < 600


def test_claims_look_at_no_finished_job(jobs: Jobs) -> None:
    _claims_stay_quick(jobs, 30_000)


@pytest.mark.slow
def test_claims_are_quick_beside_a_million_finished_jobs(jobs: Jobs) -> None:
    _claims_stay_quick(jobs, 1_000_000)
    began = time.monotonic()
    for number in range(200):
        jobs.submit(f"00000000-0000-4000-8001-{number:012}")
        jobs.complete(jobs.claimed())
    assert time.monotonic() - began < 60  # a scan of the table would take minutes


def _at_once(tasks: Sequence[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert not any(thread.is_alive() for thread in threads)


def _wait_for_a_lock(jobs: Jobs) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if jobs.sql("SELECT FROM pg_locks WHERE NOT granted"):
            return
        time.sleep(0.01)
    pytest.fail("nobody waits for a lock")
