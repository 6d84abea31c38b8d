"""walstream: tails an append-only Postgres ledger of agent events and drives projectors.

The public names are the ones below; everything else may change between releases.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from walstream.engine.context import Context as Context
    from walstream.engine.projector import FunctionProjector as FunctionProjector
    from walstream.engine.projector import Projector as Projector
    from walstream.engine.subscribe import Subscription as Subscription
    from walstream.engine.subscribe import subscribe as subscribe
    from walstream.engine.waiting import EventParked as EventParked
    from walstream.errors import ConfigError as ConfigError
    from walstream.errors import PayloadError as PayloadError
    from walstream.errors import RetryLater as RetryLater
    from walstream.errors import RowMissing as RowMissing
    from walstream.errors import WalstreamError as WalstreamError
    from walstream.event import Event as Event
    from walstream.ledger.fold import Fold as Fold
    from walstream.ledger.fold import apply_event as apply_event
    from walstream.ledger.fold import sendable as sendable
    from walstream.stream import Stream as Stream

# Loaded when they are first asked for, so that `import walstream` (and the command line) stays quick.
_HOMES = {
    "ConfigError": "walstream.errors",
    "Context": "walstream.engine.context",
    "Event": "walstream.event",
    "EventParked": "walstream.engine.waiting",
    "Fold": "walstream.ledger.fold",
    "FunctionProjector": "walstream.engine.projector",
    "PayloadError": "walstream.errors",
    "Projector": "walstream.engine.projector",
    "RetryLater": "walstream.errors",
    "RowMissing": "walstream.errors",
    "Stream": "walstream.stream",
    "Subscription": "walstream.engine.subscribe",
    "WalstreamError": "walstream.errors",
    "apply_event": "walstream.ledger.fold",
    "sendable": "walstream.ledger.fold",
    "subscribe": "walstream.engine.subscribe",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
