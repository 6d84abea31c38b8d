"""The hook of the tamper alarm: somebody is told of each violation, at least once, after it is on record.

A command or a function, on a thread of its own: it may take its time, fail or hang, and the sink goes on. Up to which
violation somebody was told stands in a small file beside the segments, so that a crash in between tells again and
does not forget. A call that failed is made again, with growing pauses.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from walstream.errors import ConfigError

from .declared import Declared
from .record import VIOLATION
from .segments import write_durably

log = logging.getLogger("walstream.audit")

NAME: Final = "alarmed.json"
LIMIT: Final = 30.0
"""Seconds that a command may take. Nobody can end a function; while one hangs, it is not called again."""

_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 300.0

Hook = Callable[[Sequence[Mapping[str, Any]]], object]


class Alarm:
    """Tells somebody of violations.

    Args:
        hook: a command with its arguments, which gets a JSON list of violations on standard input and says with exit
            code 0 that it took note; or a function of that list; or nothing.
        directory: of the trail.

    Raises:
        ConfigError: the hook is neither.
    """

    def __init__(self, hook: Sequence[str] | Hook | None, directory: Path) -> None:
        is_command = isinstance(hook, list | tuple) and hook and all(isinstance(word, str) for word in hook)
        if not (hook is None or callable(hook) or is_command):
            raise ConfigError(
                f"on_violation is {hook!r}", hint="a list of a program and its arguments, or a function of one argument"
            )
        self._hook = hook
        self._path = directory / NAME
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._slow = False
        self._told: int | None = None
        self._failures = 0
        self._not_before = 0.0
        self._outcome: tuple[int, str | None] | None = None

    def ring(self, recorded: int, violations: Callable[[int, int], list[Declared]]) -> None:
        """See to it that somebody is told; returns at once.

        Args:
            recorded: id of the last violation on record.
            violations: those behind one id, up to another, that nobody has acknowledged.

        Raises:
            OSError: the directory cannot be written to.
            WalstreamError: of ``violations``.
        """
        if self._hook is None or self._is_busy():
            return
        if self._outcome is not None:
            (upto, failure), self._outcome = self._outcome, None
            self._conclude(upto, failure)
        if self._told is None:
            self._told = self._read()
        if recorded <= self._told or time.monotonic() < self._not_before:
            return
        found = violations(self._told, recorded)
        if not found:
            self._note(recorded)
            return
        self._began, self._slow = time.monotonic(), False
        self._thread = threading.Thread(target=self._call, args=(found,), name="walstream-audit-alarm", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Somebody else may have written the file since."""
        self._told = None

    def _is_busy(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            return False
        if not self._slow and time.monotonic() - self._began > LIMIT:
            self._slow = True
            log.error("the hook on_violation has not come back for %.0f s, and is not called again meanwhile", LIMIT)
        return True

    def _conclude(self, upto: int, failure: str | None) -> None:
        if failure is None:
            self._failures = 0
            self._note(upto)
            return
        self._failures += 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._failures - 1))
        self._not_before = time.monotonic() + pause
        log.error("the hook on_violation failed, and is called again in %.0f s: %s", pause, failure)

    def _note(self, upto: int) -> None:
        write_durably(self._path, orjson.dumps({VIOLATION: upto}) + b"\n")
        self._told = upto

    def _read(self) -> int:
        with suppress(FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return int(orjson.loads(self._path.read_bytes())[VIOLATION])
        return 0

    def _call(self, found: list[Declared]) -> None:
        documents = [{"id": id_, **document} for id_, document in found]
        failure: str | None
        try:
            if callable(self._hook):
                self._hook(documents)
                failure = None
            else:
                assert self._hook is not None
                failure = run(self._hook, orjson.dumps(documents))
        except BaseException as error:  # whatever a function of somebody else raises
            failure = f"{type(error).__name__}: {error}"
        self._outcome = (found[-1][0], failure)


def run(command: Sequence[str], data: bytes) -> str | None:
    """Run a command with ``data`` on standard input; why it failed, or ``None``.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, said = process.communicate(data, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started: that holds the pipe
        process.communicate()
        return f"{command[0]} did not end within {LIMIT:g} s"
    if process.returncode:
        words = said.decode(errors="replace").strip().splitlines()
        return f"{command[0]} ended with {process.returncode}" + (f": {words[-1]}" if words else "")
    return None
