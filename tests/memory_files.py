"""Temporary files of the tests in memory, where there is plenty of it.

Each test has a database of its own, and a database is three hundred files: on a disk their making and removing takes
more of a test's time than all that it does with them, and what else writes to that disk decides how much more.
Nothing that is proven here asks for a disk. Processes are killed, machines are not, and what a process has written
stays in memory as it stays in the cache of a disk.

``TMPDIR`` wins over all of this.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

# By the Linux Filesystem Hierarchy no folder is promised to be in memory; this one is wherever glibc has shm_open(3).
_FOLDER = Path("/dev/shm")
# What the tests hold there at once is below one of these, and the slow ones two. The rest is for the processes.
_FREE = 6 << 30
_AVAILABLE = 10 << 30


def use_memory() -> None:
    """Let ``TMPDIR`` name a folder in memory, for this process and all that it starts."""
    if "TMPDIR" not in os.environ and _fits():
        os.environ["TMPDIR"] = str(_FOLDER)
        tempfile.tempdir = None  # somebody may have asked before


def _fits() -> bool:
    try:
        # Without leave to execute, copies of a server's programs could not run from there: so it is in containers.
        usable = not os.statvfs(_FOLDER).f_flag & os.ST_NOEXEC and os.access(_FOLDER, os.R_OK | os.W_OK | os.X_OK)
        return usable and shutil.disk_usage(_FOLDER).free >= _FREE and _available() >= _AVAILABLE
    except (OSError, AttributeError):  # no such folder, or a system that knows no such flag
        return False


def _available() -> int:
    """The bytes that processes could still take, of the machine's or of what this container was given."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) << 10
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        left = min(left, int(text) - int(limit.with_name("memory.current").read_text()))
    return left
