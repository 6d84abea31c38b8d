"""A trail as a Parquet file, for analysis. Needs pyarrow (the extra ``parquet``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from walstream.errors import ConfigError

from .record import Record

ROWS: Final = 20_000
"""Rows of a row group."""

_TEXTS: Final = ("key", "session_id", "agent_id", "event_type", "created_at", "lsn")


def write_parquet(
    records: Iterator[tuple[bytes, Record, dict[str, Any]]], target: Path, progress: Callable[[int], None]
) -> int:
    """Write records to ``target``, which is there as a whole or not at all; return how many.

    Raises:
        ConfigError: pyarrow is not installed, or the file cannot be written.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError("writing Parquet needs pyarrow", hint="pip install 'walstream[parquet]'") from None
    moment = arrow.timestamp("us", tz="UTC")
    schema = arrow.schema(
        [("n", arrow.int64()), ("kind", arrow.string()), ("offset", arrow.int64()), ("seq", arrow.int64())]
        + [(name, arrow.string()) for name in _TEXTS]
        + [("committed_at", moment), ("recorded_at", moment), ("xid", arrow.int64()), ("recovered", arrow.bool_())]
        + [(name, arrow.string()) for name in ("payload", "extras", "sha256", "hash")]
    )
    scratch = target.with_name(f".{target.name}.part")
    written = 0
    try:
        with parquet.ParquetWriter(scratch, schema, compression="zstd") as writer:
            rows: list[dict[str, Any]] = []
            for _, record, fields in records:
                rows.append(_row(record, fields))
                if len(rows) == ROWS:
                    writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                    written += len(rows)
                    progress(len(rows))
                    rows = []
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            written += len(rows)
        scratch.rename(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        scratch.unlink(missing_ok=True)
    return written


def _row(record: Record, fields: dict[str, Any]) -> dict[str, Any]:
    import orjson

    extras = fields.get("extras")
    return {
        "n": record.n,
        "kind": record.kind,
        "offset": record.offset,
        "seq": record.seq,
        **{name: fields.get(name) for name in _TEXTS},
        "committed_at": _moment(fields.get("committed_at")),
        "recorded_at": _moment(fields.get("recorded_at")),
        "xid": fields.get("xid"),
        "recovered": fields.get("recovered"),
        "payload": None if record.payload is None else record.payload.decode(),
        "extras": None if extras is None else orjson.dumps(extras).decode(),
        "sha256": record.sha256.decode(),
        "hash": record.hash.decode(),
    }


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
