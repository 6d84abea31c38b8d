"""A process of the demo, consumer or worker: started, killed without warning, started again, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from walstream.config import ENV_PREFIX
from walstream.errors import WalstreamError

from .orphans import PARENT_VARIABLE

_KEPT: Final = f"{ENV_PREFIX}PG_BIN"


class Child:
    """One process at a time.

    Args:
        name: what a person calls it. What it prints, in all its incarnations, goes into a log of that name.
        command: ``run`` or ``worker``.
        target: what that runs, ``package.module:name``.
        config: the stream's ``walstream.toml``; its folder is where the process runs.

    Attributes:
        environment: of its process.
    """

    def __init__(self, name: str, command: str, target: str, config: Path) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "walstream.cli", command, target, "--config", str(config)]
        self._folder = config.parent
        self._log = self._folder / f"{name}.log"
        # Settings of the user's own stream must not reach the demo's.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX) or k == _KEPT}
        self.environment[PARENT_VARIABLE] = str(os.getpid())
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; ``None`` while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it, in a session of its own: a Ctrl-C at the terminal is for us to pass on."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self._folder,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it with SIGKILL, as a machine out of memory would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def ask_to_stop(self) -> None:
        """Send it SIGTERM."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, timeout: float) -> None:
        """End it with SIGTERM, and after ``timeout`` seconds with SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self.ask_to_stop()
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
        raise WalstreamError(f"the {self.name} ended by itself with exit code {code}: {self.said}")

    @property
    def said(self) -> str:
        """The end of what all its incarnations printed."""
        try:
            tail = self._log.read_text(errors="replace")[-2000:].strip()
        except FileNotFoundError:
            tail = ""
        return tail or "it said nothing"
