"""The most memory that a process has held, of its own.

What the kernel sums up at the end (`ru_maxrss`) is on Linux at least what the process held that started it: a client of
one megabyte, started by a benchmark of fifty, has fifty. The high-water mark in /proc begins anew with the program.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import Final

_PEAK: Final = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_mb(pid: int) -> float | None:
    """So far, in MB; ``None`` if the process has ended, or where there is no /proc."""
    try:
        found = _PEAK.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


def peak_mb_in(usage: resource.struct_rusage) -> float:
    """What the kernel summed up, in MB: for where there is no /proc."""
    per_kib = 1 if sys.platform == "linux" else 1024
    return usage.ru_maxrss / per_kib / 1024
