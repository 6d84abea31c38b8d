"""Drains a slot with walbox, an asyncio client, and exits after so many inserts.

Arguments: connection (JSON: host, port, database, user, password), slot, publication, inserts.
"""

import asyncio
import json
import os
import sys
from typing import Any

from walbox import ChangeKind, CheckpointHandle, Client, Transaction, WalboxOptions


class Nowhere:
    """Keeps no position: a counter has none."""

    async def load(self) -> int | None:
        return None

    async def save(self, lsn: int, *, connection: Any = None) -> None:
        del lsn, connection


async def main(connection: str, slot: str, publication: str, inserts: str) -> None:
    words = json.loads(connection)
    words["dbname"] = words.pop("database")
    dsn = " ".join(f"{name}={value}" for name, value in words.items())
    left = int(inserts)

    async def handle(transaction: Transaction, checkpoint: CheckpointHandle) -> None:
        nonlocal left
        del checkpoint
        left -= sum(change.kind == ChangeKind.INSERT for change in transaction.changes)
        if left <= 0:
            os._exit(0)

    options = WalboxOptions(consumer_name="bench", dsn=dsn, slot_name=slot, publication_name=publication)
    await Client(options, Nowhere()).run(handle)


asyncio.run(main(*sys.argv[1:]))
