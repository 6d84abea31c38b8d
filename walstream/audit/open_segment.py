"""The newest segment, as the process that writes to it knows it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from .chain import Link
from .loading import Loaded
from .segments import sync_folder


@dataclass(slots=True)
class OpenSegment:
    """A segment that is written to.

    Attributes:
        size: in bytes, as far as it is flushed.
        link: behind its last record.
        began: when its first record was made, by the wall clock, to roll by time.
        chain: hash of the chain's first record.
        head_n: number of the last record that a head vouches for.
    """

    path: Path
    fd: int
    size: int
    link: Link
    began: float
    chain: str
    head_n: int

    @classmethod
    def taken_up(cls, directory: Path, loaded: Loaded) -> OpenSegment:
        """Open the one that was found, and make durable what is in it: somebody may have been killed before that.

        Raises:
            OSError: the files cannot be written to.
        """
        assert loaded.segment is not None
        path = directory / loaded.segment.name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.fsync(fd)
            sync_folder(directory)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, loaded.size, loaded.link, loaded.began, loaded.chain, loaded.head_n)

    def age(self) -> float:
        """Seconds since its first record was made; 0 while it has none."""
        return time.time() - self.began if self.size else 0.0

    def append(self, data: bytes, link: Link) -> None:
        """Write and flush.

        Raises:
            OSError: it did not work. The file is as before then, or has to be read anew before it is written to again.
        """
        try:
            written = 0
            view = memoryview(data)
            while written < len(data):
                written += os.pwrite(self.fd, view[written:], self.size + written)
            os.fdatasync(self.fd)
        except OSError:
            os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)
        self.link = link
