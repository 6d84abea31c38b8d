"""Whether standbys keep a copy of the slot (17 and newer), so that it is there after a fail-over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .checks import Exam, Finding

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.source.facts import ServerFacts, SlotFacts

SINCE: Final = 17
"""The first version that has such slots (documentation, 47.2.3 "Replication Slot Synchronization")."""


def due(settings: Settings, slot: SlotFacts | None, server: ServerFacts) -> bool | None:
    """What a slot that is there has to be changed to; ``None`` if it is as it should be, or there is none."""
    if slot is None or slot.lost or server.major < SINCE:
        return None
    wanted = settings.failover_slot != "off"
    return wanted if slot.failover != wanted else None


def change(settings: Settings, wanted: bool) -> str:
    """Change the slot; return what became of it. A slot that is read cannot be changed."""
    from walstream.errors import Unavailable
    from walstream.source.slots import set_failover

    try:
        set_failover(
            settings.replication_dsn or settings.require_dsn(),
            settings.slot,
            wanted,
            connect_timeout=settings.connect_timeout,
        )
    except Unavailable as error:
        return (
            f"slot {settings.slot} is {'not ' if wanted else ''}for fail-over, and cannot be changed now ({error}):"
            " stop `walstream run`, and repeat `walstream init`"
        )
    return f"standbys {'may' if wanted else 'no longer'} keep a copy of slot {settings.slot} now"


def findings(exam: Exam) -> Iterator[Finding]:
    """Whether the slot survives a fail-over, and whether what was delivered does."""
    wanted = due(exam.settings, exam.slot, exam.server)
    standbys = exam.rows(
        "SELECT r.application_name FROM pg_catalog.pg_stat_replication AS r"
        " WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_replication_slots AS s"
        " WHERE s.active_pid = r.pid AND s.slot_type = 'logical') AND r.application_name NOT LIKE 'walstream:%%'"
    )
    if exam.slot is None or (exam.server.major < SINCE and not standbys):
        return
    name = "fail-over slot"
    if exam.server.major < SINCE:
        yield Finding(
            name,
            "ok",
            f"PostgreSQL {exam.server.major} has none: after a fail-over a new slot is made, and what it missed is"
            " found in the ledger",
        )
    elif wanted is not None:
        yield Finding(
            name,
            "warning",
            f"{exam.settings.slot} is {'not ' if wanted else ''}kept by standbys, and failover_slot is"
            f" {exam.settings.failover_slot}",
            "stop `walstream run`, then walstream init",
        )
    elif exam.slot.failover and standbys and not exam.server.settings.get("synchronized_standby_slots"):
        yield Finding(
            name,
            "warning",
            f"standbys may keep a copy of {exam.settings.slot}, but nothing keeps walstream from delivering what they"
            " do not have yet: a fail-over can then lose events that are out already",
            exam.provider.set_parameter("synchronized_standby_slots", "the physical slots of the standbys"),
        )
    else:
        yield Finding(name, "ok", "standbys may keep a copy" if exam.slot.failover else "off, as configured")
