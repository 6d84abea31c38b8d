"""Whose Postgres it is, as far as it can be told over SQL, and how things are done there.

Managed Postgres has no superuser for its customer, so ``ALTER SYSTEM`` and sometimes ``ALTER ROLE … REPLICATION`` do
not exist there; a remedy that names them is none. Providers are told by the roles that they create in every cluster.
Sources: the providers' pages on logical replication, and docs/operations.md, "Managed Postgres".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from walstream.config import quote

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


@dataclass(frozen=True)
class Provider:
    """Ways of one provider.

    Attributes:
        key: for JSON: ``rds``, ``aurora``, …; ``own`` for a server that its user runs.
        name: for a person.
        parameters: how a server parameter is set, with ``{name}`` and ``{value}``.
        logical: how ``wal_level = logical`` is had.
        replication: the statement that lets a role replicate, with ``{role}`` (quoted).
        replication_role: a role whose members may replicate without the attribute, or ``""``.
        direct: how a connection past the pooler is had, or ``""`` where there is none by default.
    """

    key: str
    name: str
    parameters: str
    logical: str
    replication: str = "ALTER ROLE {role} REPLICATION"
    replication_role: str = ""
    direct: str = ""

    def set_parameter(self, name: str, value: str) -> str:
        """What to do to set a parameter that can be changed without a restart."""
        return self.parameters.format(name=name, value=value)

    def allow_replication(self, role: str) -> str:
        """The statement that lets ``role`` replicate."""
        return self.replication.format(role=quote(role))


OWN: Final = Provider(
    "own",
    "your own server",
    "ALTER SYSTEM SET {name} = '{value}'; SELECT pg_reload_conf();",
    "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
)

_RDS: Final = {
    "parameters": "set {name} = {value} in the instance's parameter group",
    "logical": "set rds.logical_replication = 1 in a custom parameter group, and reboot the instance",
    "replication": "GRANT rds_replication TO {role}",
    "replication_role": "rds_replication",
    "direct": "the endpoint of the instance instead of RDS Proxy",
}

# (role or function that betrays it, provider). The first that is there decides, so Aurora stands before RDS.
_SIGNS: Final[tuple[tuple[str, str, Provider], ...]] = (
    (
        "function",
        "aurora_version",
        Provider(
            "aurora",
            "Amazon Aurora",
            **{
                **_RDS,
                "parameters": "set {name} = {value} in the cluster's parameter group",
                "logical": "set rds.logical_replication = 1 in a custom cluster parameter group, and reboot the writer",
                "direct": "the cluster (writer) endpoint instead of RDS Proxy",
            },
        ),
    ),
    ("role", "rds_superuser", Provider("rds", "Amazon RDS", **_RDS)),
    (
        "role",
        "neon_superuser",
        Provider(
            "neon",
            "Neon",
            "Neon sets {name} itself; ask its support ({value} is meant). A slot that nobody reads for about 40 hours"
            " is removed there",
            "enable logical replication in the project's settings (it cannot be switched off again)",
            "create the role in the console, with the API or the CLI: such roles may replicate",
            direct="the host without `-pooler`",
        ),
    ),
    (
        "role",
        "supabase_admin",
        Provider(
            "supabase",
            "Supabase",
            "supabase postgres-config update --experimental --project-ref REF --config {name}={value}",
            "it is logical there by default; ask the support",
            direct="the direct connection string (db.REF.supabase.co) instead of the pooler's",
        ),
    ),
    (
        "role",
        "cloudsqlsuperuser",
        Provider(
            "cloudsql",
            "Google Cloud SQL",
            "gcloud sql instances patch INSTANCE --database-flags=… with {name}={value} (in MB without a unit) among"
            " all the flags that are set already",
            "set the flag cloudsql.logical_decoding = on (the instance restarts)",
            direct="the address of the instance instead of the managed connection pool's",
        ),
    ),
    (
        "role",
        "azure_pg_admin",
        Provider(
            "azure",
            "Azure Database for PostgreSQL",
            "set {name} = {value} under the server parameters of the instance",
            "set wal_level = logical under the server parameters, save, and restart",
            direct="port 5432 instead of the built-in PgBouncer's 6432",
        ),
    ),
)


def provider_of(conn: Connection) -> Provider:
    """The provider of the server behind ``conn``; :data:`OWN` if nothing betrays one."""
    with conn.cursor() as cur:
        cur.execute(
            "SELECT 'role', rolname::text FROM pg_catalog.pg_roles WHERE rolname = ANY (%s)"
            " UNION ALL SELECT 'function', proname::text FROM pg_catalog.pg_proc WHERE proname = ANY (%s)",
            (
                [sign for kind, sign, _ in _SIGNS if kind == "role"],
                [sign for kind, sign, _ in _SIGNS if kind == "function"],
            ),
        )
        found = set(cur.fetchall())
    return next((provider for kind, sign, provider in _SIGNS if (kind, sign) in found), OWN)
