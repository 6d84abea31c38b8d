"""The processes of a benchmark: started, stopped, held still, and what processor time they took."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from walstream.config import ENV_PREFIX
from walstream.postgres import PostgresServer

_ROOT: Final = Path(__file__).resolve().parents[2]
_STAT: Final = Path("/proc")
_PARENT, _OWN, _CHILDREN = 1, slice(11, 13), slice(13, 15)  # of the fields behind the name


class Processes:
    """Children of this process, which end with it.

    Args:
        log: takes what they print.
        environment: what they find there beside ours; settings of a stream of the caller's are left out.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)} | dict(environment)
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *words: str, **environment: str) -> None:
        """Start ``python -m module words``."""
        with self._log.open("ab") as log:
            self._running.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment | environment,
                    cwd=_ROOT,
                )
            )

    def check(self) -> None:
        """See whether all of them still run.

        Raises:
            RuntimeError: one has ended; the message holds the end of the log.
        """
        for process in self._running:
            if process.poll() is not None:
                told = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{told}")

    @contextlib.contextmanager
    def held(self, first: int = 0) -> Iterator[None]:
        """Stop those from number ``first`` on (SIGSTOP), and let them go on at the end."""
        for process in self._running[first:]:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self._running[first:]:
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all of them."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def cpu_seconds(self) -> float | None:
        """Processor time that they have taken so far; ``None`` where there is no /proc."""
        fields = [_stat(process.pid) for process in self._running]
        return _sum(sum(map(int, each[_OWN])) for each in fields if each)

    def rss_mb(self) -> float:
        """Memory that they hold at present, in MB; 0 where there is no /proc."""
        pages = 0
        for process in self._running:
            with contextlib.suppress(OSError):
                pages += int((_STAT / str(process.pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def cpu_seconds_of(pid: int) -> float | None:
    """Processor time that one process has taken so far; ``None`` if it is gone, or where there is no /proc."""
    fields = _stat(pid)
    return None if fields is None else _sum([sum(map(int, fields[_OWN]))])


def server_cpu_seconds(server: PostgresServer) -> float | None:
    """Processor time that a server's processes have taken so far, those that have ended included; ``None`` where there
    is no /proc."""
    pid = server.pid
    postmaster = _stat(pid) if pid else None
    if postmaster is None:
        return None
    total = sum(map(int, (*postmaster[_OWN], *postmaster[_CHILDREN])))
    for entry in _STAT.iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields and int(fields[_PARENT]) == pid:
            total += sum(map(int, fields[_OWN]))
    return _sum([total])


def _stat(pid: int) -> list[str] | None:
    try:
        return (_STAT / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _sum(ticks: Iterable[int]) -> float | None:
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if _STAT.exists() else None
