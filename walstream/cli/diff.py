"""``walstream diff``: where two sessions part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ExitCode

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import lines, shortened

if TYPE_CHECKING:
    from walstream.config import Settings
    from walstream.ledger.diff import Comparison, Divergence
    from walstream.ledger.fold import Fold, Foldable
    from walstream.ledger.steps import Step

_LINES: Final = 8  # of a value, around the place where the two differ
_BEFORE: Final = 3  # lines before that place
_WIDE: Final = 400  # characters of a line
_SHORT: Final = 60


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(diff)


@takes_settings
def diff(
    settings: Settings,
    session_a: Annotated[str, typer.Argument(metavar="SESSION_A", help="A session's id, or FILE, or FILE#SESSION.")],
    session_b: Annotated[str, typer.Argument(metavar="SESSION_B", help="The other one.")],
    *,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", help="Both with their events up to this seq (line of a file).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that are shown, from where they part.")] = 5,
    as_json: Json = False,
) -> None:
    """Compare two sessions step by step and show where they part. Exit code 1 if they differ.

    A step goes from one request to the model to the next: the context, the model and what it said, tools, arguments,
    results, handoffs, the outcome. Call ids, prompt hashes and token counts are no difference. A fork is compared from
    the beginning of its parent. Files are JSON Lines, as for `walstream import`.
    """
    from walstream.ledger.diff import compare
    from walstream.ledger.fold import load_fold

    fold = load_fold(settings)
    left, right = _read(settings, fold, at, session_a, session_b)
    found = compare(left, right, fold)
    if as_json:
        console.print_json(_document(found, session_a, session_b))
    else:
        _show(found, session_a, session_b, steps)
    if not found.equal:
        raise typer.Exit(int(ExitCode.FAILED))


def _read(settings: Settings, fold: Fold, at: int | None, *words: str) -> list[list[Foldable]]:
    from walstream.ledger.schema import LEDGER_VERSION

    from .histories import session_of_file, session_of_ledger

    found = [session_of_file(word) for word in words]
    if any(each is None for each in found):
        with installed(settings, "diff", LEDGER_VERSION, PATIENT) as conn:
            found = [
                list(session_of_ledger(conn, settings, word, fold, at)) if each is None else each
                for word, each in zip(words, found, strict=True)
            ]
    return [[event for event in each or () if at is None or event.seq <= at] for each in found]


def _document(found: Comparison, session_a: str, session_b: str) -> dict[str, Any]:
    import orjson

    from walstream.ledger.canonical import canonical

    def exact(divergence: Divergence) -> Any:
        return orjson.Fragment(canonical(divergence.as_json()))  # no digit is lost on the way

    return {
        "a": {"session": session_a, "steps": len(found.steps[0])},
        "b": {"session": session_b, "steps": len(found.steps[1])},
        "equal": found.equal,
        "first": None if found.first is None else exact(found.first),
        "first_by_aspect": {aspect: exact(each) for aspect, each in found.first_by_aspect().items()},
        "differing_steps": sorted({each.step for each in found.divergences}),
    }


def _show(found: Comparison, session_a: str, session_b: str, most: int) -> None:
    from rich.table import Table
    from rich.text import Text

    first = found.first
    lengths = tuple(map(len, found.steps))
    if first is None:
        console.say(f"equal: {lengths[0]} {'step' if lengths[0] == 1 else 'steps'}")
        return
    if first.step > 1:
        console.say(f"steps 1 to {first.step - 1} are equal" if first.step > 2 else "step 1 is equal")
    console.say(
        f"they part at step {first.step}, in {first.aspect}{f': {first.difference.path}' * bool(first.difference.path)}"
    )
    table = Table(show_lines=True)
    table.add_column("step", justify="right")
    table.add_column("")
    table.add_column(Text(f"A  {session_a}"), ratio=1)
    table.add_column(Text(f"B  {session_b}"), ratio=1)
    last = min(first.step + most - 1, max(lengths))
    shown: dict[tuple[str, ...], int] = {}
    for step in range(first.step, last + 1):
        here = [each for each in found.divergences if each.step == step]
        sides = [steps[step - 1] if step <= len(steps) else None for steps in found.steps]
        table.add_row(str(step), "", *(Text(_headline(each), style="bold") for each in sides))
        for each in here:
            before = shown.setdefault((each.aspect, *map(repr, each.difference)), step)
            texts = beside(each) if before == step else (f"as in step {before}",) * 2
            table.add_row("", Text(each.aspect, style="red"), *map(Text, texts))
    console.out().print(table)
    later = sorted({each.step for each in found.divergences if each.step > last})
    if later:
        console.say(
            f"{len(later)} more steps differ, up to step {later[-1]}; --steps {later[-1] - first.step + 1} shows them"
        )
    for aspect, each in found.first_by_aspect().items():
        console.say(f"first in {aspect}: step {each.step}")


def _headline(step: Step | None) -> str:
    """A step in one line: what was called, or said."""
    from walstream.ledger.json_paths import excerpt

    if step is None:
        return "(no such step)"
    parts = [
        f"{shortened(str(call.name), 30)}({shortened(excerpt(call.arguments, _SHORT), _SHORT)})"
        for call in step.calls.values()
    ]
    parts += [handoff["type"] for handoff in step.handoffs]
    if step.outcome is not None:
        parts.append(f"task {step.outcome['status']}")
    if not parts and step.said is not None:
        parts.append(shortened(str(step.said.get("content") or ""), _SHORT))
    place = f"seq {step.seqs[0]}" if len(step.seqs) == 1 else f"seq {step.seqs[0]} to {step.seqs[-1]}"
    return f"{', '.join(parts) or 'nothing called'}  ({place})"


def beside(divergence: Divergence) -> tuple[str, str]:
    """Both values of a divergence, cut to the lines where they begin to differ."""
    path = divergence.difference.path
    texts = [_text(divergence.difference.left), _text(divergence.difference.right)]
    start = _lines_alike(*texts)
    skipped = max(0, start - _BEFORE)
    shown = []
    for text in texts:
        each = text.split("\n")[skipped:]
        body = lines("\n".join(_around(each, texts, skipped)), _LINES)
        head = [path] if path else []
        shown.append("\n".join([*head, *([f"… ({skipped} lines alike)"] if skipped else []), body]))
    return shown[0], shown[1]


def _around(each: list[str], texts: list[str], skipped: int) -> Iterator[str]:
    """Long lines are cut, the one that differs first around the place where it does."""
    others = [text.split("\n")[skipped:] for text in texts]
    for place, line in enumerate(each):
        if len(line) <= _WIDE:
            yield line
            continue
        pair = [other[place] if place < len(other) else "" for other in others]
        alike = next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), 0)
        begin = max(0, alike - _WIDE // 4)
        end = begin + _WIDE
        yield f"{'…' if begin else ''}{line[begin:end]}{'…' if end < len(line) else ''}"


def _lines_alike(left: str, right: str) -> int:
    alike = 0
    for one, other in zip(left.split("\n"), right.split("\n"), strict=False):
        if one != other:
            break
        alike += 1
    return alike


def _text(value: Any) -> str:
    from walstream.ledger.canonical import canonical
    from walstream.ledger.json_paths import ABSENT

    if value is ABSENT:
        return "(nothing)"
    return value.replace("\r\n", "\n") if isinstance(value, str) else canonical(value).decode()
