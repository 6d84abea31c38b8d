"""How a worker stands, for probes and metrics. From memory alone: nothing here asks the server or a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from walstream.metrics import METRICS, Sample
from walstream.monitoring.health import Health

from .hand import Hand
from .shift import Options, Shift

HAND_STATES: Final = ("waiting", "busy", "away")
OUTCOMES: Final = ("completed", "failed", "later", "lost")


def begin_counting(agent: str) -> None:
    """Bring the counters to 0: one that begins with its first event hides that one from whoever watches it rise."""
    for outcome in OUTCOMES:
        METRICS.add("worker_turns_total", 0, agent=agent, outcome=outcome)
    METRICS.add("worker_turn_seconds_total", 0, agent=agent)


def worker_health(options: Options, shift: Shift | None, *, ended: bool) -> Health:
    """Alive while nothing has ended it; ready while its hands can claim jobs. ``shift`` is ``None`` before it began."""
    if shift is None:
        return Health(not ended, {}, starting=True)
    hands = shift.hands
    dead = sum(not hand.alive for hand in hands)
    troubles = [hand.trouble for hand in hands if hand.trouble is not None]
    part: dict[str, Any] = {
        "ready": not dead and not troubles,
        "state": "failed" if ended else "away" if dead or troubles else "working",
        "busy": sum(hand.busy for hand in hands),
        "hands": len(hands),
        "error": troubles[0] if troubles else f"{dead} of its threads have ended" if dead else None,
    }
    return Health(not ended and not dead, {f"worker:{options.agent}": part})


def worker_samples(options: Options, shift: Shift | None) -> Iterator[Sample]:
    """The gauges of its hands; the counters of turns stand in the process's metrics."""
    states = [_state_of(hand) for hand in shift.hands] if shift is not None else []
    for state in HAND_STATES:
        labels = (("agent", options.agent), ("state", state))
        yield Sample("worker_hands", labels, float(states.count(state)), counter=False)


def _state_of(hand: Hand) -> str:
    return "busy" if hand.busy else "away" if hand.trouble is not None or not hand.alive else "waiting"
