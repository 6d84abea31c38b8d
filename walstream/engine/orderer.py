"""The orderer: gives offsets to what was received, one segment a flush, and only then shows it to anybody.

A thread of its own, so that no wait for SQL keeps the reader from sending feedback. A flush takes all that came while
the last one ran, so segments are small when it is quiet and large under load, where a pause makes them larger still
(:mod:`walstream.engine.gathering`).

Rules kept here (docs/architecture.md, "The rules of ingest"):

- 1: events are published after the order row that holds their offsets has committed.
- 2: a transaction is released once a fresh snapshot shows it finished; what is behind it in commit order waits too.
- 3: a commit may be confirmed once the slot's own stream has passed the WAL position taken after its order row.
- 6: an insert whose seq has an offset already is a violation, not an event.
- 10: no order row for empty transactions.
- 11: recovered segments are durable before they are delivered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from walstream.order.buffer import HotBuffer
from walstream.order.reconcile import recovered_segments
from walstream.order.segment import MAX_EVENTS, Segment
from walstream.order.writer import Snapshot, Tail

from .backlog import Backlog, Noticed, Recovered, without_doubles
from .batch import Batch
from .gathering import Gathering
from .intake import Burst
from .violations import Violation

_NAP_FIRST = 0.0002
_NAP_LAST = 0.02
_FEW = 16
"""Up to so many transactions are ordered in one round trip. Where there are more, a round trip is nothing to them, and
one of them is more often not finished."""
_POSITION_SECONDS = 0.05
"""How often the WAL position is asked for that rule 3 needs. The slot is told of confirmations a second apart, or a
hundred at once, so to ask after every flush under load would only make the next one wait."""
_EVENT_BYTES = 420
_COMMIT_BYTES = 260
"""What Python's objects take beside the text of an event (the tuple of its row, the headers of its values) and of a
transaction, about."""


class OrderStore(Protocol):
    """Where the order is written (walstream.order.writer; a scripted one in tests)."""

    def snapshot(self) -> Snapshot: ...
    def append(self, segment: Segment, durable: bool = False) -> None: ...
    def append_if_finished(self, segment: Segment, xids: Sequence[int]) -> bool: ...
    def wal_position(self) -> int: ...
    def note_position(self, lsn: int) -> None: ...
    def record_violations(self, violations: Sequence[Violation]) -> int: ...
    def record_noticed(self, noticed: Noticed) -> int: ...


class KnownSeqs(Protocol):
    """Which seqs have an offset already (walstream.order.seen)."""

    def known(self, seqs: Sequence[int]) -> set[int]: ...
    def add(self, seqs: Sequence[int]) -> None: ...


class Orderer:
    """Orders bursts in the order in which they are submitted.

    Args:
        store: writes segments, under one generation.
        seen: the seqs that have an offset.
        buffer: receives the events after that.
        next_offset: the first free offset.
        last_lsn, partial_inserts: where the order ends (recovered segments repeat it).
        generation: of this ingest.
        key_prefix: ``ledger:epoch``.
        pending_limit: bytes that may wait before the reader should pause.
        announce: called after each flush, from this thread; must return at once.
        wake: called likewise when there is something for the reader: a commit that may be confirmed, or an error.
        heartbeat, heartbeat_seconds: called this often from this thread, also while it waits for a transaction.
    """

    def __init__(
        self,
        store: OrderStore,
        seen: KnownSeqs,
        buffer: HotBuffer,
        *,
        next_offset: int,
        last_lsn: int,
        partial_inserts: int | None,
        generation: int,
        key_prefix: str,
        pending_limit: int,
        announce: Callable[[], None],
        wake: Callable[[], None],
        heartbeat: Callable[[], None],
        heartbeat_seconds: float,
    ) -> None:
        self._store = store
        self._seen = seen
        self._buffer = buffer
        self._next = next_offset
        self._last_lsn = last_lsn
        self._partial_inserts = partial_inserts
        self._generation = generation
        self._key_prefix = key_prefix
        self._pending_limit = pending_limit
        self._announce = announce
        self._wake = wake
        self._heartbeat = heartbeat
        self._heartbeat_seconds = heartbeat_seconds

        self._changed = threading.Condition()
        self._gathering = Gathering()
        self._gathers = False  # in a pause: what is submitted then need not wake the thread
        self._queue: deque[tuple[Batch, list[Violation]] | Recovered | Noticed] = deque()
        self._expected = next_offset  # of what is submitted next, if nothing comes in between
        self._pending_bytes = 0
        self._stop = False
        self._unfinished = 0
        self._lowest_seq: int | None = None
        self._thread = threading.Thread(target=self._run, name="walstream-orderer", daemon=True)

        self._behind = 0  # end LSN of the newest commit that was ordered and has no position in `confirmable` yet
        self._position_at = 0.0  # when to ask for the next one, by the monotonic clock
        self.confirmable: deque[tuple[int, int]] = deque()
        """(WAL position, end LSN): the second may be confirmed once the stream has passed the first. Rule 3."""
        self.error: BaseException | None = None
        """What ended the thread."""
        self.events = 0
        self.recovered = 0
        self.violations = 0

    @property
    def next_offset(self) -> int:
        """The first offset that is not given yet."""
        return self._next

    @property
    def has_room(self) -> bool:
        """Whether the reader should go on reading."""
        return self._pending_bytes < self._pending_limit

    @property
    def idle(self) -> bool:
        """Nothing is waiting, nothing is being written, and all that was written may be confirmed already."""
        with self._changed:
            return self._unfinished == 0 and not self._behind and not self.confirmable

    def take_lowest_seq(self) -> int | None:
        """The lowest seq that the slot delivered since this was asked last; ``None`` if it delivered nothing."""
        with self._changed:
            lowest, self._lowest_seq = self._lowest_seq, None
        return lowest

    def start(self) -> None:
        self._thread.start()

    def submit(self, found: Burst | Recovered | Noticed) -> None:
        """Queue what was received; returns at once. Bursts come from one thread, which lays them out here."""
        item = (Batch.of(found, self._expected), found.violations) if isinstance(found, Burst) else found
        with self._changed:
            self._queue.append(item)
            self._unfinished += 1
            if isinstance(item, tuple):
                self._pending_bytes += item[0].nbytes
                self._expected += len(item[0])
            if not self._gathers or not self.has_room:
                self._changed.notify_all()

    def wait_for_room(self, timeout: float) -> None:
        """Block until the reader may go on, or for ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room or self.error is not None, timeout)

    def drain(self, timeout: float) -> bool:
        """Wait until all that was submitted is ordered; ``False`` if that took longer than ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0 or self.error is not None, timeout)

    def stop(self, timeout: float) -> bool:
        """Order no more; ``False`` if the thread did not end in time (its connection should then be closed)."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # the reader sees it and ends the session
            self.error = error
        finally:
            with self._changed:
                self._changed.notify_all()
            self._wake()

    def _loop(self) -> None:
        backlog = Backlog()
        due = time.monotonic() + self._heartbeat_seconds
        nap = _NAP_FIRST
        while True:
            with self._changed:
                if self._gathering.pause and not backlog.pieces:
                    self._gathers = True
                    self._changed.wait_for(lambda: self._stop or not self.has_room, self._gathering.pause)
                    self._gathers = False
                if not self._queue and not backlog.pieces:
                    until = min(due, self._position_at) if self._behind else due
                    self._changed.wait_for(lambda: self._queue or self._stop, max(0.0, until - time.monotonic()))
                if not self._stop:
                    self._absorb(backlog)
            if self._stop:
                self._heartbeat()  # counts and position as they are at the end
                return
            if time.monotonic() >= due:
                self._heartbeat()
                due = time.monotonic() + self._heartbeat_seconds
            self._take_position()
            while backlog.noticed:
                self._record_noticed(backlog.noticed.popleft())
            if backlog.pieces:
                released = self._release(backlog, first_look=nap == _NAP_FIRST)
                if released:
                    nap = _NAP_FIRST
                else:
                    # The transaction is streamed but not finished for others: microseconds on a plain server, as long
                    # as the standby is away with synchronous replication.
                    with self._changed:
                        self._changed.wait_for(lambda: self._stop, nap)
                    nap = min(nap * 2, _NAP_LAST)
            elif backlog.bursts:
                self._flush(backlog, 0)
            if not backlog.pieces and backlog.recovered:
                self._order_recovered(backlog.recovered.popleft())

    def _absorb(self, backlog: Backlog) -> None:
        # A recovered batch is ordered only when everything before it is, so nothing is taken past it.
        while self._queue and not backlog.recovered:
            item = self._queue.popleft()
            if isinstance(item, Recovered):
                backlog.recovered.append(item)
            elif isinstance(item, Noticed):
                backlog.noticed.append(item)
            else:
                backlog.absorb(*item)

    def _release(self, backlog: Backlog, *, first_look: bool) -> bool:
        """Order the longest prefix that is visible to others and fits into a segment. Rule 2."""
        # Who waited once waits for long, mostly: from then on only the question is sent, and no row with it.
        if first_look and backlog.pieces <= _FEW and not backlog.violations and self._release_all(backlog):
            return True
        ready = backlog.batch.ready(self._store.snapshot())
        if not ready:
            return False
        self._flush(backlog, ready)
        return True

    def _release_all(self, backlog: Backlog) -> bool:
        """Order all of it, if nothing about it is special: the question whether it is visible goes along with the row,
        which saves every event of a quiet ledger a round trip. ``False`` if that is still to be asked."""
        batch = backlog.batch
        if not batch.events or len(batch) > MAX_EVENTS or self._doubles(batch) is not None:
            return False
        segment = batch.segment(self._next, self._generation)
        self._note_lowest(min(batch.seqs))
        if not self._store.append_if_finished(segment, batch.xids):
            return False
        backlog.pop(backlog.pieces)
        self._ordered(batch, segment)
        self._flushed(backlog, batch, batch.nbytes)
        return True

    def _flush(self, backlog: Backlog, ready: int) -> None:
        batch, violations = backlog.pop(ready)
        nbytes = batch.nbytes
        known = self._doubles(batch)
        if known is not None:
            batch, found = without_doubles(batch, known)
            violations += found
            self._shift(-len(found))
        if violations:
            # Before the order: what is ordered is not seen again.
            self.violations += self._store.record_violations(violations)
        if batch.events:
            segment = batch.segment(self._next, self._generation)
            self._note_lowest(min(batch.seqs))  # before others can see that they are ordered
            self._store.append(segment)
            self._ordered(batch, segment)
        self._flushed(backlog, batch, nbytes)

    def _doubles(self, batch: Batch) -> set[int] | None:
        """The seqs that have an offset already, if there are any or some come twice in the batch; else ``None``."""
        known = self._seen.known(batch.seqs)
        return known if known or len(set(batch.seqs)) != len(batch) else None

    def _ordered(self, batch: Batch, segment: Segment) -> None:
        self._seen.add(batch.seqs)
        self._last_lsn = segment.last_lsn
        self._partial_inserts = segment.partial_inserts
        self._gathering.flushed(len(batch))
        self._publish(batch, len(segment.tx_sizes))

    def _flushed(self, backlog: Backlog, batch: Batch, nbytes: int) -> None:
        end = next((piece[2] for piece in reversed(batch.pieces) if piece[2]), 0)
        if end:
            self._behind = end
            self._take_position()
        self._finish(backlog, nbytes)

    def _take_position(self) -> None:
        """Ask where the WAL stands behind what was ordered, if it is time to. Rule 3."""
        if not self._behind or time.monotonic() < self._position_at:
            return
        if self._behind > self._last_lsn:  # it ends at changes, or at a piece without rows: no order row says so
            self._store.note_position(self._behind)
        self.confirmable.append((self._store.wal_position(), self._behind))
        self._behind = 0
        self._position_at = time.monotonic() + _POSITION_SECONDS
        self._wake()

    def _note_lowest(self, seq: int) -> None:
        with self._changed:
            self._lowest_seq = seq if self._lowest_seq is None else min(seq, self._lowest_seq)

    def _publish(self, batch: Batch, commits: int) -> None:
        batch.renumber(self._next)
        events = batch.events
        self._next += len(events)
        self.events += len(events)
        if batch.stripped:
            self._buffer.skip(self._next)  # payloads were not kept: projectors read this stretch from the ledger
        else:
            self._buffer.publish(events, batch.nbytes + _EVENT_BYTES * len(events) + _COMMIT_BYTES * commits)

    def _shift(self, offsets: int) -> None:
        """Let what is submitted from now on be laid out so many offsets further on."""
        with self._changed:
            self._expected += offsets

    def _order_recovered(self, found: Recovered) -> None:
        """Rule 11: durable before anybody sees them, because no slot can derive them again."""
        known = self._seen.known([row.seq for row in found.rows])
        fresh = [row for row in found.rows if row.seq not in known]
        tail = Tail(self._next, self._last_lsn, 0, self._partial_inserts or 0, None)
        for segment in recovered_segments(fresh, tail, self._next, self._generation):
            self._store.append(segment, durable=True)
            self._seen.add(segment.seqs)
            self._next = segment.next_offset
            self._shift(segment.events)
            self.recovered += segment.events
            self.events += segment.events
            self._buffer.skip(self._next)
        found.done.set()
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()
        self._announce()

    def _record_noticed(self, noticed: Noticed) -> None:
        self.violations += self._store.record_noticed(noticed)
        noticed.done.set()
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _finish(self, backlog: Backlog, nbytes: int) -> None:
        with self._changed:
            self._pending_bytes -= nbytes
            if not backlog.pieces:
                self._unfinished -= backlog.bursts
                backlog.bursts = 0
            self._changed.notify_all()
        self._announce()
