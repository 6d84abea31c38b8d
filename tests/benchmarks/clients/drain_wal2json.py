"""Drains a slot with psycopg2 and wal2json, as most guides have it, and exits after so many inserts.

Arguments: connection (JSON: host, port, database, user, password), slot, publication (there is none), inserts.
"""

import json
import os
import sys
from typing import Any

import psycopg2
from psycopg2.extras import LogicalReplicationConnection


def main(connection: str, slot: str, _publication: str, inserts: str) -> None:
    left = int(inserts)

    def consume(message: Any) -> None:
        nonlocal left
        change = json.loads(message.payload)
        if change["action"] == "I":
            left -= 1
        if left <= 0:
            os._exit(0)
        message.cursor.send_feedback(flush_lsn=message.data_start)

    cursor = psycopg2.connect(**json.loads(connection), connection_factory=LogicalReplicationConnection).cursor()
    cursor.start_replication(
        slot_name=slot, decode=True, options={"format-version": "2", "add-tables": "public.agent_events"}
    )
    cursor.consume_stream(consume)


main(*sys.argv[1:])
