"""The server under test says what the scenarios say: the decoder on a real server, read through the SQL functions.

Among them the cases C01 (infinity, BC), C03 (LATIN1), C10 (new shapes), C11 (types, origins), C12 (messages), C14
(update, delete, truncate, unchanged TOAST), C15 (leaves and root), C16 and C20 (commit order), C17 (binary), C28
(savepoints, blocks) and C29 (prepared transactions).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Server

from .capture import Captures
from .scenario import Scenario
from .scenarios import SCENARIOS
from .test_golden import assert_says
from .vectors import MAJORS, load, outline


@pytest.fixture(scope="module")
def captures(server: Server) -> Iterator[Captures]:
    with Captures(server.dsn()) as made:
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_the_server_under_test_says_it_too(captures: Captures, scenario: Scenario) -> None:
    if captures.major < scenario.since:
        pytest.skip(f"from PostgreSQL {scenario.since} on")
    now = captures.take(scenario)
    assert_says(now, scenario)
    if captures.major in MAJORS:
        (then,) = (each for each in load(captures.major) if each.scenario == scenario.name)
        # How the changes of a large transaction fall into blocks depends on the build; what they say does not.
        if not scenario.letters:
            assert outline(m for _, m in now.decoded()) == outline(m for _, m in then.decoded())
