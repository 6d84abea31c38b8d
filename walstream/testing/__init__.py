"""What users' tests and our own share: events made by hand, an order in memory, a projector that fails on demand."""

from .events import deliver, make_context, make_event
from .faulty import FaultyProjector
from .memory import MemoryOrder, MemorySource
from .provider import check_messages

__all__ = [
    "FaultyProjector",
    "MemoryOrder",
    "MemorySource",
    "check_messages",
    "deliver",
    "make_context",
    "make_event",
]
