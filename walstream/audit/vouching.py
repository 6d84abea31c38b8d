"""When a head is due, and where it is written to."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from pathlib import Path

from walstream.config import Settings
from walstream.errors import RetryLater

from .head_places import append_to, place_called
from .heads import NAME, make_head
from .keys import load_signer


class Voucher:
    """Makes heads for one trail.

    Args:
        key: file of the private key; without it, the one in the environment; without that, heads are not signed.
        places: the second places, by name.
        every, seconds: a head after so many records, or so long after the last one.

    Raises:
        ConfigError: the key or a place is not what it should be.
    """

    def __init__(self, key: str | Path | None, places: Sequence[str], every: int, seconds: float) -> None:
        self._signer = load_signer(key)
        self._places = [place_called(name) for name in places]
        self._every = every
        self._seconds = seconds
        self._last = 0.0

    @property
    def signs(self) -> bool:
        """Whether heads are signed."""
        return self._signer is not None

    def is_due(self, records: int) -> bool:
        """Whether a head is due when so many records were made since the last one."""
        return records >= self._every or time.monotonic() - self._last >= self._seconds

    def vouch(self, directory: Path, chain: str, n: int, hash_: str, offset: int, settings: Settings) -> None:
        """Write a head to the second places, and then beside the segments: what stands there counts as done.

        Raises:
            RetryLater: a second place is away.
            WalstreamError: of the database that holds one.
            OSError: the directory cannot be written to.
        """
        head = make_head(chain, n, hash_, offset, self._signer)
        for place in self._places:
            try:
                place(head, settings)
            except OSError as error:
                made = "; a directory has to be there" if error.errno == errno.ENOENT else ""
                raise RetryLater(f"heads cannot be written to {error.filename}: {error.strerror}{made}") from error
        append_to(directory / NAME, head)
        self._last = time.monotonic()
