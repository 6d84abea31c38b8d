"""What a chaos run injects, drawn from its seed alone: the same seed gives the same steps, whatever becomes of them.

(When a step meets the stream, in the middle of which statement, is up to the machine; so a seed that found something is
worth running more than once.)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

LEASE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Step:
    """One fault.

    Attributes:
        kind: a name of :data:`KINDS`.
        choices: what was drawn for it.
        pause: seconds before it.
        alone: the stream is to have recovered from it before the next one comes.
    """

    kind: str
    choices: dict[str, Any] = field(default_factory=dict)
    pause: float = 0.0
    alone: bool = True

    def __str__(self) -> str:
        words = ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in self.choices.items())
        return f"{self.kind} ({words})" if words else self.kind


KINDS: Final[dict[str, str]] = {
    "kill": "SIGKILL of the consumer, or of the process that reads without a slot",
    "stop": "SIGSTOP of one of them, for less or more than its lease, then SIGCONT",
    "walsender": "the server ends the consumer's walsender",
    "backend": "the server ends another session of the consumer's",
    "crash": "immediate shutdown of the server, and its start",
    "cut": "every connection is reset",
    "stall": "no byte passes for a while, in either direction",
    "half_open": "connections are lost, and one side, or neither, is told",
    "slow": "each piece of data takes long, and there are few bytes a second",
    "disk_full": "the disk of the audit trail is full for a while",
    "two_consumers": "a second consumer stands by, and then the one that works is killed, stopped or told to end",
    "worker_kill": "SIGKILL of a worker, or SIGSTOP for longer than the lease of its jobs",
    "slot_dropped": "the slot is dropped under a living consumer",
    "slot_advanced": "the slot is moved past events that were never read",
    "slot_invalidated": "the server gives up WAL that the slot needs, while nobody reads",
    "publication_dropped": "the publication is dropped and, some seconds later, made again",
    "publication_emptied": "the table is taken out of the publication for a while",
}

BIRTHS: Final = frozenset({"slot_dropped", "slot_invalidated", "publication_dropped"})
"""Kinds after which the consumer makes the slot anew. It gives up after five such within ten minutes (ADR 0020)."""

TERMINAL: Final[dict[str, frozenset[int]]] = {"publication_dropped": frozenset({3})}
"""Exit codes of a consumer that are right while a fault lasts: only a person can make what is missing."""


def steps(seed: int, kinds: Sequence[str] = ()) -> Iterator[Step]:
    """The steps of a run, without end: in each round every kind once, in an order of its own.

    Args:
        kinds: some of :data:`KINDS`; all of them without it.
    """
    chance = random.Random(seed)
    chosen = [kind for kind in KINDS if not kinds or kind in kinds]
    while True:
        for kind in chance.sample(chosen, len(chosen)):
            pause = chance.uniform(0, 1.5)
            yield Step(kind, _choices(kind, chance), pause, alone=chance.random() < 0.75)


def _choices(kind: str, chance: random.Random) -> dict[str, Any]:
    match kind:
        case "kill":
            return {"who": chance.choice(("consumer", "consumer", "reader")), "seconds": chance.uniform(0, 1)}
        case "stop":
            long = chance.random() < 0.5
            seconds = chance.uniform(1.1, 2.5) * LEASE_SECONDS if long else chance.uniform(0.2, 0.8) * LEASE_SECONDS
            return {"who": chance.choice(("consumer", "consumer", "reader")), "seconds": seconds}
        case "worker_kill":
            how = chance.choice(("kill", "kill", "stop"))
            seconds = chance.uniform(1.1, 2.0) * LEASE_SECONDS if how == "stop" else chance.uniform(0, 1)
            return {"which": chance.randrange(2), "how": how, "seconds": seconds}
        case "backend":
            return {"which": chance.randrange(1000)}
        case "stall":
            return {"seconds": chance.choice((chance.uniform(0.2, 2), chance.uniform(3, 12)))}
        case "half_open":
            return {"told": chance.choice(("client", "server", "both"))}
        case "slow":
            return {
                "seconds": chance.uniform(2, 6),
                "delay": chance.uniform(0.005, 0.1),
                "rate": chance.choice((30_000.0, 200_000.0, 2_000_000.0)),
            }
        case "disk_full" | "slot_advanced" | "publication_dropped" | "publication_emptied":
            return {"seconds": chance.uniform(0.5, 5)}
        case "two_consumers":
            return {
                "how": chance.choice(("kill", "stop", "end")),
                "seconds": chance.uniform(0, 2),
            }
        case _:
            return {}
