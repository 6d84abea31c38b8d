"""What a rebuild costs as a session grows, and how fast the snapshot writer is.

    python -m tests.benchmarks rebuild [--quick] [--json]

An agent's session repeats a turn of ten events, of which the first loads the window (twenty messages, about 4 kB). The
writer's rate is measured under the engine, cold, over the same events as that of a transactional projector which does
nothing. Everything is measured in turn, several times; medians are shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.benchmarks import document
from tests.conftest import Database
from tests.runner_world import World, eventually
from walstream import Context, Event, Projector, rebuild_context
from walstream.postgres import PostgresServer
from walstream.projectors.snapshot_writer import SnapshotWriter

TURN = (
    "context.loaded", "model.requested", "model.responded", "tool.invoked", "tool.observed",
    "model.requested", "model.responded", "tool.invoked", "tool.observed", "x.checked",
)  # fmt: skip
WINDOW = [{"role": "user" if n % 2 else "assistant", "content": "x" * 180} for n in range(20)]


class Nothing(Projector):
    """The least that a transactional projector can do."""

    name = "nothing"
    transactional = True

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        pass


def payloads() -> list[str]:
    call = {"call_id": "c", "name": "search", "arguments": {"query": "y" * 60}}
    calls = [{"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}]
    said = {"message": {"role": "assistant", "content": "z" * 120, "tool_calls": calls}}
    bodies: dict[str, Any] = {
        "context.loaded": {"messages": WINDOW},
        "model.requested": {
            "model": "m-1",
            "parameters": {"temperature": 0.2},
            "prompt_hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        },
        "model.responded": said,
        "tool.invoked": call,
        "tool.observed": {"call_id": "c", "result": {"found": ["w" * 120]}},
        "x.checked": {"text": "v" * 200},
    }
    return [json.dumps(bodies[event_type]) for event_type in TURN]


def add(world: World, sessions: int, events: int) -> int:
    """Sessions that go on side by side, a turn of each after the other; return the last offset."""
    last = 0
    for start in range(0, events, 1000):
        rows = world.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
            " SELECT format('00000000-0000-4000-9000-%%s', lpad((%s * 1000 + s)::text, 12, '0'))::uuid, 'agent',"
            " (%s::text[])[1 + e %% 10], (%s::text[])[1 + e %% 10]::jsonb"
            " FROM generate_series(0, %s) AS t, generate_series(1, %s) AS s, generate_series(0, 9) AS e"
            " ORDER BY t, s, e RETURNING seq",
            events,
            list(TURN),
            payloads(),
            min(1000, events - start) // 10 - 1,
            sessions,
        )
        seqs = [int(row[0]) for row in rows]
        for part in range(0, len(seqs), 10_000):
            piece = seqs[part : part + 10_000]
            last = world.order(*(piece[n : n + 2] for n in range(0, len(piece), 2)))
    world.execute("VACUUM ANALYZE agent_events")
    return last


def session_of(events: int) -> str:
    return f"00000000-0000-4000-9000-{events * 1000 + 1:012d}"


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def drain(world: World, projector: Projector, last: int) -> tuple[float, float]:
    """Events a second of one projector that begins at the first event, and microseconds of this process's own time for
    each, which other work on the machine does not change."""
    group = world.group(projector)
    group.start()
    try:
        eventually(lambda: world.positions(projector.name) != [], 30)
        started, first = time.perf_counter(), min(world.positions(projector.name))
        own = time.process_time()
        eventually(lambda: world.reached(projector.name, last), 600)
        events = last - first
        return events / (time.perf_counter() - started), (time.process_time() - own) / events * 1e6
    finally:
        group.stop(5)
        world.execute("DELETE FROM walstream.projectors WHERE name = %s", projector.name)
        world.execute("DELETE FROM walstream.cursors WHERE projector = %s", projector.name)


def measure(world: World, *, quick: bool) -> dict[str, Any]:
    sizes = (100, 1000, 5000) if quick else (1000, 10_000, 100_000)
    for size in sizes:
        last = add(world, 1, size)
    drain(world, SnapshotWriter(), last)
    # Rebuilds in the middle between two snapshots: fifty events after the last one.
    for size in sizes:
        session = session_of(size)
        for _ in range(5):
            for event_type, payload in zip(TURN, payloads(), strict=True):
                last = world.add(event_type, session=session, payload_text=payload)
    times: dict[str, list[float]] = {}
    for _ in range(5 if quick else 25):
        for size in sizes:
            call = lambda size=size: rebuild_context(world.connection, session_of(size), settings=world.settings)  # noqa: E731
            times.setdefault(str(size), []).append(milliseconds(call))
    zero = lambda: rebuild_context(world.connection, session_of(sizes[-1]), settings=world.settings, snapshots=False)  # noqa: E731
    from_zero = milliseconds(zero)

    world.execute("TRUNCATE agent_snapshots")
    rates: dict[str, list[tuple[float, float]]] = {"nothing": [], "snapshot-writer": []}
    for _ in range(1 if quick else 3):
        for projector in (Nothing(), SnapshotWriter()):
            rates[projector.name].append(drain(world, projector, last))
            world.execute("TRUNCATE agent_snapshots")
    medians = {size: round(statistics.median(values), 2) for size, values in times.items()}
    (writer, writer_us), (nothing, nothing_us) = (
        map(statistics.median, zip(*rates[name], strict=True)) for name in ("snapshot-writer", "nothing")
    )
    return {
        "rebuild_ms": medians,
        "rebuild_from_zero_ms": round(from_zero, 1),
        "longest_to_shortest": round(medians[str(sizes[-1])] / medians[str(sizes[0])], 2),
        "events": last,
        "writer_events_per_second": round(writer),
        "nothing_events_per_second": round(nothing),
        "ratio": round(writer / nothing, 3),
        "writer_process_us": round(writer_us, 1),
        "nothing_process_us": round(nothing_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sessions: whether it works at all")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    words = parser.parse_args()
    machine = document.machine()
    with PostgresServer(durable=False) as server:
        database = Database(server, "bench_rebuild")
        database.create()
        world = World(database)
        try:
            found = measure(world, quick=words.quick)
        finally:
            world.close()
    if words.json:
        document.write("rebuild", machine, found)
        return
    for size, took in found["rebuild_ms"].items():
        print(f"rebuild of {int(size):>7,} events: {took:8.2f} ms")
    print(f"the longest from zero:      {found['rebuild_from_zero_ms']:8.1f} ms")
    print(f"the longest to the shortest: {found['longest_to_shortest']:.2f}")
    print(
        f"the writer over {found['events']:,} events: {found['writer_events_per_second']:,} a second,"
        f" {found['ratio']:.2f} of a projector that does nothing ({found['nothing_events_per_second']:,});"
        f" {found['writer_process_us']} and {found['nothing_process_us']} microseconds of the process's own time each"
    )


if __name__ == "__main__":
    main()
