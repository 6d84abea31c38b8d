"""What workers note outside of the database: a line that a rollback does not take back, nor a SIGKILL.

All workers append to one file, each line with one write, so that lines do not mix and a process that dies leaves none
of them half written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = "turns.jsonl"  # in the folder that the worker is started in


@dataclass(frozen=True, slots=True)
class Begun:
    """A handler was called.

    Attributes:
        seq: of the handoff.
        token: of the claim: 1 the first time.
        at_us: when its first line ran, in microseconds since 1970.
    """

    seq: int
    token: int
    agent: str
    at_us: int


@dataclass(frozen=True, slots=True)
class Undone:
    """So many events were inserted in a turn and taken back, with their transaction or to a savepoint."""

    events: int
    savepoint: bool


def note(entry: Begun | Undone) -> None:
    """Append a line."""
    members = {name: getattr(entry, name) for name in entry.__slots__}
    line = json.dumps({"what": type(entry).__name__, **members}) + "\n"
    file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(file: Path) -> Iterator[Begun | Undone]:
    """All lines; none if there is no such file."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            members: dict[str, Any] = json.loads(line)
            kind = {"Begun": Begun, "Undone": Undone}[members.pop("what")]
            yield kind(**members)
