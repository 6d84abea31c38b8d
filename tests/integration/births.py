"""What a set-up has to come to: order and stream together hold every row exactly once."""

from __future__ import annotations

from tests.conftest import Database
from walstream.order.table import COLUMNS, segment_of
from walstream.protocol.decoder import Decoder
from walstream.protocol.messages import Insert, Relation

INSERT = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (gen_random_uuid(), 'a', 't', '{}')"
)


def insert_rows(database: Database, count: int) -> None:
    """Append ``count`` rows, all in one transaction."""
    database.execute(INSERT.replace("VALUES (", "SELECT ").removesuffix(")") + f" FROM generate_series(1, {count})")


def ordered_seqs(database: Database) -> list[int]:
    """The seqs of the order, by offset. Checks that the offsets are dense."""
    seqs: list[int] = []
    for row in database.execute(f"SELECT {COLUMNS} FROM walstream.commit_order ORDER BY first_offset"):
        segment = segment_of(row)
        assert segment.first_offset == len(seqs) + 1
        assert segment.recovered
        seqs += segment.seqs
    return seqs


def streamed_seqs(database: Database, slot: str, publication: str = "walstream") -> list[int]:
    """The seqs that the slot sends from where it stands, which stays there."""
    decoder = Decoder()
    seqs: list[int] = []
    position = {}
    for (payload,) in database.execute(
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', %s)",
        slot,
        '"' + publication.replace('"', '""') + '"',
    ):
        message = decoder.decode(bytes(payload))
        if isinstance(message, Relation):
            position[message.oid] = [column.name for column in message.columns].index("seq")
        elif isinstance(message, Insert):
            value = message.new[position[message.relation_oid]]
            assert isinstance(value, bytes)
            seqs.append(int(value))
    return seqs


def assert_every_row_once(database: Database, slot: str) -> tuple[list[int], list[int]]:
    """Order and stream together are the table: nothing is missing, nothing is there twice."""
    streamed = streamed_seqs(database, slot)
    ordered = ordered_seqs(database)
    everything = [row[0] for row in database.execute("SELECT seq FROM agent_events ORDER BY seq")]
    assert sorted(ordered + streamed) == everything
    return ordered, streamed
