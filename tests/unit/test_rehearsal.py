"""The rehearsal passes projectors that stand what happens to them, and finds those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from walstream import Context, Event, Projector
from walstream.testing import FAULTS, make_event, rehearse

EVENTS = [make_event(n, "even" if n % 2 == 0 else "odd", payload={"n": n}) for n in range(1, 37)]


class Keyed(Projector):
    """A file an event, called by its key."""

    name = "keyed"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        for event in events:
            (self.folder / event.key).write_text(str(event.payload["n"]))


class Blind(Keyed):
    """Appends a line, and does not see that it stands there already."""

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        with (self.folder / "lines").open("a") as file:
            for event in events:
                file.write(f"{event.key}\n")
                file.flush()


class Hoarder(Keyed):
    """Keeps a few in memory, and says that they are done."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kept: list[Event] = []

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        self._kept += events
        while len(self._kept) >= 5:
            super().project(self._kept[:5], ctx)
            del self._kept[:5]

    def close(self) -> None:
        for event in self._kept:
            (self.folder / event.key).write_text(str(event.payload["n"]))


class TwoSteps(Keyed):
    """Marks an event as done before it is, and skips what is marked: only a kill between its lines shows it."""

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        for event in events:
            mark = self.folder / f"mark-{event.key}"
            if mark.exists():
                continue
            mark.touch()
            super().project([event], ctx)


class Spoiling(Keyed):
    """Changes the payload that all projectors share."""

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        super().project(events, ctx)
        for event in events:
            event.payload["n"] += 1


class Async(Keyed):
    events = ("even",)

    async def project(self, events: Sequence[Event], ctx: Context) -> None:  # type: ignore[override]  # either is allowed
        super().project(events, ctx)


def contents(folder: Path) -> Callable[[], dict[str, str]]:
    return lambda: {path.name: path.read_text() for path in folder.iterdir()}


def emptying(folder: Path) -> Callable[[], None]:
    def empty() -> None:
        for path in folder.iterdir():
            path.unlink()

    return empty


def rehearsed(kind: type[Keyed], folder: Path, *faults: str, rounds: int = 8) -> list[str]:
    return rehearse(
        lambda: kind(folder),
        EVENTS,
        contents(folder),
        reset=emptying(folder),
        rounds=rounds,
        faults=faults or FAULTS,
    )


@pytest.mark.parametrize("kind", [Keyed, Async])
def test_what_stands_everything_passes(kind: type[Keyed], tmp_path: Path) -> None:
    told = rehearsed(kind, tmp_path, rounds=16)
    drawn = {fault for fault in FAULTS if any(line.endswith(f": {fault}") for line in told)}
    assert drawn == set(FAULTS) or kind is Async  # whose events are too few for all of them
    files = contents(tmp_path)()
    assert files == {event.key: str(event.payload["n"]) for event in EVENTS if kind is Keyed or event.offset % 2 == 0}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (Blind, "kill_before_cursor"),
        (Blind, "redeliver"),
        (Hoarder, "kill_after_cursor"),
        (TwoSteps, "kill"),
        (Spoiling, "redeliver"),
    ],
)
def test_what_does_not_stand_it_is_found(kind: type[Keyed], fault: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"round \d+ of seed 1\n(.|\n)*: {fault}\n(.|\n)*instead of"):
        rehearsed(kind, tmp_path, fault, rounds=40)


@pytest.mark.parametrize(
    ("kind", "fault"), [(Blind, "restart"), (Hoarder, "restart"), (TwoSteps, "kill_before_cursor")]
)
def test_no_fault_is_more_than_its_name(kind: type[Keyed], fault: str, tmp_path: Path) -> None:
    assert rehearsed(kind, tmp_path, fault, rounds=2)


def test_a_seed_draws_the_same_faults(tmp_path: Path) -> None:
    assert rehearsed(Keyed, tmp_path, rounds=3) == rehearsed(Keyed, tmp_path, rounds=3)


def test_what_it_raises_is_shown(tmp_path: Path) -> None:
    class Failing(Keyed):
        def project(self, events: Sequence[Event], ctx: Context) -> None:
            raise ZeroDivisionError(f"of event {events[0].offset} in {ctx.projector}")

    with pytest.raises(AssertionError, match=r"nothing was injected(.|\n)*of event 1 in keyed"):
        rehearsed(Failing, tmp_path)


def test_a_wrong_call_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fault meteor"):
        rehearsed(Keyed, tmp_path, "meteor")
    with pytest.raises(ValueError, match="no events"):
        rehearse(lambda: Keyed(tmp_path), [], dict, reset=dict)
    with pytest.raises(ValueError, match="none of these events"):
        rehearse(lambda: Async(tmp_path), EVENTS[:1], dict, reset=dict)

    class Rows(Keyed):
        transactional = True

    with pytest.raises(AssertionError, match="connect="):
        rehearsed(Rows, tmp_path)
