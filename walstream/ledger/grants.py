"""What a login needs to run walstream, and no more: the statements, for set-up and for docs/operations.md.

None of it makes the login an owner: it cannot change the schema, the publication or the ledger. Whether a login may
replicate is an attribute of the role (or, with some providers, the membership in one), which only a superuser, or the
provider's stand-in for one, can give.
"""

from __future__ import annotations

from typing import Final

from walstream.config import Settings, quote

# The privileges on each of walstream's tables. FOR SHARE on the fencing row needs UPDATE on it (documentation, SELECT,
# "The Locking Clause"); compaction replaces order rows, so it deletes; erasures are declared by people, not by `run`.
PRIVILEGES: Final[dict[str, str]] = {
    "migrations": "SELECT",
    "identity": "SELECT",
    "generation": "SELECT, UPDATE",
    "ingest": "SELECT, UPDATE",
    "commit_order": "SELECT, INSERT, DELETE",
    "projectors": "SELECT, INSERT, UPDATE",
    "cursors": "SELECT, INSERT, UPDATE, DELETE",
    "parked": "SELECT, INSERT, UPDATE, DELETE",
    "erasures": "SELECT",
    "violations": "SELECT, INSERT",
}


def grant_statements(settings: Settings, role: str) -> list[str]:
    """The statements that let ``role`` run this stream, apart from the right to replicate. Idempotent.

    What a projector writes to tables of its own has to be granted on those tables.
    """
    namespace, ledger, grantee = quote(settings.namespace), settings.ledger, quote(role)
    return [
        f"GRANT USAGE ON SCHEMA {namespace} TO {grantee};",
        *(f"GRANT {privileges} ON {namespace}.{table} TO {grantee};" for table, privileges in PRIVILEGES.items()),
        f"GRANT USAGE ON SCHEMA {quote(ledger.namespace)} TO {grantee};",
        f"GRANT SELECT ON {ledger.qualified} TO {grantee};",
    ]
