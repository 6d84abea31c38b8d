"""The next cold batch, read while the one before is being projected.

Who is far behind would otherwise wait for the server while the server waits for him. One batch is read ahead, on the
same connection, and only where the last one was so large that there is probably more. What was read ahead is given to
nobody who asks for another place, or comes for it late, and it ends with its connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from walstream.event import Event

WORTH: Final = 500
"""A batch that accounts for so many offsets is followed by another one, probably."""

FRESH_SECONDS: Final = 5.0
"""What was read longer ago is read again: a projector may have waited for hours with the batch before, and rows may
have been erased since."""


class ColdBatch(Protocol):
    """What the cold reader returns."""

    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def through(self) -> int: ...


class Cold(Protocol):
    """The cold reader (walstream.order.reader)."""

    def read(self, after: int, limit: int, max_bytes: int) -> ColdBatch: ...


_Place = tuple[int, int, int]


class ReadAhead:
    """A cold reader that is a batch ahead. One thread uses it.

    Args:
        reader: reads.
        abandon: ends the reader's connection at once, whoever waits on it.
    """

    def __init__(self, reader: Cold, abandon: Callable[[], None]) -> None:
        self._reader = reader
        self._abandon = abandon
        self._errand: _Errand | None = None

    def read(self, after: int, limit: int, max_bytes: int) -> ColdBatch:
        """See the cold reader's; also for what is raised."""
        place = (after, limit, max_bytes)
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.join()  # the connection is in use until then
        if errand is not None and errand.place == place and time.monotonic() - errand.ended < FRESH_SECONDS:
            batch = errand.result()
        else:
            batch = self._reader.read(*place)
        if batch.through - after >= WORTH:
            self._errand = _Errand(self._reader, (batch.through, limit, max_bytes))
            self._errand.start()
        return batch

    def forget(self) -> None:
        """Drop what was read ahead: it is not needed any more."""
        if self._errand is not None and not self._errand.is_alive():
            self._errand = None

    def close(self) -> None:
        """Read nothing more. The connection can be closed after that."""
        errand, self._errand = self._errand, None
        if errand is not None and errand.is_alive():
            self._abandon()
            errand.join()


class _Errand(threading.Thread):
    """One read, in a thread of its own."""

    def __init__(self, reader: Cold, place: _Place) -> None:
        super().__init__(name="walstream-read-ahead", daemon=True)
        self.place = place
        self.ended = 0.0
        self._reader = reader
        self._batch: ColdBatch | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._batch = self._reader.read(*self.place)
        except BaseException as error:  # for whoever asks for it
            self._error = error
        self.ended = time.monotonic()

    def result(self) -> ColdBatch:
        if self._error is not None:
            raise self._error
        assert self._batch is not None
        return self._batch
