"""Where events stand in the commit order, from their seqs: offset and time of commit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple

from psycopg2.extensions import connection as Connection

from walstream.order.table import neighbours, segments_with_seqs_between


class Place(NamedTuple):
    """An event's place.

    Attributes:
        offset: in the commit order.
        commit_us: when it committed, in microseconds since 2000-01-01 UTC; 0 if unknown.
    """

    offset: int
    commit_us: int


def places_of(connection: Connection, namespace: str, seqs: Collection[int]) -> dict[int, Place]:
    """The places of those of ``seqs`` that have one. What is not ordered yet, or lies below the floor, has none.

    The segments around the seqs are read and decoded, about 10,000 events each: seqs that lie close together cost
    little, those of a session that goes on through the whole ledger cost the whole order.

    Raises:
        LedgerError: a segment is damaged.
        WalstreamError: of the connection.
    """
    found: dict[int, Place] = {}
    for group in neighbours(sorted(seqs)):
        wanted = set(group)
        for segment in segments_with_seqs_between(connection, namespace, group[0], group[-1]):
            if wanted.isdisjoint(segment.seqs):
                continue
            ends = list(accumulate(segment.tx_sizes))
            for index, seq in enumerate(segment.seqs):
                if seq in wanted:
                    commit_us = segment.commit_times[bisect_right(ends, index)]
                    found[seq] = Place(segment.first_offset + index, commit_us)
    return found
