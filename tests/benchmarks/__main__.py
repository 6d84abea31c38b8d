"""``python -m tests.benchmarks NAME …``: the benchmarks by their names. Each tells with --help what it does."""

from __future__ import annotations

import importlib
import sys
from typing import Final

NAMES: Final = {
    "latency": "from an insert to its handler",
    "drain": "draining a backlog through the slot, beside pg_recvlogical and other clients",
    "catchup": "a projector that is far behind, beside draining the slot",
    "sustained": "how many appends a second it keeps up with, and for how long (soak)",
    "scale": "cost by size of the ledger, projectors and sessions; bytes of the order and of WAL",
    "ceiling": "what an event costs the client alone, without a walsender's noise",
    "decode": "what decoding a message costs",
    "append": "what append() costs beside an INSERT",
    "audit": "putting events on record, and verifying",
    "handoff": "from a handoff's commit to the handler in another process, beside other queues",
    "standby": "how long events wait until a stand-by has taken over",
    "rebuild": "what a rebuild of a session costs, and the snapshot writer",
    "plot": "no benchmark: charts of what drain, latency, scale and sustained printed with --json",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print("usage: python -m tests.benchmarks NAME …\n", file=sys.stderr)
        for name, says in NAMES.items():
            print(f"  {name:10} {says}", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m tests.benchmarks {name}"
    return int(importlib.import_module(f"tests.benchmarks.{name}").main() or 0)


if __name__ == "__main__":
    sys.exit(main())
