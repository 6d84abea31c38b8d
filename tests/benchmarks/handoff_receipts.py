"""What the handlers of all contenders do: write down which handoff they were entered for, and when.

A line goes to a file that several processes append to. The clock is the machine's monotonic one, which is the same for
all of its processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

FILE: Final = "BENCH_RECEIPTS"
HANDS: Final = "BENCH_HANDS"
DSN: Final = "BENCH_DSN"


class Receipts:
    """Writes receipts to the file that the environment names."""

    def __init__(self) -> None:
        self._file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, number: int) -> None:
        """The handler's first line."""
        os.write(self._file, b"%d %d\n" % (number, time.monotonic_ns()))


def read(file: Path) -> dict[int, int]:
    """Handoff to the moment (nanoseconds) at which its handler was entered.

    Raises:
        RuntimeError: a handler was entered twice for one handoff, which none of the contenders should do here.
    """
    found: dict[int, int] = {}
    for line in file.read_bytes().splitlines():
        number, moment = map(int, line.split())
        if number in found:
            raise RuntimeError(f"handoff {number} was handled twice")
        found[number] = moment
    return found


def count(file: Path) -> int:
    """How many there are so far."""
    return file.read_bytes().count(b"\n")
