"""The hook: told at least once, and never able to hold the sink up."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from walstream.audit import alarm as alarm_module
from walstream.audit.alarm import NAME, Alarm, run
from walstream.audit.declared import Declared
from walstream.errors import ConfigError


class Sink:
    """What the alarm is rung by: so many violations are on record."""

    def __init__(self, directory: Path, hook: Any) -> None:
        self.alarm = Alarm(hook, directory)
        self.acknowledged = 0
        self.recorded = 0

    def _violations(self, after: int, upto: int) -> list[Declared]:
        return [(id_, {"what": "delete", "seq": id_}) for id_ in range(after + 1, upto + 1) if id_ > self.acknowledged]

    def tick(self) -> None:
        self.alarm.ring(self.recorded, self._violations)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.tick()
            time.sleep(0.01)


def noted(directory: Path) -> int:
    file = directory / NAME
    return int(json.loads(file.read_text()).get("violation", 0)) if file.exists() else 0


def test_a_function_is_told_once(tmp_path: Path) -> None:
    calls: list[list[int]] = []
    sink = Sink(tmp_path, lambda found: calls.append([each["id"] for each in found]))
    sink.tick()
    assert calls == []
    sink.recorded = 2
    sink.until(lambda: noted(tmp_path) == 2)
    sink.recorded = 3
    sink.until(lambda: noted(tmp_path) == 3)
    assert calls == [[1, 2], [3]]
    again = Sink(tmp_path, lambda found: calls.append([each["id"] for each in found]))
    again.recorded = 4
    again.until(lambda: noted(tmp_path) == 4)
    assert calls[2:] == [[4]]


def test_a_command_gets_them_on_its_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = f"import pathlib, sys; pathlib.Path({str(out)!r}).write_text(sys.stdin.read())"
    sink = Sink(tmp_path, [sys.executable, "-c", program])
    sink.recorded = 1
    sink.until(lambda: noted(tmp_path) == 1)
    assert json.loads(out.read_text()) == [{"id": 1, "what": "delete", "seq": 1}]


def test_what_fails_is_tried_again_and_nothing_is_noted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alarm_module, "_FIRST_PAUSE", 0.05)
    tries: list[int] = []

    def hook(found: Sequence[Mapping[str, Any]]) -> None:
        tries.append(len(found))
        if len(tries) < 3:
            assert noted(tmp_path) == 0
            raise SystemExit("away")

    sink = Sink(tmp_path, hook)
    sink.recorded = 2
    sink.until(lambda: noted(tmp_path) == 2)
    assert tries == [2, 2, 2]
    assert caplog.text.count("the hook on_violation failed") == 2
    assert "SystemExit: away" in caplog.text


def test_one_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alarm_module, "LIMIT", 0.1)
    release = threading.Event()
    calls: list[int] = []

    def hook(found: Sequence[Mapping[str, Any]]) -> None:
        calls.append(len(found))
        release.wait(600)

    sink = Sink(tmp_path, hook)
    sink.recorded = 1
    sink.until(lambda: calls)
    sink.recorded = 5
    sink.until(lambda: "has not come back" in caplog.text)
    for _ in range(100):
        sink.tick()
    assert not release.is_set(), "it still hangs"
    assert calls == [1]
    release.set()
    sink.until(lambda: noted(tmp_path) == 5)
    assert calls == [1, 4]


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm_module, "LIMIT", 0.3)
    began = time.monotonic()
    failure = run(["sh", "-c", f"(sleep 300; touch {tmp_path}/late) & sleep 300"], b"[]")
    assert failure == "sh did not end within 0.3 s"
    assert time.monotonic() - began < 200


def test_why_a_command_failed() -> None:
    assert run(["sh", "-c", "echo reason >&2; exit 3"], b"[]") == "sh ended with 3: reason"
    assert run(["true"], b"[]") is None
    with pytest.raises(FileNotFoundError):
        run(["/nowhere/at/all"], b"[]")


def test_what_was_acknowledged_meanwhile_is_no_alarm(tmp_path: Path) -> None:
    calls: list[int] = []
    sink = Sink(tmp_path, lambda found: calls.append(len(found)))
    sink.recorded = sink.acknowledged = 7
    sink.until(lambda: noted(tmp_path) == 7)
    assert calls == []


def test_a_file_that_is_none_tells_again(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{}")
    calls: list[int] = []
    sink = Sink(tmp_path, lambda found: calls.append(len(found)))
    sink.recorded = 2
    sink.until(lambda: noted(tmp_path) == 2)
    assert calls == [2]


@pytest.mark.parametrize("hook", ["a-program", [], [1], 5])
def test_what_is_no_hook(tmp_path: Path, hook: Any) -> None:
    with pytest.raises(ConfigError, match="on_violation"):
        Alarm(hook, tmp_path)
