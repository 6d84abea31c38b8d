"""The watcher: looks at the slots again and again, judges them, and says what changed.

On a thread and a connection of its own, so that it costs ingest nothing and goes on while ingest is away. What it found
last stands in :attr:`Watch.latest`, for metrics and health checks, which never ask the server themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg2

from walstream.config import MiB, Settings
from walstream.errors import Unavailable, WalstreamError
from walstream.figures import duration, size
from walstream.source.connection import connect
from walstream.source.failures import classify

from .agent_rates import AgentRates
from .dropping import drop_if_due
from .policy import Finding, State, Verdict, judge
from .reading import SlotReader
from .storms import Baselines, Storm

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.guard")

LEAST_WAL: Final = 1.0 * MiB  # bytes a second below which no WAL is a storm
LEAST_EVENTS: Final = 10.0  # and events of an agent

_STALE_SECONDS: Final = 60.0
_STALE_LOOKS: Final = 4
"""A report is old after so many seconds and so many intervals."""

_REMIND: Final = 600.0  # seconds after which what has not changed is said again
_LEVELS: Final = {
    State.OK: logging.INFO,
    State.WARN: logging.WARNING,
    State.CRITICAL: logging.ERROR,
    State.LOST: logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class Report:
    """What one round found.

    Attributes:
        at: when, in seconds since 1970.
        verdicts: a slot each.
        storms: what is far above its recent past.
        acted: what was dropped or could not be, in words.
        wal_rate: bytes a second, if known.
        error: why nothing is known: the server is away, or may not be asked.
    """

    at: float
    verdicts: tuple[Verdict, ...] = ()
    storms: tuple[Storm, ...] = ()
    acted: tuple[str, ...] = ()
    wal_rate: float | None = None
    error: WalstreamError | None = None

    @property
    def state(self) -> State | None:
        """The worst of all; ``None`` if nothing is known."""
        if self.error is not None:
            return None
        worst = max((verdict.state for verdict in self.verdicts), default=State.OK)
        return max(worst, State.WARN) if self.storms else worst


class Guard:
    """Looks and judges, a round at a time.

    Args:
        settings: of the stream; its slot is watched, and its ledger's agents.
        every_slot: all logical slots of the server instead.
        may_drop: follow ``[guard] drop``; the slot that it names is looked at as well.
        watching: rounds are done again and again (see :class:`SlotReader`).
    """

    def __init__(
        self, settings: Settings, *, every_slot: bool = False, may_drop: bool = False, watching: bool = False
    ) -> None:
        self._limits = settings.guard
        self._allow_unbounded = settings.allow_unbounded_slot
        self._rule = settings.guard.drop if may_drop else None
        self._reader = SlotReader(
            settings.slot, every=every_slot, also=self._rule.slot if self._rule else None, watching=watching
        )
        self._agents = AgentRates(settings.ledger)
        factor = settings.guard.storm_factor
        self._wal = Baselines("wal", factor, LEAST_WAL)
        self._events = Baselines("agent", factor, LEAST_EVENTS)

    def sample(self, connection: Connection) -> None:
        """Only look, so that the next :meth:`round` knows rates."""
        self._reader.look(connection)

    def round(self, connection: Connection) -> Report:
        """Look at everything and judge it, on a connection in autocommit.

        Raises:
            psycopg2.Error: the server does not answer, or refuses.
        """
        look = self._reader.look(connection)
        verdicts, acted = [], []
        for slot in look.slots:
            verdict = judge(slot, self._limits, allow_unbounded=self._allow_unbounded)
            dropped, said = drop_if_due(connection, self._rule, slot)
            if said:
                acted.append(said)
            if dropped:
                gone = Finding("slot_missing", State.LOST, said, "if it is to be read again: `walstream init`")
                verdict = Verdict(slot, (gone,))
            verdicts.append(verdict)
        storms = [] if look.wal_rate is None else self._wal.judge({"": look.wal_rate})
        rates = self._agents.read(connection) if self._limits.storm_factor else None
        storms += [] if rates is None else self._events.judge(rates)
        return Report(time.time(), tuple(verdicts), tuple(storms), tuple(acted), look.wal_rate)


class Watch:
    """Rounds on a thread of its own until it is stopped.

    Args:
        settings: of the stream.
        guard: does the rounds.
        on_report: called after each round, from the watcher's thread.
        delay: seconds before the first round, for a process that begins to read the slot itself.
    """

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        on_report: Callable[[Report], None] = lambda _report: None,
        *,
        delay: float = 0.0,
    ) -> None:
        self._settings = settings
        self._guard = guard
        self._on_report = on_report
        self._delay = delay
        self._said: dict[str, tuple[State, tuple[str, ...], float]] = {}
        self._storming: set[str] = set()
        self._acted: tuple[str, ...] = ()
        self._failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="walstream-guard", daemon=True)
        self._latest: Report | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End after the round at work."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def latest(self) -> Report | None:
        """What the last round found. One that is old says that nothing is known: a look may hang in the network."""
        found = self._latest
        if found is None:
            return None
        age = time.time() - found.at
        if age <= max(_STALE_SECONDS, _STALE_LOOKS * self._settings.guard.interval_seconds):
            return found
        return Report(found.at, error=Unavailable(f"the last look at the slots was {duration(age)} ago"))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        connection: Connection | None = None
        self._stopping.wait(self._delay)
        while not self._stopping.is_set():
            try:
                if connection is None or connection.closed:
                    connection = guard_connection(self._settings)
                report = self._guard.round(connection)
            except Exception as raised:
                if connection is not None:
                    connection.close()
                    connection = None
                if not isinstance(raised, psycopg2.Error | WalstreamError):
                    log.exception("a fault of walstream in the guard")
                report = Report(time.time(), error=classify(raised, doing="looking at the slots"))
            self._latest = report
            self._say(report)
            self._on_report(report)
            self._stopping.wait(self._settings.guard.interval_seconds)
        if connection is not None:
            connection.close()

    def _say(self, report: Report) -> None:
        """Log what is new: a state, a cause, a storm, a server that is away or back."""
        if report.error is not None:
            if not self._failing:
                log.warning("nothing is known of the slots: %s", report.error)
            self._failing = True
            return
        if self._failing:
            log.info("the slots can be seen again")
        self._failing = False
        now = time.monotonic()
        for verdict in report.verdicts:
            self._say_verdict(verdict, now)
        for storm in report.storms:
            if storm.name not in self._storming:
                log.warning("%s", in_words(storm))
        for said in report.acted:
            if said not in self._acted:
                log.warning("%s", said)
        self._acted = report.acted
        self._storming = {storm.name for storm in report.storms}

    def _say_verdict(self, verdict: Verdict, now: float) -> None:
        name, state = verdict.reading.name, verdict.state
        causes = tuple(sorted(finding.cause for finding in verdict.findings))
        before, known, said_at = self._said.get(name, (State.OK, (), now))
        if (state, causes) == (before, known) and (state is State.OK or now - said_at < _REMIND):
            return
        self._said[name] = (state, causes, now)
        if state is State.OK:
            log.info("slot %s is ok again", name)
        for finding in verdict.findings:
            log.log(_LEVELS[finding.state], "slot %s: %s: %s (%s)", name, state.word, finding.found, finding.remedy)


def guard_connection(settings: Settings) -> Connection:
    """The guard's own connection: short statements, no locks."""
    return connect(
        settings.require_dsn(),
        application_name=f"walstream:{settings.namespace}:guard",
        connect_timeout=settings.connect_timeout,
        options={"statement_timeout": "10s", "lock_timeout": "1s"},
    )


def in_words(storm: Storm) -> str:
    """A storm for a person."""
    if storm.kind == "wal":
        return f"WAL storm: {size(int(storm.rate))} a second, usually {size(int(storm.usual))}"
    return f"event storm: agent {storm.name!r} appends {storm.rate:,.0f} events a second, usually {storm.usual:,.1f}"
