"""The examples in docstrings of what users write against, run as they stand."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "walstream.event",
    "walstream.metrics",
    "walstream.stream",
    "walstream.engine.projector",
    "walstream.engine.context",
    "walstream.ledger.idempotency",
    "walstream.testing.events",
    "walstream.testing.faulty",
    "walstream.testing.memory",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
