"""A projector that fails on demand, and remembers what it was given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from walstream.engine.context import Context
from walstream.engine.projector import Projector
from walstream.event import Event

Fault = Callable[[Event, int], BaseException | None]


class FaultyProjector(Projector):
    """Asks a function before each event whether it shall fail.

    Args:
        name: of the projector.
        fault: called with the event and the number of times that it was tried before; what it returns is raised.
        options: any option of :class:`~walstream.Projector`.

    Attributes:
        tries: every try, in order, by offset.
        done: the offsets that were finished, in order.
        keys: the keys of those.
        open: cleared, it holds every delivery up until it is set again.

    >>> from walstream.testing import FaultyProjector, deliver, make_event
    >>> projector = FaultyProjector("p", lambda event, tries: ValueError("once") if tries == 0 else None)
    >>> try:
    ...     deliver(projector, [make_event(1)])
    ... except ValueError as error:
    ...     print(error)
    once
    >>> deliver(projector, [make_event(1)])
    >>> projector.tries, projector.done
    ([1, 1], [1])
    """

    def __init__(self, name: str, fault: Fault | None = None, **options: Any) -> None:
        self.name = name
        for option, value in options.items():
            setattr(self, option, value)
        self._fault = fault
        self._lock = threading.Lock()
        self.tries: list[int] = []
        self.done: list[int] = []
        self.keys: list[str] = []
        self.batches: list[list[int]] = []
        self.open = threading.Event()
        self.open.set()

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        with self._lock:
            self.batches.append([event.offset for event in events])
        for event in events:
            self.open.wait()
            with self._lock:
                tried = self.tries.count(event.offset)
                self.tries.append(event.offset)
            error = self._fault(event, tried) if self._fault is not None else None
            if error is not None:
                raise error
            self.effect(event, ctx)
            with self._lock:
                self.done.append(event.offset)
                self.keys.append(event.key)

    def effect(self, event: Event, ctx: Context) -> None:
        """What it does with an event that it does not fail on; override it to write somewhere."""
