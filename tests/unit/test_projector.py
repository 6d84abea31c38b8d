"""Projectors and their options, without a database."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from walstream.config import ProjectorSettings
from walstream.engine.context import Context
from walstream.engine.projector import FunctionProjector, Options, Projector
from walstream.errors import ConfigError
from walstream.event import Event
from walstream.testing import deliver, make_context, make_event


class Sample(Projector):
    name = "sample"


def test_the_configuration_overrides_the_class() -> None:
    options = Options.of(Sample(), ProjectorSettings(lanes=4, on_poison="halt", start="latest", deadline=1.5, batch=7))
    assert (options.lanes, options.on_poison, options.start, options.deadline, options.batch) == (
        4,
        "halt",
        "latest",
        1.5,
        7,
    )
    assert Options.of(Sample()).max_attempts == 3
    assert Options.of(Sample(), ProjectorSettings(max_attempts=9)).max_attempts == 9


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", ""),
        ("name", "white space"),
        ("name", "x" * 64),
        ("name", "-x"),
        ("start", "soon"),
        ("start", 0),
        ("start", True),
        ("on_poison", "skip"),
        ("max_attempts", 0),
        ("lanes", 0),
        ("lanes", 257),
        ("batch", 0),
        ("deadline", 0),
        ("retry_first", 99.0),
        ("events", "model.responded"),
        ("tables", "token_usage"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(option: str, value: Any) -> None:
    projector = Sample()
    setattr(projector, option, value)
    with pytest.raises(ConfigError, match=option):
        Options.of(projector)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="'lane'"):
        FunctionProjector(print, lane=3)


def test_a_projector_without_project_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Sample"):
        Sample().project([make_event(1)], make_context())


def _takes(seen: list[Any]) -> dict[str, Any]:
    def event_only(event: Event) -> None:
        seen.append((event,))

    def with_context(event: Event, ctx: Context) -> None:
        seen.append((event, ctx))

    def with_default(event: Event, tries: int = 3) -> None:
        seen.append((event, tries))

    def with_default_context(event: Event, ctx: Context | None = None) -> None:
        seen.append((event, ctx))

    async def is_async(event: Event, ctx: Context) -> None:
        await asyncio.sleep(0)
        seen.append((event, ctx))

    @functools.wraps(is_async)
    def wraps_async(*args: Any) -> Any:
        return is_async(*args)

    class Method:
        def call(self, event: Event, context: Context) -> None:
            seen.append((event, context))

        async def __call__(self, event: Event) -> None:
            seen.append((event,))

    return {
        "event": event_only,
        "event and ctx": with_context,
        "a default of its own": with_default,
        "ctx with a default": with_default_context,
        "async": is_async,
        "async in a plain wrapper": wraps_async,
        "method": Method().call,
        "async callable": Method(),
        "partial": functools.partial(with_default, tries=5),
        "builtin": seen.append,
    }


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("event", None),
        ("event and ctx", Context),
        ("a default of its own", 3),
        ("ctx with a default", Context),
        ("async", Context),
        ("async in a plain wrapper", Context),
        ("method", Context),
        ("async callable", None),
        ("partial", 5),
        ("builtin", None),
    ],
)
def test_a_function_gets_what_it_takes(kind: str, second: Any) -> None:
    seen: list[Any] = []
    event = make_event(1)
    deliver(FunctionProjector(_takes(seen)[kind], name="p"), [event])
    (got,) = seen
    if kind == "builtin":
        assert got is event
    else:
        assert got[0] is event
        assert len(got) == (1 if second is None else 2)
        if second is Context:
            assert isinstance(got[1], Context)
        elif second is not None:
            assert got[1] == second


def test_a_function_that_takes_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        FunctionProjector(lambda: None)


def test_a_generator_is_refused() -> None:
    """A call of it runs nothing, and every event would count as done."""

    def lazy(event: Event) -> Iterator[int]:
        yield event.offset

    async def lazy_async(event: Event) -> AsyncIterator[int]:
        yield event.offset

    for function in (lazy, lazy_async):
        with pytest.raises(ConfigError, match=r"^lazy(_async)? is a generator"):
            FunctionProjector(function)


def test_what_a_function_has_done_is_noted() -> None:
    def fails_at_three(event: Event) -> None:
        if event.offset == 3:
            raise ValueError

    ctx = make_context()
    with pytest.raises(ValueError):
        deliver(FunctionProjector(fails_at_three), [make_event(n) for n in range(1, 6)], ctx)
    assert ctx.finished is not None
    assert ctx.finished.offset == 2


def test_what_an_async_function_has_done_is_noted() -> None:
    async def fails_at_three(event: Event) -> None:
        await asyncio.sleep(0)
        if event.offset == 3:
            raise ValueError

    ctx = make_context()
    with pytest.raises(ValueError):
        deliver(FunctionProjector(fails_at_three), [make_event(n) for n in range(1, 6)], ctx)
    assert ctx.finished is not None
    assert ctx.finished.offset == 2


def test_an_external_projector_has_no_transaction() -> None:
    ctx = make_context("p")
    with pytest.raises(ConfigError, match="'p' is external"):
        _ = ctx.cursor
    with pytest.raises(ConfigError, match="'p' is external"):
        _ = ctx.connection
