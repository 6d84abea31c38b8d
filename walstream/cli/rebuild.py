"""``walstream projectors rebuild``: replay a projector into copies of its tables, compare, and put them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from walstream.errors import ConfigError, ExitCode

from . import console
from .options import Json, Yes, takes_settings
from .session import installed

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.engine.projector import Projector
    from walstream.engine.rebuild import Outcome


@takes_settings
def rebuild(
    settings: Settings,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the projector.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="The stream it belongs to, as package.module:name, as for `run`."),
    ] = None,
    *,
    compare: Annotated[
        bool, typer.Option("--compare", help="Only compare; the live tables stay. Exit code 1 if they differ.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Replay a transactional projector into copies of the tables it declares, and put them in place of the live ones.

    It goes on running meanwhile; only for the last stretch it is paused, so that both stand at the same offset when
    they are compared and swapped, in one transaction. Outward effects are silent in a replay (ctx.rebuilding).
    """
    from walstream.engine.rebuild import Rebuild
    from walstream.ledger.identity import check_identity

    settings, projector = _find(settings, name, target)
    with installed(settings, "rebuild") as conn:
        identity = check_identity(conn, settings)
    if not compare:
        console.confirm(f"Put what a replay makes in place of {', '.join(projector.tables) or 'its tables'}?", yes)
    with _bar() as tell:
        outcome = Rebuild(settings, projector, identity.key_prefix, on_progress=tell).run(compare_only=compare)
    if as_json:
        console.print_json({"projector": name, **asdict(outcome)})
    else:
        _show(name, outcome)
    if compare and any(difference.any for difference in outcome.differences):
        raise typer.Exit(ExitCode.FAILED)


def _find(settings: Settings, name: str, target: str | None) -> tuple[Settings, Projector]:
    """The projector of that name, made anew, and the settings that its stream makes of ours.

    Raises:
        ConfigError: neither the target nor the configuration has it.
    """
    from walstream.plugins import configured_projectors, load_target

    brought: tuple[Projector, ...] = ()
    if target is not None:
        stream = load_target(target)
        settings = stream.settings(settings.model_dump(exclude_unset=True))
        brought = tuple(stream.projectors)
    known = (*brought, *configured_projectors(settings, beside=brought))
    for projector in known:
        if projector.name == name:
            return settings, projector
    names = ", ".join(projector.name for projector in known)
    raise ConfigError(
        f"there is no projector {name!r} here",
        hint=f"there are: {names}" if names else "name the stream that has it, as for `walstream run`",
    )


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Where the replay says how far it is."""
    if not console.person_reads():
        yield lambda _at, _of: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console.err(), transient=True) as bar:
        task = bar.add_task("replaying", total=None)
        yield lambda at, of: bar.update(task, completed=at, total=of)


def _show(name: str, outcome: Outcome) -> None:
    for difference in outcome.differences:
        if difference.any:
            console.say(
                f"{difference.table}: {difference.rows:,} rows rebuilt; the live table lacked {difference.missing:,} of"
                f" them and had {difference.surplus:,} that should not be there"
            )
        else:
            console.say(f"{difference.table}: {difference.rows:,} rows, the same as in the live table")
    if outcome.parked:
        console.say(f"{outcome.parked:,} events could not be projected in the replay (`walstream parked list {name}`)")
    words = "the rebuilt content is in place" if outcome.swapped else "the live tables were not touched"
    console.say(f"{name}: compared at offset {outcome.offset:,}; {words}")
