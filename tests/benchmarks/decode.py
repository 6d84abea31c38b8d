"""How long the decoder takes for one message, without a server or a driver.

    python -m tests.benchmarks decode [--quick] [--json]

Prints the best of many rounds in microseconds, the call itself included, for inserts of about 290 bytes.
"""

from __future__ import annotations

import argparse
import random
import uuid
from collections.abc import Callable
from time import perf_counter
from typing import Any

from tests.benchmarks import document
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import compile_row_decoder, decode_begin, decode_commit
from walstream.protocol.messages import Column, Relation
from walstream.testing import wire

_NAMES = ("seq", "session_id", "agent_id", "event_type", "payload", "created_at")
_TYPES = (20, 2950, 25, 25, 3802, 1184)
_AGENTS = (b"planner", b"researcher-1", b"researcher-12", b"writer", b"reviewer")
_KINDS = (b"model.requested", b"model.responded", b"tool.invoked", b"handoff.emitted")
_ROUNDS = 100
_OID = 16_400


def relation(*more: str) -> Relation:
    """The ledger of the design, with ``more`` columns of text behind."""
    columns = [Column(name == "seq", name, oid, -1) for name, oid in zip(_NAMES, _TYPES, strict=True)]
    return Relation(_OID, "public", "agent_events", "d", (*columns, *(Column(False, name, 25, -1) for name in more)))


def inserts(*more: bytes | None, count: int = 1000) -> list[bytes]:
    """Messages that differ as real ones do: in seq, session, agent, type and length of the payload."""
    dice = random.Random(7)
    out = []
    for i in range(count):
        session = str(uuid.UUID(int=dice.getrandbits(128))).encode()
        payload = b'{"text": "' + b"x" * dice.randrange(110, 150) + b'"}'
        time = b"2024-02-03 04:05:06.%06d+00" % dice.randrange(1_000_000)
        row = (b"%d" % (123_456 + i), session, dice.choice(_AGENTS), dice.choice(_KINDS), payload, time, *more)
        out.append(wire.insert(*row, oid=_OID))
    return out


def once(call: Callable[[bytes], Any], messages: list[bytes]) -> float:
    """Seconds for all messages in one round."""
    started = perf_counter()
    for message in messages:
        call(message)
    return perf_counter() - started


def measure(rounds: int) -> dict[str, float]:
    """Microseconds of a message, in the best round, by case."""
    plain = inserts()
    begins = [wire.begin(n << 20, time_us=n, xid=n) for n in range(1, 1001)]
    commits = [wire.commit(n << 20, n << 21, time_us=n) for n in range(1, 1001)]
    cases: list[tuple[str, Callable[[bytes], Any], list[bytes]]] = [
        ("an empty function", lambda _: None, plain),
        ("insert, row decoder", compile_row_decoder(relation(), _NAMES), plain),
        ("insert, row decoder, two extras", compile_row_decoder(relation("a", "b"), _NAMES), inserts(b"x", None)),
        ("insert, general decoder", Decoder(1).decode, plain),
        ("begin", decode_begin, begins),
        ("commit", decode_commit, commits),
    ]
    fastest = dict.fromkeys((name for name, _, _ in cases), float("inf"))
    for _ in range(rounds):  # all cases in turn, so that a busy moment of the machine does not hit one of them alone
        for name, call, messages in cases:
            fastest[name] = min(fastest[name], once(call, messages) / len(messages))
    return {name: round(seconds * 1e6, 3) for name, seconds in fastest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    machine = document.machine()
    found = measure(5 if given.quick else _ROUNDS)
    if given.json:
        document.write("decode", machine, {"microseconds": found})
        return
    print("microseconds of a message; an insert is about 290 bytes:")
    for name, microseconds in found.items():
        print(f"  {name:32} {microseconds:6.2f}")


if __name__ == "__main__":
    main()
