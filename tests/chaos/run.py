"""A chaos run from beginning to end: a stage, a load, faults for as long as was asked for, and the verdict."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2

from tests.cli_calls import call

from .cast import TURNS
from .crowd import Crowd
from .faults import Faults
from .plan import BIRTHS, TERMINAL, Step, steps
from .recovery import Recoveries
from .stage import WORKERS, Ended, Stage
from .verdict import PROJECTORS, Verdict, judge, parked_as_it_should

_SETTLE_SECONDS = 240.0
_LARGEST = 4_000  # rows of a transaction
_PAUSE, _LONG_PAUSE = 0.15, 3.0  # seconds between two transactions of a writer, at the most
_BACKLOG = 1_500  # events: above it the writers take the long one, so that a busy machine is not taken for a hang
_BIRTHS_WITHIN = 600.0  # seconds in which a consumer makes at most five slots
_BIRTHS = 4
_WORK = "SELECT count(*) FROM agent_jobs WHERE status NOT IN ('COMPLETED', 'FAILED', 'CANCELED')"
_COUNTS = """\
SELECT (SELECT count(*) FROM agent_events),
       (SELECT coalesce(min(position), 0) FROM walstream.cursors),
       (SELECT count(DISTINCT projector) FROM walstream.cursors)"""


@dataclass(slots=True)
class Progress:
    """What the screen shows."""

    phase: str = "starting a server"
    fault: str = ""
    faults: int = 0
    events: int = 0
    delivered: int = 0
    share: float = 0.0


@dataclass(slots=True)
class Report:
    """What a run found.

    Attributes:
        ended: processes of the consumer that ended although nothing should have ended them, and during which fault.
        terminal: ends that are right, by the kind of fault: a person had to make what was missing.
        kept: the folder with logs and data, if the run failed.
    """

    seed: int
    minutes: float
    postgres: str
    verdict: Verdict = field(default_factory=Verdict)
    faults: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, Any] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    terminal: Counter[str] = field(default_factory=Counter)
    kept: str | None = None

    @property
    def clean(self) -> bool:
        return self.verdict.clean and not self.stuck and not self.ended

    def document(self) -> dict[str, Any]:
        """As JSON."""
        verdict = self.verdict
        return {
            "clean": self.clean,
            "seed": self.seed,
            "minutes": self.minutes,
            "postgres": self.postgres,
            "events": verdict.events,
            "lost": verdict.lost,
            "doubled": verdict.doubled,
            "out_of_order": verdict.out_of_order,
            "dense": verdict.dense,
            "recovered": verdict.recovered,
            "redelivered": verdict.redelivered,
            "parked": verdict.parked,
            "faults": dict(sorted(self.faults.items())),
            "recovery_s": self.recovery,
            "stuck": self.stuck,
            "ended": self.ended,
            "terminal": dict(self.terminal),
            "findings": verdict.findings,
            "kept": self.kept,
        }


class Run:
    """One run.

    Args:
        seed: everything that is drawn, is drawn from it.
        minutes: how long faults are injected; what comes before and after is extra.
        kinds: of faults; all without it.
        writers: how many sessions write at once.

    Attributes:
        progress: read by whoever shows it.
    """

    def __init__(self, seed: int, minutes: float, kinds: Sequence[str] = (), *, writers: int = 4) -> None:
        self._seed = seed
        self._minutes = minutes
        self._kinds = kinds
        self._writers = writers
        self._step = Step("start")
        self._going_on: Callable[[], list[str]] = list
        self.progress = Progress()

    def run(self) -> Report:
        """Returns a report whatever happens to the stream."""
        folder = Path(tempfile.mkdtemp(prefix="walstream-chaos-"))
        folder.chmod(0o755)
        try:
            report = Report(self._seed, self._minutes, "")
            with Stage(folder, lambda ended: self._take_down(ended, report)) as stage:
                report.postgres = stage.server.version
                with _log_of(folder) as say:
                    self._play(stage, report, say)
                if not report.clean:
                    report.kept = str(folder)
                    stage.keep()
        except BaseException:
            print(f"what there is of it stands in {folder}", file=sys.stderr)
            raise
        if report.clean:
            shutil.rmtree(folder)
        return report

    def _take_down(self, ended: Ended, report: Report) -> None:
        for kind in {self._step.kind, *self._going_on()}:
            if ended.code in TERMINAL.get(kind, ()):
                report.terminal[kind] += 1
                return
        report.ended.append(
            f"the {ended.who} ended by itself with exit code {ended.code} during {self._step}: {ended.said[-600:]}"
        )

    def _play(self, stage: Stage, report: Report, say: Callable[[str], None]) -> None:
        progress = self.progress
        set_up = call("init", "--slot", stage.settings.slot, "--json", dsn=stage.server.dsn())
        assert set_up.exit_code == 0, set_up
        recoveries = Recoveries(stage.server.execute, PROJECTORS)
        self._going_on = lambda: [outage.kind for outage in recoveries.open]
        stage.execute(TURNS)
        for who in ("consumer", "reader", *WORKERS):
            stage.start(who)
        crowd = Crowd(stage.settings, writers=self._writers, seed=self._seed, pause=_PAUSE, largest=_LARGEST)
        crowd.start()
        ended = threading.Event()
        threading.Thread(target=_pace, args=(stage, crowd, ended), daemon=True).start()
        try:
            recoveries.wait([recoveries.watch("start", time.monotonic())])
            self._inject(stage, recoveries, report, say)
        finally:
            ended.set()
            crowd.stop()
        progress.phase, progress.fault = "letting it catch up", ""
        self._settle(stage, say)
        recoveries.wait(recoveries.outages)
        report.recovery = recoveries.figures()
        report.stuck = [f"{each.kind}, fault {each.number}" for each in recoveries.outages if each.stuck]
        findings = self._stomach(stage, report)
        progress.phase = "comparing everything with the ledger"
        for who, code in stage.terminate().items():
            if code:
                findings.append(f"the {who} ended with exit code {code} after SIGTERM")
        parked = report.verdict.parked
        report.verdict = judge(stage.execute, stage.folder, crowd.appended)
        report.verdict.parked = parked
        report.verdict.findings += findings + _audit(stage, report.verdict.events) + _snapshots(stage)

    def _inject(self, stage: Stage, recoveries: Recoveries, report: Report, say: Callable[[str], None]) -> None:
        progress = self.progress
        faults = Faults(stage)
        began = time.monotonic()
        plan = steps(self._seed, self._kinds)
        births: list[float] = []
        while (elapsed := time.monotonic() - began) < self._minutes * 60:
            step = next(plan)
            if step.kind in BIRTHS:
                births = [at for at in births if elapsed - at < _BIRTHS_WITHIN]
                if len(births) >= _BIRTHS:
                    time.sleep(0.1)
                    continue
                births.append(elapsed)
            progress.phase, progress.share = "injecting faults", elapsed / (self._minutes * 60)
            time.sleep(step.pause)
            self._note(step, stage)
            say(f"{elapsed:7.1f} s  {step}")
            since = faults.inject(step)
            report.faults[step.kind] += 1
            progress.faults += 1
            outage = recoveries.watch(step.kind, since)
            if step.alone:
                recoveries.wait(recoveries.open)
                behind = f", long behind: {outage.behind}" if outage.behind else ""
                how = f"STUCK {_standing(stage)}" if outage.seconds is None else f"recovered in {outage.seconds:.1f} s"
                say(f"{'':11}{how}{behind}")

    def _note(self, step: Step, stage: Stage) -> None:
        self._step = step
        self.progress.fault = str(step)
        with contextlib.suppress(psycopg2.Error):
            self.progress.events, self.progress.delivered, _ = stage.server.execute(_COUNTS)[0]

    def _settle(self, stage: Stage, say: Callable[[str], None]) -> None:
        """Until every projector has passed every row, or does not get on any more."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            events, delivered, projectors = stage.execute(_COUNTS)[0]
            self.progress.events, self.progress.delivered = events, delivered
            done = delivered >= events and projectors >= PROJECTORS and stage.execute(_WORK) == [(0,)]
            # Workers write events when they complete a job, so the two are looked at together.
            if done and stage.execute(_COUNTS)[0][0] == events:
                return
            time.sleep(0.2)
        say(f"not everything was delivered in time: {_standing(stage)}")

    def _stomach(self, stage: Stage, report: Report) -> list[str]:
        """See that what is parked is what should be; then let it be delivered."""
        findings = parked_as_it_should(stage.execute)
        report.verdict.parked = int(stage.execute("SELECT count(*) FROM walstream.parked")[0][0])
        (stage.folder / "antidote").touch()
        if report.verdict.parked:
            call("parked", "retry", "poisoned", "--json", dsn=stage.server.dsn())
        deadline = time.monotonic() + 60
        while stage.execute("SELECT count(*) FROM walstream.parked") != [(0,)]:
            if time.monotonic() > deadline:
                return [*findings, "what is parked is not delivered although it could be"]
            time.sleep(0.2)
        return findings


def _pace(stage: Stage, crowd: Crowd, ended: threading.Event) -> None:
    """Let the writers take their time while the projectors are far behind."""
    while not ended.wait(1):
        with contextlib.suppress(psycopg2.Error):
            events, delivered, _ = stage.server.execute(_COUNTS)[0]
            crowd.ease(_LONG_PAUSE if events - delivered > _BACKLOG else _PAUSE)


def _standing(stage: Stage) -> str:
    """Who stands where, for the log of a run that does not get on."""
    found = stage.execute(
        "SELECT (SELECT count(*) FROM agent_events), state, error, generation FROM walstream.ingest UNION ALL"
        " SELECT position, projector || ' ' || lane || ' ' || state, error, generation"
        " FROM walstream.cursors JOIN walstream.projectors ON name = projector"
    )
    return "; ".join(" ".join(map(str, row)) for row in found)


def _audit(stage: Stage, events: int) -> list[str]:
    """`walstream audit verify`, against the ledger too."""
    words = ["--ledger", "--key", str(stage.public_key), "--heads", str(stage.folder / "heads"), "--json"]
    called = call("audit", "verify", str(stage.audit / "trail"), *words, dsn=stage.server.dsn())
    if called.exit_code:
        return [f"the audit trail: {called.stdout[-800:]}{called.stderr[-800:]}"]
    recorded = called.json["events"]
    return [] if recorded == events else [f"the audit trail holds {recorded} events"]


def _snapshots(stage: Stage) -> list[str]:
    """`walstream verify --snapshots`: each is what its session's events fold to."""
    called = call("verify", "--snapshots", "--json", dsn=stage.server.dsn())
    if called.exit_code:
        return [f"the snapshots: {called.stdout[-800:]}{called.stderr[-800:]}"]
    return [] if stage.execute("SELECT count(*) FROM agent_snapshots") != [(0,)] else ["there are no snapshots"]


@contextlib.contextmanager
def _log_of(folder: Path) -> Any:
    with (folder / "faults.log").open("w") as file:

        def say(line: str) -> None:
            file.write(f"{time.strftime('%H:%M:%S')}  {line}\n")
            file.flush()
            os.fsync(file.fileno())

        yield say
