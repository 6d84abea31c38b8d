"""Append an event and do what it says, in one transaction: psycopg 3.

python append_psycopg3.py      # and again: the second time nothing is booked twice
"""

import os
import uuid

import psycopg

from walstream import Ledger, idempotency_key

session = uuid.uuid5(uuid.NAMESPACE_URL, "https://example.com/trips/psycopg3")
ledger = Ledger()

with psycopg.connect(os.environ["WALSTREAM_DSN"], autocommit=True) as connection:
    connection.execute("CREATE TABLE IF NOT EXISTS bookings (session_id uuid, flight text)")

    with connection.transaction():
        done = ledger.append(
            session,
            "booker",
            "tool.observed",
            {"call_id": "call_1", "result": "booked LH 400"},
            key=idempotency_key(session, "call_1"),
            on=connection,
        )
        if done.appended:  # not if an earlier try went through
            connection.execute("INSERT INTO bookings VALUES (%s, 'LH 400')", (session,))

print("appended" if done.appended else "was there already", "as seq", done.seq)
