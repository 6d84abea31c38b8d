"""Taking up a trail: where its chain ends, by its files, and whether that can be gone on from."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from walstream.errors import ProjectorHalted

from .chain import TAKEN_OVER, Link, first_offset_of
from .heads import NAME as HEADS
from .heads import Head, heads_in
from .manifest import NAME as MANIFEST
from .manifest import BadManifest, Closed, Manifest, describe
from .record import NoRecord, Record, parse
from .segments import DamagedFile, Segment, name_of, read_lines, remove_scratch, segments_in, sync_folder
from .tail import SIDE_FOLDER, Tail, examine, set_aside

log = logging.getLogger("walstream.audit")

_END_OF_HEADS = 256 * 1024


class TrailBroken(ProjectorHalted):
    """The trail cannot be gone on with: somebody changed it, or it is of another history. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trail as its files are.

    Attributes:
        manifest: as it is written down, or as much of it as is certain.
        segment: the newest one, to be written to (its file may not be there yet); ``None`` if there is no chain.
        link: behind the last record.
        size: of the newest segment, in bytes.
        began: when its first record was made, by the wall clock.
        chain: hash of the chain's first record.
        head_n: number of the last record that a head vouches for.
    """

    manifest: Manifest
    segment: Segment | None
    link: Link
    size: int
    began: float
    chain: str
    head_n: int


def load(directory: Path) -> Loaded:
    """Read the end of a trail; put aside what a crash left half written.

    Raises:
        TrailBroken: what is wrong with it is no crash's work.
        OSError: it cannot be read.
    """
    remove_scratch(directory)
    segments = _begun(directory)
    head = _last_head(directory)
    manifest = _read_manifest(directory)
    if not segments:
        if head is not None:
            raise TrailBroken(
                f"{directory} holds heads of a chain with {head.n} records, and no segment",
                hint="put the segments back; `walstream audit verify` then says whether they are whole",
            )
        return Loaded(Manifest(), None, Link(), 0, time.time(), "", 0)
    chain, first_offset = _beginning(segments[0], manifest)
    manifest.chain, manifest.first_offset = manifest.chain or chain, first_offset
    newest = segments[-1]
    if newest.packed is not None:  # a closed one, and the one behind it was never begun
        closed = _describe(newest)
        offset = newest.next_offset - 1 if closed.last_offset is None else closed.last_offset
        link = Link(closed.last_n, closed.hash.encode(), offset, events=1)
        name = name_of(link.n + 1, offset + 1)
        segment = Segment(name, link.n + 1, offset + 1, directory / name, None)
        loaded = Loaded(manifest, segment, link, 0, time.time(), chain, head.n if head else 0)
    else:
        loaded = _open_segment(newest, segments, manifest, chain, head)
    for kind, id_ in ids_on_record(segments[:-1], manifest).items():
        loaded.link.ids[kind] = max(id_, loaded.link.ids.get(kind, 0))
    if head is not None and head.n > loaded.link.n:
        raise TrailBroken(
            f"{directory} ends with record {loaded.link.n}, and a head vouches for record {head.n}"
            f" (offset {head.offset}): records were cut off",
            hint="put them back; nothing is written meanwhile",
        )
    return loaded


def _open_segment(
    newest: Segment, segments: list[Segment], manifest: Manifest, chain: str, head: Head | None
) -> Loaded:
    assert newest.plain is not None
    head_n = head.n if head else 0
    tail = examine(newest.plain, _before(newest, segments, manifest), {head_n})
    if tail.fault is not None:
        _put_right(newest, tail, head_n)
    found = tail.link.hashes.get(head_n)
    if head is not None and found is not None and found.decode() != head.hash:
        raise TrailBroken(
            f"record {head_n} in {newest.name} is not the one that its head vouches for: the chain was made anew",
            hint="`walstream audit verify` says more",
        )
    return Loaded(manifest, newest, tail.link, tail.size, _began(newest.plain, tail.size), chain, head_n)


def _put_right(newest: Segment, tail: Tail, head_n: int) -> None:
    """Cut off what a crash can have left: no head vouches for it, and it is no whole record of another chain."""
    assert newest.plain is not None
    n = tail.link.n + 1
    if n <= head_n or tail.sound:
        raise TrailBroken(
            f"{newest.name}, record {n}: {tail.fault}; and that is not what a crash leaves behind",
            hint="`walstream audit verify` says what was changed; nothing is written meanwhile",
        )
    aside = set_aside(newest.plain, tail.size)
    log.warning(
        "%s: what stands behind record %d (offset %s) was put aside as %s, and comes again: %s",
        newest.plain,
        tail.link.n,
        tail.link.offset,
        f"{SIDE_FOLDER}/{aside.name}",
        tail.fault,
    )


def _begun(directory: Path) -> list[Segment]:
    """The segments; without a first one that was made and never written to."""
    segments = segments_in(directory)
    if len(segments) == 1 and segments[0].first_n == 1 and segments[0].packed is None:
        plain = segments[0].plain
        assert plain is not None
        with plain.open("rb") as file:
            whole = b"\n" in file.read(64 * 1024)  # the record that begins a chain is short
        if not whole:
            plain.unlink()
            sync_folder(directory)
            return []
    return segments


def _before(newest: Segment, segments: list[Segment], manifest: Manifest) -> Link | None:
    """Where the chain stands before the newest segment; ``None`` if nothing here says so."""
    if newest.first_n == 1:
        return Link()
    closed = next((each for each in manifest.segments if each.last_n == newest.first_n - 1), None)
    if closed is None and len(segments) > 1:
        closed = _describe(segments[-2])
    if closed is None:
        return None
    return Link(closed.last_n, closed.hash.encode(), newest.next_offset - 1, events=1)


def ids_on_record(closed: list[Segment], manifest: Manifest) -> dict[str, int]:
    """The highest ids of what was taken over from the database in closed segments, by kind.

    The manifest says so of those that are described in it, but it vouches for nothing: an id that is too high would
    keep violations from the record. So the segment that is to hold the highest is looked at, where it is here.
    """
    described = {each.first_n: each for each in manifest.segments}
    files = {each.first_n: each for each in closed}
    found: dict[str, int] = {}
    for each in closed:
        if each.first_n not in described:
            described[each.first_n] = _describe(each)
    for kind in TAKEN_OVER:
        holder = max(described.values(), key=lambda each: each.ids.get(kind, 0), default=None)
        if holder is None or not holder.ids.get(kind):
            continue
        if holder.first_n in files and _describe(files[holder.first_n]).ids.get(kind) != holder.ids[kind]:
            raise TrailBroken(
                f"{MANIFEST} says that {holder.file} holds the {kind} {holder.ids[kind]}, and it does not",
                hint="remove it: it is made anew from the segments",
            )
        found[kind] = holder.ids[kind]
    return found


def _describe(segment: Segment) -> Closed:
    try:
        return describe(segment)
    except (NoRecord, DamagedFile) as error:
        raise TrailBroken(
            f"the closed segment {segment.path.name} is damaged: {error}", hint="`walstream audit verify` says more"
        ) from error


def _beginning(oldest: Segment, manifest: Manifest) -> tuple[str, int]:
    """Hash of the chain's first record, and the first offset."""
    if oldest.first_n != 1:
        return manifest.chain, manifest.first_offset
    try:
        for lines in read_lines(oldest.path, block=64 * 1024):
            first: Record = parse(lines[0])
            return first.hash.decode(), first_offset_of(first)
    except (NoRecord, DamagedFile) as error:
        raise TrailBroken(f"{oldest.path.name} does not begin with a record: {error}") from error
    raise TrailBroken(f"{oldest.path.name} is empty")


def _began(path: Path, size: int) -> float:
    if size:
        for lines in read_lines(path, block=64 * 1024):
            try:
                return datetime.fromisoformat(str(parse(lines[0]).fields()["recorded_at"])).timestamp()
            except (NoRecord, KeyError, ValueError):
                break
    return time.time()


def _last_head(directory: Path) -> Head | None:
    try:
        with (directory / HEADS).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_OF_HEADS))
            found = list(heads_in(file.read()))
    except FileNotFoundError:
        return None
    return max(found, key=lambda head: head.n, default=None)


def _read_manifest(directory: Path) -> Manifest:
    """The manifest; what is none is put aside, and made anew from the segments."""
    try:
        return Manifest.read(directory) or Manifest()
    except BadManifest as error:
        folder = directory / SIDE_FOLDER
        folder.mkdir(exist_ok=True)
        aside = folder / f"{MANIFEST}.{time.time_ns()}"
        (directory / MANIFEST).rename(aside)
        sync_folder(directory)
        log.warning("%s; it was put aside as %s and is made anew from the segments", error, aside)
        return Manifest()
