"""Declared erasures in a trail: a record says what is removed, and only then payloads are taken out of the segments."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from walstream.errors import RetryLater
from walstream.event import Event

from .blanking import MOST, Unfinished, archived, blank, find, put_aside, ranges_of
from .declared import Declarations, Erasure
from .loading import Loaded, TrailBroken, load
from .manifest import Manifest
from .packing import Packer
from .record import ERASURE, GONE, NoRecord, Pen
from .segments import DamagedFile
from .tail import SIDE_FOLDER

log = logging.getLogger("walstream.audit")

_PATIENCE: Final = 5.0
_SECONDS = 10.0  # of one go: a projector that takes longer is taken for one that hangs


def taken_over(
    declarations: Declarations, pen: Pen, ids: dict[str, int], directory: Path, manifest: Manifest, now: bytes
) -> list[bytes]:
    """The records of the next erasure that is not in the chain yet; nothing, if there is none.

    Args:
        ids: up to where the chain has each kind; moved on.

    Raises:
        TrailBroken, OSError: as for :func:`lines`.
        WalstreamError: of the database.
    """
    erasure = declarations.erasure(ids.get(ERASURE, 0))
    if erasure is None:
        return []
    ids[ERASURE] = erasure.id
    return lines(pen, directory, manifest, erasure, now)


def lines(pen: Pen, directory: Path, manifest: Manifest, erasure: Erasure, now: bytes) -> list[bytes]:
    """The records of one erasure: which records lose their payloads, with the digests of what they had.

    The last one carries the erasure's id. If a crash takes it away, the whole erasure is taken over again.

    Args:
        pen: writes them.
        now: when they are recorded, a JSON string.

    Raises:
        TrailBroken: a segment is not what it was.
        OSError: it cannot be read.
    """
    try:
        found = find(directory, erasure.offsets, erasure.session_id) if erasure.session_id is not None else []
    except (NoRecord, DamagedFile) as error:
        raise _damaged(directory, error) from error
    made: list[bytes] = []
    copies: set[str] = set()
    aside = [] if erasure.session_id is None else put_aside(directory / SIDE_FOLDER, erasure.session_id)
    for start in range(0, max(1, len(found)), MOST):
        some = found[start : start + MOST]
        records = ranges_of([each.n for each in some])
        kept = archived(manifest, records)
        copies.update(kept)
        document = {
            **erasure.document,
            "records": records,
            "sha256": [each.sha256 for each in some],
            "archived": kept,
            "aside": aside,
        }
        if start + MOST < len(found):
            made.append(pen.other(ERASURE, document, now))
        else:
            made.append(pen.other(ERASURE, document, now, id=erasure.id))
    if found:
        log.warning("%s: %d payloads of session %s are erased", directory, len(found), erasure.session_id)
    for each in [*sorted(copies), *(f"{SIDE_FOLDER}/{name}" for name in aside)]:
        log.warning("%s: %s still holds payloads of session %s that were erased", directory, each, erasure.session_id)
    return made


def settled(directory: Path, loaded: Loaded, packer: Packer) -> Loaded:
    """A trail that was taken up, once what its newest segment declares erased is gone from every segment.

    Raises:
        TrailBroken: a segment is not what it was.
        RetryLater: a segment is being compressed, or copied to the archive; or it takes longer than one go may.
        OSError: the disk is full, or gone.
    """
    if not loaded.link.erasures:
        return loaded
    if not packer.put_down(_PATIENCE):
        raise RetryLater(f"{directory}: payloads are erased once the segment at hand is compressed and archived")
    try:
        changed = blank(directory, loaded.link.erasures, loaded.manifest, done=packer.blanked, seconds=_SECONDS)
    except Unfinished as unfinished:
        raise RetryLater(f"{directory}: payloads are being erased: {unfinished}") from None
    except (NoRecord, DamagedFile) as error:
        raise _damaged(directory, error) from error
    return load(directory) if changed else loaded


def gone(pen: Pen, event: Event, erased: tuple[str, str], now: bytes) -> bytes:
    """The record of an event that comes from memory, and was erased before it came here."""
    reason, at = erased
    return pen.other(GONE, {"reason": reason, "erased_at": at}, now, place=(event.offset, event.seq))


def _damaged(directory: Path, error: Exception) -> TrailBroken:
    return TrailBroken(
        f"{directory} is damaged where payloads are to be erased: {error}", hint="run `walstream audit verify`"
    )
