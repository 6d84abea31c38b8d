"""What users' tests and our own share: events made by hand, an order in memory, a projector that fails on demand, a
rehearsal that kills a projector again and again, and checks of folds and of the windows that they make."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .events import deliver as deliver
    from .events import make_context as make_context
    from .events import make_event as make_event
    from .faulty import FaultyProjector as FaultyProjector
    from .memory import MemoryOrder as MemoryOrder
    from .memory import MemorySource as MemorySource
    from .provider import check_messages as check_messages
    from .purity import assert_pure as assert_pure
    from .purity import check_fold as check_fold
    from .rehearsal import FAULTS as FAULTS
    from .rehearsal import rehearse as rehearse

# Loaded when they are first asked for: a process that checks a fold needs nothing of the engine.
_HOMES = {
    "FAULTS": "rehearsal",
    "FaultyProjector": "faulty",
    "MemoryOrder": "memory",
    "MemorySource": "memory",
    "assert_pure": "purity",
    "check_fold": "purity",
    "check_messages": "provider",
    "deliver": "events",
    "make_context": "events",
    "make_event": "events",
    "rehearse": "rehearsal",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
