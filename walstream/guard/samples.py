"""What the guard found last, as metrics. NULL figures are NaN there: no comparison with one is true, and none is 0."""

from __future__ import annotations

import math
from collections.abc import Iterator

from walstream.metrics import Sample

from .policy import CAUSES, State, Verdict
from .watch import Report


def samples(report: Report | None) -> Iterator[Sample]:
    """The metrics of a report; without one, only that nothing is known."""
    yield _gauge("guard_up", float(report is not None and report.error is None))
    if report is None:
        return
    yield _gauge("guard_looked_timestamp_seconds", report.at)
    if report.error is not None:
        return  # old figures would look like present ones
    yield _gauge("wal_bytes_per_second", _known(report.wal_rate))
    if report.verdicts:
        oldest = report.verdicts[0].reading.transaction
        yield _gauge("oldest_transaction_seconds", 0.0 if oldest is None else _known(oldest.seconds))
    for verdict in report.verdicts:
        yield from _of_slot(verdict)
    for storm in report.storms:
        yield _gauge("storm_ratio", storm.times, kind=storm.kind, agent=storm.name)


def _of_slot(verdict: Verdict) -> Iterator[Sample]:
    slot = verdict.reading
    for state in State:
        yield _gauge("slot_state", float(state is verdict.state), slot=slot.name, state=state.word)
    named = {finding.cause for finding in verdict.findings}
    for cause in CAUSES:
        yield _gauge("slot_cause", float(cause in named), slot=slot.name, cause=cause)
    if not slot.exists:
        return
    yield _gauge("slot_active", float(slot.active), slot=slot.name)
    yield _gauge("slot_retained_bytes", _known(slot.retained), slot=slot.name)
    yield _gauge("slot_behind_bytes", _known(slot.behind), slot=slot.name)
    yield _gauge("slot_room_bytes", _known(slot.room), slot=slot.name)
    yield _gauge("slot_bound_bytes", math.inf if slot.bound is None else slot.bound, slot=slot.name)
    yield _gauge("slot_seconds_to_loss", _to_loss(verdict), slot=slot.name)
    yield _gauge("slot_inactive_seconds", 0.0 if slot.active else _known(slot.inactive_seconds), slot=slot.name)


def _to_loss(verdict: Verdict) -> float:
    if verdict.state is State.LOST:
        return 0.0
    return math.inf if verdict.forecast is None else verdict.forecast


def _known(figure: float | None) -> float:
    return math.nan if figure is None else float(figure)


def _gauge(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, tuple(sorted(labels.items())), value, counter=False)
