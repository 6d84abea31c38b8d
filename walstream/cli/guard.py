"""``walstream guard``: what becomes of the slots, without a consumer; once, as a monitoring plugin, or as a watcher."""

from __future__ import annotations

import math
import signal
import threading
import time
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import WalstreamError

from . import console
from .logs import Form, LogFormat, log_to_stderr
from .options import Json, MetricsListen, takes_settings, with_metrics

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.guard.policy import SlotReading, Verdict
    from walstream.guard.watch import Report


class PluginCode(IntEnum):
    """Exit codes of a monitoring plugin (Nagios, Icinga, Sensu and those after them), which differ from ours."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_WORDS: Final = {"ok": "OK", "warn": "WARNING", "critical": "CRITICAL", "lost": "CRITICAL"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(guard)


@takes_settings
def guard(
    settings: Settings,
    *,
    every_slot: Annotated[bool, typer.Option("--all", help="All logical slots of the server.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C or SIGTERM.")] = False,
    interval: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks (guard.interval_seconds).")
    ] = None,
    sample: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="Once: how long to watch the WAL grow, for the forecast.")
    ] = 2.0,
    metrics_listen: MetricsListen = None,
    log_format: LogFormat = Form.TEXT,
    as_json: Json = False,
) -> None:
    """Judge the slot: how it stands, why, how long it lasts, and what to do. It needs no consumer.

    Exit codes are those of monitoring plugins: 0 ok, 1 warning, 2 critical or lost, 3 unknown (the server does not
    answer, or the configuration is off). A slot is dropped only if [guard] drop in the configuration names it and the
    bound.
    """
    if interval is not None:
        settings = settings.model_copy(
            update={"guard": settings.guard.model_copy(update={"interval_seconds": interval})}
        )
    settings = with_metrics(settings, metrics_listen)
    if watch:
        log_to_stderr(form=log_format)
        _watch(settings, every_slot, as_json)
        return
    raise typer.Exit(_once(settings, every_slot, sample, as_json))


def _once(settings: Settings, every_slot: bool, sample: float, as_json: bool) -> PluginCode:
    import psycopg2

    from walstream.guard.watch import Guard, Report, guard_connection
    from walstream.source.failures import classify

    try:
        connection = guard_connection(settings)
        try:
            one = Guard(settings, every_slot=every_slot, may_drop=True)
            one.sample(connection)
            time.sleep(sample)
            report = one.round(connection)
        finally:
            connection.close()
    except (WalstreamError, psycopg2.Error) as raised:
        report = Report(time.time(), error=classify(raised, doing="looking at the slots"))
    if as_json:
        console.print_json(document(report))
    else:
        console.say("\n".join(lines(report)))
    return code_of(report)


def _watch(settings: Settings, every_slot: bool, as_json: bool) -> None:
    from walstream.guard.samples import samples
    from walstream.guard.watch import Guard, Watch
    from walstream.monitoring.health import Health
    from walstream.monitoring.reporting import reporting

    ended = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    def on_report(report: Report) -> None:
        if as_json:
            try:
                console.print_json(document(report))
            except BrokenPipeError:
                ended.set()

    def health() -> Health:
        found = watcher.latest
        state = None if found is None or found.state is None else found.state.word
        error = None if found is None or found.error is None else console.redact(str(found.error))
        part = {"ready": state is not None, "state": state or "unknown", "error": error}
        return Health(watcher.alive, {"guard": part}, starting=found is None)

    settings.require_dsn()
    watcher = Watch(settings, Guard(settings, every_slot=every_slot, may_drop=True, watching=True), on_report)
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with reporting(settings, health, lambda: samples(watcher.latest)):
            watcher.start()
            while not ended.wait(0.2):
                pass
    finally:
        watcher.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def code_of(report: Report) -> PluginCode:
    """The exit code for what was found."""
    state = report.state
    return PluginCode.UNKNOWN if state is None else PluginCode(min(int(state), PluginCode.CRITICAL))


def document(report: Report) -> dict[str, Any]:
    """For ``--json``. ``null`` is a figure that nobody knows, which is the worst that it can be."""
    from walstream.guard.watch import in_words

    state = report.state
    found: dict[str, Any] = {
        "state": "unknown" if state is None else state.word,
        "slots": [_slot_document(verdict) for verdict in report.verdicts],
        "storms": [
            {"kind": storm.kind, "agent": storm.name or None, "rate": storm.rate, "usual": storm.usual}
            | {"found": in_words(storm)}
            for storm in report.storms
        ],
        "acted": list(report.acted),
        "wal_rate": report.wal_rate,
    }
    if report.error is not None:
        found["error"] = {"message": console.redact(str(report.error)), "hint": console.redact(report.error.hint)}
    return found


def _slot_document(verdict: Verdict) -> dict[str, Any]:
    slot = verdict.reading
    oldest = slot.transaction
    return {
        "name": slot.name,
        "state": verdict.state.word,
        "causes": [
            {"cause": each.cause, "state": each.state.word, "found": each.found, "remedy": each.remedy}
            for each in verdict.findings
        ],
        "forecast_seconds": verdict.forecast,
        "exists": slot.exists,
        "database": slot.database,
        "active": slot.active,
        "holder": slot.holder or None,
        "wal_status": slot.wal_status or None,
        "invalidation": slot.invalidation or None,
        "retained_bytes": slot.retained,
        "behind_bytes": slot.behind,
        "safe_bytes": slot.safe,
        "bound_bytes": slot.bound,
        "free_disk_bytes": slot.free_disk,
        "inactive_seconds": slot.inactive_seconds,
        "wal_rate": slot.wal_rate,
        "awaited_standbys": list(slot.awaited),
        "oldest_transaction": None
        if oldest is None
        else {"who": oldest.who, "seconds": oldest.seconds, "prepared": oldest.prepared, "remedy": oldest.remedy},
    }


def lines(report: Report) -> list[str]:
    """As a monitoring plugin prints it: a line for the pager with performance data, then details."""
    from walstream.guard.watch import in_words

    if report.error is not None:
        hint = f" ({report.error.hint})" if report.error.hint else ""
        return [console.redact(f"WALSTREAM UNKNOWN - {report.error}{hint}")]
    state = report.state
    assert state is not None
    findings = sorted((each for verdict in report.verdicts for each in verdict.findings), key=lambda each: -each.state)
    said = [*(finding.found for finding in findings), *(in_words(storm) for storm in report.storms)]
    if not report.verdicts:
        said = ["there is no logical slot on this server", *said]
    elif not said:
        said = [", ".join(_well(verdict.reading) for verdict in report.verdicts)]
    figures = " ".join(_performance(verdict.reading) for verdict in report.verdicts if verdict.reading.exists)
    first = f"WALSTREAM {_WORDS[state.word]} - {said[0]}"
    details = [
        *said[1:],
        *(f"to do: {finding.remedy}" for finding in findings),
        *(f"drop: {each}" for each in report.acted),
    ]
    # A | begins performance data, wherever it stands.
    rows = [console.redact(line).replace("|", "/") for line in (first, *details)]
    return [f"{rows[0]} | {figures}" if figures else rows[0], *rows[1:]]


def _well(slot: SlotReading) -> str:
    from walstream.figures import size

    room = "without a bound" if slot.bound is None else f"of {size(slot.bound)}"
    return f"slot {slot.name}: {size(slot.retained)} retained {room}, {size(slot.behind)} behind"


def _performance(slot: SlotReading) -> str:
    """``'label'=value[unit];warn;crit;min;max``; U is a value that nobody knows (the plugins' guidelines)."""

    def value(number: float | None) -> str:
        return "U" if number is None or math.isinf(number) else f"{number:.0f}B"

    most = "" if slot.bound is None else f"{slot.bound}"
    return f"'{slot.name} retained'={value(slot.retained)};;;0;{most} '{slot.name} behind'={value(slot.behind)};;;0;"
