"""Who may write into a trail's directory: one process at a time, by a lock that goes with the process.

The lock is held for one batch at a time, so that a process that stands by, and may have worked before, keeps nobody
from it. What it remembers of the files is good only while nobody else has had them: whoever takes the lock after
somebody else writes its own token into the lock's file, and reads the files again. That is the fence: one that was
stopped for a minute and goes on finds another token, or is still inside of the lock and nobody else was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOCK: Final = "lock"
_LONGEST: Final = 512


class Busy(Exception):
    """Another process is writing into the directory."""


class Directory:
    """A trail's directory, for one process.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = f"{socket.gethostname()} pid {os.getpid()} {secrets.token_hex(8)}".encode()
        self._fd: int | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the directory. Yields whether somebody else has held it since this process did.

        Raises:
            Busy: another process holds it now.
            OSError: it is not there, cannot be read, or cannot be written to.
        """
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, _LONGEST, 0).decode(errors="replace").rpartition(" ")[0]
            raise Busy(owner or "another process") from None
        try:
            changed = os.pread(descriptor, _LONGEST, 0) != self._token
            if changed:
                os.pwrite(descriptor, self._token, 0)
                os.ftruncate(descriptor, len(self._token))
            yield changed
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock's file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        """The lock's file, opened once; again if the directory is another one by now (mounted, moved, made anew)."""
        path = self.path / LOCK
        if self._fd is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(self._fd)):
                    return self._fd
            self.close()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._fd
