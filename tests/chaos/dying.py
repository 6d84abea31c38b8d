"""The stream of a chaos run, in a process that kills itself at a chosen point: ``DIE_AT=module:Class.method:after:3``
is right after the third call of that method (by any thread, of any object)."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
from typing import Any

from .cast import stream

__all__ = ["stream"]


def die_at(point: str) -> None:
    """From now on, at that point, SIGKILL."""
    module, path, when, number = point.split(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    original = getattr(owner, name)
    calls = itertools.count(1)

    def deadly(*arguments: Any, **named: Any) -> Any:
        due = next(calls) == int(number)
        if due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = original(*arguments, **named)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    setattr(owner, name, deadly)


if "DIE_AT" in os.environ:
    die_at(os.environ["DIE_AT"])
