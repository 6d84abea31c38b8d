"""What ``append()`` costs beside a plain INSERT: one event a transaction, and batches.

    python -m tests.benchmarks append [--rounds N] [--events N] [--dsn DSN] [--quick] [--json]

All ways take turns, round by round, so that a busy moment of the machine does not hit one of them alone. The figures
are medians over the rounds, and ratios to the plain INSERT of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import uuid
from collections.abc import Callable
from time import perf_counter

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extras import execute_values

from tests.benchmarks import document
from walstream import Draft, Ledger
from walstream.config import Settings
from walstream.ledger import schema
from walstream.postgres import PostgresServer
from walstream.postgres.server import execute

_PAYLOAD = {"call_id": "call_0001", "result": "x" * 120, "usage": {"in": 1200, "out": 34}}
_TEXT = json.dumps(_PAYLOAD)
_EVENT = "tool.observed"
_INSERT = "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, %s, %s, %s) RETURNING seq"
_SQL = "SELECT seq FROM walstream.append(%s, %s, %s, %s)"

Way = Callable[[Connection, int, int], None]


def plain(conn: Connection, events: int, batch: int) -> None:
    """INSERT, with the transaction's other statement being its COMMIT."""
    with conn.cursor() as cur:
        session = str(uuid.uuid4())
        for _ in range(events // batch):
            if batch == 1:
                cur.execute(_INSERT, (session, "agent", _EVENT, _TEXT))
            else:
                row = (session, "agent", _EVENT, _TEXT)
                execute_values(cur, _INSERT.replace("(%s, %s, %s, %s)", "%s"), [row] * batch, page_size=batch)
            cur.fetchall()
            conn.commit()


def sql(conn: Connection, events: int, batch: int) -> None:
    """The SQL function, called with the driver."""
    del batch
    with conn.cursor() as cur:
        session = str(uuid.uuid4())
        for _ in range(events):
            cur.execute(_SQL, (session, "agent", _EVENT, _TEXT))
            cur.fetchall()
            conn.commit()


def ledger(conn: Connection, events: int, batch: int, keys: bool = False) -> None:
    """``Ledger.append`` or ``append_batch``."""
    made, session = Ledger(Settings()), str(uuid.uuid4())
    for turn in range(events // batch):
        if batch == 1:
            key = f"key {turn}" if keys else None
            made.append(session, "agent", _EVENT, _PAYLOAD, key=key, on=conn)
        else:
            made.append_batch(
                [Draft(session, "agent", _EVENT, _PAYLOAD, f"key {turn} {n}" if keys else None) for n in range(batch)],
                on=conn,
            )
        conn.commit()


def keyed(conn: Connection, events: int, batch: int) -> None:
    """The same with an idempotency key."""
    ledger(conn, events, batch, keys=True)


CASES: tuple[tuple[str, int, dict[str, Way]], ...] = (
    ("one event a transaction", 1, {"INSERT": plain, "append() in SQL": sql, "Ledger": ledger, "with a key": keyed}),
    ("100 events a transaction", 100, {"INSERT": plain, "Ledger": ledger, "with a key": keyed}),
)


def measure(dsn: str, rounds: int, events: int) -> dict[str, dict[str, dict[str, float]]]:
    """Events a second, and the ratio to INSERT, by case and way."""
    with psycopg2.connect(dsn) as conn, conn.cursor() as cur:
        cur.execute(schema.ledger_sql(Settings().ledger))
    conn.commit()
    schema.install(conn, Settings())
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, batch, ways in CASES:
        rates: dict[str, list[float]] = {name: [] for name in ways}
        count = events if batch == 1 else events * 10
        for number in range(rounds + 1):
            for name, way in ways.items():
                started = perf_counter()
                way(conn, count, batch)
                if number:  # the first round only warms up
                    rates[name].append(count / (perf_counter() - started))
        found[title] = {
            name: {
                "per_second": round(statistics.median(all_of_it)),
                "ratio": round(
                    statistics.median(mine / first for mine, first in zip(all_of_it, rates["INSERT"], strict=True)), 3
                ),
            }
            for name, all_of_it in rates.items()
        }
    conn.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", help="an empty database; without it a server is started, durable, and removed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--events", type=int, default=300, help="events a round, one a transaction; tenfold in batches")
    parser.add_argument("--quick", action="store_true", help="within a minute: two rounds of few events")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    words = parser.parse_args()
    rounds, events = (2, 50) if words.quick else (words.rounds, words.events)
    machine = document.machine()
    if words.dsn:
        found = measure(words.dsn, rounds, events)
    else:
        with PostgresServer(durable=True) as server:
            execute(server.dsn(), "CREATE DATABASE bench")
            found = measure(server.dsn("bench"), rounds, events)
    if words.json:
        document.write("append", machine, {"cases": found})
        return
    for title, ways in found.items():
        print(title)
        for name, values in ways.items():
            print(f"  {name:18} {values['per_second']:8.0f} events/s   {values['ratio']:.2f} of INSERT")


if __name__ == "__main__":
    main()
