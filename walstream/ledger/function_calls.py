"""Calls of walstream's SQL functions from Python, in the transaction that the caller has open."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from walstream.config import LedgerTable, Settings

from .adapters import Rows, Statement, encoding_named, execute
from .refusals import refusal
from .schema import fill, names_of


def statement(sql: str) -> Statement:
    """SQL with ``$names``, in which ``?type`` is a place for a value of that type: some drivers send one of their own
    with it."""
    parts = sql.split("?")
    head, text = parts[0], []
    for part in parts[1:]:
        kind = part[: len(part) - len(part.lstrip("abcdefghijklmnopqrstuvwxyz0123456789[]"))]
        text.append(head + "CAST(")
        head = f" AS pg_catalog.{kind})" + part[len(kind) :]
    return Statement((*text, head))


def named(settings: Settings, sql: Statement) -> Statement:
    """A statement with ``$names`` under the configured ones."""
    return _named(settings.ledger, settings.namespace, sql)


@lru_cache(maxsize=512)  # the statements are few, and called often
def _named(ledger: LedgerTable, namespace: str, sql: Statement) -> Statement:
    wanted = names_of(ledger, namespace)
    return Statement(tuple(fill(part, wanted) for part in sql.parts))


def call(
    settings: Settings, sql: Statement, values: tuple[Any, ...], on: Any, *, function: str, what: str, doing: str
) -> Rows:
    """Run a statement under the configured names; what the functions refuse comes as an error of ours.

    Args:
        function: the function that it calls (or the table of walstream's that it reads).
        what: what it is about, for the errors: ``job 7``.
        doing: what a login that lacks the grant may not do.

    Raises:
        WalstreamError: see :func:`walstream.ledger.refusals.refusal`.
        Exception: whatever else the driver raises.
    """
    try:
        with encoding_named():
            return execute(on, named(settings, sql), values)
    except Exception as error:
        refused = refusal(error, settings.namespace, function, what, doing=doing)
        if refused is None:
            raise
        raise refused from error


def shown_time(column: str) -> str:
    """SQL for a time as text that :func:`time_of` reads, whatever the driver makes of a ``timestamptz``."""
    return f"pg_catalog.to_char(pg_catalog.timezone('UTC', {column}), 'YYYY-MM-DD HH24:MI:SS.US')"


def time_of(text: str | None) -> datetime | None:
    """The time that ``text`` stands for; ``None`` for NULL, infinity, and a year that Python does not know."""
    try:
        return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None
