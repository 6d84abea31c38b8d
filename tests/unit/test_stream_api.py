"""The class Stream without a database."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import walstream
from walstream import ConfigError, Event, FunctionProjector, Projector, Stream, Subscription
from walstream.config import Settings


def test_what_is_added_runs_in_that_order() -> None:
    stream = Stream()

    @stream.on("a", "b", lanes=2)
    def first(event: Event) -> None:
        del event

    class Second(Projector):
        name = "second"

    second = stream.add(Second())
    assert [projector.name for projector in stream.projectors] == ["first", "second"]
    assert stream.projectors[1] is second
    made = stream.projectors[0]
    assert isinstance(made, FunctionProjector)
    assert (made.events, made.lanes, made.function) == (("a", "b"), 2, first)


def test_a_wrong_option_is_refused_where_it_is_written() -> None:
    stream = Stream()
    with pytest.raises(ConfigError, match="'lane'"):
        stream.on("a", lane=2)(print)


def test_forgotten_parentheses_are_noticed() -> None:
    stream = Stream()
    with pytest.raises(ConfigError, match="event types") as raised:

        @stream.on  # type: ignore[arg-type]
        def nothing(event: Event) -> None:
            del event

    assert "@stream.on()" in raised.value.hint


def test_a_class_is_no_projector() -> None:
    class Meter(Projector):
        name = "meter"

    with pytest.raises(ConfigError, match="Meter is none") as raised:
        Stream().add(Meter)  # type: ignore[type-var]
    assert "stream.add(Meter())" in raised.value.hint


def test_without_async_with_there_is_nothing_to_wait_for() -> None:
    with pytest.raises(ConfigError, match="not running"):
        asyncio.run(Stream().wait())


def test_an_application_can_give_up_while_the_stream_waits_for_the_server() -> None:
    stream = Stream("host=127.0.0.1 port=1 dbname=nobody", connect_timeout=2)
    outcome: list[BaseException] = []

    async def application() -> None:
        async with asyncio.timeout(0.3), stream:
            pass

    def program() -> None:
        try:
            asyncio.run(application())
        except TimeoutError as error:
            outcome.append(error)

    running = threading.Thread(target=program, daemon=True)
    running.start()
    running.join(60)
    assert not running.is_alive(), "the program waits for the server although nobody does"
    assert outcome
    with pytest.raises(ConfigError, match="not running"):
        asyncio.run(stream.wait())


def test_every_public_name_is_there() -> None:
    for name in walstream.__all__:
        assert getattr(walstream, name).__name__ == name
    assert set(walstream.__all__) <= set(dir(walstream))
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = walstream.nothing


def test_the_configuration_wins_over_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    stream = Stream("postgresql:///program", slot="program", drain_seconds=3)
    (tmp_path / "walstream.toml").write_text("slot = 'file'\nenvironment = 'file'\n")
    monkeypatch.setenv("WALSTREAM_ENVIRONMENT", "environment")
    settings = stream.settings({"dsn": "postgresql:///flag"})
    assert (settings.dsn, settings.slot, settings.environment, settings.drain_seconds) == (
        "postgresql:///flag",
        "file",
        "environment",
        3,
    )


@pytest.mark.parametrize(
    "wrong", [{"after": "earliest"}, {"after": -1}, {"after": True}, {"sessions": "id"}, {"event_types": "a.b"}]
)
def test_a_subscription_from_nowhere_is_refused(wrong: dict[str, Any]) -> None:
    """A string of sessions would be taken letter by letter, and no event would ever come."""
    with pytest.raises(ConfigError, match=re.escape(repr(next(iter(wrong.values())))) + "|single string"):
        Subscription(Settings(dsn="postgresql:///nowhere"), **wrong)
