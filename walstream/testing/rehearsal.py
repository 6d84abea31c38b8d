"""Whether a projector stands what will happen to it: kills, deliveries that come again, restarts. What it leaves behind
is compared with what an undisturbed life leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from walstream.engine.projector import Projector
from walstream.event import Event

from .lives import Delivery, Ended, Fault, live

FAULTS: Final = (
    "kill",
    "kill_before_cursor",
    "kill_after_cursor",
    "redeliver",
    "one_by_one",
    "restart",
)
"""What :func:`rehearse` injects: SIGKILL in the middle of ``project``, between its effect and the cursor, or right
after the cursor has moved; a batch that is given again because the connection was lost, or one by one because another
event of it failed; and a clean end, followed by a new object in a new process."""

_CALM: Final = 0.35  # so many deliveries have no fault
_LARGEST: Final = 20
_DEATHS: Final = frozenset({"kill", "kill_before_cursor", "kill_after_cursor"})


def rehearse(
    make: Callable[[], Projector],
    events: Sequence[Event],
    outcome: Callable[[], Any],
    *,
    reset: Callable[[], object],
    connect: Callable[[], Any] | None = None,
    rounds: int = 20,
    seed: int = 1,
    faults: Collection[str] = FAULTS,
) -> list[str]:
    """Let a projector live through ``events`` again and again, with faults, as the runner would deliver them.

    Each life is a process of its own (forked, so this needs Linux or macOS): ``make()``, ``setup``, batches of random
    sizes, hot and cold, and its end. Who is killed is made anew and goes on behind the last cursor; what a
    transactional projector has written since then is rolled back, what an external one has done is done. After each
    round ``outcome()`` must be what it was after a life without any fault.

    Args:
        make: makes the projector, in the child. It must not use what the parent holds open.
        events: what it is given, in order; :func:`~walstream.testing.make_event` makes them. Of other types than it
            subscribes to, it gets none.
        outcome: reads what the projector has left behind: rows of its table, a file, what a fake server received. It is
            called here, and compared with ``==``. An external projector gets some events twice, so leave out what only
            says how often: compare a set of keys, or what the other side makes of them.
        reset: takes away what the projector has left behind; called before each round.
        connect: makes a connection (psycopg2), for a transactional projector; what it returns is committed or rolled
            back here.
        rounds: how often, each with faults of its own.
        seed: of everything that is drawn; the same seed draws the same faults.
        faults: some of :data:`FAULTS`.

    Returns:
        what was injected, a line a fault.

    Raises:
        AssertionError: it left something else behind, or raised. The message says after which faults, and which seed.
        ValueError: a fault that does not exist, or no events.
    """
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown or not events:
        raise ValueError(f"there is no fault {', '.join(unknown)}" if unknown else "there are no events to rehearse")
    probe = make()
    wanted = [event for event in events if not probe.events or event.event_type in probe.events]
    if not wanted:
        raise ValueError(f"projector {probe.name!r} subscribes to none of these events")

    def run(deliveries: Sequence[Delivery], lines_an_event: float) -> Ended:
        return live(make, connect, wanted, deliveries, lines_an_event)

    reset()
    calm = run(list(_whole(len(wanted), probe.batch)), 0)
    if calm.error:
        raise AssertionError(f"it failed although nothing was injected: {calm.error}")
    expected = outcome()
    chance = random.Random(seed)
    told: list[str] = []
    for number in range(1, rounds + 1):
        reset()
        log = [f"round {number} of seed {seed}"]
        _round(run, len(wanted), calm.lines / len(wanted), sorted(faults), chance, log)
        found = outcome()
        if found != expected:
            raise AssertionError("\n".join([*log, f"left behind: {found!r}", f"instead of:  {expected!r}"]))
        told += log
    return told


def _round(
    run: Callable[[Sequence[Delivery], float], Ended],
    total: int,
    lines_an_event: float,
    faults: Sequence[str],
    chance: random.Random,
    log: list[str],
) -> None:
    position = 0
    while position < total:
        deliveries = list(_life(position, total, faults, chance))
        log += [
            f"events {each.start + 1} to {each.end}, {'hot' if each.hot else 'cold'}: {each.fault.kind}"
            for each in deliveries
            if each.fault is not None
        ]
        ended = run(deliveries, lines_an_event)
        if ended.error:
            raise AssertionError("\n".join([*log, ended.error]))
        position = ended.position


def _whole(total: int, batch: int) -> Iterator[Delivery]:
    for start in range(0, total, batch):
        yield Delivery(start, min(total, start + batch), hot=True)


def _life(position: int, total: int, faults: Sequence[str], chance: random.Random) -> Iterator[Delivery]:
    """The deliveries of one life: up to one that kills it or ends it, or to the last event."""
    while position < total:
        end = min(total, position + chance.randint(1, _LARGEST))
        fault = None
        if faults and chance.random() > _CALM:
            fault = Fault(chance.choice(faults), chance.random())
        yield Delivery(position, end, chance.random() < 0.5, fault)
        position = end
        if fault is not None and (fault.kind in _DEATHS or fault.kind == "restart"):
            return
