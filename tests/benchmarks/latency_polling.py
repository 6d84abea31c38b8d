"""The contender that polls: it asks for rows above the highest seq that it has seen, every 100 ms.

It is what many do, and it is wrong: a row whose transaction commits late, below a seq that was seen already, is never
found. Here that costs it some of its events; they are counted as missing.
"""

from __future__ import annotations

import os
import time
from typing import Final

import psycopg2

from tests.benchmarks.noted import DSN, Notes

PAUSE: Final = 0.1


def main() -> None:
    notes = Notes()
    connection = psycopg2.connect(os.environ[DSN])
    connection.autocommit = True
    with connection.cursor() as cur:
        cur.execute("SELECT COALESCE(max(seq), 0) FROM agent_events")
        ((last,),) = cur.fetchall()
        while True:
            cur.execute("SELECT seq, payload FROM agent_events WHERE seq > %s ORDER BY seq", (last,))
            rows = cur.fetchall()
            if rows:
                moment = time.time_ns() // 1000
                notes.add([(each["run"], each["client"], each["n"]) for _, each in rows], moment)
                last = rows[-1][0]
            time.sleep(PAUSE)


if __name__ == "__main__":
    main()
