"""What happens to closed segments, beside the work: they are compressed, described, and copied to the archive.

A thread does it, and touches only files of closed segments. Its results are put into the manifest by whoever holds the
directory, and only then is the plain file removed: a crash at any point is made good by doing it again.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .manifest import Closed, describe
from .record import NoRecord
from .segments import DamagedFile, Segment, pack

log = logging.getLogger("walstream.audit")

PAUSE: Final = 15.0
"""Seconds after a failure before it is tried again."""

Store = Callable[[Path, str], str]
"""Copies a file of the chain with this name to the archive, and says where it stands; raises if it is not whole."""


class Packer:
    """Packs segments, one after the other.

    Args:
        store: of the archive; ``None`` if there is none.

    Attributes:
        blanked: segments that were found to hold nothing any more that is to be erased, see ``blanking.blank``.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.archives = store is not None
        self.blanked: set[tuple[int, str, int]] = set()
        self._store = store
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._done: list[Closed] = []
        self._not_before = 0.0
        self._stopping = False

    @property
    def ready(self) -> bool:
        """Whether it can be given work: it has none, and the last of it did not just fail."""
        idle = self._thread is None or not self._thread.is_alive()
        return idle and not self._done and time.monotonic() >= self._not_before

    def start(self, segments: Sequence[Segment], chain: str) -> None:
        """Work on these, if :attr:`ready`."""
        if not segments or not self.ready:
            return
        self._thread = threading.Thread(
            target=self._work, args=(list(segments), chain), name="walstream-audit-packer", daemon=True
        )
        self._thread.start()

    def take(self) -> list[Closed]:
        """What has been done since it was last asked."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def finish(self, timeout: float) -> None:
        """Wait for the work at hand, and begin no other segment."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(timeout)
        self._stopping = False

    def put_down(self, timeout: float) -> bool:
        """Wait for the work at hand and forget what came of it, since the files are to change; false if it goes on."""
        self.finish(timeout)
        self.take()
        return self._thread is None or not self._thread.is_alive()

    def _work(self, segments: list[Segment], chain: str) -> None:
        for segment in segments:
            if self._stopping:
                return
            try:
                packed = segment if segment.packed is not None else dataclasses.replace(segment, packed=pack(segment))
                closed = describe(packed)
            except (OSError, NoRecord, DamagedFile) as error:
                log.warning("the audit segment %s could not be closed, and is tried again: %s", segment.name, error)
                self._not_before = time.monotonic() + PAUSE
                return
            if self._store is not None:
                try:
                    closed = dataclasses.replace(closed, archived=self._store(packed.path, chain))
                except Exception as error:  # whatever a file system of fsspec raises
                    log.warning("the audit segment %s is not archived yet: %s", segment.name, error)
                    self._not_before = time.monotonic() + PAUSE
            with self._lock:
                self._done.append(closed)
