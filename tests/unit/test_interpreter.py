"""What a process that is walstream's to run sets in the interpreter, and takes back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from walstream.interpreter import SWITCH_SECONDS, YOUNG, tuned


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def test_it_is_set_meanwhile() -> None:
    gc.set_threshold(700, 10, 10)
    sys.setswitchinterval(0.005)
    with tuned():
        assert gc.get_threshold() == (YOUNG, 10, 10)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert gc.get_threshold() == (700, 10, 10)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_somebody_chose_stays() -> None:
    gc.set_threshold(0, 10, 10)  # no collections at all
    sys.setswitchinterval(0.0001)
    with tuned():
        assert gc.get_threshold()[0] == 0
        assert sys.getswitchinterval() == pytest.approx(0.0001)
        gc.set_threshold(50_000, 5, 5)
        sys.setswitchinterval(0.001)
    assert gc.get_threshold() == (50_000, 5, 5)
    assert sys.getswitchinterval() == pytest.approx(0.001)
