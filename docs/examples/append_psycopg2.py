"""Append an event and do what it says, in one transaction: psycopg2.

python append_psycopg2.py      # and again: the second time nothing is booked twice
"""

import os
import uuid

import psycopg2

from walstream import Ledger, idempotency_key

session = uuid.uuid5(uuid.NAMESPACE_URL, "https://example.com/trips/psycopg2")
ledger = Ledger()

connection = psycopg2.connect(os.environ["WALSTREAM_DSN"])
with connection, connection.cursor() as cursor:
    cursor.execute("CREATE TABLE IF NOT EXISTS bookings (session_id uuid, flight text)")

with connection, connection.cursor() as cursor:  # commits at the end, or rolls back
    done = ledger.append(
        session,
        "booker",
        "tool.observed",
        {"call_id": "call_1", "result": "booked LH 400"},
        key=idempotency_key(session, "call_1"),
        on=cursor,
    )
    if done.appended:  # not if an earlier try went through
        cursor.execute("INSERT INTO bookings VALUES (%s, 'LH 400')", (str(session),))

print("appended" if done.appended else "was there already", "as seq", done.seq)
connection.close()
