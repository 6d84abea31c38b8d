"""What a slot's figures mean: facts in, state, causes and remedies out. Pure: no I/O, no clock.

Rules that the tests hold:

- What the server does not say (NULL) is the worst that it can be, never zero: a slot without ``restart_lsn`` is taken
  for lost, one without a confirmed position for stuck in its creation, one without ``safe_wal_size`` under a bound for
  about to be lost.
- Worse facts never give a better state.
- A state that is not ``ok`` has a cause, and a cause has something to do about it.

How the WAL that a slot keeps comes about: it keeps everything from ``restart_lsn`` on. What ingest has not confirmed
yet is *behind*; what lies between ``restart_lsn`` and that is *held* by transactions that were open at the time
(prepared ones included), in any database.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from walstream.config import GuardSettings, MiB
from walstream.figures import duration, size

NOTICEABLE: Final = 64 * MiB
"""Four WAL segments: less than this is ordinary. The server moves ``restart_lsn`` in steps, every 15 s at the best."""

UNSEEN: Final = 1024 * MiB
"""Without a bound, and where the disk cannot be seen, so much retained WAL with a cause is critical."""

BRIEF: Final = 60.0
"""Seconds without a reader that a restart or a take-over may take."""

SETTLED: Final = 30.0
"""Seconds for which a transaction has to be open before held WAL is blamed on it: twice the server's step."""


class State(IntEnum):
    """How a slot stands, the worst last."""

    OK = 0
    WARN = 1
    CRITICAL = 2
    LOST = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """The oldest open transaction that has written something, in any database.

    Attributes:
        who: session or prepared transaction, with database and user.
        remedy: the statement that ends it.
        seconds: how long it is open; ``None`` where the role may not see it.
        prepared: no session has it; only COMMIT or ROLLBACK PREPARED ends it.
    """

    who: str
    remedy: str
    seconds: float | None
    prepared: bool


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One slot at one moment. Bytes are distances to the end of the WAL.

    Attributes:
        active: somebody reads it now; ``holder`` says who.
        wal_status: ``reserved``, ``extended``, ``unreserved`` or ``lost``.
        invalidation: why the server gave it up, or ``""``.
        retained: from ``restart_lsn``.
        behind: from the confirmed position.
        safe: WAL that may still be written before the slot is in danger.
        bound: ``max_slot_wal_keep_size``; ``None`` without one.
        free_disk: bytes on the disk of the WAL; ``None`` where that cannot be seen.
        inactive_seconds: without a reader; ``None`` while it has one, or where the version does not say.
        idle_timeout: ``idle_replication_slot_timeout`` in seconds (from 18 on); 0 is none.
        wal_rate: bytes of WAL a second; ``None`` before there are two samples.
        growth: by how much ``behind`` grew a second; ``None`` as well.
        transaction: the oldest open one.
        ours: it is the configuration's slot, so that what to do is known; another one is somebody else's.
        awaited: standbys (their slots) that the server waits for before it sends anything on this slot
            (``synchronized_standby_slots``, from 17 on) and that are not there.
    """

    name: str
    exists: bool = True
    database: str = ""
    active: bool = False
    holder: str = ""
    wal_status: str = ""
    invalidation: str = ""
    retained: int | None = None
    behind: int | None = None
    safe: int | None = None
    bound: int | None = None
    free_disk: int | None = None
    inactive_seconds: float | None = None
    idle_timeout: float = 0.0
    wal_rate: float | None = None
    growth: float | None = None
    transaction: OpenTransaction | None = None
    ours: bool = True
    awaited: tuple[str, ...] = ()

    @property
    def lost(self) -> bool:
        """It can never be read again."""
        return self.wal_status == "lost" or bool(self.invalidation) or self.retained is None

    @property
    def briefly_alone(self) -> bool:
        """Without a reader for no longer than a restart takes."""
        return not self.active and self.inactive_seconds is not None and self.inactive_seconds < BRIEF

    @property
    def room(self) -> int | None:
        """WAL that may still be written before the slot is lost or the disk is full; ``None`` if nobody knows."""
        limits = [self.free_disk] if self.bound is None else [self.safe, self.free_disk]
        known = [max(0, limit) for limit in limits if limit is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Attributes:
        cause: one of :data:`CAUSES`.
        state: how bad it is.
        found: what is the matter, for a person.
        remedy: what to do, a statement where there is one.
    """

    cause: str
    state: State
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy makes of one slot.

    Attributes:
        forecast: seconds until the slot is lost at the present rate; ``None`` if it will not be, or nobody knows.
    """

    reading: SlotReading
    findings: tuple[Finding, ...]
    forecast: float | None = None

    @property
    def state(self) -> State:
        return max((finding.state for finding in self.findings), default=State.OK)


CAUSES: Final = (
    "slot_missing",
    "slot_lost",
    "half_made",
    "nobody_connected",
    "standby_awaited",
    "long_transaction",
    "ingest_behind",
    "restart_held",
    "bound_missing",
)


def judge(slot: SlotReading, limits: GuardSettings, *, allow_unbounded: bool = False) -> Verdict:
    """Return what the facts mean.

    Args:
        allow_unbounded: the configuration accepts a server without a bound.
    """
    gone = _gone(slot)
    if gone is not None:
        return Verdict(slot, (gone,))
    pressures = list(_pressures(slot, limits))
    forecast = _forecast(slot, pressures)
    urgency = _urgency(slot, limits, any(pressure.state > State.OK for pressure in pressures), forecast)
    findings = []
    for index, pressure in enumerate(pressures):
        # What is urgent is urgent because of the first of them; the others are as bad as they are by themselves.
        state = max(pressure.state, urgency) if index == 0 else pressure.state
        if state > State.OK:
            found = f"{pressure.found}; {_figures(slot, forecast)}"
            findings.append(Finding(pressure.cause, state, found, pressure.remedy))
    if slot.bound is None and not allow_unbounded:
        findings.append(
            Finding(
                "bound_missing",
                State.WARN,
                "max_slot_wal_keep_size is -1: whatever keeps this slot from moving fills the disk",
                "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf(); (what the disk can spare;"
                " on managed Postgres a parameter of the provider's: `walstream doctor` says which)",
            )
        )
    return Verdict(slot, tuple(sorted(findings, key=lambda finding: -finding.state)), forecast)


@dataclass(frozen=True, slots=True)
class _Pressure:
    """A reason for WAL to be kept, as bad as it is by itself, and how fast it makes the slot's room shrink."""

    cause: str
    state: State
    speed: float | None
    found: str
    remedy: str


def _gone(slot: SlotReading) -> Finding | None:
    again = "`walstream run` makes a new one (so does `walstream init`), and what was missed is found in the ledger"
    if not slot.exists:
        return Finding("slot_missing", State.LOST, f"there is no slot {slot.name} on this server", again)
    if slot.lost:
        why = slot.invalidation or ("wal_status is lost" if slot.wal_status == "lost" else "restart_lsn is NULL")
        return Finding(
            "slot_lost",
            State.LOST,
            f"slot {slot.name} is lost ({why}): the server removed WAL that it needs",
            again if slot.ours else f"{_drop(slot)}; its consumer has to begin again",
        )
    return None


def _pressures(slot: SlotReading, limits: GuardSettings) -> Iterator[_Pressure]:
    """Every reason that applies, the one to look at first standing first. There is always one."""
    if slot.behind is None:
        yield _half_made(slot)
    if not slot.active:
        yield _unread(slot)
    if slot.awaited:
        yield _awaiting(slot)
    retained = slot.retained or 0
    behind = retained if slot.behind is None else slot.behind
    held = max(0, retained - behind)
    lagging = [(behind, _lagging(slot, behind))] if slot.active else []
    holding = [(held, _holding(slot, held, limits))] if held >= NOTICEABLE else []
    for _, pressure in sorted(lagging + holding, key=lambda each: -each[0]):
        yield pressure


def _half_made(slot: SlotReading) -> _Pressure:
    blocker = slot.transaction
    return _Pressure(
        "half_made",
        State.CRITICAL,
        slot.wal_rate,
        f"slot {slot.name} has no confirmed position: its creation waits for open transactions"
        + (f" ({blocker.who})" if blocker else "")
        + ", or whoever made it has died",
        f"if it is forgotten: {blocker.remedy}" if blocker else f"wait a minute, or {_drop(slot)}",
    )


def _unread(slot: SlotReading) -> _Pressure:
    seconds = slot.inactive_seconds
    return _Pressure(
        "nobody_connected",
        State.OK if slot.briefly_alone else State.WARN,
        0.0 if slot.briefly_alone else slot.wal_rate,
        f"nobody reads slot {slot.name}"
        + ("; this server does not say since when" if seconds is None else f" since {duration(seconds)}"),
        f"start {'`walstream run`' if slot.ours else 'its consumer'}; if nobody is to read it again: {_drop(slot)}",
    )


def _awaiting(slot: SlotReading) -> _Pressure:
    names = ", ".join(slot.awaited)
    return _Pressure(
        "standby_awaited",
        State.WARN,
        slot.wal_rate,
        f"slot {slot.name} sends nothing before standby {names} has it (synchronized_standby_slots), and nobody reads"
        " that slot",
        "start the standby; or, if it is not to come back: ALTER SYSTEM SET synchronized_standby_slots = '' (or the"
        " standbys that are left); SELECT pg_reload_conf(); a fail-over can then lose events that are out already",
    )


def _holding(slot: SlotReading, held: int, limits: GuardSettings) -> _Pressure:
    blocker = slot.transaction
    seconds = 0.0 if blocker is None else blocker.seconds
    if blocker is None or (seconds is not None and seconds < SETTLED):
        # It moves in steps, so the rate says nothing about it: only how much there is.
        return _Pressure(
            "restart_held",
            State.OK,
            0.0,
            f"{size(held)} that were confirmed are still kept for slot {slot.name}, and no old transaction is open: the"
            " server moves restart_lsn when it next logs the running transactions",
            "CHECKPOINT; if that changes nothing, see what the walsender decodes (pg_stat_replication_slots)",
        )
    kind = "prepared transaction" if blocker.prepared else "transaction"
    age = "for nobody can see how long" if seconds is None else f"for {duration(seconds)}"
    return _Pressure(
        "long_transaction",
        State.OK if seconds is not None and seconds < limits.transaction_seconds else State.WARN,
        slot.wal_rate,
        f"a {kind} that is open {age} holds {size(held)} for slot {slot.name}: {blocker.who}",
        f"if it is forgotten: {blocker.remedy}",
    )


def _lagging(slot: SlotReading, behind: int) -> _Pressure:
    speed = slot.wal_rate if slot.growth is None else max(0.0, slot.growth)
    return _Pressure(
        "ingest_behind",
        State.OK,
        speed if behind >= NOTICEABLE else 0.0,
        f"{'ingest' if slot.ours else 'the reader'} is {size(behind)} behind on slot {slot.name}"
        + (f" ({slot.holder})" if slot.holder else ""),
        ("`walstream status` says whether it works; if" if slot.ours else "look whether it works; if")
        + " it cannot keep up, see what else writes WAL on this server (the slot reads all of it), and whether it has a"
        " core of its own",
    )


def _forecast(slot: SlotReading, pressures: list[_Pressure]) -> float | None:
    """Seconds until the slot is lost if nothing changes."""
    ends = []
    speed = max(pressure.speed or 0.0 for pressure in pressures)
    if slot.room is not None and speed > 0:
        ends.append(slot.room / speed)
    if slot.idle_timeout > 0 and not slot.active and not slot.briefly_alone:
        # Where nobody says since when it is idle, the time may be over.
        idle = slot.idle_timeout if slot.inactive_seconds is None else slot.inactive_seconds
        ends.append(max(0.0, slot.idle_timeout - idle))
    return min(ends, default=None)


def _urgency(slot: SlotReading, limits: GuardSettings, pressed: bool, forecast: float | None) -> State:
    """How bad it is by what is left, whatever the cause."""
    unsafe = slot.bound is not None and slot.safe is None
    if unsafe or slot.wal_status not in ("reserved", "extended"):
        return State.CRITICAL
    found = State.OK
    retained, room = slot.retained or 0, slot.room
    if room is None:
        if pressed or retained >= NOTICEABLE:
            found = State.CRITICAL if retained >= UNSEEN else State.WARN
    else:
        share = 1.0 if room == 0 else retained / (retained + room)
        found = _step(share >= limits.warn_share, share >= limits.critical_share)
    if forecast is not None:
        found = max(found, _step(forecast <= limits.warn_seconds, forecast <= limits.critical_seconds))
    return found


def _step(warn: bool, critical: bool) -> State:
    return State.CRITICAL if critical else State.WARN if warn else State.OK


def _figures(slot: SlotReading, forecast: float | None) -> str:
    """The figures behind a finding, for a person."""
    parts = [f"{size(slot.retained)} retained" + ("" if slot.bound is None else f" of {size(slot.bound)}")]
    if slot.free_disk is not None and slot.room == max(0, slot.free_disk):
        parts.append(f"{size(slot.free_disk)} free on the disk")
    elif slot.bound is None:
        parts.append("the disk cannot be seen from here")
    if slot.wal_rate is not None:
        parts.append(f"WAL grows by {size(int(slot.wal_rate))} a second")
    if slot.wal_status == "unreserved":
        parts.append("the server may remove what it needs at the next checkpoint")
    if forecast is not None:
        parts.append(f"lost in {duration(forecast)} if this goes on")
    return ", ".join(parts)


def _drop(slot: SlotReading) -> str:
    return f"SELECT pg_drop_replication_slot('{slot.name}')"
