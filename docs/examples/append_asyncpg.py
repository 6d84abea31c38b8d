"""Append an event and do what it says, in one transaction: asyncpg, which calls the SQL function itself.

This is how any other language does it, too. ``Ledger.payload_text`` checks the payload before a statement is sent.
asyncpg takes connection strings that are URIs.

    python append_asyncpg.py       # and again: the second time nothing is booked twice
"""

import asyncio
import os
import uuid

import asyncpg

from walstream import Ledger, idempotency_key

session = uuid.uuid5(uuid.NAMESPACE_URL, "https://example.com/trips/asyncpg")
ledger = Ledger()


async def main() -> None:
    connection = await asyncpg.connect(os.environ["WALSTREAM_DSN"])
    await connection.execute("CREATE TABLE IF NOT EXISTS bookings (session_id uuid, flight text)")

    payload = ledger.payload_text("tool.observed", {"call_id": "call_1", "result": "booked LH 400"})
    async with connection.transaction():
        done = await connection.fetchrow(
            "SELECT seq, appended FROM walstream.append($1, $2, $3, $4, key => $5)",
            str(session),
            "booker",
            "tool.observed",
            payload,
            idempotency_key(session, "call_1"),
        )
        if done["appended"]:  # not if an earlier try went through
            await connection.execute("INSERT INTO bookings VALUES ($1, 'LH 400')", session)

    print("appended" if done["appended"] else "was there already", "as seq", done["seq"])
    await connection.close()


asyncio.run(main())
