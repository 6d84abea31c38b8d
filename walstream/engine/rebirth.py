"""What a running ingest does about a slot that cannot be read any further: it makes a new one, and takes what that one
will not send from the ledger, before it streams.

Automatic, because it loses nothing: every row that the lost slot would have sent stands in the ledger. Bounded, because
a slot that is lost again and again, or can never be made, is for a person: then the process ends with the reason and
what to run. Only a slot of the stream's own name, plugin and database is ever dropped, and only while nobody reads it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import psycopg2

from walstream.config import Settings, quote
from walstream.errors import ConfigError, PublicationGone, SlotError, SlotGone, Unavailable, WalstreamError
from walstream.ledger.identity import Identity
from walstream.lsn import format_lsn
from walstream.source.failures import classify

from .birth import Birth, BirthStopped, Born, InTheWay, SlotMaker
from .leadership import Lease

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.ingest")

WAIT_SECONDS: Final = 60.0
"""How long one attempt waits for open transactions."""

MOST_ATTEMPTS: Final = 10
"""Attempts that fail one after the other, each with a pause before the next."""

MOST_BIRTHS: Final = 5
WITHIN_SECONDS: Final = 600.0
"""So many new slots in so much time are not an accident any more."""


class Rebirth:
    """Sees to it that a session begins with a slot that can be read.

    One for all sessions of a process, because it counts them.

    Args:
        settings: of the stream.
        preflight: checks everything; raises :class:`SlotGone` for what a new slot heals. Returns whether somebody else
            has moved the slot.
        maker: makes the slot.
        stopped: whether the process was told to stop.
    """

    def __init__(
        self,
        settings: Settings,
        preflight: Callable[[Settings, Connection], bool],
        maker: SlotMaker,
        stopped: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._preflight = preflight
        self._maker = maker
        self._stopped = stopped
        self._refused: SlotGone | PublicationGone | None = None
        self._failed = 0
        self._births: deque[float] = deque()

    @property
    def automatic(self) -> bool:
        """Whether the configuration leaves it to `run`."""
        return self._settings.recover_slot == "auto"

    def note(self, error: WalstreamError) -> bool:
        """A session ended with ``error``; ``True`` if the next one will try to mend it.

        The look before that session may find nothing wrong: a publication that is younger than the slot's position, or
        a WAL file that is missing, shows only when the slot is read.
        """
        if not isinstance(error, (SlotGone, PublicationGone)) or error is self._refused or not self.automatic:
            return False  # also one that this very object has raised: it could not be mended
        self._refused = error
        return True

    def ensure(
        self,
        connection: Connection,
        lease: Lease,
        identity: Identity,
        *,
        on_begin: Callable[[str], None],
        on_filled: Callable[[], None],
    ) -> bool:
        """Return, once the slot can be streamed from, whether somebody else has moved it.

        Args:
            connection: that holds the lease.
            lease: taken.
            identity: as it stands now.
            on_begin: called with the cause before a slot is made.
            on_filled: called whenever something was ordered.

        Raises:
            SlotError: it cannot be mended here (any more); the hint says what to run.
            Unavailable: not at this moment.
            WalstreamError: what else the preflight finds.
        """
        moved, cause = self._look(connection, identity)
        if cause is None:
            self._refused = None
            return moved
        if not self.automatic:
            raise SlotError(cause, hint="recover_slot is `never`: run `walstream init`, which loses no event")
        self._check_bounds(cause)
        self._check_privileges(connection)
        log.warning("slot %s is made anew: %s", self._settings.slot, cause)
        on_begin(cause)
        born = self._bear(connection, lease, cause, on_filled)
        self._refused = None
        log.warning(
            "slot %s sends what commits from %s on; taken from the ledger, flagged recovered: %s; cause: %s",
            born.slot,
            format_lsn(born.consistent_point),
            born.filled,
            cause,
        )
        return self._preflight(self._settings, connection)

    def _look(self, connection: Connection, identity: Identity) -> tuple[bool, str | None]:
        """Whether somebody has moved the slot, and why a new one is needed (``None`` if none is)."""
        moved, cause = False, str(self._refused) if isinstance(self._refused, SlotGone) else None
        published = False
        try:
            try:
                moved = self._preflight(self._settings, connection)
            except PublicationGone as error:
                self._publish(connection, error)
                published = True
                moved = self._preflight(self._settings, connection)
                if error.statement.startswith("CREATE"):
                    cause = str(error)  # the slot is older than the new one, and can read nothing through it
        except SlotGone as error:
            cause = str(error)
        if identity.slot_state != "ready":
            cause = f"its birth was cut short (state {identity.slot_state})"
        return moved or published or isinstance(self._refused, PublicationGone), cause

    def _publish(self, connection: Connection, error: PublicationGone) -> None:
        """Put the publication right, if that is left to us and this login may.

        Raises:
            PublicationGone: it is not, or it may not.
        """
        self._refused = error
        if not self.automatic:
            raise error
        try:
            with connection.cursor() as cur:
                cur.execute(error.statement)
        except psycopg2.errors.InsufficientPrivilege as refused:
            raise error from refused
        except psycopg2.Error as failed:
            raise classify(failed, doing=error.statement) from failed
        log.warning("%s; done: %s", error, error.statement)

    def _bear(self, connection: Connection, lease: Lease, cause: str, on_filled: Callable[[], None]) -> Born:
        birth = Birth(
            self._settings,
            connection,
            lease,
            self._maker,
            timeout=WAIT_SECONDS,
            progress=_Logged(),
            state="recovering",
            cause=cause,
            stopped=self._stopped,
            on_filled=on_filled,
        )
        try:
            born = birth.run()
        except BirthStopped:
            raise
        except Unavailable as error:
            # A server that is away is waited for as long as it takes; a slot that it does not let us make is not.
            if not _answers(connection):
                raise
            self._failed += 1
            if self._failed < MOST_ATTEMPTS:
                raise
            raise SlotError(
                f"slot {self._settings.slot} could not be made anew in {self._failed} attempts; the last: {error}",
                hint=f"{error.hint}; then start `walstream run` again, or `walstream init --wait 3600`. What stands in"
                " the ledger so far has been delivered",
            ) from error
        self._failed = 0
        self._births.append(time.monotonic())
        return born

    def _check_bounds(self, cause: str) -> None:
        """Not again and again.

        Raises:
            SlotError: it was made anew too often lately.
        """
        while self._births and time.monotonic() - self._births[0] > WITHIN_SECONDS:
            self._births.popleft()
        if len(self._births) >= MOST_BIRTHS:
            raise SlotError(
                f"slot {self._settings.slot} was made anew {len(self._births)} times within"
                f" {WITHIN_SECONDS / 60:.0f} minutes, and is gone again: {cause}",
                hint="find out who drops it (the server's log), or raise max_slot_wal_keep_size above what is written"
                " while ingest is a moment behind; then start `walstream run` again, which begins with a new slot",
            )

    def _check_privileges(self, connection: Connection) -> None:
        """Before anything is dropped: the state has to be written down.

        Raises:
            ConfigError: this role may not.
        """
        identity = f"{quote(self._settings.namespace)}.identity"
        with connection.cursor() as cur:
            cur.execute(
                "SELECT current_user, pg_catalog.has_column_privilege(%s, 'slot_state', 'UPDATE')",
                (identity,),
            )
            row = cur.fetchone()
        if row is not None and not row[1]:
            raise ConfigError(
                f"slot {self._settings.slot} has to be made anew, and {row[0]} may not write down that it is",
                hint=f"GRANT UPDATE (slot_state) ON {identity} TO {quote(row[0])} (or `walstream init --grants"
                f" {row[0]}`) as the owner, and start again; or `walstream init` as the owner, which makes the slot",
            )


class _Logged:
    """Says how a birth gets on."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._rows = 0
        self._said = time.monotonic()

    def begin(self, what: str, total: int | None) -> None:
        log.info("%s%s", what, "" if total is None else f", about {total:,}")

    def advance(self, rows: int) -> None:
        self._rows += rows
        if time.monotonic() - self._said >= 10.0:
            self._said = time.monotonic()
            log.info("%s rows are ordered", f"{self._rows:,}")

    def waiting(self, blockers: Sequence[InTheWay]) -> None:
        for blocker in blockers:
            if str(blocker) not in self._told:
                self._told.add(str(blocker))
                log.warning("the new slot waits for %s; to end it: %s", blocker, blocker.remedy)


def _answers(connection: Connection) -> bool:
    try:
        with connection.cursor() as cur:
            cur.execute("SELECT 1")
    except (psycopg2.Error, WalstreamError):
        return False
    return True
