"""From the commit of a handoff to the first line of the handler in another process, beside two other queues.

    python -m tests.benchmarks handoff [--rates 1,50,500] [--seconds N] [--repeats N] [--quick] [--json]

Contenders: walstream (`walstream run` with the router, and one `walstream worker`), a table of jobs that a worker looks
into every 100 ms, and procrastinate. Each has a durable server of its own, workers in processes of their own, and is
handed work by this process. They take turns, rate by rate, and their processes run only while it is their turn.

Latency: from the moment at which COMMIT had returned, and from the one at which it was sent. Throughput: eight workers,
and a backlog that is there when they begin; walstream also with jobs that come from no event and write none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.benchmarks import document, handoff_receipts
from tests.benchmarks.handoff_contenders import Contender, Emit, Polling, Procrastinate, Walstream, WithoutEvents
from walstream.postgres import PostgresServer

HANDS: Final = 4  # of the one worker whose latency is measured
WORKERS: Final = 8
SHAPES: Final = {"8 processes": (WORKERS, 1), "1 process of 8": (1, WORKERS)}
_EMITTERS: Final = 4  # connections that emit: one alone does not commit 500 times a second everywhere


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
        rates: handoffs a second.
        seconds: how long each rate is held.
        repeats: of everything.
        jobs: in the backlog.
        shapes: what eight workers are.
    """

    rates: tuple[int, ...]
    seconds: float
    repeats: int
    jobs: int
    shapes: tuple[str, ...]


Figures = dict[str, Any]


def emit(contender: Contender, rate: int, seconds: float, dice: random.Random) -> dict[int, tuple[int, int]]:
    """Hand over at a rate, each at a random moment of its share of the time; return when it was sent and committed."""
    numbers = contender.take_numbers(max(1, round(rate * seconds)))
    shares = [(number, (place + dice.random()) / rate) for place, number in enumerate(numbers)]
    waiting = iter(shares)
    taking = threading.Lock()
    emitted: dict[int, tuple[int, int]] = {}

    def work(send: Emit, start: float) -> None:
        while True:
            with taking:
                number, share = next(waiting, (None, 0.0))
            if number is None:
                return
            time.sleep(max(0.0, start + share - time.monotonic()))
            emitted[number] = send(number)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(_EMITTERS) as pool:
        emitters = [stack.enter_context(contender.emitter()) for _ in range(_EMITTERS)]
        start = time.monotonic() + 0.2
        for done in [pool.submit(work, send, start) for send in emitters]:
            done.result()
    return emitted


def latency(contender: Contender, rate: int, seconds: float, dice: random.Random) -> Figures:
    """One run at one rate."""
    with contender.running(1, HANDS) as file:
        before, warm = contender.cpu_seconds(), handoff_receipts.count(file)
        emitted = emit(contender, rate, seconds, dice)
        contender.received(file, warm + len(emitted), f"receiving at {rate} a second")
        after = contender.cpu_seconds()
        received = handoff_receipts.read(file)
    committed = [(received[n] - at[1]) / 1e6 for n, at in emitted.items()]
    sent = [(received[n] - at[0]) / 1e6 for n, at in emitted.items()]
    moments = sorted(at[1] for at in emitted.values())
    held = (len(moments) - 1) / (moments[-1] - moments[0]) * 1e9 if len(moments) > 1 else rate
    return {
        **percentiles(committed),
        "from_sent": percentiles(sent),
        "n": len(emitted),
        "held_per_second": round(held, 1),
        **cpu(before, after, len(emitted)),
    }


def throughput(contender: Contender, shape: str, jobs: int) -> Figures:
    """One run: jobs a second, from the moment at which the workers may begin until the last one is completed."""
    with contender.running(*SHAPES[shape]) as file:
        with contender.processes.held(contender.workers_from):
            warm = handoff_receipts.count(file)
            begin = contender.fill(contender.take_numbers(jobs))
            time.sleep(0.5)  # what the server does after it
            before = contender.cpu_seconds()
        started = time.monotonic()
        begin()
        contender.received(file, warm + jobs, "the backlog", 0.01)
        took = time.monotonic() - started
        after = contender.cpu_seconds()
        handoff_receipts.read(file)
    return {"jobs_per_second": round(jobs / took, 1), "n": jobs, **cpu(before, after, jobs)}


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile; of less than a hundred values the latter is the largest."""
    ordered = sorted(milliseconds)
    last = min(len(ordered) - 1, int(len(ordered) * 0.99))
    return {"p50_ms": round(statistics.median(ordered), 2), "p99_ms": round(ordered[last], 2)}


def cpu(
    before: tuple[float | None, float | None], after: tuple[float | None, float | None], jobs: int
) -> dict[str, float | None]:
    """Milliseconds of processor time for a job: of the receiving processes, and of the server."""
    return {
        f"{who}_cpu_ms": None if first is None or last is None else round((last - first) / jobs * 1000, 2)
        for who, first, last in zip(("client", "server"), before, after, strict=True)
    }


def summary(runs: Sequence[Figures]) -> Figures:
    """Medians over the runs, with the least and the greatest of what counts; ``n`` is the sum."""
    found: Figures = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(value, dict):
            found[name] = summary(values)
        elif name == "n":
            found[name] = sum(values)
        elif None in values:
            found[name] = None
        else:
            found[name] = round(statistics.median(values), 2)
            if not name.endswith("cpu_ms"):
                found.setdefault("spread", {})[name] = [min(values), max(values)]
    return found


def measure(plan: Plan) -> Figures:
    """Everything, in turns."""
    dice = random.Random(4)
    rates: dict[str, dict[str, list[Figures]]] = {}
    backlogs: dict[str, dict[str, list[Figures]]] = {}
    load: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def contender(kind: type[Contender]) -> Contender:
            return kind(stack.enter_context(PostgresServer(durable=True)), folder)

        walstream, procrastinate = contender(Walstream), contender(Procrastinate)
        handing: list[Contender] = [walstream, contender(Polling), procrastinate] if plan.rates else []
        working: list[Contender] = [walstream, contender(WithoutEvents), procrastinate] if plan.jobs else []
        for repeat in range(plan.repeats):
            for rate, place in itertools.product(plan.rates, range(len(handing))):
                each = handing[(place + repeat) % len(handing)]
                _tell(f"{each.name} at {rate} a second, run {repeat + 1} of {plan.repeats}")
                load.append(os.getloadavg()[0])
                found = latency(each, rate, plan.seconds, dice)
                rates.setdefault(each.name, {}).setdefault(str(rate), []).append(found)
            for shape, place in itertools.product(plan.shapes, range(len(working))):
                each = working[(place + repeat) % len(working)]
                _tell(f"{each.name} with {shape}, run {repeat + 1} of {plan.repeats}")
                load.append(os.getloadavg()[0])
                found = throughput(each, shape, plan.jobs)
                backlogs.setdefault(each.name, {}).setdefault(shape, []).append(found)
        version = walstream.server.version
    contenders: dict[str, Figures] = {}
    for key, kept in (("rates", rates), ("throughput", backlogs)):
        for name, runs in kept.items():
            contenders.setdefault(name, {})[key] = {case: summary(several) for case, several in runs.items()}
    return {
        "machine": {
            "cores": os.cpu_count(),
            "load": [round(min(load), 2), round(statistics.median(load), 2), round(max(load), 2)],
            "postgres": version,
            "python": platform.python_version(),
        },
        "plan": plan._asdict() | {"hands": HANDS, "workers": WORKERS},
        "contenders": contenders,
    }


def show(found: Figures) -> None:
    """The figures as tables."""
    machine, plan = found["machine"], found["plan"]
    print(
        f"PostgreSQL {machine['postgres']}, Python {machine['python']}, {machine['cores']} cores,"
        f" load {machine['load'][0]} to {machine['load'][2]}; medians of {plan['repeats']} runs (least to greatest)"
    )
    print(f"\ncommit to handler, milliseconds; one worker process of {plan['hands']}")
    print(f"{'':32}{'a second':>9}{'p50':>32}{'p99':>32}{'from COMMIT sent':>20}{'CPU ms':>16}")
    for name, each in found["contenders"].items():
        for rate, values in each.get("rates", {}).items():
            sent = values["from_sent"]
            held = (
                "" if values["held_per_second"] > 0.9 * float(rate) else f"   only {values['held_per_second']} emitted"
            )
            print(
                f"{name:32}{rate:>9}{_spread(values, 'p50_ms'):>32}{_spread(values, 'p99_ms'):>32}"
                f"{sent['p50_ms']:>11} {sent['p99_ms']:>8}{_cpu(values):>16}{held}"
            )
    print("\njobs a second, eight workers and a backlog")
    for name, each in found["contenders"].items():
        for shape, values in each.get("throughput", {}).items():
            print(f"{name:32}{shape:>16}{_spread(values, 'jobs_per_second'):>28}{_cpu(values):>16}")


def _spread(values: Figures, name: str) -> str:
    least, greatest = values["spread"][name]
    return f"{values[name]} ({least} to {greatest})"


def _cpu(values: Figures) -> str:
    return f"{values['client_cpu_ms']} + {values['server_cpu_ms']}"


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def plan_of(words: Sequence[str] | None = None) -> tuple[Plan, bool]:
    """The plan that the command line asks for, and whether the answer is to be JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1,50,500", help="handoffs a second; empty for none")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each rate is held")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3000, help="in the backlog; 0 for no throughput")
    parser.add_argument("--quick", action="store_true", help="within a minute: whether it works, and about how fast")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(words)
    rates = tuple(int(rate) for rate in given.rates.split(",") if rate)
    if given.quick:
        return Plan(rates, 1.0, 1, 200 if given.jobs else 0, ("1 process of 8",)), given.json
    return Plan(rates, given.seconds, given.repeats, given.jobs, tuple(SHAPES)), given.json


def main() -> None:
    plan, as_json = plan_of()
    found = measure(plan)
    if as_json:
        document.write("handoff", found["machine"], found)
    else:
        show(found)


if __name__ == "__main__":
    main()
