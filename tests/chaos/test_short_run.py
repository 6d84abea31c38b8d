"""``python -m tests.chaos``, as short as it can be: it holds, it repeats itself, and it can fail."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from walstream.errors import ConfigError
from walstream.order.segment import Segment, encode_body
from walstream.postgres.binaries import find_binaries

from .plan import KINDS, steps
from .verdict import Delivered, Ledger, Verdict, exactly_once, lines

ROOT = Path(__file__).parents[2]


def chaos(folder: Path, *words: str, timeout: float = 500) -> tuple[int, dict[str, Any], str]:
    """Run it; exit code, report, and what it said."""
    try:
        find_binaries()
    except ConfigError as error:
        pytest.skip(f"needs Postgres programs: {error}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--json", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temp directory of its own, as open to the server's account as /tmp is."""
    made = Path(tempfile.mkdtemp(prefix="chaos-"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_faults_that_are_over_soon_lose_nothing(folder: Path) -> None:
    code, report, said = chaos(folder, "--minutes", "0.05", "--seed", "5", "--faults", "kill,walsender,cut,crash")
    assert code == 0, (report, said)
    assert report["clean"] is True
    assert report["events"] > 100
    assert (report["lost"], report["doubled"], report["out_of_order"], report["dense"]) == (0, 0, 0, True)
    assert (report["stuck"], report["ended"], report["findings"], report["kept"]) == ([], [], [], None)
    assert sum(report["faults"].values()) >= 1
    for kind in report["faults"]:
        figures = report["recovery_s"]["by_kind"][kind]
        assert 0 <= figures["p50"] <= figures["max"] <= report["recovery_s"]["max"]
    assert not list(folder.glob("walstream-chaos-*")), "what is clean leaves nothing behind"


@pytest.mark.slow
def test_every_kind_of_fault(folder: Path) -> None:
    code, report, said = chaos(folder, "--minutes", "1.5", "--seed", "6", timeout=900)
    assert code == 0, (report, said)
    assert report["parked"] > 0, "there was poison"
    assert sum(report["faults"].values()) >= 4


def test_a_seed_decides_everything_that_is_drawn() -> None:
    def first(seed: int, *kinds: str) -> list[str]:
        return [str(step) for step in itertools.islice(steps(seed, kinds), 200)]

    assert first(1) == first(1) != first(2)
    drawn = {step.kind for step in itertools.islice(steps(1), len(KINDS))}
    assert drawn == set(KINDS), "each round has every kind"
    assert {step.kind for step in itertools.islice(steps(1, ["kill", "crash"]), 50)} == {"kill", "crash"}


def test_a_fault_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--faults", "kill,meteor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert "there is no fault meteor" in done.stderr


# -- the oracle ------------------------------------------------------------------------------------------------------

_TABLE = [(1, "s1"), (2, "s1"), (3, "s2"), (5, "s2")]


def ledger(order: list[int], *, recovered: frozenset[int] = frozenset(), first: int = 1) -> Ledger:
    """Four committed rows, and an order of one segment an event."""

    def query(sql: str, *_: object) -> list[tuple[Any, ...]]:
        if "commit_order" not in sql:
            return list(_TABLE)
        found = []
        for place, seq in enumerate(order):
            segment = Segment(first + place, [seq], [1], [seq * 64], [1], b"\x06", seq * 64, None, seq in recovered, 1)
            row = (first + place, 1, segment.last_lsn, None, seq in recovered, 1, encode_body(segment))
            found.append(row)
        return found

    return Ledger(query)


def delivered(truth: Ledger, *rows: tuple[int, int, str, bool]) -> Verdict:
    verdict = Verdict()
    exactly_once(truth, verdict, "plain", [Delivered(*row) for row in rows])
    return verdict


GOOD = ((1, 1, "s1", False), (2, 2, "s1", False), (3, 3, "s2", False), (4, 5, "s2", False))


def counts(verdict: Verdict) -> tuple[int, int, int]:
    return verdict.lost, verdict.doubled, verdict.out_of_order


def test_the_oracle_sees_what_is_lost_doubled_or_out_of_order() -> None:
    truth = ledger([1, 2, 3, 5])
    assert counts(delivered(truth, *GOOD)) == (0, 0, 0)
    assert counts(delivered(truth, *GOOD[:3])) == (1, 0, 0)
    assert delivered(truth, *GOOD[:3]).findings == ["plain: lost: 1, such as 5"]
    assert counts(delivered(truth, *GOOD, GOOD[3]))[1:] == (1, 1)
    assert counts(delivered(truth, GOOD[1], GOOD[0], *GOOD[2:])) == (0, 0, 2), "of its session, and by offset"
    assert counts(delivered(truth, (1, 2, "s1", False), (2, 1, "s1", False), *GOOD[2:]))[2] >= 2, "wrong offsets"
    assert counts(delivered(truth, (1, 1, "s2", False), *GOOD[1:]))[2] == 1, "another session's"


def test_the_oracle_excuses_what_the_slot_missed_and_nothing_else() -> None:
    late = [2, 1, 3, 5]
    rows = ((1, 2, "s1", False), (2, 1, "s1", True), *GOOD[2:])
    assert counts(delivered(ledger(late, recovered=frozenset({1})), *rows)) == (0, 0, 0)
    assert counts(delivered(ledger(late), *rows))[2] > 0, "the order does not say that it was recovered"


def test_the_oracle_sees_an_order_that_is_not_dense() -> None:
    assert ledger([1, 2, 3, 5]).gaps == []
    assert ledger([1, 2, 3, 5], first=2).gaps == [2, 3, 4, 5]


def test_a_line_that_a_kill_tore_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "external"
    file.write_text("\n1 1 s1 k:1 0 .\n\n2 2 s1 k\n2 2 s1 k:2 0 .\n\n3 3 s")
    assert [(each.offset, each.key) for each in lines(file)] == [(1, "k:1"), (2, "k:2")]
