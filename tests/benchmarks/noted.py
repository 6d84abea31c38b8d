"""What handlers note for the benchmarks of latency: which event they were entered for, and when."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

FILE: Final = "BENCHMARK_NOTES"
DSN: Final = "BENCHMARK_DSN"
_ENTRY: Final = struct.Struct("<IIIq")


class Notes:
    """A file to which one process appends."""

    def __init__(self) -> None:
        self._out = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, places: list[tuple[int, int, int]], moment: int) -> None:
        """Note (run, client, number) of events, all of them handled from ``moment`` on (microseconds since 1970)."""
        os.write(self._out, b"".join([_ENTRY.pack(*place, moment) for place in places]))


def count(file: Path) -> int:
    """How many there are."""
    return file.stat().st_size // _ENTRY.size if file.exists() else 0


def read(file: Path, run: int) -> dict[tuple[int, int], int]:
    """Moment by (client, number) of one run."""
    return {(client, n): at for of, client, n, at in _ENTRY.iter_unpack(file.read_bytes()) if of == run}
