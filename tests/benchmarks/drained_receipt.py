"""What a consumer leaves behind when its projectors have had all events: when that was, and what it cost."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Final

from tests.benchmarks.peak_memory import peak_mb, peak_mb_in

EVENTS: Final = "BENCHMARK_EVENTS"
RECEIPT: Final = "BENCHMARK_RECEIPT"
PROJECTORS: Final = "BENCHMARK_PROJECTORS"
PARSING: Final = "BENCHMARK_PARSING"


class Receipt:
    """What it cost until ``projectors`` had ``events`` events each.

    Args:
        file: where it is left.
    """

    def __init__(self, events: int, projectors: int, file: Path) -> None:
        self.events = events
        self._missing = projectors
        self._file = file
        self._lock = threading.Lock()
        self._began = 0.0
        self._cpu = 0.0
        self._threads: dict[str, float] = {}

    def begin(self) -> None:
        """Everything is loaded and connected; events come from here on."""
        with self._lock:
            if not self._threads:
                self._began, self._cpu, self._threads = time.time(), time.process_time(), _cpu_of_threads()

    def finish(self) -> None:
        """One projector has had them all."""
        ended = time.time()
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
            cpu = time.process_time() - self._cpu
            threads = {
                name: round(seconds - self._threads.get(name, 0.0), 3) for name, seconds in _cpu_of_threads().items()
            }
        found = {
            "began": self._began,
            "ended": ended,
            "cpu": cpu,
            "threads": threads,
            "rss_mb": peak_mb(os.getpid()) or peak_mb_in(resource.getrusage(resource.RUSAGE_SELF)),
        }
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(found))
        beside.rename(self._file)


def _cpu_of_threads() -> dict[str, float]:
    """Processor time of each thread that lives, by its name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and hasattr(time, "pthread_getcpuclockid"):
            found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found
