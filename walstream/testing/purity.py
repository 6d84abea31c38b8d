"""Whether a fold is pure: the same events always make the same context.

In anyone's tests::

    def test_the_fold_is_pure() -> None:
        assert_pure("app.agents:fold", recorded_events)

The sessions are folded once under traps: the clock, random numbers, files, the network, the environment, other
processes, threads and ``id()`` are forbidden, and no event and nothing that outlives the call may be changed. Then they
are folded again, in another order; with each context written down and read back, as a snapshot is; and, for a fold that
is given by its name, in processes with other hash seeds and time zones. Every context has to be the same each time.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from walstream.errors import ConfigError
from walstream.ledger.fold import Fold, Foldable

from .purity_runs import (
    Finding,
    Recorded,
    Session,
    by_session,
    check,
    different,
    fine_from,
    recorded,
    stride_of,
    unequal,
)

HASH_SEEDS: Final = ("0", "1", "2")
"""With the first one everything is checked, with the others that the results are equal."""

_ZONES: Final = ("UTC0", "EAST-13:45", "WEST+11")
"""``TZ`` of those processes, by POSIX: what is not said (``datetime.fromtimestamp(seconds)``) comes from there."""


def assert_pure(
    fold: Fold | str, events: Iterable[Foldable | Recorded], *, hash_seeds: Sequence[str] = HASH_SEEDS
) -> None:
    """Assert that a fold is pure, as far as these events show it. See :func:`check_fold`.

    Raises:
        AssertionError: it is not; names the first event and what is wrong, one line each.
        ConfigError: the name leads to no fold.
    """
    findings = check_fold(fold, events, hash_seeds=hash_seeds)
    if findings:
        raise AssertionError("the fold is not pure:\n" + "\n".join(f"- {each}" for each in findings))


def check_fold(
    fold: Fold | str, events: Iterable[Foldable | Recorded], *, hash_seeds: Sequence[str] = HASH_SEEDS
) -> list[Finding]:
    """Fold recorded events several times and tell what a pure fold would not show.

    Args:
        fold: ``package.module:name``, which is then imported in processes of their own; or the object itself, which is
            checked in this process, without other hash seeds (sets of strings keep their order in one process).
        events: of any number of sessions, those of one session in the order of their seq.
        hash_seeds: values of ``PYTHONHASHSEED``, at least one.

    Raises:
        ConfigError: the name leads to no fold.
    """
    sessions = by_session(recorded(events))
    if isinstance(fold, Fold):
        return check(fold, sessions)
    surroundings = [(seed, _ZONES[place % len(_ZONES)]) for place, seed in enumerate(hash_seeds)]
    findings, first = _child(fold, surroundings[0], sessions, everything=True)
    for each in surroundings[1:] if not findings else ():
        _, other = _child(fold, each, sessions)
        for session, one, two in zip(sessions, first, other, strict=True):
            if one != two:
                return [_by_surroundings(fold, session, (surroundings[0], each), unequal(one, two))]
    return findings


def _by_surroundings(fold: str, session: Session, two: tuple[tuple[str, str], tuple[str, str]], coarse: int) -> Finding:
    place = coarse
    if stride_of(session) > 1:
        until, fine = session[: coarse + 1], fine_from(coarse, stride_of(session))
        (one,), (other,) = (_child(fold, each, [until], stride=stride_of(session), fine=fine)[1] for each in two)
        place = unequal(one, other) if one != other else coarse
    left, right = (_child(fold, each, [session], show=place)[1] for each in two)
    at_home = _child(fold, (two[1][0], two[0][1]), [session], show=place)[1]
    kind = "different result in another time zone" if at_home == left else "different result with another hash seed"
    return different(session, place, kind, left, right)


def _child(
    fold: str,
    surroundings: tuple[str, str],
    sessions: Sequence[Session],
    *,
    everything: bool = False,
    stride: int | None = None,
    fine: int | None = None,
    show: int | None = None,
) -> tuple[list[Finding], Any]:
    """Fold in a process with this hash seed and time zone: findings (with ``everything``), and the digests of each
    session (see :func:`walstream.testing.purity_runs.digests`); with ``show`` the canonical text of the context after
    that event."""
    job = {
        "fold": fold,
        "sessions": list(sessions),
        "strides": [stride or stride_of(session) for session in sessions],
        "everything": everything,
        "fine": fine,
        "show": show,
    }
    path = [each for each in sys.path if each]
    done = subprocess.run(
        [sys.executable, "-m", "walstream.testing.purity_process"],
        input=pickle.dumps(job),
        capture_output=True,
        env={
            **os.environ,
            "PYTHONHASHSEED": surroundings[0],
            "TZ": surroundings[1],
            "PYTHONPATH": os.pathsep.join(path),
        },
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"the fold {fold} cannot be run: {said.splitlines()[-1] if said else 'its process died'}")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, ConfigError):
        raise answer
    findings, result = answer
    return findings, result
