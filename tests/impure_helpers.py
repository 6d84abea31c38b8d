"""State of a module that folds of another one use (:mod:`tests.impure_folds`)."""

from __future__ import annotations

seen: list[int] = []
_remembered: dict[int, bool] = {}


def remember(seq: int) -> None:
    _remembered[seq] = True
