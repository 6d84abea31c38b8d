"""The consumer's process: started, killed without warning, started again, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from walstream.config import ENV_PREFIX
from walstream.errors import WalstreamError

STREAM: Final = "walstream.demo.consumer:stream"
PARENT_VARIABLE: Final = f"{ENV_PREFIX}DEMO_PARENT"
"""Environment variable with our process id: a consumer whose parent is another one was orphaned, and ends."""

_KEPT: Final = f"{ENV_PREFIX}PG_BIN"


class Child:
    """One consumer at a time.

    Args:
        config: the stream's ``walstream.toml``; its folder is where the consumer runs.
        log: file that takes everything it prints, all incarnations one after the other.
        stream: what it runs, ``package.module:name``.

    Attributes:
        environment: of its process.
        starts: how often it was started.
    """

    def __init__(self, config: Path, log: Path, stream: str) -> None:
        self._config = config
        self._log = log
        self._stream = stream
        # Settings of the user's own stream must not reach the demo's.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX) or k == _KEPT}
        self.environment[PARENT_VARIABLE] = str(os.getpid())
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Its process id; ``None`` while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it, in a session of its own: a Ctrl-C at the terminal is for us to pass on."""
        command = [sys.executable, "-m", "walstream.cli", "run", self._stream, "--config", str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self._config.parent,
                start_new_session=True,
            )
        self.starts += 1

    def kill(self) -> None:
        """End it with SIGKILL, as a machine out of memory would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout: float) -> None:
        """End it with SIGTERM, and after ``timeout`` seconds with SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def check(self) -> None:
        """Raise if it ended by itself.

        Raises:
            WalstreamError: with the end of what it printed, and its exit code.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return
        raise WalstreamError(f"the consumer ended by itself with exit code {code}: {self.said}")

    @property
    def said(self) -> str:
        """The end of what all its incarnations printed."""
        try:
            tail = self._log.read_text(errors="replace")[-2000:].strip()
        except FileNotFoundError:
            tail = ""
        return tail or "it said nothing"
