"""A consumer as a process of its own, to be killed, stopped and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


class Consumer:
    """``walstream run`` on a target, or another command, with its output in a file.

    Args:
        dsn: of the ledger's database.
        log: where standard output and error go (appended).
        command: of walstream.
        target: ``package.module:stream``.
        settings: further settings, as environment (``LEASE_SECONDS="2"``).
        flags: further words of the command line.
    """

    def __init__(
        self,
        dsn: str,
        log: Path,
        *,
        command: str = "run",
        target: str = "tests.chaos.projectors:stream",
        settings: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        self._log = log
        self._command = [sys.executable, "-m", "walstream", command, target, *flags]
        self._environ = {
            **os.environ,
            "WALSTREAM_DSN": dsn,
            "WALSTREAM_LEASE_SECONDS": "3",
            "WALSTREAM_RETRY_CAP_SECONDS": "1",
            "PYTHONPATH": str(_ROOT),
            **{f"WALSTREAM_{name}": value for name, value in (settings or {}).items()},
            **(environ or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Consumer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended; ``None`` while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def start(self) -> Consumer:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ, cwd=_ROOT
            )
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM; return the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout)

    def wait(self, timeout: float = 60) -> int:
        """Until it ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait(timeout)


def eventually(condition: object, timeout: float = 60, *, pause: float = 0.05, what: str = "it") -> None:
    """Poll a callable until it is true, with ``pause`` seconds between two looks."""
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(pause)
