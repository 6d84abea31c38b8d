"""The event: what every projector receives, hot or cold.

An event is one row of the ledger with its place in the commit order. It is light (millions are made), shared (every
projector gets the same object) and immutable. Nothing is decoded until somebody looks: the columns are kept as the
exact bytes of text that Postgres sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import orjson

from .errors import PayloadError

# The columns of one ledger row as text in UTF-8, in this fixed order, whatever the table calls them:
# (seq, session_id, agent_id, event_type, payload, created_at, extras)
# `extras` is None, or (names, values) of the table's other columns, values as text bytes or None for NULL.
Row = tuple[int, bytes, bytes, bytes, bytes, bytes | None, "tuple[tuple[str, ...], tuple[bytes | None, ...]] | None"]

ERASED_PAYLOAD: Final = b'{"walstream_erased": true}'
"""What a row has for a payload once that was redacted, as Postgres renders it. Folds pass it; readers of events pass it
where ``erasures`` declares it, so that an event that an agent made to look like this is delivered."""

ERASED_ERROR: Final = "erased, with a session that it may have told of"
"""What a projector has for an error once an erasure took its text."""

POSTGRES_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Times in the replication protocol count microseconds from here (documentation, 55.9 "Message Formats")."""

# A number that orjson could distort: sixteen or more digits in a row (a point among them), or an exponent (only the
# type `json` keeps those).
_DELICATE_NUMBER = re.compile(rb"[0-9][0-9.]{15,}|[0-9][eE][-+]?[0-9]")
# The same question, asked of ordinary payloads several times as fast: with all digits (and points) made one.
_AS_ONE_DIGIT: Final = bytes.maketrans(b"0123456789.", b"0" * 11)
_MANY_DIGITS: Final = b"0" * 16
_BACKSLASH: Final = ord("\\")
_EXACT: Final = frozenset({str, int, bool, type(None)})
_LARGE: Final = 1024 * 1024  # from here on a copy is dearer than time
_UNPARSED: Final = object()


class Commit:
    """One committed transaction, shared by its events.

    Attributes:
        lsn: where its commit record starts (``final_lsn`` of the Begin message); 0 for recovered events.
        time_us: microseconds since 2000-01-01 UTC; 0 means unknown (recovered, or from a replication origin).
        xid: 32-bit transaction id; 0 when read from the order, which does not keep it.
        key_prefix: ``ledger:epoch``, the first two parts of every key.
        recovered: the slot did not deliver these events; the reconciler found them in the ledger.
    """

    __slots__ = ("key_prefix", "lsn", "recovered", "time_us", "xid")

    def __init__(self, lsn: int, time_us: int, xid: int, key_prefix: str, recovered: bool = False) -> None:
        self.lsn = lsn
        self.time_us = time_us
        self.xid = xid
        self.key_prefix = key_prefix
        self.recovered = recovered


class Event:
    """One committed row of the ledger, with its offset in the commit order.

    >>> from walstream.testing import make_event
    >>> event = make_event(7, "tool.invoked", payload={"tool": "search"}, agent_id="researcher-1")
    >>> event.offset, event.agent_id, event.event_type, event.payload["tool"]
    (7, 'researcher-1', 'tool.invoked', 'search')
    >>> event.payload_text
    '{"tool": "search"}'
    >>> event.key == make_event(7).key  # the same on every delivery
    True
    """

    __slots__ = ("_commit", "_offset", "_parsed", "_row")

    def __init__(self, offset: int, row: Row, commit: Commit) -> None:
        self._offset = offset
        self._row = row
        self._commit = commit
        self._parsed: Any = _UNPARSED

    @property
    def offset(self) -> int:
        """Place in the commit order: dense, from 1, the same for every projector."""
        return self._offset

    @property
    def seq(self) -> int:
        """The row's own number. Has gaps, and can commit out of order: never resume or sort by it."""
        return self._row[0]

    @property
    def session_id(self) -> str:
        return self._row[1].decode()

    @property
    def agent_id(self) -> str:
        return self._row[2].decode()

    @property
    def event_type(self) -> str:
        return self._row[3].decode()

    @property
    def payload_text(self) -> str:
        """The payload as the exact text that Postgres rendered."""
        return self._row[4].decode()

    @property
    def payload_bytes(self) -> bytes:
        """The same in UTF-8, without a copy."""
        return self._row[4]

    @property
    def payload(self) -> Any:
        """The payload, parsed on first use and then shared. Integers are exact; a decimal number that a float would
        distort is a ``decimal.Decimal``. Treat it as read-only: other projectors see the same object.

        Raises:
            PayloadError: legal JSON that cannot be parsed here; ``payload_text`` is still good.
        """
        if self._parsed is _UNPARSED:
            self._parsed = parse_payload(self._row[4])
        return self._parsed

    @property
    def created_at(self) -> datetime | None:
        """The row's ``created_at``, or ``None`` where Python's datetime cannot hold it (``infinity``, BC, after 9999);
        ``created_at_text`` always can."""
        text = self.created_at_text
        return None if text is None else _parse_timestamp(text)

    @property
    def created_at_text(self) -> str | None:
        """``created_at`` as Postgres rendered it in UTC; ``None`` only for NULL."""
        raw = self._row[5]
        return None if raw is None else raw.decode()

    @property
    def committed_at(self) -> datetime | None:
        """When the transaction committed by the server's clock; ``None`` if unknown (never the year 2000)."""
        us = self._commit.time_us
        return POSTGRES_EPOCH + timedelta(microseconds=us) if us else None

    @property
    def lsn(self) -> int:
        """Where the transaction's commit record starts in the WAL; 0 for recovered events. See :mod:`walstream.lsn`."""
        return self._commit.lsn

    @property
    def key(self) -> str:
        """``ledger:epoch:seq``: the same on every delivery, replay and rebuild. Send it along as idempotency key."""
        return f"{self._commit.key_prefix}:{self._row[0]}"

    @property
    def recovered(self) -> bool:
        """The slot missed this event and the reconciler found it: it comes later than its commit."""
        return self._commit.recovered

    @property
    def extras(self) -> Mapping[str, str | None]:
        """The table's other columns, as Postgres rendered them; ``None`` for NULL."""
        pair = self._row[6]
        if pair is None:
            return {}
        return {name: None if raw is None else raw.decode() for name, raw in zip(*pair, strict=True)}

    @property
    def row(self) -> Row:
        """The undecoded columns (see ``Row``), for code that must be fast."""
        return self._row

    @property
    def commit(self) -> Commit:
        """The transaction this event belongs to."""
        return self._commit

    def __repr__(self) -> str:
        return f"Event(offset={self._offset}, seq={self.seq}, {self.event_type!r}, session={self.session_id!r})"


def parse_payload(raw: bytes) -> Any:
    """Parse JSON without distorting a number.

    Raises:
        PayloadError: too deep, an integer longer than ``sys.get_int_max_str_digits()``, an exponent that not even
            ``Decimal`` holds (only the type ``json`` keeps those), or no JSON at all.
    """
    try:
        try:
            parsed = orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass  # orjson stops at a depth of 1024; the standard library says precisely what is wrong
        else:
            # Whatever number orjson distorts, it makes a float of: it has no Decimal and no integers beyond 64 bits.
            # Most payloads are one object without any, and to ask that is much cheaper than to look at the text.
            if (type(parsed) is dict and _EXACT.issuperset(map(type, parsed.values()))) or not _is_delicate(raw):
                return parsed
        return json.loads(raw, parse_float=_exact_float, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, ArithmeticError) as error:  # the last: an exponent beyond Decimal's
        raise PayloadError(
            f"this payload of {len(raw)} bytes cannot be parsed: {error}",
            hint="read event.payload_text instead, which is exact",
        ) from error


def _is_delicate(raw: bytes) -> bool:
    """Whether orjson could distort a number in ``raw``."""
    if len(raw) < _LARGE:
        # Most of a payload stands in strings, where a hash or an id often looks like a number. What is left without
        # them is right for all that is JSON, and orjson takes nothing else.
        if _BACKSLASH in raw:
            raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
        raw = b'"'.join(raw.split(b'"')[::2])
        digits = raw.translate(_AS_ONE_DIGIT)  # asked with `find`: `in` takes four times as long
        if digits.find(_MANY_DIGITS) < 0 and digits.find(b"0e") < 0 and digits.find(b"0E") < 0:
            return False
    return _DELICATE_NUMBER.search(raw) is not None  # a match in a string of a very large one: the exact, slower road


def _refuse_constant(text: str) -> Any:
    # The standard library takes NaN and Infinity, which JSON does not have.
    raise ValueError(f"{text} is not JSON")


def _exact_float(text: str) -> float | Decimal:
    """A float where it says the same number, else a Decimal."""
    exact = Decimal(text)
    value = float(text)
    return value if Decimal(repr(value)) == exact else exact


def _parse_timestamp(text: str) -> datetime | None:
    # `2024-02-03 04:05:06.123456+00`, zone pinned to UTC on every connection. fromisoformat (3.11) reads it all, also
    # offsets with minutes and seconds; infinity, BC and years of five digits are what it refuses.
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
