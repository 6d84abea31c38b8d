"""Postgres is the oracle: random values are inserted, streamed and decoded, and compared with how the server itself
renders them (the type's output function, and its send function in binary format)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg2.extensions import cursor as Cursor

from tests.conftest import Database
from walstream.lsn import parse_lsn
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import RowDecoder, compile_row_decoder
from walstream.protocol.messages import Binary, Insert, Message, Relation

_PINNED = (
    "-c client_encoding=UTF8 -c datestyle=ISO -c timezone=UTC -c intervalstyle=postgres -c bytea_output=hex"
    " -c extra_float_digits=1"
)

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
# jsonb keeps numbers of any length, and refuses \u0000 and lone surrogates.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
).map(lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False))
DIGITS = st.text("0123456789", min_size=1, max_size=60)
NUMERIC = st.one_of(
    st.sampled_from(["NaN", "Infinity", "-Infinity", "0", "-0.00", "1e400", "1e-300"]),
    st.builds("{}{}.{}".format, st.sampled_from(["", "-"]), DIGITS, DIGITS),
)


@st.composite
def times(draw: st.DrawFn) -> str:
    """Any timestamptz, years of up to six digits and before Christ among them."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(["infinity", "-infinity", "epoch", "4714-11-24 00:00:00+00 BC"]))
    era = draw(st.sampled_from(["", " BC"]))
    year = draw(st.integers(1, 4713 if era else 294275))
    day = f"{year:04}-{draw(st.integers(1, 12)):02}-{draw(st.integers(1, 28)):02}"
    clock = f"{draw(st.integers(0, 23)):02}:{draw(st.integers(0, 59)):02}:{draw(st.integers(0, 59)):02}"
    return f"{day} {clock}.{draw(st.integers(0, 999999)):06}+{draw(st.integers(0, 15)):02}{era}"


# Column, type, strategy, send function. The first six are a ledger; the others are its extras.
COLUMNS: tuple[tuple[str, str, st.SearchStrategy[Any], str], ...] = (
    ("seq", "bigint", st.integers(-(1 << 63), (1 << 63) - 1).map(str), "int8send"),
    ("session_id", "uuid", st.uuids().map(str), "uuid_send"),
    ("agent_id", "text", TEXT | TEXT.map(lambda text: text * 40), "textsend"),
    ("event_type", "text", TEXT, "textsend"),
    ("payload", "jsonb", JSON, "jsonb_send"),
    ("created_at", "timestamptz", st.none() | times(), "timestamptz_send"),
    ("amount", "numeric", st.none() | NUMERIC, "numeric_send"),
    ("raw", "bytea", st.none() | st.binary(max_size=300), "byteasend"),
    ("tags", "text[]", st.none() | st.lists(st.none() | TEXT, max_size=4), "array_send"),
    ("flag", "boolean", st.none() | st.booleans(), "boolsend"),
    ("weight", "float8", st.none() | st.floats(), "float8send"),
    ("note", "json", st.none() | JSON, "json_send"),
    ("stay", "interval", st.none() | st.integers(-(1 << 31), (1 << 31) - 1).map(lambda s: f"{s} s"), "interval_send"),
)
NAMES = [column[0] for column in COLUMNS]
LEDGER = ("seq", "session_id", "agent_id", "event_type", "payload", "created_at")
ROWS = st.lists(st.tuples(*(column[2] for column in COLUMNS)), min_size=1, max_size=8, unique_by=lambda row: row[0])

Rows = list[tuple[Any, ...]]


def _cursor(database: Database) -> Cursor:
    connection = database.connect(options=_PINNED)
    connection.autocommit = True
    made = connection.cursor()
    made.execute(f"CREATE TABLE agent_events ({', '.join(f'{name} {kind}' for name, kind, _, _ in COLUMNS)})")
    made.execute("CREATE PUBLICATION p FOR TABLE agent_events")
    made.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [database.name])
    return made


def _stream(cursor: Cursor, slot: str, rows: Rows, **options: str) -> list[tuple[bytes, Message]]:
    cursor.execute("TRUNCATE agent_events")
    marks = ", ".join(f"%s::{kind}" for _, kind, _, _ in COLUMNS)
    for row in rows:
        cursor.execute(
            f"INSERT INTO agent_events VALUES ({marks})",
            [psycopg2.Binary(value) if isinstance(value, bytes) else value for value in row],
        )
    flat = [text for pair in options.items() for text in pair]
    cursor.execute(
        "SELECT lsn::text, data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        f" 'publication_names', 'p'{', %s' * len(flat)})",
        [slot, *flat],
    )
    decoder = Decoder(1)
    return [(bytes(data), decoder.decode(bytes(data), parse_lsn(lsn))) for lsn, data in cursor.fetchall()]


def _repeat(database: Database, check: Callable[[Cursor, Rows], None], examples: int) -> None:
    cursor = _cursor(database)

    # Without shrinking: each try costs a round through the server, and a failing example is small enough to read.
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(ROWS)
    def each(rows: Rows) -> None:
        check(cursor, rows)

    each()


def test_text_is_what_the_server_renders(database: Database) -> None:
    """C01, and `bytes` of the guarantees: the exact text, through the general decoder and the compiled one alike."""

    def check(cursor: Cursor, rows: Rows) -> None:
        got: list[tuple[Any, ...]] = []
        compiled: list[tuple[Any, ...]] = []
        decode: RowDecoder | None = None
        for payload, message in _stream(cursor, database.name, rows):
            if isinstance(message, Relation):
                decode = compile_row_decoder(message, LEDGER)
            elif isinstance(message, Insert):
                assert decode is not None
                got.append(message.new)
                compiled.append(decode(payload))
        # format() calls the type's output function, as pgoutput does; a cast to text does not for some types
        # (boolean: `true` against `t`; inet and character(n) differ too).
        shown = (f"CASE WHEN {name} IS NOT NULL THEN convert_to(format('%%s', {name}), 'UTF8') END" for name in NAMES)
        cursor.execute(f"SELECT seq, {', '.join(shown)} FROM agent_events", ())
        rendered: dict[str, tuple[Any, ...]] = {
            str(seq): tuple(None if value is None else bytes(value) for value in values)
            for seq, *values in cursor.fetchall()
        }
        wanted = [rendered[row[0]] for row in rows]
        assert got == wanted
        assert compiled == [(int(w[0]), *w[1:6], (tuple(NAMES[6:]), w[6:])) for w in wanted]

    _repeat(database, check, 25)


def test_binary_is_what_the_type_sends(database: Database) -> None:
    """Binary values are passed on untouched and marked as binary, so that nobody takes them for text (C17)."""

    def check(cursor: Cursor, rows: Rows) -> None:
        messages = _stream(cursor, database.name, rows, binary="true")
        got = [message.new for _, message in messages if isinstance(message, Insert)]
        cursor.execute(f"SELECT seq, {', '.join(f'{send}({name})' for name, _, _, send in COLUMNS)} FROM agent_events")
        sent = {
            str(seq): tuple(None if value is None else Binary(bytes(value)) for value in values)
            for seq, *values in cursor.fetchall()
        }
        assert got == [sent[row[0]] for row in rows]

    _repeat(database, check, 10)
