"""How a command that has something to clean up is ended from outside."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[None]:
    """Turn the first SIGTERM, Ctrl-C or hang-up into ``SystemExit`` (128 + the signal's number, as a shell has it).

    So every ``finally`` runs, and a second signal does not interrupt it: the way down has to be bounded by itself.
    """

    def unwind(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
