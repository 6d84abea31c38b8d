"""Append an event, then wait until a projector has dealt with it. The projector runs anywhere:

walstream run token_usage:stream     # in another terminal
python read_your_writes.py
"""

import os
import uuid

import psycopg2

from walstream import Stream

with psycopg2.connect(os.environ["WALSTREAM_DSN"]) as connection, connection.cursor() as cursor:
    cursor.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " VALUES (%s, 'writer', 'model.responded', '{\"tokens\": 100}') RETURNING seq",
        (str(uuid.uuid4()),),
    )
    (seq,) = cursor.fetchone() or (0,)

# The transaction has committed. Now wait for the projector, and read what it made of it.
if not Stream().wait_for("token-usage", seq, timeout=30):
    raise SystemExit("token-usage is not there yet: does it run?")

with psycopg2.connect(os.environ["WALSTREAM_DSN"]) as connection, connection.cursor() as cursor:
    cursor.execute("SELECT tokens FROM token_usage WHERE agent_id = 'writer'")
    print(cursor.fetchone())
