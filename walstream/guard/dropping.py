"""The one thing that the guard may do: drop the slot that the configuration names, above the bound that it names.

Dropping loses no event, for the ledger has them all. But a slot is somebody's, so nothing is dropped that was not
named; and while somebody reads it, only if the configuration says that this is meant as well, and then it is said who.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import psycopg2

from walstream.config import DropRule
from walstream.errors import Unavailable, WalstreamError
from walstream.figures import size
from walstream.source import slots
from walstream.source.facts import slot_facts
from walstream.source.failures import classify

from .policy import SlotReading

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.guard")

_LETS_GO: Final = 5.0  # seconds that a walsender may take to give its slot back


def due(rule: DropRule | None, slot: SlotReading) -> bool:
    """Whether the configuration wants this slot dropped. What is not known is not above anything."""
    return (
        rule is not None
        and slot.exists
        and slot.name == rule.slot
        and slot.retained is not None
        and slot.retained > rule.above
    )


def drop_if_due(connection: Connection, rule: DropRule | None, slot: SlotReading) -> tuple[bool, str]:
    """Drop the slot if the configuration wants it; return whether it was, and what there is to say (``""``: nothing).

    Args:
        connection: to the database that the slot belongs to, in autocommit.
    """
    if rule is None or not due(rule, slot):
        return False, ""
    # Without the figure, what is said each time is the same each time, and is logged once.
    above = f"it keeps more than the {size(rule.above)} of [guard] drop"
    if slot.active and not rule.active:
        return False, (
            f"slot {slot.name} is not dropped, although {above}: it is in use by {slot.holder or 'somebody'}, and the"
            " rule does not say `active = true`"
        )
    if slot.active:
        log.warning("slot %s is in use, and is dropped all the same (%s): ending %s", slot.name, above, slot.holder)
    try:
        dropped = _drop(connection, slot.name, end_reader=rule.active)
    except (WalstreamError, psycopg2.Error) as raised:
        error = classify(raised, doing=f"dropping slot {slot.name}")
        return False, f"slot {slot.name} could not be dropped, although {above}: {error}"
    used = f"; it was in use: {slot.holder}" if slot.active else ""
    return dropped, f"slot {slot.name} was dropped, with {size(slot.retained)}: {above}{used}"


def _drop(connection: Connection, name: str, *, end_reader: bool) -> bool:
    until = time.monotonic() + _LETS_GO
    while True:
        facts = slot_facts(connection, name)
        if end_reader and facts is not None and facts.holder is not None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_catalog.pg_terminate_backend(%s)", (facts.holder.pid,))
        try:
            return slots.drop(connection, name)
        except Unavailable:
            if not end_reader or time.monotonic() >= until:
                raise
        time.sleep(0.1)
