"""Rebuild a projector beside the live one: replay its events into shadow tables, compare, put them in place.

The replay is a projector of its own, under a name that no user can give (``NAME~rebuild``), so everything that holds
for projectors holds for it: cursor, fencing, deadline, narrowing, parking. It chases the live one; only for the last
stretch is the live one paused, so that both stand at the same offset when they are compared and swapped, in one
transaction. With lanes, at the same offset lane by lane: the replay runs in one until the live lanes part.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psycopg2

from walstream.config import Settings, quote
from walstream.errors import ConfigError, Unavailable
from walstream.metrics import Metrics
from walstream.source.failures import classify

from .context import REBUILD_SUFFIX
from .cursors import Cursors
from .delivery import Delivery
from .event_loop import LoopThread
from .leadership import Lease, owner_name
from .parking import Parking
from .projector import Options, Projector
from .retry import describe
from .runner import LaneRunner
from .shadow import Difference, Shadow
from .source import EventSource
from .supply import Supply

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.rebuild")

_LEASE_SECONDS = 86_400.0  # it ends with the connection it was taken on, which is the rule that counts here
_CLOSE = 5_000  # events behind the live one at which that one is paused
_PAUSE_SECONDS = 60.0
_TELL_SECONDS = 0.2
_QUIET = ("paused", "halted", "stopped", "new")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rebuild found and did.

    Attributes:
        offset: at which the live and the rebuilt tables were compared (of the foremost lane).
        differences: table by table.
        parked: events that the rebuilt projector could not project either.
        swapped: the live tables now have the rebuilt content.
    """

    offset: int
    differences: tuple[Difference, ...]
    parked: int
    swapped: bool


class Rebuild:
    """One rebuild. Also what its lane works at (:class:`walstream.engine.runner.Desk`).

    Args:
        settings: of the stream.
        projector: the one to rebuild; made anew, not the object that runs.
        key_prefix: ``ledger:epoch``.
        on_progress: called with (offset reached, offset aimed at) now and then.

    Raises:
        ConfigError: it is not transactional, or declares no tables.
    """

    def __init__(
        self,
        settings: Settings,
        projector: Projector,
        key_prefix: str,
        *,
        on_progress: Callable[[int, int], None] = lambda _at, _of: None,
    ) -> None:
        live = Options.of(projector, settings.projectors.get(projector.name))
        if not live.transactional or not live.tables:
            raise ConfigError(
                f"projector {live.name!r} cannot be rebuilt: it is "
                + ("transactional but declares no `tables`" if live.transactional else "external"),
                hint="only what lies in declared tables of the ledger's database can be rebuilt beside the live one;"
                f" otherwise: `walstream projectors reset {live.name} --to earliest`",
            )
        if live.start == "latest":
            raise ConfigError(
                f"projector {live.name!r} started at `latest`, and where that was is not written down",
                hint="give it the offset it shall be rebuilt from: `start` in its configuration",
            )
        self._settings = settings
        self._projector = projector
        self._live = live
        self.options = replace(live, name=f"{live.name}{REBUILD_SUFFIX}", lanes=1, start=live.start)
        self._schema = quote(settings.namespace)
        self._shadow = Shadow(settings.namespace, live.name, live.tables)
        self._on_progress = on_progress
        self._loop = LoopThread("walstream-rebuild-loop")
        self._cancelled = False
        self._supply = Supply(settings, None, key_prefix, Metrics())
        self.metrics = self._supply.metrics
        self._target = 0
        self._lane = 0
        self._lanes = 1
        self._told_at = 0.0
        self._is_ours = False
        self.cursors = Cursors(settings.namespace, self.options.name)
        self.parking = Parking(settings.namespace, self.options.name)

    def run(self, *, compare_only: bool = False) -> Outcome:
        """Replay, compare, and (unless ``compare_only``) put the rebuilt content in place where it differs.

        Raises:
            ConfigError: the projector never ran, a table is missing, another rebuild of it is going on, or it writes
                past the copies.
            ProjectorHalted: its policy is ``halt``, and it halted in the replay. The live one is untouched.
            Unavailable: the live one could not be paused in time.
        """
        control = self._supply.connect_projector(self._live)
        try:
            self._begin(control)
            self._set_up()
            self._chase(control)
            with self._live_paused(control):
                targets = self._live_positions(control)
                self._replay(control, targets)
                return self._conclude(control, targets, compare_only=compare_only)
        except psycopg2.Error as raised:
            raise classify(raised, doing=f"rebuilding projector {self._live.name!r}") from raised
        finally:
            self._clean_up(control)
            control.close()
            self._supply.stop()
            self._loop.stop()

    # -- the desk of its lane --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing interrupts it but an exception; tells how far it is."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_SECONDS:
            self._told_at = now
            at = self.metrics.value("projector_position", projector=self.options.name, lane=str(self._lane))
            self._on_progress(int(at), self._target)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def open_source(self) -> EventSource:
        return self._supply.open_source()

    def open_delivery(self, lane: int) -> Delivery:
        connection = self._supply.connect_projector(self.options)
        try:
            with connection.cursor() as cur:
                self._shadow.enter(cur)
            connection.commit()
            return Delivery(
                self._projector,
                self.options,
                connection,
                self.cursors,
                self.parking,
                self._supply.watchdog,
                self._loop,
                lane=lane,
                environment=self._settings.environment,
                abandoned=lambda: self._cancelled,
                rebuilding=True,
                guard=self._shadow.refuse_live_writes,
                settings=self._settings,
            )
        except BaseException:
            connection.close()
            raise

    # -- step by step ----------------------------------------------------------------------------------------------

    def _begin(self, control: Connection) -> None:
        """Fresh rows and fresh copies; the lease keeps a second rebuild out."""
        namespace, name = self._settings.namespace, self.options.name
        with control.cursor() as cur:
            if Cursors(namespace, self._live.name).row(cur) is None:
                raise ConfigError(
                    f"projector {self._live.name!r} has never run on this ledger: there is nothing to rebuild"
                )
            self.cursors.register(cur, self.options)
            control.commit()
            lease = Lease.for_projector(namespace, name, owner=owner_name(), seconds=_LEASE_SECONDS)
            generation = lease.acquire(cur)
            if generation is None:
                control.rollback()
                raise ConfigError(
                    f"another rebuild of projector {self._live.name!r} is going on",
                    hint="wait for it, or end its process",
                )
            self._is_ours = True
            self.cursors = Cursors(namespace, name, generation)
            self.parking = Parking(namespace, name, generation)
            self.cursors.describe(cur, self.options)
            self.cursors.set_state(cur, "rebuilding", force=True)
            first = 0 if self.options.start == "earliest" else int(self.options.start) - 1
            self.cursors.rewrite_lanes(cur, 1, first)
            cur.execute(f"DELETE FROM {self._schema}.parked WHERE projector = %s", (name,))
            self._shadow.create(cur)
            control.commit()

    def _set_up(self) -> None:
        delivery = self.open_delivery(0)
        try:
            delivery.setup()
        except Exception as raised:
            raise ConfigError(
                f"the setup of projector {self._live.name!r} failed in its rebuild: {describe(raised)[0]}",
                hint="the live one was not touched",
            ) from raised
        finally:
            delivery.close()

    def _chase(self, control: Connection) -> None:
        """Follow the live one until it is near."""
        reached: dict[int, int] = {}
        while True:
            targets = self._live_positions(control)
            if all(target - reached.get(lane, -1) <= _CLOSE for lane, target in targets.items()):
                return
            log.info("rebuilding projector %r: replaying to offset %d", self._live.name, max(targets.values()))
            self._replay(control, targets)
            reached = targets

    def _replay(self, control: Connection, targets: dict[int, int]) -> None:
        """Bring the replay to where the live lanes stand."""
        self._target = max(targets.values())
        if self._lanes == 1:
            level = min(targets.values())
            LaneRunner(self, 0, 1, until=level).run()
            if level == self._target:
                return
            with control.cursor() as cur:
                self.cursors.rewrite_lanes(cur, len(targets), level)
            control.commit()
            self._lanes = len(targets)
        if self._lanes != len(targets):
            raise Unavailable(
                f"the lanes of projector {self._live.name!r} changed their number during its rebuild",
                hint="start the rebuild again",
            )
        for lane, target in targets.items():
            self._lane = lane
            LaneRunner(self, lane, self._lanes, until=target).run()

    def _live_positions(self, control: Connection) -> dict[int, int]:
        with control.cursor() as cur:
            positions = Cursors(self._settings.namespace, self._live.name).positions(cur)
        control.rollback()
        return positions or {0: 0}

    @contextlib.contextmanager
    def _live_paused(self, control: Connection) -> Iterator[None]:
        """Pause the live one, wherever it runs, and wait until it has finished its batch."""
        name = self._live.name
        with control.cursor() as cur:
            cur.execute(
                f"UPDATE {self._schema}.projectors AS p SET desired = 'paused' FROM {self._schema}.projectors AS o"
                " WHERE p.name = %s AND o.name = p.name RETURNING o.desired",
                (name,),
            )
            row = cur.fetchone()
            before = "running" if row is None else str(row[0])
            control.commit()
        try:
            self._wait_until_quiet(control)
            yield
        finally:
            with contextlib.suppress(psycopg2.Error):
                control.rollback()
                with control.cursor() as cur:
                    cur.execute(f"UPDATE {self._schema}.projectors SET desired = %s WHERE name = %s", (before, name))
                    control.commit()

    def _wait_until_quiet(self, control: Connection) -> None:
        until = time.monotonic() + _PAUSE_SECONDS
        while True:
            with control.cursor() as cur:
                cur.execute(
                    f"SELECT p.state, p.owner, p.owner IS NULL OR p.lease_until < clock_timestamp() OR NOT EXISTS ("
                    " SELECT 1 FROM pg_stat_activity AS a WHERE a.pid = p.control_pid"
                    " AND (a.backend_start IS NULL OR a.backend_start = p.control_start))"
                    f" FROM {self._schema}.projectors AS p WHERE p.name = %s",
                    (self._live.name,),
                )
                state, owner, alone = cur.fetchone() or ("new", None, True)
            control.rollback()
            if alone or state in _QUIET:
                return
            if time.monotonic() > until:
                raise Unavailable(
                    f"projector {self._live.name!r}, run by {owner}, did not pause within {_PAUSE_SECONDS:g} s"
                    f" (it is {state})",
                    hint="see `walstream status`; the rebuild can be started again",
                )
            time.sleep(0.05)

    def _conclude(self, control: Connection, targets: dict[int, int], *, compare_only: bool) -> Outcome:
        """Compare and swap in one transaction, both standing at ``targets``."""
        name, offset = self._live.name, max(targets.values())
        with control.cursor() as cur:
            # A runner that was stopped and does not know of the pause is fenced. Committed at once: its keeper must not
            # wait for this row as long as a large table takes.
            cur.execute(f"UPDATE {self._schema}.projectors SET generation = generation + 1 WHERE name = %s", (name,))
            control.commit()
            self._shadow.lock(cur)  # whoever is in mid-transaction commits or is ended before this returns
            cur.execute(f"SELECT lane, position FROM {self._schema}.cursors WHERE projector = %s FOR UPDATE", (name,))
            if {int(lane): int(position) for lane, position in cur.fetchall()} != targets:
                raise Unavailable(
                    f"the cursor of projector {name!r} was moved during its rebuild", hint="start the rebuild again"
                )
            differences = self._shadow.differences(cur)
            cur.execute(f"SELECT count(*) FROM {self._schema}.parked WHERE projector = %s", (self.options.name,))
            parked = int((cur.fetchone() or (0,))[0])
            if compare_only:
                control.rollback()
                return Outcome(offset, tuple(differences), parked, swapped=False)
            self._shadow.put_in_place(cur, differences)
            # What the replay could project is done, also where the live one had parked it; and the other way round.
            cur.execute(f"DELETE FROM {self._schema}.parked WHERE projector = %s", (name,))
            cur.execute(
                f"UPDATE {self._schema}.parked SET projector = %s WHERE projector = %s", (name, self.options.name)
            )
            control.commit()
        log.info("projector %r was rebuilt at offset %d", name, offset)
        return Outcome(offset, tuple(differences), parked, swapped=True)

    def _clean_up(self, control: Connection) -> None:
        if not self._is_ours:
            return
        try:
            control.rollback()
            with control.cursor() as cur:
                cur.execute(f"DELETE FROM {self._schema}.projectors WHERE name = %s", (self.options.name,))
                self._shadow.drop(cur)
            control.commit()
        except psycopg2.Error as error:
            log.warning("what the rebuild left is removed by the next one: %s", error)
