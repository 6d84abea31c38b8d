"""Drains a slot with pypgoutput, and exits after so many inserts.

Arguments: connection (JSON: host, port, database, user, password), slot, publication, inserts.
"""

import json
import os
import sys

import pypgoutput


def main(connection: str, slot: str, publication: str, inserts: str) -> None:
    left = int(inserts)
    reader = pypgoutput.LogicalReplicationReader(publication_name=publication, slot_name=slot, **json.loads(connection))
    for change in reader:
        left -= change.op == "I"
        if left <= 0:
            reader.extractor.kill()
            os._exit(0)
    sys.exit(f"it ended with {left} inserts to go")  # it logs its errors, and stops


if __name__ == "__main__":
    main(*sys.argv[1:])
