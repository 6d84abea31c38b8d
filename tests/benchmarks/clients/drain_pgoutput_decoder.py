"""Drains a slot with pgoutput-decoder, whose decoder is in Rust, and exits after so many inserts.

Arguments: connection (JSON: host, port, database, user, password), slot, publication, inserts.
"""

import asyncio
import json
import os
import sys

import pgoutput_decoder


async def main(connection: str, slot: str, publication: str, inserts: str) -> None:
    words = {"password": "", **json.loads(connection)}
    words["port"] = int(words["port"])
    left = int(inserts)
    reader = pgoutput_decoder.LogicalReplicationReader(publication_name=publication, slot_name=slot, **words)
    async for message in reader:
        left -= message.op == "c"
        if left <= 0:
            os._exit(0)


asyncio.run(main(*sys.argv[1:]))
