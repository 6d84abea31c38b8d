"""Folds that are not pure, each in its own way, for the tests of the guard. ``fold_NAME`` is the fold of ``NAME``."""

from __future__ import annotations

import asyncio
import datetime
import functools
import io
import os
import random
import secrets
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
import uuid
from array import array
from collections.abc import Callable
from datetime import UTC, date
from itertools import count
from pathlib import Path
from time import monotonic as ticks
from typing import Any

from tests import impure_helpers
from walstream.ledger.fold import Fold, Foldable
from walstream.ledger.messages import Context

EVENT = "note.added"
FORBIDDEN: dict[str, str] = {}
"""Name -> what the guard has to say was called."""

FOLDS: dict[str, Fold] = {}


def impure(what: str | None = None) -> Callable[[Callable[[Context, Foldable], None]], Any]:
    """Make a fold of the function; ``what`` is the call that the guard has to name."""

    def register(function: Callable[[Context, Foldable], None]) -> Any:
        fold = Fold()
        fold.on(EVENT)(function)
        FOLDS[function.__name__] = fold
        globals()[f"fold_{function.__name__}"] = fold
        if what is not None:
            FORBIDDEN[function.__name__] = what
        return function

    return register


# -- forbidden calls ------------------------------


@impure("time.time")
def clock(context: Context, _event: Foldable) -> None:
    context["at"] = time.time()


@impure("time.monotonic")
def renamed_clock(context: Context, _event: Foldable) -> None:
    context["at"] = ticks()


@impure("datetime.now")
def now(context: Context, _event: Foldable) -> None:
    context["at"] = datetime.datetime.now(UTC).isoformat()


@impure("date.today")
def today(context: Context, _event: Foldable) -> None:
    context["on"] = date.today().isoformat()


@impure("time.sleep")
def sleeps(_context: Context, _event: Foldable) -> None:
    time.sleep(0)


@impure("random.random")
def chance(context: Context, _event: Foldable) -> None:
    context["chance"] = random.random()


@impure("random.shuffle")
def shuffled(context: Context, _event: Foldable) -> None:
    order = [1, 2, 3]
    random.shuffle(order)
    context["order"] = order


@impure("uuid.uuid4")
def random_id(context: Context, _event: Foldable) -> None:
    context["id"] = str(uuid.uuid4())


@impure("secrets.token_hex")
def secret(context: Context, _event: Foldable) -> None:
    context["token"] = secrets.token_hex()


@impure("os.environ")
def environment(context: Context, _event: Foldable) -> None:
    context["home"] = os.environ.get("HOME")


@impure("os.environ")
def environment_by_function(context: Context, _event: Foldable) -> None:
    context["home"] = os.getenv("HOME")


@impure("open")
def reads(context: Context, _event: Foldable) -> None:
    with open(__file__) as file:
        context["text"] = file.readline()


_opened = open(os.devnull, "w")  # noqa: SIM115 (that it stays open is the point)


@impure("TextIOWrapper.write")
def writes_to_a_file_that_is_open(_context: Context, event: Foldable) -> None:
    _opened.write(f"{event.seq}\n")


@impure("exists")
def looks(context: Context, _event: Foldable) -> None:
    context["there"] = Path("/etc").exists()


@impure("tempfile")
def temporary(context: Context, _event: Foldable) -> None:
    context["file"] = tempfile.mkdtemp()


@impure("socket")
def network(_context: Context, _event: Foldable) -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=0.01)


@impure("urllib.request")
def web(_context: Context, _event: Foldable) -> None:
    urllib.request.urlopen("http://127.0.0.1:9/")


@impure("subprocess.run")
def program(_context: Context, _event: Foldable) -> None:
    subprocess.run(["true"], check=False)


@impure("threading.Thread")
def thread(_context: Context, _event: Foldable) -> None:
    threading.Thread(target=int).start()


@impure("asyncio")
def loop(_context: Context, _event: Foldable) -> None:
    asyncio.new_event_loop().close()


@impure("os.getpid")
def process(context: Context, _event: Foldable) -> None:
    context["process"] = os.getpid()


@impure("id")
def address(context: Context, event: Foldable) -> None:
    context["address"] = id(event)


def _helper() -> float:
    return time.time()


@impure("time.time")
def in_a_helper(context: Context, _event: Foldable) -> None:
    context["at"] = _helper()


@impure("time.time")
def swallowed(context: Context, _event: Foldable) -> None:
    try:
        context["at"] = time.time()
    except BaseException:
        context["at"] = 0


# -- state that outlives the call ------------------------------

_seen: list[int] = []
_total = 0
_numbers = count()


@impure()
def global_list(_context: Context, event: Foldable) -> None:
    _seen.append(event.seq)


@impure()
def global_counter(context: Context, _event: Foldable) -> None:
    global _total
    _total += 1
    context["total"] = _total


@impure()
def global_iterator(context: Context, _event: Foldable) -> None:
    context["number"] = next(_numbers)


@impure()
def global_of_another_module(_context: Context, event: Foldable) -> None:
    impure_helpers.seen.append(event.seq)


@impure()
def function_of_another_module(_context: Context, event: Foldable) -> None:
    impure_helpers.remember(event.seq)


@impure()
def default_argument(context: Context, event: Foldable, seen: list[int] = []) -> None:  # noqa: B006 (that is the fault)
    seen.append(event.seq)
    context["seen"] = len(seen)


@impure()
def attribute_of_function(context: Context, _event: Foldable) -> None:
    attribute_of_function.calls = getattr(attribute_of_function, "calls", 0) + 1
    context["calls"] = attribute_of_function.calls


class _Tally:
    total = 0


@impure()
def attribute_of_class(context: Context, _event: Foldable) -> None:
    _Tally.total += 1
    context["total"] = _Tally.total


class _Slots:
    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


_slotted = _Slots()
_array = array("q")


@impure()
def object_with_slots(_context: Context, _event: Foldable) -> None:
    _slotted.total += 1


@impure()
def global_array(_context: Context, event: Foldable) -> None:
    _array.append(event.seq)


def _closure() -> Callable[[Context, Foldable], None]:
    calls = 0

    def in_a_closure(context: Context, _event: Foldable) -> None:
        nonlocal calls
        calls += 1
        context["calls"] = calls

    return in_a_closure


impure()(_closure())


# -- the event, and what is no JSON ------------------------------


@impure()
def changes_payload(_context: Context, event: Foldable) -> None:
    event.payload["seen"] = True


@impure()
def changes_kept_payload(context: Context, event: Foldable) -> None:
    kept = context.setdefault("kept", [])
    if kept:
        kept[0]["later"] = event.seq
    else:
        kept.append(event.payload)


@impure()
def not_json(context: Context, _event: Foldable) -> None:
    context.setdefault("tags", set()).add("x")


@impure()
def raises(context: Context, _event: Foldable) -> None:
    context["nothing"]["there"] = 1


# -- results that differ ------------------------------


@impure()
def clock_called_by_c(context: Context, _event: Foldable) -> None:
    # `iter(function, sentinel)` calls it in C, where no profile function sees it.
    context["at"] = next(iter(time.perf_counter_ns, None))


@impure()
def order_of_a_set(context: Context, event: Foldable) -> None:
    context["words"] = list({*event.payload["text"].split()})


@impure()
def order_of_a_set_late(context: Context, event: Foldable) -> None:
    if event.seq > 1333:
        context["words"] = list({"some", "words", "of", "a", "note"})


@impure()
def shares_late(context: Context, event: Foldable) -> None:
    if event.seq == 1300:
        context["first"] = context["second"] = []
    if event.seq == 1333:
        context["first"].append(event.seq)


@impure()
def hash_of_a_string(context: Context, event: Foldable) -> None:
    context["bucket"] = hash(event.payload["text"]) % 1000


@impure()
def local_time(context: Context, event: Foldable) -> None:
    context["at"] = datetime.datetime.fromtimestamp(1_700_000_000 + event.seq).isoformat()


@impure()
def shares_within_the_context(context: Context, event: Foldable) -> None:
    if "first" not in context:
        context["first"] = context["second"] = []
    context["first"].append(event.seq)


@impure()
def order_of_the_context(context: Context, event: Foldable) -> None:
    notes = context.setdefault("notes", {})
    notes[event.payload["text"]] = event.seq
    context["oldest"] = next(iter(notes))


# -- what is fair ------------------------------


@functools.cache
def _words(text: str) -> int:
    return len(text.split())


@functools.cache
def _lazy() -> Any:
    import colorsys  # an import reads files, once

    return colorsys


fair = Fold()


@fair.on(EVENT)
def note_added(context: Context, event: Foldable) -> None:
    """Everything in here is pure, though not at first sight."""
    _lazy()
    context["words"] = context.get("words", 0) + _words(event.payload["text"])
    context["lot"] = random.Random(event.seq).randint(1, 1000)
    context["name"] = str(uuid.uuid5(uuid.NAMESPACE_URL, event.payload["text"]))
    context["tags"] = sorted({*event.payload["text"].split()})
    context["at"] = datetime.datetime.fromisoformat("2026-01-02T03:04:05+00:00").isoformat()
    context["then"] = datetime.datetime.fromtimestamp(event.seq, UTC).isoformat()
    written = io.StringIO()
    written.write("in memory")
    print(written.getvalue())
    context.setdefault("kept", []).append(event.payload)
