"""What a projector is: the class that users derive from, the functions that are wrapped into it, and its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from walstream.config import ProjectorSettings
from walstream.errors import ConfigError
from walstream.event import Event

from .retry import Backoff

if TYPE_CHECKING:
    from .context import Context

Start = Literal["earliest", "latest"] | int
OnPoison = Literal["park", "halt"]

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,62}")


class Projector:
    """Derives something from the ledger: a table, a message, a file. Subclass it for what has state or a lifecycle.

    Attributes:
        name: identifies its cursor; a projector under a new name starts over.
        events: the event types it receives; empty means all. The others are passed over cheaply.
        transactional: it writes to the ledger's own database through ``ctx.cursor``, and its effect commits together
            with its cursor: exactly once. Otherwise it is *external*: at least once, with the same ``event.key`` on
            every delivery.
        tables: the tables that it alone fills, for ``rebuild``.
        outward: it acts on the world (sends a message, starts an agent), so a rebuild must keep it silent.
        start: where it begins when it is new: ``"earliest"``, ``"latest"`` (what commits from now on), or the offset
            of the first event it shall receive.
        on_poison: what happens to an event that failed ``max_attempts`` times: ``"park"`` its session and go on with
            the others, or ``"halt"`` this projector.
        max_attempts: tries of one event before that, the first included.
        retry_first, retry_cap: seconds between those tries: doubled from the one to the other.
        park_first, park_cap: the same for the later tries of a parked session.
        lanes: threads, each with the sessions of one hash; 1 keeps the commit order over all sessions. With more, one
            object is called from several threads at once.
        batch: the most events that :meth:`project` receives at once (a larger transaction is split). Up to 500 at
            first; more only where a full batch takes less than 0.2 s.
        deadline: seconds that a transactional batch may take before its transaction is ended from outside.
        synchronous_commit: ``False``: a transactional batch does not wait until its commit is on the disk. A crash of
            the server may take the last moments back, effect and cursor together, and the events come again. Good where
            nobody outside of the database acts on what he reads there.
        tick_seconds: an external projector's :meth:`tick` is called about this often; ``None`` means never.

    A word in the configuration (``[projectors.NAME]``) overrides the class's.

    >>> from collections import Counter
    >>> from walstream import Event, Projector
    >>> from walstream.testing import deliver, make_event
    >>> class TypeCount(Projector):
    ...     name = "type-count"
    ...     def __init__(self):
    ...         self.seen = Counter()
    ...     def project(self, events, ctx):
    ...         self.seen.update(event.event_type for event in events)
    >>> projector = TypeCount()
    >>> deliver(projector, [make_event(1, "tool.invoked"), make_event(2, "tool.invoked")])
    >>> projector.seen["tool.invoked"]
    2
    """

    name: str = ""
    events: Sequence[str] = ()
    transactional: bool = False
    tables: Sequence[str] = ()
    outward: bool = False
    start: Start = "earliest"
    on_poison: OnPoison = "park"
    max_attempts: int = 3
    retry_first: float = 0.2
    retry_cap: float = 30.0
    park_first: float = 5.0
    park_cap: float = 3600.0
    lanes: int = 1
    batch: int = 2000
    deadline: float = 30.0
    synchronous_commit: bool = True
    tick_seconds: float | None = None

    def setup(self, ctx: Context) -> Awaitable[None] | None:
        """Called once in each process before the first event, when it is this process's turn; may be ``async``.

        A transactional projector can create its tables here: ``ctx.cursor`` is in a transaction that commits after.
        """

    def project(self, events: Sequence[Event], ctx: Context) -> Awaitable[None] | None:
        """Derive. May be ``async``.

        Args:
            events: one or more, in commit order. They are shared with other projectors: read only.
            ctx: the transaction to write through, and what is known about this delivery.

        Raises:
            RetryLater: the target is away; the same events come again, and it is nobody's fault.
            Exception: anything else is a failed attempt.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what to do with events: define project()")

    def tick(self, ctx: Context) -> Awaitable[None] | None:
        """Do what is due by time and not by events (close a file, send what was collected); may be ``async``.

        Called by lane 0 of an external projector, never at the same time as this lane's :meth:`project`: at the start,
        then every ``tick_seconds``, also while nothing comes. What it raises is treated like a failure of
        :meth:`project`, but that no session is there to be parked: with ``on_poison = "park"`` it is given up until
        the next tick.
        """

    def close(self) -> Awaitable[None] | None:
        """Called once when this process stops running it; may be ``async``."""


Handler = Callable[..., Any]


class FunctionProjector(Projector):
    """A function, plain or async, of ``(event)`` or ``(event, ctx)``, called for each event by itself.

    >>> from walstream.testing import deliver, make_event
    >>> seen = []
    >>> def note(event):
    ...     seen.append(event.payload["n"])
    >>> deliver(FunctionProjector(note), [make_event(1, payload={"n": 7})])
    >>> seen
    [7]

    Raises:
        ConfigError: the function takes neither one nor two arguments, or is a generator; or an option is unknown.
    """

    _OPTIONS: ClassVar[frozenset[str]] = frozenset(Projector.__annotations__) - {"tick_seconds"}

    def __init__(self, function: Handler, events: Sequence[str] = (), **options: Any) -> None:
        unknown = sorted(set(options) - self._OPTIONS)
        if unknown:
            raise ConfigError(
                f"a projector has no option {', '.join(map(repr, unknown))}",
                hint=f"it has: {', '.join(sorted(self._OPTIONS))}",
            )
        self.name = getattr(function, "__name__", type(function).__name__)
        self.events = tuple(events)
        for option, value in options.items():
            setattr(self, option, value)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"{self.name} is a generator (it says `yield`): a call of it would run nothing",
                hint="write it as a plain or an async function",
            )
        self.function = function
        self._with_context = _takes_context(function)

    def project(self, events: Sequence[Event], ctx: Context) -> Awaitable[None] | None:
        for index, event in enumerate(events):
            outcome = self._call(event, ctx)
            # What it returns tells, and not how it is declared: a decorator may have wrapped what is async.
            if inspect.isawaitable(outcome):
                return self._await(outcome, events[index:], ctx)
            ctx.done(event)
        return None

    async def _await(self, outcome: Awaitable[Any], events: Sequence[Event], ctx: Context) -> None:
        """Wait for what the first of ``events`` came to, and go on with the others."""
        await outcome
        ctx.done(events[0])
        for event in events[1:]:
            outcome = self._call(event, ctx)
            if inspect.isawaitable(outcome):
                await outcome
            ctx.done(event)

    def _call(self, event: Event, ctx: Context) -> Any:
        return self.function(event, ctx) if self._with_context else self.function(event)


@dataclass(frozen=True, slots=True)
class Options:
    """A projector's options after the configuration has had its word. See :class:`Projector` for their meaning."""

    name: str
    events: frozenset[bytes]
    transactional: bool
    tables: tuple[str, ...]
    outward: bool
    start: Start
    on_poison: OnPoison
    max_attempts: int
    retry: Backoff
    park: Backoff
    lanes: int
    batch: int
    deadline: float
    synchronous_commit: bool
    tick_seconds: float | None

    @property
    def kind(self) -> str:
        """``transactional`` or ``external``, as the table ``projectors`` has it."""
        return "transactional" if self.transactional else "external"

    @classmethod
    def of(cls, projector: Projector, override: ProjectorSettings | None = None) -> Options:
        """The options of ``projector``.

        Raises:
            ConfigError: one of them makes no sense; the message names projector and option.
        """
        word = override or ProjectorSettings()
        name = projector.name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{type(projector).__name__} has the name {name!r}",
                hint="a projector's name has 1 to 63 letters, digits and . _ : - and begins with none of the marks",
            )
        options = cls(
            name=name,
            events=frozenset(_texts(name, "events", projector.events)),
            transactional=bool(projector.transactional),
            tables=tuple(table.decode() for table in _texts(name, "tables", projector.tables)),
            outward=bool(projector.outward),
            start=projector.start if word.start is None else word.start,
            on_poison=projector.on_poison if word.on_poison is None else word.on_poison,
            max_attempts=projector.max_attempts if word.max_attempts is None else word.max_attempts,
            retry=Backoff(projector.retry_first, projector.retry_cap),
            park=Backoff(projector.park_first, projector.park_cap),
            lanes=projector.lanes if word.lanes is None else word.lanes,
            batch=projector.batch if word.batch is None else word.batch,
            deadline=projector.deadline if word.deadline is None else word.deadline,
            synchronous_commit=bool(projector.synchronous_commit),
            tick_seconds=projector.tick_seconds,
        )
        options._check()
        return options

    def _check(self) -> None:
        sound = {
            "start": self.start in ("earliest", "latest") or (type(self.start) is int and self.start >= 1),
            "on_poison": self.on_poison in ("park", "halt"),
            "max_attempts": self.max_attempts >= 1,
            "retry_first and retry_cap": 0 <= self.retry.first <= self.retry.cap,
            "park_first and park_cap": 0 <= self.park.first <= self.park.cap,
            "lanes": 1 <= self.lanes <= 256,
            "batch": self.batch >= 1,
            "deadline": self.deadline > 0,
            "tick_seconds": self.tick_seconds is None or (self.tick_seconds > 0 and not self.transactional),
        }
        wrong = [option for option, fits in sound.items() if not fits]
        if wrong:
            raise ConfigError(
                f"projector {self.name!r}: {', '.join(wrong)} cannot be what it is",
                hint="start is 'earliest', 'latest' or an offset from 1; on_poison is 'park' or 'halt';"
                " max_attempts, batch and lanes (to 256) are at least 1; times are seconds; only an external projector"
                " has ticks",
            )


def _texts(name: str, option: str, value: Sequence[str]) -> list[bytes]:
    if isinstance(value, str):  # ("model.responded") is no tuple, and would be 15 events of one letter
        raise ConfigError(f"projector {name!r}: {option} is the text {value!r}", hint=f"write {option} = ({value!r},)")
    return [text.encode() for text in value]


def _takes_context(function: Handler) -> bool:
    """Whether ``function`` wants ``(event, ctx)`` rather than ``(event)``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin such as list.append: it has no signature, and wants the event
        return False
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) >= 2 and positional[1].name in ("ctx", "context", "_ctx", "_context", "_"):
        return True
    # A second argument with a default, as in `def f(event, tries=3)`, is the function's own.
    for arguments in (1, 2):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments == 2
    name = getattr(function, "__qualname__", repr(function))
    raise ConfigError(f"{name} cannot be called with (event) or with (event, ctx)")
