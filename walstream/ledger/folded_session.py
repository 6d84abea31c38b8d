"""What is held of a session while its events are folded one by one."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Final

from .fold import Context

LOWEST: Final = -(1 << 63)
_OF_THE_WINDOW: Final = frozenset(
    {"model.requested", "model.responded", "tool.invoked", "tool.retried", "tool.observed", "tool.abandoned"}
)
_PER_BYTE: Final = 4  # memory that parsed JSON takes for a byte of its text, about
_PER_SESSION: Final = 1500


@dataclass(slots=True)
class FoldedSession:
    """A session that is held.

    Attributes:
        upto_seq: the highest seq folded.
        upto_offset: of the last event that was handed over.
        base_offset: every event up to this offset is in it, because a snapshot said so.
        settled_seq: no seq up to here can appear any more.
        young: the seqs in it above ``settled_seq``, ascending.
        events, bytes, ended: what was folded since the last snapshot, and whether a task ended in it.
        pending_fork: the seq up to which a parent has to settle before what was taken from it is final.
        epoch: see :class:`~walstream.ledger.session_folds.SessionFolds`.
        others: see :meth:`~walstream.ledger.snapshots.SnapshotTable.others`.
        text_bytes, rest_bytes: of the context, about; and of what is not its window of messages.
    """

    session_id: str
    context: Context
    epoch: int
    others: tuple[int, int] | None = None
    upto_seq: int = LOWEST
    upto_offset: int = 0
    base_offset: int = 0
    settled_seq: int = LOWEST
    young: array[int] = field(default_factory=lambda: array("q"))
    events: int = 0
    bytes: int = 0
    ended: bool = False
    pending_fork: int | None = None
    text_bytes: int = 0
    rest_bytes: int = 0
    memory: int = 0

    def holds(self, seq: int) -> bool:
        """Whether ``seq`` is among the young ones."""
        place = bisect_left(self.young, seq)
        return place < len(self.young) and self.young[place] == seq

    def settle(self, mark: int) -> None:
        """Note that all that can appear up to ``mark`` is in it."""
        upto = min(mark, self.upto_seq)
        if upto > self.settled_seq:
            self.settled_seq = upto
            del self.young[: bisect_right(self.young, upto)]

    def note(self, seq: int, event_type: str, size: int, *, ends: bool) -> None:
        """Note that the event with this seq, the highest so far, and a payload of this size was folded into it."""
        self.upto_seq = seq
        self.young.append(seq)
        self.events += 1
        self.bytes += size
        self.ended = self.ended or ends
        if event_type == "context.loaded":  # the window is another one now
            self.text_bytes = self.rest_bytes + size
        else:
            self.text_bytes += size
            if event_type not in _OF_THE_WINDOW:
                self.rest_bytes += size

    def measure(self) -> int:
        """About how much memory it takes."""
        return _PER_SESSION + _PER_BYTE * self.text_bytes + 8 * len(self.young)
