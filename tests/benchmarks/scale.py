"""What grows with the ledger, and what does not.

    python -m tests.benchmarks scale [--events N,…] [--projectors N,…] [--sessions N,…] [--singles N] [--quick]
                                       [--json]

Cost of an event (processor time of the client, and events a second through the slot) by number of events, of projectors
and of sessions; bytes of `commit_order` an event, when draining and when every event has a row of its own, before and
after compaction; bytes of WAL that order and cursors add to an event.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from tests.benchmarks import document
from tests.benchmarks.draining import by_walstream
from tests.benchmarks.filled_ledger import FilledLedger
from tests.benchmarks.shapes import SHAPES, Shape
from walstream.order.compaction import Compactor
from walstream.order.segment import Segment, size_codes
from walstream.order.writer import OrderWriter
from walstream.source.connection import connect

_SINGLE: Final = 20_000  # rows of one event each
_RATE: Final = 200  # a second, at which they come
_FEW: Final = 100_000  # events where something else than their number is varied
_BYTES: Final = (
    "SELECT sum(pg_column_size(c.*)), pg_total_relation_size('walstream.commit_order') FROM walstream.commit_order AS c"
)

Figures = document.Figures


def drained(shape: Shape, events: int, *, projectors: int = 1, sessions: int = 1000) -> Figures:
    """One drain, what it left in the order, and the WAL that it wrote."""
    print(
        f"{shape.name}: {events:,} events, {projectors} projectors, {sessions:,} sessions", file=sys.stderr, flush=True
    )
    with FilledLedger(shape, events, sessions=sessions) as ledger:
        ledger.reset()
        before = ledger.wal_bytes()
        run = by_walstream(ledger, projectors=projectors)
        wal = ledger.wal_bytes() - before
        ((rows, relation),) = ledger.execute(_BYTES)
    return {
        "shape": shape.name,
        "events": events,
        "projectors": projectors,
        "sessions": sessions,
        "events_per_s": round(events / run.seconds),
        "client_cpu_us": round(run.client_cpu / events * 1e6, 2),
        "walsender_cpu_us": None if run.walsender_cpu is None else round(run.walsender_cpu / events * 1e6, 2),
        "order_bytes": round(float(str(rows)) / events, 3),
        "order_relation_bytes": round(float(str(relation)) / events, 3),
        "wal_bytes": round(wal / events, 2),
        "rss_mb": round(run.rss_mb),
    }


def compacted(single: int) -> Figures:
    """Bytes an event when each has a row of its own, as at low rates, and after compaction.

    They come at random moments, and records have random lengths, with a page of its own (`full_page_writes`) now and
    then: what is regular would take no bytes at all.
    """
    chance = random.Random(1)
    with FilledLedger(SHAPES["A"], 0) as ledger, contextlib.closing(_connection(ledger)) as connection:
        ledger.execute("UPDATE walstream.generation SET generation = 1")
        writer = OrderWriter(connection, "walstream", 1)
        writer.tail()
        sizes, moment, lsn = size_codes([400]), 800_000_000_000_000, 1 << 24
        for n in range(1, single + 1):
            lsn += 8 * chance.randint(60, 90) + (8_192 if chance.random() < 0.05 else 0)
            moment += 1 + int(chance.expovariate(_RATE) * 1_000_000)
            writer.append(Segment(n, [n], [1], [lsn], [moment], sizes, lsn + 48, None, False, 1))
        before = ledger.execute(_BYTES)[0][0]
        began = time.monotonic()
        compactor = Compactor(connection, "walstream", 1)
        while compactor.run():  # as a process does now and then, a little at a time
            pass
        took = time.monotonic() - began
        after = ledger.execute(_BYTES)[0][0]
    return {
        "events": single,
        "bytes_before": round(float(str(before)) / single, 2),
        "bytes_after": round(float(str(after)) / single, 2),
        "compaction_us": round(took / single * 1e6, 2),
    }


def _connection(ledger: FilledLedger) -> Any:
    return connect(ledger.dsn(), application_name="bench", options={"synchronous_commit": "off"})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", default="100000,1000000", help="sizes of the ledger (5000000 takes half an hour)")
    parser.add_argument("--projectors", default="1,10,50")
    parser.add_argument("--sessions", default="1,100000")
    parser.add_argument("--singles", type=int, default=_SINGLE, help="rows of one event (720000: an hour's)")
    parser.add_argument("--quick", action="store_true", help="within a minute: a tenth")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    sizes = [20_000] if given.quick else _numbers(given.events)
    few = 20_000 if given.quick else _FEW
    a, b = SHAPES["A"], SHAPES["B"]
    machine = document.machine()
    found = {
        "events": {f"{shape.name} {n:,}": drained(shape, n) for shape in (a, b) for n in sizes},
        "projectors": {str(n): drained(b, few, projectors=n) for n in _numbers(given.projectors)},
        "sessions": {str(n): drained(b, few, sessions=n) for n in _numbers(given.sessions)},
        "compaction": compacted(_SINGLE // 10 if given.quick else given.singles),
    }
    if given.json:
        document.write("scale", machine, found)
        return 0
    for title in ("events", "projectors", "sessions"):
        print(f"{title:16}{'events/s':>12}{'CPU us':>10}{'sender':>8}{'order bytes':>13}{'WAL bytes':>11}{'MB':>6}")
        for name, each in found[title].items():
            print(
                f"{name:>16}{each['events_per_s']:>12,}{each['client_cpu_us']:>10.2f}"
                f"{each['walsender_cpu_us'] or 0:>8.2f}{each['order_bytes']:>13.2f}"
                f"{each['wal_bytes']:>11.1f}{each['rss_mb']:>6}"
            )
    each = found["compaction"]
    print(
        f"one event a row: {each['bytes_before']} bytes, {each['bytes_after']} after compaction, which took"
        f" {each['compaction_us']} us an event"
    )
    print(document.described(machine))
    return 0


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]
