"""A server snapshot, to tell which transactions are finished for everybody who looks from now on (rule 2).

Pure. The stream names transactions by 32 bits, ``pg_current_snapshot()`` by 64; both are compared in the server's own
circular arithmetic (``TransactionIdPrecedes``): of two ids, the one up to 2^31 behind is the older. The server itself
never lets living ids spread wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from walstream.errors import LedgerError

_MASK: Final = (1 << 32) - 1
_HALF: Final = 1 << 31


class Snapshot:
    """The text of ``pg_current_snapshot()`` as an object.

    Source of the format: documentation, 9.27.8 "Transaction ID and Snapshot Information Functions":
    ``xmin:xmax:xip_list``. Everything before ``xmin`` is finished, nothing from ``xmax`` on is, and in between only
    what the list does not name. Subtransactions are not listed, and the stream does not name them either.

    Attributes:
        xmin, xmax: 64-bit transaction ids.
        running: those in progress in between (prepared transactions are among them).
    """

    __slots__ = ("_running32", "_xmax32", "_xmin32", "running", "xmax", "xmin")

    def __init__(self, xmin: int, xmax: int, running: frozenset[int]) -> None:
        self.xmin = xmin
        self.xmax = xmax
        self.running = running
        self._xmin32 = xmin & _MASK
        self._xmax32 = xmax & _MASK
        self._running32 = frozenset(xid & _MASK for xid in running)

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read the server's text.

        Raises:
            LedgerError: it is no snapshot.
        """
        try:
            xmin, xmax, running = text.split(":")
            parsed = cls(int(xmin), int(xmax), frozenset(map(int, running.split(","))) if running else frozenset())
        except ValueError:
            raise LedgerError(f"the server's snapshot {text!r} has no form that is known here") from None
        if not 0 < parsed.xmin <= parsed.xmax:
            raise LedgerError(f"the server's snapshot {text!r} contradicts itself")
        return parsed

    def shows_finished(self, xid: int) -> bool:
        """Whether whoever takes a snapshot from now on sees what transaction ``xid`` (32 bits) committed."""
        if (xid - self._xmin32) & _MASK >= _HALF:
            return True
        return (xid - self._xmax32) & _MASK >= _HALF and xid not in self._running32

    def finished_first(self, xids: Sequence[int]) -> int:
        """How many of ``xids`` come before the first that is not finished: the same question, asked of many at once."""
        xmin, shows_finished = self._xmin32, self.shows_finished
        if xids and max(xids) < xmin and xmin - min(xids) < _HALF:
            return len(xids)  # nearly always, and asked without a step of ours for each
        for index, xid in enumerate(xids):
            if (xid - xmin) & _MASK < _HALF and not shows_finished(xid):
                return index
        return len(xids)

    def __repr__(self) -> str:
        return f"Snapshot({self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.running)))})"


def full_xid(xid: int, near: int) -> int:
    """The 64-bit id of which the stream names 32 bits.

    Args:
        near: a 64-bit id that is less than 2^31 away, as every living one is from every other.
    """
    return near + ((xid - near + _HALF) & _MASK) - _HALF
