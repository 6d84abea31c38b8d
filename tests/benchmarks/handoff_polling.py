"""The contender that polls: a table of jobs, and a worker that looks there every 100 ms when it found nothing."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.benchmarks.handoff_receipts import DSN, HANDS, Receipts

PAUSE: Final = 0.1

TABLE: Final = """
CREATE TABLE jobs (
    job_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, agent_id text NOT NULL, payload jsonb NOT NULL,
    status text NOT NULL DEFAULT 'SUBMITTED', created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON jobs (agent_id, job_id) WHERE status = 'SUBMITTED'"""
INSERT: Final = "INSERT INTO jobs (agent_id, payload) VALUES ('researcher', %s)"
_CLAIM: Final = """
UPDATE jobs SET status = 'DELIVERED' WHERE job_id IN (
    SELECT job_id FROM jobs WHERE agent_id = 'researcher' AND status = 'SUBMITTED'
     ORDER BY job_id LIMIT %s FOR UPDATE SKIP LOCKED)
RETURNING job_id, payload"""
_COMPLETE: Final = "UPDATE jobs SET status = 'COMPLETED' WHERE job_id = %s"


def main() -> None:
    """Claim as many as there are hands, let each hand complete its own, and look again."""
    receipts, hands = Receipts(), int(os.environ[HANDS])
    claiming = _connect()
    connections = [_connect() for _ in range(hands)]

    def work(job_id: int, number: int, connection: Connection) -> None:
        receipts.note(number)
        with connection.cursor() as cur:
            cur.execute(_COMPLETE, (job_id,))

    with ThreadPoolExecutor(hands) as pool, claiming.cursor() as cur:
        while True:
            cur.execute(_CLAIM, (hands,))
            found = cur.fetchall()
            for done in [
                pool.submit(work, job_id, payload["number"], connection)
                for (job_id, payload), connection in zip(found, connections, strict=False)
            ]:
                done.result()
            if not found:
                time.sleep(PAUSE)


def _connect() -> Connection:
    connection: Connection = psycopg2.connect(os.environ[DSN])
    connection.autocommit = True
    return connection


if __name__ == "__main__":
    main()
