"""The ledger's lease, for a command that writes what ingest writes: nobody else does meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from walstream.config import Settings, quote
from walstream.errors import Unavailable

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.engine.leadership import Lease


@contextlib.contextmanager
def holding(settings: Settings, conn: Connection, command: str, *, also: Sequence[str] = ()) -> Iterator[Lease]:
    """Hold the lease of ingest, on this connection.

    Args:
        conn: in autocommit.
        command: which one it is, for who looks at `status` meanwhile.
        also: statements of the same transaction: who finds the lease taken finds them done.

    Raises:
        Unavailable: a consumer, or another such command, has it.
    """
    from walstream.engine.birth import LEASE_SECONDS
    from walstream.engine.leadership import Lease, owner_name

    namespace = quote(settings.namespace)
    lease = Lease.for_ingest(settings.namespace, owner=f"{owner_name()} ({command})", seconds=LEASE_SECONDS)
    with conn.cursor() as cur:
        cur.execute("BEGIN")
        try:
            generation = lease.acquire(cur)
            if generation is None:
                cur.execute(f"SELECT owner FROM {namespace}.ingest")
                row: Any = cur.fetchone()
                raise Unavailable(
                    f"{row[0]} works on this ledger at this moment, and `walstream {command}` cannot beside it",
                    hint=f"stop it, or wait until it has ended, and run `walstream {command}` again",
                )
            # The lease's row and the fencing row change together, or not at all (rule 7).
            cur.execute(f"UPDATE {namespace}.generation SET generation = %s", (generation,))
            for statement in also:
                cur.execute(statement)
            cur.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # what was raised matters more
                cur.execute("ROLLBACK")
            raise
        try:
            yield lease
        finally:
            with contextlib.suppress(Exception):  # a lost connection ends the lease as well
                lease.release(cur)
