"""A projector's row and its cursors in the database: where each lane stands, and who may move it.

One statement moves a cursor (:meth:`Cursors.step`). It is a compare-and-set: it succeeds only from the position that
the runner believes in, only under the projector's newest generation, only within the transaction that the runner
itself began, and only up to where the order really is. Whatever a runner that was stopped, replaced or cut off still
wants to write is therefore refused by the database, and not by its own view of things.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import psycopg2

from walstream.config import quote
from walstream.errors import ConfigError, ConnectionLost, Fenced, ProjectorHalted
from walstream.event import ERASED_ERROR
from walstream.ledger.schema import FINDINGS_VERSION
from walstream.order.erasures import COVERS

from .leadership import Backend
from .projector import Options
from .trouble import Trouble

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

BATCH_MARK: Final = "walstream.batch"
"""A setting local to the runner's transaction: gone as soon as anybody else ends that transaction."""

_STEP: Final = """
    UPDATE {schema}.cursors AS c SET position = {after}, updated_at = pg_catalog.clock_timestamp()
      FROM {schema}.projectors AS p
     WHERE c.projector = {projector} AND c.lane = {lane} AND c.position = {before}
       AND p.name = c.projector AND p.generation = {generation}
       AND ({mark}::text IS NULL OR pg_catalog.current_setting('{setting}', true) = {mark}::text)
       AND {after} <= (SELECT first_offset + events - 1 FROM {schema}.commit_order
                        ORDER BY first_offset DESC LIMIT 1)"""
_PREPARE: Final = "PREPARE {name} (bigint, text, int, bigint, bigint, text) AS {statement}"
_EXECUTE: Final = "EXECUTE {name} (%(after)s, %(projector)s, %(lane)s, %(before)s, %(generation)s, %(mark)s)"
_numbers: Final = count(1)  # one connection may see the cursors of several projectors

MOST_SEQS: Final = 1_000
"""Events that an error is kept together with; of a larger batch it is not known which of them it tells of."""


class StaleCursor(ConnectionLost):
    """What the runner holds in memory is not what the database holds: start over from the stored cursor (rule 4)."""


class TransactionEnded(ProjectorHalted):
    """A projector committed or rolled back the transaction that belongs to the runner."""


@dataclass(frozen=True, slots=True)
class ProjectorRow:
    """What the table says about a projector.

    Attributes:
        desired: ``running`` or ``paused``.
        state: as last written.
        generation: of the newest runner.
        lanes: how many cursors it has.
    """

    desired: str
    state: str
    generation: int
    lanes: int


class Cursors:
    """The rows of one projector.

    Args:
        namespace: walstream's schema.
        projector: its name.
        generation: under which this process runs it; 0 for one that only reads.
    """

    def __init__(self, namespace: str, projector: str, generation: int = 0) -> None:
        self._schema = quote(namespace)
        self._projector = projector
        self._generation = generation
        self._name = f"walstream_step_{next(_numbers)}"
        self._prepared: WeakSet[Connection] = WeakSet()  # on which a step is prepared under that name

    # -- set-up ----------------------------------------------------------------------------------------------------

    def register(self, cur: Cursor, options: Options) -> bool:
        """Make the rows of a new projector; ``False`` if it was known. In one transaction of the caller."""
        cur.execute(
            f"INSERT INTO {self._schema}.projectors (name, kind, lanes, target_lanes, tables)"
            " VALUES (%s, %s, %s, %s, %s) ON CONFLICT (name) DO NOTHING",
            (self._projector, options.kind, options.lanes, options.lanes, list(options.tables)),
        )
        if cur.rowcount == 0:
            return False
        if options.start == "latest":
            position = self.head(cur)
        else:
            position = 0 if options.start == "earliest" else options.start - 1
        self._insert_cursors(cur, options.lanes, position)
        return True

    def describe(self, cur: Cursor, options: Options) -> None:
        """Write down what the projector is now; its class may have changed since it was registered."""
        cur.execute(
            f"UPDATE {self._schema}.projectors SET kind = %s, target_lanes = %s, tables = %s, updated_at = now()"
            " WHERE name = %s AND generation = %s",
            (options.kind, options.lanes, list(options.tables), self._projector, self._generation),
        )
        if cur.rowcount == 0:
            raise self._fenced()

    def rewrite_lanes(self, cur: Cursor, lanes: int, position: int) -> None:
        """Replace the cursors by ``lanes`` new ones, all at ``position``. In one transaction of the caller.

        Raises:
            Fenced: another process runs the projector now.
        """
        cur.execute(
            f"UPDATE {self._schema}.projectors SET lanes = %s, target_lanes = %s, updated_at = now()"
            " WHERE name = %s AND generation = %s",
            (lanes, lanes, self._projector, self._generation),
        )
        if cur.rowcount == 0:
            raise self._fenced()
        cur.execute(f"DELETE FROM {self._schema}.cursors WHERE projector = %s", (self._projector,))
        self._insert_cursors(cur, lanes, position)

    def require_level(self, cur: Cursor, position: int) -> None:
        """Check that all lanes stand at ``position``, and keep them there until the end of the transaction.

        Raises:
            StaleCursor: one does not: a runner that was replaced in the middle of a commit has moved it.
        """
        cur.execute(
            f"SELECT lane, position FROM {self._schema}.cursors WHERE projector = %s ORDER BY lane FOR UPDATE",
            (self._projector,),
        )
        moved = {int(lane): int(found) for lane, found in cur.fetchall() if found != position}
        if moved:
            raise StaleCursor(
                f"projector {self._projector!r}: lanes were brought to offset {position}, and some stand elsewhere now"
                f" (lane: offset) {moved}"
            )

    def _insert_cursors(self, cur: Cursor, lanes: int, position: int) -> None:
        cur.execute(
            f"INSERT INTO {self._schema}.cursors (projector, lane, position)"
            " SELECT %s, lane, %s FROM generate_series(0, %s) AS lane",
            (self._projector, position, lanes - 1),
        )

    # -- reading ---------------------------------------------------------------------------------------------------

    def row(self, cur: Cursor) -> ProjectorRow | None:
        """The projector's row, or ``None`` if it was never registered (or was removed)."""
        cur.execute(
            f"SELECT desired, state, generation, lanes FROM {self._schema}.projectors WHERE name = %s",
            (self._projector,),
        )
        row = cur.fetchone()
        return None if row is None else ProjectorRow(str(row[0]), str(row[1]), int(row[2]), int(row[3]))

    def positions(self, cur: Cursor) -> dict[int, int]:
        """Lane -> the last offset that is done."""
        cur.execute(f"SELECT lane, position FROM {self._schema}.cursors WHERE projector = %s", (self._projector,))
        return {int(lane): int(position) for lane, position in cur.fetchall()}

    def position(self, cur: Cursor, lane: int) -> int:
        """Where one lane stands.

        Raises:
            ConfigError: the cursor is gone: the projector was removed while it ran.
        """
        cur.execute(
            f"SELECT position FROM {self._schema}.cursors WHERE projector = %s AND lane = %s", (self._projector, lane)
        )
        row = cur.fetchone()
        if row is None:
            raise ConfigError(
                f"projector {self._projector!r} has no cursor for lane {lane}: its rows were removed while it ran",
                hint="start the process again: a projector without rows begins at its `start`",
            )
        return int(row[0])

    def head(self, cur: Cursor) -> int:
        """The last offset in the order; 0 while there is none."""
        cur.execute(
            f"SELECT first_offset + events - 1 FROM {self._schema}.commit_order ORDER BY first_offset DESC LIMIT 1"
        )
        row = cur.fetchone()
        return 0 if row is None else int(row[0])

    def backends(self, cur: Cursor) -> list[Backend]:
        """The server processes that the lanes were last seen with."""
        cur.execute(
            f"SELECT backend_pid, backend_start::text FROM {self._schema}.cursors"
            " WHERE projector = %s AND backend_pid IS NOT NULL",
            (self._projector,),
        )
        return [Backend(int(pid), str(start)) for pid, start in cur.fetchall()]

    def former_backend(self, cur: Cursor, lane: int) -> Backend | None:
        """The server process that this lane had before, under the same generation, if it had another one."""
        cur.execute(
            f"SELECT c.backend_pid, c.backend_start::text FROM {self._schema}.cursors AS c"
            f" JOIN {self._schema}.projectors AS p ON p.name = c.projector"
            " WHERE c.projector = %s AND c.lane = %s AND p.generation = %s AND c.backend_pid <> pg_backend_pid()",
            (self._projector, lane, self._generation),
        )
        row = cur.fetchone()
        return None if row is None else Backend(int(row[0]), str(row[1]))

    # -- writing ---------------------------------------------------------------------------------------------------

    def sign_in(self, cur: Cursor, lane: int, backend: Backend) -> None:
        """Write down which server process holds a lane's transactions, so that a take-over can end it: one that is
        stopped with row locks in its hands would hold its successor up until its deadline.

        Raises:
            Fenced: another process runs the projector now.
        """
        cur.execute(
            f"UPDATE {self._schema}.cursors AS c SET backend_pid = %s, backend_start = %s::timestamptz"
            f" FROM {self._schema}.projectors AS p WHERE c.projector = %s AND c.lane = %s"
            " AND p.name = c.projector AND p.generation = %s",
            (backend.pid, backend.start, self._projector, lane, self._generation),
        )
        if cur.rowcount != 1:
            raise self._fenced()

    def require_turn(self, cur: Cursor) -> None:
        """Check that this process runs the projector.

        Raises:
            Fenced: another one does.
        """
        row = self.row(cur)
        if row is None or row.generation != self._generation:
            raise self._fenced()

    def mark_batch(self, cur: Cursor, mark: str) -> None:
        """Mark the transaction as the runner's own; :meth:`step` checks the mark."""
        cur.execute("SELECT pg_catalog.set_config(%s, %s, true)", (BATCH_MARK, mark))

    def require_mark(self, cur: Cursor, mark: str, events: str) -> None:
        """Check that the transaction is still the one that was marked.

        Args:
            events: those that the projector was given, for the error.

        Raises:
            TransactionEnded: it is not.
        """
        cur.execute("SELECT pg_catalog.current_setting(%s, true)", (BATCH_MARK,))
        found = cur.fetchone()
        if found is None or found[0] != mark:
            raise TransactionEnded(
                f"projector {self._projector!r} ended the transaction of the runner (a commit or rollback on"
                f" ctx.connection or ctx.cursor) in {events}; its effects may be committed without the runner's part",
                hint="leave commit and rollback to the runner (also `with ctx.connection:` commits), or say"
                " `transactional = False`",
            )

    def step(
        self, cur: Cursor, lane: int, before: int, after: int, mark: str | None = None, *, prepared: bool = False
    ) -> None:
        """Move a lane's cursor from ``before`` to ``after`` in the transaction of ``cur``.

        Args:
            mark: what :meth:`mark_batch` was given, if this transaction was also in the hands of a projector.
            prepared: planned once on this connection, which halves what it costs the server. Only where no projector
                gets at the connection, who could deallocate it.

        Raises:
            Fenced: another process runs the projector now.
            StaleCursor: the cursor was moved (``projectors reset``), or the order ends before ``after``.
            TransactionEnded: the transaction is not the one that was marked.
        """
        values = {
            "after": after,
            "projector": self._projector,
            "lane": lane,
            "before": before,
            "generation": self._generation,
            "mark": mark,
        }
        if prepared and cur.connection not in self._prepared:
            statement = self._statement({name: f"${number}" for number, name in enumerate(values, 1)})
            cur.execute(_PREPARE.format(name=self._name, statement=statement))
            self._prepared.add(cur.connection)
        named = {name: f"%({name})s" for name in values}
        cur.execute(_EXECUTE.format(name=self._name) if prepared else self._statement(named), values)
        if cur.rowcount != 1:
            raise self._refused(cur, lane, before, after, mark)

    def _statement(self, places: Mapping[str, str]) -> str:
        return _STEP.format(**places, schema=self._schema, setting=BATCH_MARK)

    def halt(self, cur: Cursor, trouble: Trouble) -> None:
        """Write down that the projector halted.

        Raises:
            Fenced: another process runs the projector now; the halt is not ours to say.
        """
        if not self._write_state(cur, "halted", trouble, force=True):
            raise self._fenced()

    def set_state(self, cur: Cursor, state: str, trouble: Trouble | None = None, *, force: bool = False) -> None:
        """Write down what the projector is doing, unless another process runs it now. A halt that is written down
        stays, unless ``force``: it is a lane's or an operator's to lift, and this may be older news.
        """
        self._write_state(cur, state, trouble, force=force)

    def _write_state(self, cur: Cursor, state: str, trouble: Trouble | None, *, force: bool) -> bool:
        """Write it; ``False`` if it is not ours to write. What was erased since it was read is told no more."""
        error, offset, seqs = trouble or (None, None, None)
        more: str = ""
        values: list[list[int] | None] = []
        with _transaction(cur) if error is not None else contextlib.nullcontext():
            if error is not None and self._keeps_seqs(cur):
                # First, and in a statement of its own: the next one has to see an erasure that held the row.
                cur.execute(
                    f"SELECT FROM {self._schema}.projectors WHERE name = %s FOR NO KEY UPDATE", (self._projector,)
                )
                if seqs and self._is_erased(cur, seqs):
                    error = ERASED_ERROR
                more, values = ", error_seqs = %s::bigint[]", [_kept(seqs)]
            cur.execute(
                f"UPDATE {self._schema}.projectors SET state = %s, error = %s, error_offset = %s{more},"
                " updated_at = now() WHERE name = %s AND generation = %s AND (state <> 'halted' OR %s)",
                (state, error, offset, *values, self._projector, self._generation, force),
            )
            return bool(cur.rowcount)

    def _keeps_seqs(self, cur: Cursor) -> bool:
        cur.execute(f"SELECT max(version) FROM {self._schema}.migrations")
        row = cur.fetchone()
        return row is not None and row[0] is not None and int(row[0]) >= FINDINGS_VERSION

    def _is_erased(self, cur: Cursor, seqs: Sequence[int]) -> bool:
        cur.execute(
            f"SELECT EXISTS (SELECT FROM unnest(%s::bigint[]) AS s JOIN {self._schema}.erasures ON {COVERS})",
            (list(seqs),),
        )
        return cur.fetchone() == (True,)

    # -- why a step was refused ------------------------------------------------------------------------------------

    def _fenced(self) -> Fenced:
        return Fenced(
            f"projector {self._projector!r}: generation {self._generation} is no longer the newest",
            hint="another process runs it now; this one stands by",
        )

    def _refused(self, cur: Cursor, lane: int, before: int, after: int, mark: str | None) -> Exception:
        if mark is not None:
            self.require_mark(cur, mark, f"the events after offset {before}")
        row = self.row(cur)
        if row is None or row.generation != self._generation:
            return self._fenced()
        position, head = self.position(cur, lane), self.head(cur)
        where = f"projector {self._projector!r}, lane {lane}"
        if position != before:
            return StaleCursor(f"{where}: the cursor was moved from {before} to {position} by somebody else")
        return StaleCursor(f"{where}: the order ends at {head}, before {after}: the server lost its last seconds")


def _kept(seqs: Sequence[int] | None) -> list[int] | None:
    return None if seqs is None or len(seqs) > MOST_SEQS else list(seqs)


@contextlib.contextmanager
def _transaction(cur: Cursor) -> Iterator[None]:
    """One, where the connection does not begin them by itself."""
    if not cur.connection.autocommit:
        yield
        return
    cur.execute("BEGIN")
    try:
        yield
        cur.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(psycopg2.Error):
            cur.execute("ROLLBACK")
        raise
