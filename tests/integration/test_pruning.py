"""Finished jobs are forgotten, and what made one never makes another (docs/handoffs.md, "Finished jobs")."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import ISOLATION_LEVEL_REPEATABLE_READ, make_dsn

from tests.cli_calls import call, ok
from tests.conftest import Database, Server
from tests.integration.test_append_sql import ODD, A, Ledger
from tests.integration.test_jobs_sql import Jobs
from walstream.config import Settings
from walstream.ledger import schema

PAIRS = "SELECT event_seq, job_id FROM walstream.pruned_jobs ORDER BY 1"
STANDING = "SELECT job_id FROM agent_jobs ORDER BY 1"


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(Ledger(database))


def finished(jobs: Jobs, seq: int | None = None, *, days: float = 100, status: str = "COMPLETED") -> int:
    """A job that ended so many days ago; its number."""
    job = jobs.submit(event_seq=seq, agent="done")
    if status == "CANCELED":
        jobs.call("cancel_job", job)
    else:
        held = jobs.begun("done")
        assert held["job_id"] == job
        arguments = ("complete_job",) if status == "COMPLETED" else ("fail_job", "no")
        jobs.call(arguments[0], job, held["fencing_token"], *arguments[1:])
    jobs.sql(
        f"UPDATE {jobs.table} SET finished_at = finished_at - %s, updated_at = updated_at - %s WHERE job_id = %s",
        *[timedelta(days=days)] * 2,
        job,
    )
    return job


def prune(jobs: Jobs, age: str = "90 days", *, on: Any = None, **named: Any) -> int:
    (row,) = jobs.call("prune_jobs", age, on=on, **named)
    return int(row["prune_jobs"])


def rows(jobs: Jobs, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in jobs.sql(sql)]


def test_what_ended_long_ago_goes_and_the_rest_stays(jobs: Jobs) -> None:
    old = [finished(jobs, 10), finished(jobs), finished(jobs, 11)]
    young, failed = finished(jobs, 12, days=80), finished(jobs, 13, status="FAILED")
    canceled = finished(jobs, 14, status="CANCELED")
    waiting = jobs.submit(event_seq=15)
    jobs.sql(f"UPDATE {jobs.table} SET updated_at = now() - interval '1 year' WHERE job_id = %s", waiting)
    assert prune(jobs) == 3
    assert rows(jobs, PAIRS) == [(10, old[0]), (11, old[2])]
    assert rows(jobs, STANDING) == [(each,) for each in (young, failed, canceled, waiting)]
    assert prune(jobs) == 0
    assert prune(jobs, statuses=["FAILED", "CANCELED"]) == 2
    assert prune(jobs, "1 day", statuses=["COMPLETED"]) == 1
    assert rows(jobs, STANDING) == [(waiting,)]
    assert len(rows(jobs, PAIRS)) == 5


def test_an_event_whose_job_is_forgotten_gets_no_other(jobs: Jobs) -> None:
    job = finished(jobs, 10)
    prune(jobs)
    assert jobs.call("submit_job", A, "somebody else", event_seq=10) == [{"job_id": job, "created": False}]
    assert rows(jobs, STANDING) == []
    assert jobs.call("submit_job", A, "a", event_seq=11)[0]["created"] is True
    assert jobs.call("submit_job", A, "a")[0]["created"] is True
    assert rows(jobs, PAIRS) == [(10, job)]


def test_so_many_at_a_time_the_oldest_first(jobs: Jobs) -> None:
    done = [finished(jobs, seq) for seq in range(5)]
    assert [prune(jobs, at_most=2) for _ in range(3)] == [2, 2, 1]
    assert rows(jobs, PAIRS) == list(enumerate(done))


def test_a_job_that_somebody_tries_again_at_this_moment_is_left(jobs: Jobs) -> None:
    job, other = finished(jobs, 10, status="FAILED"), finished(jobs, 11, status="FAILED")
    conn = jobs.ledger.database.connect()
    jobs.call("retry_job", job, on=conn)
    assert prune(jobs, statuses=["FAILED"]) == 1
    conn.commit()
    assert prune(jobs, statuses=["FAILED"]) == 0
    assert rows(jobs, STANDING) == [(job,)]
    assert rows(jobs, PAIRS) == [(11, other)]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_who_submits_while_the_job_is_pruned_waits_and_makes_no_other(jobs: Jobs, ends: str) -> None:
    job = finished(jobs, 10)
    pruning = jobs.ledger.database.connect()
    prune(jobs, on=pruning)
    answers: list[dict[str, Any]] = []
    submits = threading.Thread(
        target=lambda: answers.extend(jobs.call("submit_job", A, "a", event_seq=10, on=jobs.connect()))
    )
    submits.start()
    deadline = time.monotonic() + 60
    while not jobs.sql("SELECT FROM pg_locks WHERE NOT granted"):
        assert time.monotonic() < deadline, "it did not wait"
        time.sleep(0.01)
    getattr(pruning, ends)()
    submits.join(60)
    assert answers == [{"job_id": job, "created": False}]
    assert rows(jobs, STANDING) == ([] if ends == "commit" else [(job,)])


def test_an_older_snapshot_makes_no_second_job_either(jobs: Jobs) -> None:
    finished(jobs, 10)
    older = jobs.ledger.database.connect()
    older.set_session(isolation_level=ISOLATION_LEVEL_REPEATABLE_READ)
    with older.cursor() as cur:
        cur.execute("SELECT count(*) FROM agent_jobs")
    prune(jobs)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        jobs.call("submit_job", A, "a", event_seq=10, on=older)
    older.rollback()
    assert jobs.call("submit_job", A, "a", event_seq=11, on=older)[0]["created"] is True
    assert jobs.call("submit_job", A, "a", event_seq=10, on=older)[0]["created"] is False
    older.commit()
    assert [seq for seq, _job in rows(jobs, PAIRS)] == [10]


def test_two_that_prune_at_once_share_the_jobs(jobs: Jobs) -> None:
    for seq in range(6):
        finished(jobs, seq)
    first, second = jobs.ledger.database.connect(), jobs.ledger.database.connect()
    assert prune(jobs, on=first, at_most=4) == 4
    assert prune(jobs, on=second, at_most=4) == 2
    first.commit()
    second.commit()
    assert rows(jobs, STANDING) == []
    assert len(rows(jobs, PAIRS)) == 6


def test_what_makes_no_sense_is_refused(jobs: Jobs) -> None:
    for values in (
        (None,),
        ("-1 day",),
        ("1 day", ["SUBMITTED"]),
        ("1 day", ["COMPLETED", None]),
        ("1 day", None),
        ("1 day", ["COMPLETED"], 0),
        ("1 day", ["COMPLETED"], None),
    ):
        assert "jobs are pruned" in jobs.refused("22023", "prune_jobs", *values)


def test_under_names_that_need_quotes(database: Database) -> None:
    jobs = Jobs(Ledger(database, ODD))
    job = finished(jobs, 10)
    assert prune(jobs) == 1
    assert jobs.call("submit_job", A, "a", event_seq=10) == [{"job_id": job, "created": False}]


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_counts_and_prunes_in_batches(
    database: Database, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walstream.cli.pruning._BATCH", 3)
    for seq in range(7):
        finished(jobs, seq, days=2 if seq == 0 else 100)
    failed = finished(jobs, 7, status="FAILED")
    told = ok("jobs", "prune", "--older-than", "90d", "--dry-run", "--json", dsn=database.dsn).json
    assert told == {"done": False, "jobs": 6, "statuses": ["COMPLETED"], "seconds": 90 * 86400.0}
    assert len(rows(jobs, STANDING)) == 8
    assert ok("jobs", "prune", "--older-than", "90d", dsn=database.dsn).stdout == "forgotten: 6 jobs\n"
    assert ok("jobs", "prune", "--older-than", "90d", "--json", dsn=database.dsn).json["jobs"] == 0
    words = ("--older-than", "36 h", "--status", "failed", "--status", "COMPLETED")
    assert ok("jobs", "prune", *words, "--dry-run", dsn=database.dsn).stdout == "would be forgotten: 2 jobs\n"
    ok("jobs", "prune", *words, dsn=database.dsn)
    assert rows(jobs, STANDING) == []
    assert (7, failed) in rows(jobs, PAIRS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--older-than"),
        (("--older-than", "soon"), "'soon' is no span of time"),
        (("--older-than", f"{'9' * 30}d"), "is no span of time"),
        (("--older-than", "1d", "--status", "SUBMITTED"), "SUBMITTED is none of COMPLETED, FAILED, CANCELED"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(database: Database, words: tuple[str, ...], message: str) -> None:
    called = call("jobs", "prune", *words, dsn=database.dsn)
    assert called.exit_code == 2
    assert message in called.stderr


def test_only_the_owner_prunes_and_whom_the_owner_lets(database: Database, jobs: Jobs, server: Server) -> None:
    finished(jobs, 10)
    role = f"p_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {role} LOGIN")
    try:
        database.execute(f"GRANT USAGE ON SCHEMA walstream TO {role}")
        database.execute(f"GRANT SELECT ON agent_jobs, walstream.migrations TO {role}")
        dsn = make_dsn(database.dsn, user=role)
        called = call("jobs", "prune", "--older-than", "1d", "--json", dsn=dsn)
        assert called.exit_code == 3
        assert "may not prune jobs" in called.error["message"]
        assert 'GRANT EXECUTE ON FUNCTION "walstream".prune_jobs' in called.error["hint"]
        database.execute(f"GRANT EXECUTE ON FUNCTION walstream.prune_jobs TO {role}")
        assert ok("jobs", "prune", "--older-than", "1d", "--json", dsn=dsn).json["jobs"] == 1
    finally:
        database.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_a_schema_of_version_4_gets_it_by_migration(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    assert schema.install(database.connect(), Settings(), upto=schema.PRUNING_VERSION - 1) == 4
    called = call("jobs", "prune", "--older-than", "1d", "--json", dsn=database.dsn)
    assert called.exit_code == 3
    assert "walstream migrate" in called.error["hint"]
    schema.install(database.connect(), Settings())
    assert ok("jobs", "prune", "--older-than", "1d", "--json", dsn=database.dsn).json["jobs"] == 0


@pytest.mark.slow
def test_many_jobs_are_pruned_in_steps_that_stay_quick(jobs: Jobs) -> None:
    jobs.sql(
        f"INSERT INTO {jobs.table} (session_id, agent_id, event_seq, status, fencing_token, created_at, finished_at)"
        " SELECT gen_random_uuid(), 'a', n, 'COMPLETED', 1, now() - interval '1 y', now() - interval '1 y'"
        " FROM generate_series(1, 300000) AS n"
    )
    jobs.sql(f"ANALYZE {jobs.table}")
    took = []
    while True:
        began = time.monotonic()
        count = prune(jobs)
        took.append(time.monotonic() - began)
        if count < 10_000:
            break
    assert len(took) == 31
    assert rows(jobs, "SELECT count(*) FROM walstream.pruned_jobs") == [(300_000,)]
    assert max(took) < 5, took
    assert sum(took[-11:-1]) < 3 * sum(took[:10]), took  # those that are gone cost the next ones nothing
