"""Where two sessions part, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .fold import Fold, Foldable
from .json_paths import ABSENT, Difference, first_difference
from .steps import ASPECTS, Step, steps_of


@dataclass(frozen=True)
class Divergence:
    """A step in which the two sessions differ in one aspect.

    Attributes:
        step: from 1.
        aspect: context, model, tool, arguments, result, handoff, other events or outcome.
        difference: the first place within the aspect; one side is ``ABSENT`` where a session has no such step.
        seqs: the seqs of the step's events, in either session; ``None`` where it has no such step.
    """

    step: int
    aspect: str
    difference: Difference
    seqs: tuple[list[int] | None, list[int] | None]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``. A side that has nothing there is left out."""
        sides = {"a": self.difference.left, "b": self.difference.right}
        return {
            "step": self.step,
            "aspect": self.aspect,
            "path": self.difference.path,
            **{name: value for name, value in sides.items() if value is not ABSENT},
            "seqs": {"a": self.seqs[0], "b": self.seqs[1]},
        }


@dataclass(frozen=True)
class Comparison:
    """Two sessions beside each other.

    Attributes:
        steps: of either session.
        divergences: every step and aspect in which they differ, in order.
    """

    steps: tuple[list[Step], list[Step]]
    divergences: list[Divergence]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.divergences

    @property
    def first(self) -> Divergence | None:
        """Where they part."""
        return self.divergences[0] if self.divergences else None

    def first_by_aspect(self) -> dict[str, Divergence]:
        """For each aspect in which they differ, where they do so first."""
        found: dict[str, Divergence] = {}
        for each in self.divergences:
            found.setdefault(each.aspect, each)
        return {aspect: found[aspect] for aspect in ASPECTS if aspect in found}


def compare(left: Iterable[Foldable], right: Iterable[Foldable], fold: Fold) -> Comparison:
    """Compare two sessions, each given by its events in the order of seq.

    Call ids, prompt hashes, token counts and who wrote an event do not count as differences; nor does how often a call
    was tried.

    Raises:
        PayloadError: an event of ours cannot be parsed.
        LedgerError: an event refers to something that was not put in.
    """
    shared: dict[bytes, Any] = {}
    sides = steps_of(left, fold, shared), steps_of(right, fold, shared)
    found: list[Divergence] = []
    for n in range(max(map(len, sides))):
        found += _compare_step(n, *(side[n] if n < len(side) else None for side in sides))
    return Comparison(sides, found)


def _compare_step(n: int, left: Step | None, right: Step | None) -> Sequence[Divergence]:
    seqs = (None if left is None else left.seqs, None if right is None else right.seqs)
    one, other = ((Step() if step is None else step).aspects() for step in (left, right))
    found = []
    for aspect in ASPECTS:
        difference = first_difference(one[aspect], other[aspect])
        if difference is not None:
            found.append(Divergence(n + 1, aspect, difference, seqs))
    if not found and (left is None or right is None):
        # A step in which nothing that counts happened; still, only one of them has it.
        missing = Difference("", *(ABSENT if step is None else step.seqs for step in (left, right)))
        found.append(Divergence(n + 1, "context", missing, seqs))
    return found
