"""Settings of the interpreter for a process that is walstream's to run; an application's own stay as they are."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Final

YOUNG: Final = 10_000
"""New objects after which Python looks for garbage in cycles. Its own 700 fit a program that makes few objects; here
tens of thousands of events come and go without a cycle, and looking through the buffered ones again and again costs up
to a third of all processor time."""

SWITCH_SECONDS: Final = 0.0005
"""How long a thread may keep the interpreter while others wait for it. After each statement of SQL a thread has to wait
for it; with Python's own 5 ms, while ingest is busy, projectors wait longer than they work, fall out of the hot buffer
and read from the tables what was in memory a moment ago."""


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Raise the threshold of the garbage collector and shorten the interpreter's switch interval meanwhile; what
    somebody has set further already stays, and what somebody sets meanwhile."""
    young, *older = gc.get_threshold()
    interval = sys.getswitchinterval()
    if 0 < young < YOUNG:
        gc.set_threshold(YOUNG, *older)
    if interval > SWITCH_SECONDS:
        sys.setswitchinterval(SWITCH_SECONDS)
    chosen = sys.getswitchinterval()
    try:
        yield
    finally:
        if gc.get_threshold()[0] == YOUNG:
            gc.set_threshold(young, *older)
        if sys.getswitchinterval() == chosen:
            sys.setswitchinterval(interval)
