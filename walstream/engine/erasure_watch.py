"""Notices erasures, so that the hot buffer does not go on handing out what is gone from the ledger.

What was read already is out of reach; who reads from now on goes to the ledger, where it is passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import psycopg2

from walstream.ledger.erased import Erasures
from walstream.order.buffer import HotBuffer
from walstream.source.failures import classify

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings

log = logging.getLogger("walstream.ingest")

_ROUNDS: Final = 5
"""Looks after each of which it is emptied: ingest may be some seconds behind what the server shows."""


class ErasureWatch:
    """Empties the buffer whenever something was declared since it was looked last, and a few looks longer.

    Args:
        connect: gives a connection in autocommit.
        buffer: of this process.
    """

    def __init__(self, settings: Settings, connect: Callable[[], Connection], buffer: HotBuffer) -> None:
        self._erasures = Erasures(settings)
        self._connect = connect
        self._buffer = buffer
        self._newest = self._rounds = 0

    def look(self) -> None:
        """Look once.

        Raises:
            WalstreamError: of the connection.
        """
        try:
            with self._connect().cursor() as cur:
                newest = self._erasures.newest(cur)
        except psycopg2.Error as error:
            raise classify(error, doing="looking for declared erasures") from error
        if newest != self._newest:
            self._newest, self._rounds = newest, _ROUNDS
            log.info("something was erased by declaration: what is kept in memory of the newest events is read anew")
        if self._rounds:
            self._rounds -= 1
            self._buffer.forget()
