"""The fold: what a session's events, one after the other, make of an agent's context.

A fold is pure. It looks at the context and the event and changes the context; no clock, no chance, no file, no
network, no environment, nothing that outlives the call. Only then does a replay give what the original run had
(``walstream fold check`` finds what breaks this).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from walstream.errors import ConfigError, PayloadError
from walstream.event import ERASED_PAYLOAD, parse_payload

from .messages import Context as Context
from .messages import add_message as add_message
from .messages import sendable as sendable
from .taxonomy_folds import TAXONOMY, empty_context

if TYPE_CHECKING:
    from walstream.config import Settings

BUILTIN_VERSION: Final = 2
"""Raised whenever one of our own folds gives another context than before: older snapshots are then not used."""

_UNPARSED: Final = object()


class Foldable(Protocol):
    """What a fold may see of an event. :class:`walstream.Event` and :class:`FoldEvent` both have it."""

    @property
    def seq(self) -> int: ...
    @property
    def session_id(self) -> str: ...
    @property
    def agent_id(self) -> str: ...
    @property
    def event_type(self) -> str: ...
    @property
    def payload(self) -> Any: ...


FoldFunction = Callable[[Context, Foldable], None]
_Function = TypeVar("_Function", bound=Callable[..., None])


class FoldEvent:
    """One row of the ledger as a fold sees it. The payload is parsed when it is first asked for."""

    __slots__ = ("_parsed", "_raw", "agent_id", "event_type", "seq", "session_id")

    def __init__(self, seq: int, session_id: str, agent_id: str, event_type: str, raw: bytes) -> None:
        self.seq = seq
        self.session_id = session_id
        self.agent_id = agent_id
        self.event_type = event_type
        self._raw = raw
        self._parsed: Any = _UNPARSED

    @classmethod
    def of(cls, seq: int, session_id: str, agent_id: str, event_type: str, payload: Any) -> FoldEvent:
        """One whose payload is parsed already."""
        event = cls(seq, session_id, agent_id, event_type, b"")
        event._parsed = payload
        return event

    @property
    def payload(self) -> Any:
        """The payload. Read-only.

        Raises:
            PayloadError: legal JSON that cannot be parsed here.
        """
        if self._parsed is _UNPARSED:
            self._parsed = parse_payload(self._raw)
        return self._parsed

    @property
    def payload_bytes(self) -> bytes:
        """The payload as the exact text in UTF-8; empty if it was given parsed."""
        return self._raw

    def with_payload(self, payload: Any) -> FoldEvent:
        """The same event with another payload (what it refers to put in)."""
        return FoldEvent.of(self.seq, self.session_id, self.agent_id, self.event_type, payload)

    def __repr__(self) -> str:
        return f"FoldEvent(seq={self.seq}, {self.event_type!r}, session={self.session_id!r})"


class Fold:
    """Folds every type of the taxonomy, and those that an application adds::

        fold = Fold()


        @fold.on("note.added", version=2)
        def note_added(context, event):
            context.setdefault("notes", []).append(event.payload["text"])

    A function registered for one of our own types replaces ours. Events of other types change nothing.
    """

    def __init__(self) -> None:
        self._functions: dict[str, FoldFunction] = dict(TAXONOMY)
        self._versions: dict[str, int] = {}
        self._sealed = False

    @property
    def version(self) -> str:
        """Recorded in every snapshot; one of another version is not used. ``2`` is ours alone; ``2+note.added=2`` has a
        type of an application in its second version."""
        return "+".join([str(BUILTIN_VERSION), *(f"{name}={self._versions[name]}" for name in sorted(self._versions))])

    @property
    def event_types(self) -> tuple[str, ...]:
        """The types that change a context, sorted."""
        return tuple(sorted(self._functions))

    def function(self, event_type: str) -> FoldFunction | None:
        """The function that folds a type; ``None`` if events of it change nothing."""
        return self._functions.get(event_type)

    def on(self, *event_types: str, version: int = 1) -> Callable[[_Function], _Function]:
        """Decorate the function that folds these types.

        Args:
            event_types: at least one.
            version: to be raised whenever the function gives another context than before.

        Raises:
            ConfigError: no type, one that is registered already, or this is the fold that everybody shares.
        """
        if self._sealed:
            raise ConfigError("the built-in fold is everybody's", hint="make your own: fold = Fold()")
        if not event_types or not all(event_types):
            raise ConfigError("a fold is registered for at least one event type", hint='@fold.on("note.added")')
        for name in event_types:
            if name in self._versions:
                raise ConfigError(f"two functions fold {name!r}", hint="register one function for each event type")

        def register(function: _Function) -> _Function:
            for name in event_types:
                self._functions[name] = function
                self._versions[name] = version
            return function

        return register

    def empty(self) -> Context:
        """The context of a session without events."""
        return empty_context()

    def apply(self, context: Context, event: Foldable) -> None:
        """Fold one event into ``context``. One whose payload was erased changes nothing.

        Raises:
            PayloadError: the fold reads the payload, and it cannot be parsed; names session and seq.
            LedgerError: the event refers to something that was not put in.
        """
        function = self._functions.get(event.event_type)
        if function is None or getattr(event, "payload_bytes", None) == ERASED_PAYLOAD:
            return
        try:
            function(context, event)
        except PayloadError as error:
            raise PayloadError(
                f"the {event.event_type} with seq {event.seq} of session {event.session_id} cannot be folded: {error}",
                hint="no context can be made of this session from there on; up to the seq before it, it can",
            ) from error
        except Exception as error:
            # It is an application's function that failed, and its error stays what it is.
            error.add_note(f"while folding the {event.event_type} with seq {event.seq} of session {event.session_id}")
            raise

    def fold(self, events: Iterable[Foldable], context: Context | None = None) -> Context:
        """Fold events in the order in which they come (that of ``seq``), from an empty context or on top of one, which
        is changed.

        Raises:
            PayloadError, LedgerError: see :meth:`apply`.
        """
        if context is None:
            context = self.empty()
        for event in events:
            self.apply(context, event)
        return context


BUILTIN: Final = Fold()
"""The fold of the taxonomy alone."""
BUILTIN._sealed = True


def apply_event(context: Context, event: Foldable) -> None:
    """Fold one event of the taxonomy into ``context``.

    Raises:
        PayloadError, LedgerError: see :meth:`Fold.apply`.
    """
    BUILTIN.apply(context, event)


def load_fold(settings: Settings) -> Fold:
    """The application's own fold, if the settings name one, else the built-in one.

    Raises:
        ConfigError: it cannot be imported, or is no ``Fold``.
    """
    return BUILTIN if settings.fold is None else import_fold(settings.fold)


def import_fold(name: str) -> Fold:
    """The fold that ``package.module:name`` stands for; the working directory is searched, too, as a last resort.

    Raises:
        ConfigError: it cannot be imported, or is no ``Fold``.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{name!r} does not name a fold", hint="write it as package.module:name")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the fold {name} cannot be imported: {error}",
            hint="start walstream in the folder that the module is in, or install it"
            if isinstance(error, ImportError)
            else "name a walstream.Fold that the module has",
        ) from error
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, SyntaxError) else f" ({at.filename}:{at.lineno})"  # which says its own
        raise ConfigError(
            f"the fold {name} cannot be imported: {type(error).__name__}: {error}{place}",
            hint="the module itself failed",
        ) from error
    if not isinstance(found, Fold):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a walstream.Fold")
    return found
