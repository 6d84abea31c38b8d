"""Faults that a hostile reader of the code found, each as the shortest run of events that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Database
from tests.runner_world import World
from walstream.order.compaction import Compactor
from walstream.order.segment import Segment
from walstream.order.table import segments_with_seqs_between


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    made = World(database)
    yield made
    made.close()


def order_one_by_one(world: World, seqs: range) -> None:
    """A segment for each, as ingest writes them at a low rate; the ledger's rows are not looked at."""
    for offset, seq in enumerate(seqs, world.writer.tail().next_offset):
        world.writer.append(
            Segment(offset, [seq], [1], [seq * 100], [1], b"\x06", seq * 100 + 50, None, False, generation=0)
        )


def test_a_search_for_seqs_survives_compaction_between_its_pages(world: World) -> None:
    """Else an insert that comes again (rule 6) would look new, and get a second offset."""
    order_one_by_one(world, range(1, 251))
    search = segments_with_seqs_between(world.connection, "walstream", 1, 250)
    found = list(next(search).seqs)  # the first page is read
    beside = world.beside()
    try:
        assert Compactor(beside.connection, "walstream", 0).run() == 1
    finally:
        beside.connection.close()
    for segment in search:
        found += segment.seqs
    assert set(found) == set(range(1, 251))
