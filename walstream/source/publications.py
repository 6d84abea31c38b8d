"""Publications: how their names are written, and how ours are made.

A publication's name goes through two quotings on its way into ``START_REPLICATION``: it is an identifier in a list
(pgoutput splits ``publication_names`` like ``search_path``: unquoted names are folded to lower case and split at commas
and blanks), and that list is a string literal of the replication grammar. Both are done here and nowhere else, so that
mixed case, blanks, quotes and any Unicode work.
"""

from __future__ import annotations

from typing import Final

from walstream.config import LedgerTable, quote

DEFAULT_OPERATIONS: Final = ("insert", "truncate")
"""What a ledger's publication publishes. Neither needs a replica identity, so UPDATE and DELETE of the application go
on working (with ``update`` or ``delete`` published and no identity, Postgres refuses them in *its* session)."""

OPERATIONS: Final = ("insert", "update", "delete", "truncate")
"""All that a publication can publish (documentation, CREATE PUBLICATION, ``publish``)."""

SINK: Final = "audit-sink"
"""The projector that puts changes of the ledger on record. Where it is configured, all of them are published."""


def name_list(*publications: str) -> str:
    """Return the value of pgoutput's option ``publication_names``, not yet quoted as a literal."""
    return ",".join(quote(name) for name in publications)


def string_literal(value: str) -> str:
    """Return ``value`` as a string literal of the replication grammar, which knows no escape but the doubled quote."""
    return "'" + value.replace("'", "''") + "'"


def create_statement(
    publication: str,
    table: LedgerTable,
    *,
    operations: tuple[str, ...] = DEFAULT_OPERATIONS,
    via_root: bool = False,
) -> str:
    """Return the ``CREATE PUBLICATION`` for one table; never ``FOR ALL TABLES``.

    Args:
        via_root: for a partitioned table, so that changes carry the root's name whatever leaf they went to.
    """
    return f"CREATE PUBLICATION {quote(publication)} FOR TABLE {table.qualified} WITH ({_with(operations, via_root)})"


def alter_statement(
    publication: str, *, operations: tuple[str, ...] = DEFAULT_OPERATIONS, via_root: bool | None = None
) -> str:
    """Return the ``ALTER PUBLICATION … SET`` that makes it publish ``operations`` (and via the root, if given)."""
    return f"ALTER PUBLICATION {quote(publication)} SET ({_with(operations, via_root)})"


def add_table_statement(publication: str, table: LedgerTable) -> str:
    """Return the ``ALTER PUBLICATION`` that adds ``table``."""
    return f"ALTER PUBLICATION {quote(publication)} ADD TABLE {table.qualified}"


def set_table_statement(publication: str, table: LedgerTable) -> str:
    """Return the ``ALTER PUBLICATION`` that makes ``table`` its only content, without row filter or column list."""
    return f"ALTER PUBLICATION {quote(publication)} SET TABLE {table.qualified}"


def drop_statement(publication: str) -> str:
    """Return the ``DROP PUBLICATION``."""
    return f"DROP PUBLICATION IF EXISTS {quote(publication)}"


def _with(operations: tuple[str, ...], via_root: bool | None) -> str:
    published = f"publish = '{', '.join(operations)}'"
    if via_root is None:
        return published
    return f"{published}, publish_via_partition_root = {'true' if via_root else 'false'}"
