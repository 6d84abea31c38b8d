"""Every metric that walstream exports: its name, kind, labels and meaning. docs/operations.md has the same table.

A name is a promise to whoever wrote an alert with it. What is counted somewhere and does not stand here is not
exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "walstream_"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric.

    Attributes:
        name: without the prefix; counters end in ``_total``.
        labels: the labels that each of its samples has.
    """

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    meaning: str


CATALOGUE: Final[tuple[Described, ...]] = (
    Described("build_info", "gauge", ("version",), "1; the version of walstream"),
    Described(
        "ingest_state", "gauge", ("state",), "1 for the state that ingest of this process is in, 0 for the others"
    ),
    Described("ingest_silence_seconds", "gauge", (), "since anything arrived on the stream; only while it streams"),
    Described("ingest_events_total", "counter", (), "events that this process ordered"),
    Described("ingest_recovered_total", "counter", (), "of these, events that the slot missed"),
    Described("ingest_violations_total", "counter", (), "changes that an append-only ledger should never show"),
    Described("ledger_violations_open", "gauge", (), "violations that nobody has acknowledged, as ingest saw last"),
    Described(
        "ingest_reconnects_total", "counter", (), "sessions of ingest that ended with an error and were tried again"
    ),
    Described("ingest_buffer_bytes", "gauge", (), "hot buffer: events in memory"),
    Described("order_head", "gauge", (), "the last offset; only where ingest streams"),
    Described(
        "projector_state", "gauge", ("projector", "state"), "1 for the state that it is in here, 0 for the others"
    ),
    Described("projector_events_total", "counter", ("projector",), "events that were projected here"),
    Described(
        "projector_position",
        "gauge",
        ("projector", "lane"),
        "the last offset that is done, in the lanes that this process had",
    ),
    Described(
        "projector_lag_seconds",
        "gauge",
        ("projector", "lane"),
        "age of the last event when it was projected; stands still when nothing is",
    ),
    Described(
        "projector_parked_total", "counter", ("projector",), "events that could not be projected and were parked"
    ),
    Described("projector_unparked_total", "counter", ("projector",), "parked events that were projected after all"),
    Described("projector_parked_sessions", "gauge", ("projector",), "sessions that are parked, as seen last here"),
    Described("projector_parked_events", "gauge", ("projector",), "their events: failed ones, and what waits behind"),
    Described("worker_hands", "gauge", ("agent", "state"), "how many of its hands are in that state"),
    Described("worker_turns_total", "counter", ("agent", "outcome"), "turns that ended here, by how they ended"),
    Described("worker_turn_seconds_total", "counter", ("agent",), "time that these turns took"),
    Described("guard_up", "gauge", (), "1 if the last look at the slots succeeded"),
    Described("guard_looked_timestamp_seconds", "gauge", (), "when that was, in seconds since 1970"),
    Described("slot_state", "gauge", ("slot", "state"), "1 for the state that the guard sees, 0 for the others"),
    Described("slot_cause", "gauge", ("slot", "cause"), "1 for each cause that the guard names, 0 for the others"),
    Described("slot_active", "gauge", ("slot",), "1 while somebody reads it"),
    Described("slot_retained_bytes", "gauge", ("slot",), "WAL that it keeps, from restart_lsn on; NaN if nobody knows"),
    Described("slot_behind_bytes", "gauge", ("slot",), "WAL that is not confirmed; NaN if nobody knows"),
    Described("slot_room_bytes", "gauge", ("slot",), "WAL until it is lost or the disk is full; NaN if nobody knows"),
    Described("slot_bound_bytes", "gauge", ("slot",), "max_slot_wal_keep_size; +Inf without"),
    Described("slot_seconds_to_loss", "gauge", ("slot",), "at the present rate; +Inf if it is not on its way there"),
    Described("slot_inactive_seconds", "gauge", ("slot",), "without a reader; NaN where the server does not say"),
    Described(
        "oldest_transaction_seconds",
        "gauge",
        (),
        "open and has written; 0 if none; since the guard saw it first, where its start may not be seen",
    ),
    Described("wal_bytes_per_second", "gauge", (), "over the last minute; NaN before there are two looks"),
    Described("storm_ratio", "gauge", ("kind", "agent"), "times its own recent past; only while there is a storm"),
)

BY_NAME: Final = {described.name: described for described in CATALOGUE}
