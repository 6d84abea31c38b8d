"""One statement through whatever the caller has in hand, inside the transaction that is open there.

The packages other than psycopg2 are never imported here: who passes an object of theirs has imported them. A cursor of
the caller's is not used but only tells the connection, so that what it was reading is not lost and its row factory does
not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

from psycopg2.extensions import connection as PsycopgConnection
from psycopg2.extensions import cursor as PsycopgCursor

Rows = list[tuple[Any, ...]]


class Statement(NamedTuple):
    """SQL with places for values, in no driver's style.

    Attributes:
        parts: the SQL around the values: one part more than there are values.
    """

    parts: tuple[str, ...]

    def render(self, place: Callable[[int], str], escape: Callable[[str], str]) -> str:
        """The SQL for a driver: ``place(n)`` stands for value ``n``, and ``escape`` is applied to everything else."""
        text = [escape(self.parts[0])]
        for number, part in enumerate(self.parts[1:]):
            text += (place(number), escape(part))
        return "".join(text)


class Failure(NamedTuple):
    """What a driver's error says.

    Attributes:
        state: the SQLSTATE.
        message: the server's message, without its context.
        inside: it was raised inside a function, not by the statement itself.
    """

    state: str
    message: str
    inside: bool


def execute(on: Any, statement: Statement, values: Sequence[Any]) -> Rows:
    """Run ``statement`` in the transaction of ``on`` and return its rows.

    Args:
        on: a psycopg2 connection or cursor, a psycopg (3) connection or cursor, a SQLAlchemy ``Session`` or
            ``Connection``, or a Django connection.

    Raises:
        TypeError: ``on`` is nothing of that.
        Exception: whatever the driver raises.
    """
    for run in (_psycopg2, _psycopg3, _sqlalchemy, _django):
        rows = run(on, statement, values)
        if rows is not None:
            return rows
    inner = getattr(on, "driver_connection", None)  # SQLAlchemy's raw_connection()
    if inner is not None:
        return execute(inner, statement, values)
    raise TypeError(f"walstream does not know how to append on a {_name(on)}. {_SUPPORTED}")


def failure(error: BaseException) -> Failure | None:
    """What the server said, found in the error of a driver or in what a framework wrapped around it; ``None`` if the
    server did not say anything."""
    seen: set[int] = set()
    inner: Any = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        state = getattr(inner, "sqlstate", None) or getattr(inner, "pgcode", None)
        diagnosis = getattr(inner, "diag", None)
        if isinstance(state, str):
            message = getattr(diagnosis, "message_primary", None) or getattr(inner, "message", None)
            context = getattr(diagnosis, "context", None) or getattr(inner, "context", None)
            return Failure(state, str(message or inner).splitlines()[0], bool(context))
        inner = getattr(inner, "orig", None) or inner.__cause__
    return None


def _psycopg2(on: Any, statement: Statement, values: Sequence[Any]) -> Rows | None:
    if isinstance(on, PsycopgCursor):
        on = on.connection
    if not isinstance(on, PsycopgConnection):
        return None
    if on.async_:
        raise TypeError(f"this psycopg2 connection is asynchronous. {_ASYNC}")
    with on.cursor(cursor_factory=PsycopgCursor) as cur:
        cur.execute(_percent(statement), tuple(values))
        return list(cur.fetchall())


def _psycopg3(on: Any, statement: Statement, values: Sequence[Any]) -> Rows | None:
    module = sys.modules.get("psycopg")
    if module is None or not isinstance(on, module.BaseConnection | module.Cursor | module.AsyncCursor):
        return None
    if isinstance(on, module.AsyncConnection | module.AsyncCursor):
        raise TypeError(f"a {_name(on)} is asynchronous. {_ASYNC}")
    connection = on if isinstance(on, module.BaseConnection) else on.connection
    # Made directly: a cursor factory of the connection may want another style of parameters.
    with module.Cursor(connection, row_factory=module.rows.tuple_row) as cur:
        cur.execute(_percent(statement), tuple(values))
        return list(cur.fetchall())


def _sqlalchemy(on: Any, statement: Statement, values: Sequence[Any]) -> Rows | None:
    module = sys.modules.get("sqlalchemy")
    if module is None:
        return None
    orm, asynchronous = sys.modules.get("sqlalchemy.orm"), sys.modules.get("sqlalchemy.ext.asyncio")
    if orm is not None and isinstance(on, orm.scoped_session):
        on = on()
    if isinstance(on, module.Engine):
        raise TypeError("an Engine has no transaction: pass a Session, or a Connection that is in one")
    if asynchronous is not None and isinstance(on, asynchronous.AsyncSession | asynchronous.AsyncConnection):
        raise TypeError(
            f"a {_name(on)} is asynchronous: await on.run_sync(lambda on: ledger.append(…, on=on)) does what you want"
        )
    if not isinstance(on, module.Connection) and not (orm is not None and isinstance(on, orm.Session)):
        return None
    sql = statement.render(lambda number: f":value_{number}", lambda part: part.replace(":", "\\:"))
    rows = on.execute(module.text(sql), {f"value_{number}": value for number, value in enumerate(values)})
    return [tuple(row) for row in rows]


def _django(on: Any, statement: Statement, values: Sequence[Any]) -> Rows | None:
    module = sys.modules.get("django.db.backends.base.base")
    if module is None:
        return None
    wrapped = getattr(on, "db", on)  # a cursor of Django's
    if not isinstance(wrapped, module.BaseDatabaseWrapper) and not _is_proxy(wrapped):
        return None
    if wrapped.vendor != "postgresql":
        raise TypeError(f"the ledger is in PostgreSQL, and this connection of Django is to {wrapped.vendor}")
    with wrapped.cursor() as cur:
        cur.execute(_percent(statement), tuple(values))
        return list(cur.fetchall())


def _is_proxy(on: Any) -> bool:
    module = sys.modules.get("django.utils.connection")  # django.db.connection is one
    return module is not None and isinstance(on, module.ConnectionProxy)


@lru_cache(maxsize=512)  # the statements are few, and called often
def _percent(statement: Statement) -> str:
    return statement.render(lambda _: "%s", lambda part: part.replace("%", "%%"))


def _name(on: Any) -> str:
    kind = type(on)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]} {kind.__name__}"


@contextmanager
def encoding_named() -> Iterator[None]:
    """Say what is wrong when a driver cannot encode a text for its connection.

    Raises:
        UnicodeEncodeError: the same one, with the remedy as a note.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        error.add_note("the connection's client_encoding cannot hold this text: set it to UTF8")
        raise


_SUPPORTED: Final = (
    "Pass a psycopg2 connection or cursor, a psycopg connection or cursor, a SQLAlchemy Session or Connection, or a"
    " Django connection; from anything else call the SQL function, as docs/examples/append_asyncpg.py does"
)
_ASYNC: Final = "Call the SQL function with it, as docs/examples/append_asyncpg.py does"
