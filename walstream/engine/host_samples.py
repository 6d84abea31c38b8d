"""How a host stands, as numbers for metrics. From memory alone: nothing here asks the server or waits for a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from walstream.metrics import Sample

from .host import Host
from .ingest_supervisor import INGEST_STATES

PROJECTOR_STATES: Final = (*("starting", "hot", "cold", "retrying", "paused", "standby", "halted", "hung", "stopped"),)


def host_samples(host: Host) -> Iterator[Sample]:
    """The gauges of ingest and projectors; their counters stand in the process's metrics."""
    ingest, runners = host.ingest, host.runners
    if host.with_ingest:
        present = "starting" if ingest is None else ingest.state.state
        for state in INGEST_STATES:
            yield _gauge("ingest_state", float(state == present), state=state)
    silence = None if ingest is None else ingest.silence
    for name, value in (
        ("ingest_silence_seconds", silence),
        ("ingest_buffer_bytes", host.buffer_bytes),
        ("order_head", host.head),
    ):
        if value is not None:
            yield _gauge(name, float(value))
    for projector, (found, _) in ({} if runners is None else runners.states()).items():
        for state in PROJECTOR_STATES:
            yield _gauge("projector_state", float(state == found), projector=projector, state=state)


def _gauge(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, tuple(sorted(labels.items())), value, counter=False)
