"""Projectors, streams and workers by name: entry points, and ``package.module:attribute``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, TypeVar

from walstream.config import Settings
from walstream.engine.projector import Projector
from walstream.errors import ConfigError, WalstreamError

if TYPE_CHECKING:
    from walstream.stream import Stream
    from walstream.worker.worker import Worker

_Kind = TypeVar("_Kind")

GROUP: Final = "walstream.projectors"
"""The entry point group under which a package offers projectors: name = "package.module:Class"."""


def load_target(target: str) -> Stream:
    """Import the stream that ``package.module:name`` names; the working directory is searched like with ``python -m``.

    Raises:
        ConfigError: it is not of that form, cannot be imported, or is no stream.
    """
    from walstream.stream import Stream

    return _load(target, Stream, "stream", "stream = walstream.Stream(…)")


def load_worker(target: str) -> Worker:
    """The same for a worker.

    Raises:
        ConfigError: as for :func:`load_target`.
    """
    from walstream.worker.worker import Worker

    return _load(target, Worker, "worker", 'worker = walstream.Worker(agent="…")')


def _load(target: str, kind: type[_Kind], named: str, example: str) -> _Kind:
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f"{target!r} names no {named}", hint=f"write package.module:name, e.g. app.agents:{named}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except WalstreamError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise ConfigError(
                f"there is no module {module_name!r} (looked in {here} and the Python path)",
                hint="start walstream in the folder that the module is in, or install it",
            ) from None
        raise ConfigError(
            f"importing {module_name!r} failed: {type(error).__name__}: {error}{_place(error)}",
            hint=f"it is the module's own error: `python -c 'import {module_name}'` in {here} shows all of it",
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, kind):
        what = "does not exist" if found is None else f"is a {type(found).__name__}"
        raise ConfigError(f"{target!r} {what}; a {named} is needed", hint=example)
    return found


def _place(error: Exception) -> str:
    """Where in somebody's module an error comes from, as far as that can be told."""
    if isinstance(error, SyntaxError):
        return ""  # its own text has it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def available() -> dict[str, EntryPoint]:
    """The projectors that installed packages offer, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def configured_projectors(settings: Settings, *, beside: Sequence[Projector] = ()) -> list[Projector]:
    """Make the projectors of ``[projectors.NAME]`` that the program itself did not bring.

    A table whose name a projector of ``beside`` has only overrides that one's options.

    Raises:
        ConfigError: nobody offers a projector of that name, or it cannot be made with these options.
    """
    brought = {projector.name for projector in beside}
    return [_make(name, word.options) for name, word in settings.projectors.items() if name not in brought]


def _make(name: str, options: dict[str, Any]) -> Projector:
    offered = available()
    entry = offered.get(name)
    if entry is None:
        raise ConfigError(
            f"[projectors.{name}]: no installed package offers a projector of that name",
            hint=f"there are: {', '.join(sorted(offered)) or 'none'}; your own ones belong into a stream"
            " (walstream run package.module:stream)",
        )
    try:
        made = entry.load()(**options)
    except Exception as error:
        raise ConfigError(
            f"the projector {name!r} ({entry.value}) cannot be made: {type(error).__name__}: {error}",
            hint=f"its options are those of [projectors.{name}.options]",
        ) from error
    if not isinstance(made, Projector):
        raise ConfigError(f"the entry point {name!r} ({entry.value}) makes no projector but a {type(made).__name__}")
    return made
