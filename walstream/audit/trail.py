"""The trail: appends events to the chain on disk, exactly once, and says so only when they are durable.

Its own end is its place: an event that stands there already is compared and not written again; the next one has to have
the next offset. What a crash left half written is put aside and comes again. So whatever was delivered twice, torn or
taken over, the files hold every event once, in order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from walstream.config import Settings
from walstream.errors import ConfigError, RetryLater, WalstreamError
from walstream.event import Event

from . import erasing, gaps
from .alarm import Alarm, Hook
from .archive import archive_at
from .chain import Link
from .declared import Declarations, warn_if_deaf
from .directory import Busy, Directory
from .history import check_end
from .known import Known
from .loading import load
from .manifest import Manifest
from .open_segment import OpenSegment
from .packing import Packer
from .record import CHAIN, ERASURE, FORMAT, VIOLATION, Pen, recorded_now
from .segments import MiB, name_of, segments_in, sync_folder
from .vouching import Voucher

log = logging.getLogger("walstream.audit")

_CLOSE_SECONDS: Final = 5.0
_ROUNDS: Final = 10  # of a tick: events wait meanwhile


class AuditTrail:
    """Records events in a directory (docs/audit.md). One process at a time writes; the others are told to wait.

    Args:
        directory: made for a new chain if its parent is there.
        key: file of the private key that signs heads. Without it ``WALSTREAM_AUDIT_KEY`` holds the key, or heads are
            not signed.
        heads_to: second places for heads: ``stdout``, ``table:[SCHEMA.]NAME``, directories.
        head_every, head_seconds: a head after so many records, or so long after the last one.
        roll_bytes, roll_seconds: a segment is closed when it is so large, or so old.
        archive: URL of a folder in object storage that closed segments are copied to.
        archive_options: for its file system (fsspec).
        on_violation: a command, or a function, that is told of violations (:class:`walstream.audit.alarm.Alarm`).

    Raises:
        ConfigError: key, places or archive are not what they should be.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        key: str | Path | None = None,
        heads_to: str | Sequence[str] = (),
        head_every: int = 1_000,
        head_seconds: float = 10.0,
        roll_bytes: int = 64 * MiB,
        roll_seconds: float = 86_400.0,
        archive: str | None = None,
        archive_options: dict[str, Any] | None = None,
        on_violation: Sequence[str] | Hook | None = None,
    ) -> None:
        if head_every < 1 or head_seconds < 0 or roll_bytes < 1 or roll_seconds <= 0:
            raise ConfigError("head_every and roll_bytes are at least 1, head_seconds and roll_seconds are positive")
        self.path = Path(directory)
        self._voucher = Voucher(key, [heads_to] if isinstance(heads_to, str) else heads_to, head_every, head_seconds)
        self._roll_bytes = roll_bytes
        self._roll_seconds = roll_seconds
        self._directory = Directory(self.path)
        self._alarm = Alarm(on_violation, self.path)
        self._packer = Packer(archive_at(archive, archive_options or {}) if archive else None)
        self._open: OpenSegment | None = None
        self._known: Known | None = None
        self._manifest = Manifest()
        self._unsettled = True
        self._seen = False
        self._settings: Settings | None = None
        self._declarations: Declarations | None = None

    def check(self, settings: Settings) -> int | None:
        """Read the trail, and compare its end with the order in the database; return the offset it ends with.

        Raises:
            TrailBroken: another event stands there in the order, the ledger has lost events that are on record, or the
                files are damaged.
            RetryLater: directory or database are away.
        """
        warn_if_deaf(settings)
        if not self.path.exists():
            return None  # a new one begins with the first event, if it is the first
        with self._patience(), self._directory.held() as changed:
            self._refresh(changed)
            open_ = self._open
            if open_ is None or not open_.link.events:
                return None
            offset = open_.link.offset or 0
            if not check_end(self.path, self._records(), offset, settings):
                log.info("%s ends with offset %d, which the order has not reached: it waits", self.path, offset)
        return offset

    def record(self, events: Sequence[Event], settings: Settings, *, first: int | None = 1) -> None:
        """Put ``events`` on record, durably; those that are there already are compared.

        Args:
            events: one or more, in the order of their offsets.
            settings: of the stream: whose ledger this is, and where to ask about offsets that have no event.
            first: the offset that a new chain begins with; ``None`` takes what comes.

        Raises:
            TrailBroken: another event stands under an offset, offsets are missing, or the files are damaged.
            RetryLater: the disk is full or gone, another process writes, a second place for heads is away.
            WalstreamError: of the database, where it had to be asked.
        """
        self._settings = settings
        with self._patience():
            self._make_directory(events[0], settings, first)
            with self._directory.held() as changed:
                self._refresh(changed)
                self._write(events, settings, first)
                self._vouch(settings)
                self._settle()

    def tick(self, settings: Settings) -> None:
        """Do what is due although nothing comes: take over violations, close a segment that is old, write a head.

        Raises:
            TrailBroken, RetryLater, WalstreamError: as for :meth:`record`.
        """
        self._settings = settings
        if not self._seen and not self.path.exists():
            return  # a chain begins with its first event
        with self._patience(), self._directory.held() as changed:
            self._refresh(changed)
            if self._open is None:
                return
            self._take_over(settings)
            if self._open.age() >= self._roll_seconds:
                self._roll(self._open, settings)
            self._vouch(settings)
            self._settle()
            self._alarm.ring(self._open.link.ids.get(VIOLATION, 0), self._asking(settings).unacknowledged)

    def close(self) -> None:
        """Vouch for the last records, finish what is being compressed, and let go of the files."""
        try:
            if self._open is None or self._settings is None:
                return
            with self._directory.held() as changed:
                if not changed:
                    with suppress(WalstreamError):  # what ends ingest ends the process, and there is no other tick
                        self._take_over(self._settings, erasures=False)
                    self._vouch(self._settings, now=True)
                    self._packer.finish(_CLOSE_SECONDS)
                    self._note_closed(self._open)
        except (OSError, Busy, WalstreamError) as error:
            log.warning("%s: closed without a head for its last records: %s", self.path, error)
        finally:
            self._forget()
            self._directory.close()
            if self._declarations is not None:
                self._declarations.close()

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """What is wrong with the disk, or is somebody else's turn, is nobody's fault: it is tried again."""
        try:
            yield
        except Busy as busy:
            raise RetryLater(f"{self.path}: {busy} is writing") from busy
        except OSError as error:
            raise RetryLater(f"{error.filename or self.path}: {error.strerror or error}") from error

    # -- the files, as they are -------------------------------------------------------------------------------------

    def _make_directory(self, event: Event, settings: Settings, first: int | None) -> None:
        # Only for a chain that may begin: whoever lost a mount must not be given an empty folder in its place.
        if self._open is None and not self.path.exists() and self._beginning(event, settings, first) is not None:
            self.path.mkdir(exist_ok=True)

    def _beginning(self, event: Event, settings: Settings, first: int | None) -> int | None:
        """The offset that a new chain begins with, if it may begin with this event: nothing is missing before it but
        what is gone by declaration."""
        if self._seen:
            return None  # there was a chain a moment ago
        if first is None or event.offset == first:
            return event.offset
        before = gaps.places(settings, first, event.offset - 1)
        return first if before and all(place.reason is not None for place in before) else None

    def _refresh(self, changed: bool) -> None:
        """Know the files again if somebody else has had them, or somebody changed them."""
        open_ = self._open
        if open_ is not None and not changed:
            with suppress(FileNotFoundError):
                found = os.stat(open_.path)
                if os.path.samestat(found, os.fstat(open_.fd)) and found.st_size == open_.size:
                    return
        self._forget()
        loaded = erasing.settled(self.path, load(self.path), self._packer)
        self._manifest, self._unsettled = loaded.manifest, True
        if loaded.segment is not None:
            self._open = OpenSegment.taken_up(self.path, loaded)
            self._seen = True
            log.info("%s ends with record %d, offset %s", self.path, loaded.link.n, loaded.link.offset)

    def _forget(self) -> None:
        if self._open is not None:
            os.close(self._open.fd)
        self._open = self._known = None

    def _records(self) -> Known:
        if self._known is None:
            self._known = Known(self.path)
        return self._known

    # -- writing ----------------------------------------------------------------------------------------------------

    def _write(self, events: Sequence[Event], settings: Settings, first: int | None) -> None:
        now = recorded_now()
        lines: list[bytes] = []
        if self._open is None:
            self._begin(events[0], settings, first, now)
        open_ = self._open
        assert open_ is not None
        end = open_.link.offset or 0
        pen = Pen(open_.link.n, open_.link.hash)
        known = [event for event in events if event.offset <= end]
        if known and (found := self._records().compare(known)) and not self._asking(settings).report(found):
            lines += [pen.other(VIOLATION, each.document, now) for each in found]
        expected = end + 1
        erased = self._asking(settings).covered(events[len(known) :])
        for event in events[len(known) :]:
            if event.offset != expected:
                lines += gaps.gone(pen, self.path, expected, event.offset - 1, settings, now)
            why = erased.get(event.seq) if erased else None
            lines.append(pen.event(event, now) if why is None else erasing.gone(pen, event, why, now))
            expected = event.offset + 1
        if not lines:
            return
        more = expected - 1 - end
        self._append(
            self._with_room(open_, settings),
            b"".join(lines),
            replace(open_.link, n=pen.n, hash=pen.hash, offset=expected - 1, events=open_.link.events + more),
        )

    def _take_over(self, settings: Settings, *, erasures: bool = True) -> None:
        """Put on record what the database says besides events; the chain says up to where it has that."""
        declarations = self._asking(settings)
        for _ in range(_ROUNDS):
            open_ = self._open
            assert open_ is not None
            pen, ids = Pen(open_.link.n, open_.link.hash), dict(open_.link.ids)
            lines = declarations.lines(pen, ids, recorded_now())
            if not lines and erasures:
                lines = erasing.taken_over(declarations, pen, ids, self.path, self._manifest, recorded_now())
            if not lines:
                return
            link, before = replace(open_.link, n=pen.n, hash=pen.hash, ids=ids), open_.link.ids
            self._append(self._with_room(open_, settings), b"".join(lines), link)
            if ids.get(ERASURE) != before.get(ERASURE):
                self._refresh(True)  # takes the payloads out, and knows the files as they are then

    def _asking(self, settings: Settings) -> Declarations:
        if self._declarations is not None and self._declarations.settings is not settings:
            self._declarations.close()
            self._declarations = None
        if self._declarations is None:
            self._declarations = Declarations(settings)
        return self._declarations

    def _with_room(self, open_: OpenSegment, settings: Settings) -> OpenSegment:
        """The segment to write to: another one, if this one is large or old enough."""
        if open_.size >= self._roll_bytes or open_.age() >= self._roll_seconds:
            open_ = self._roll(open_, settings)
        if not open_.size:
            open_.began = time.time()
        return open_

    def _append(self, open_: OpenSegment, data: bytes, link: Link) -> None:
        try:
            open_.append(data, link)
        except OSError:
            self._forget()  # it is read anew before anybody writes to it again
            raise
        self._known = None  # its list of segments may be old by now

    def _begin(self, event: Event, settings: Settings, first: int | None, now: bytes) -> None:
        """Begin a chain: its first record says where."""
        begins = self._beginning(event, settings, first)
        if begins is None:
            raise RetryLater(
                f"{self.path} holds no chain, and the projector stands at offset {event.offset - 1}: is the disk "
                f"mounted? To begin a chain there, give the projector start = {event.offset}"
            )
        if not self._voucher.signs:
            log.warning("heads of %s are not signed: whoever can write there can make another chain", self.path)
        pen = Pen()
        line = pen.other(
            CHAIN,
            {
                "format": FORMAT,
                "first_offset": begins,
                "ledger": event.commit.key_prefix,
                "environment": settings.environment,
                "namespace": settings.namespace,
                "table": f"{settings.ledger.namespace}.{settings.ledger.table}",
            },
            now,
        )
        path = self.path / name_of(1, begins)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._manifest = Manifest(pen.hash.decode(), begins)
        self._open = OpenSegment(path, fd, 0, Link(), time.time(), pen.hash.decode(), 0)
        try:
            self._append(self._open, line, Link(pen.n, pen.hash, begins - 1))
            sync_folder(self.path)
            self._manifest.write(self.path)
            self._seen = True
        except BaseException:
            path.unlink(missing_ok=True)  # it held nothing yet
            self._forget()
            raise
        log.info("%s: a chain begins at offset %d", self.path, begins)

    # -- rolling, vouching, settling --------------------------------------------------------------------------------

    def _roll(self, open_: OpenSegment, settings: Settings) -> OpenSegment:
        """Close the segment: a head vouches for it, and the next one is there before it is touched."""
        self._vouch(settings, now=True)
        path = self.path / name_of(open_.link.n + 1, (open_.link.offset or 0) + 1)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            sync_folder(self.path)
        except BaseException:
            os.close(fd)
            raise
        os.close(open_.fd)
        self._known = None
        self._unsettled = True
        self._open = OpenSegment(path, fd, 0, open_.link, time.time(), open_.chain, open_.head_n)
        return self._open

    def _vouch(self, settings: Settings, *, now: bool = False) -> None:
        """Write a head if one is due."""
        open_ = self._open
        if open_ is None:
            return
        link, made = open_.link, open_.link.n - open_.head_n
        if made and (now or self._voucher.is_due(made)):
            self._voucher.vouch(self.path, open_.chain, link.n, link.hash.decode(), link.offset or 0, settings)
            open_.head_n = link.n

    def _settle(self) -> None:
        """Put what the packer has done into the manifest, and give it what is left to do."""
        open_ = self._open
        if open_ is None:
            return
        self._note_closed(open_)
        if not (self._unsettled and self._packer.ready):
            return
        settled = {each.file for each in self._manifest.segments if each.archived or not self._packer.archives}
        closed = [segment for segment in segments_in(self.path) if segment.name != open_.path.name]
        left = [segment for segment in closed if segment.plain or segment.path.name not in settled]
        self._unsettled = bool(left)
        self._packer.start(left, open_.chain[:16])

    def _note_closed(self, open_: OpenSegment) -> None:
        done = self._packer.take()
        if not done:
            return
        self._manifest.chain = open_.chain
        for closed in done:
            self._manifest.add(closed)
        self._manifest.write(self.path)
        for closed in done:
            (self.path / closed.file.removesuffix(".zst")).unlink(missing_ok=True)
