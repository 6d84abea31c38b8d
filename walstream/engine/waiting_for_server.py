"""The start of a process: a server that is away is waited for, and asked whose ledger it has as soon as it answers."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg2

from walstream.config import Settings
from walstream.errors import Unavailable, WalstreamError
from walstream.ledger.identity import Identity, check_identity
from walstream.ledger.schema import require_schema
from walstream.source.failures import classify

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


def identity_once_it_answers(
    settings: Settings,
    connect: Callable[[], Connection],
    stopping: threading.Event,
    log: logging.Logger,
    *,
    version: int | None = None,
) -> Identity | None:
    """Who the ledger is, or ``None`` if told to stop meanwhile.

    A slot that is being made is ingest's affair, where the configuration leaves it to that: everybody else reads what
    is ordered without one, and works.

    Args:
        connect: makes a connection, which is closed again.
        version: of the schema that is needed; the oldest that this release works on if not given.

    Raises:
        WalstreamError: configuration, identity or set-up that a retry cannot help.
    """
    attempt = 0
    while not stopping.is_set():
        try:
            with contextlib.closing(connect()) as connection:
                if version is None:
                    require_schema(connection, settings)
                else:
                    require_schema(connection, settings, version)
                # A copy of production must not do production's work.
                return check_identity(connection, settings, unfinished=settings.recover_slot == "auto")
        except (WalstreamError, psycopg2.Error) as raised:
            error = classify(raised, doing="reading the ledger's identity")
            if not isinstance(error, Unavailable):
                raise error from (None if error is raised else raised)
            attempt += 1
            pause = min(settings.retry_cap_seconds, 0.1 * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
            hint = f" ({error.hint})" if error.hint and attempt == 1 else ""
            log.warning("waiting for the server, next try in %.1f s: %s%s", pause, error, hint)
            stopping.wait(pause)
    return None
