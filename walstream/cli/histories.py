"""Sessions that a command reads as a whole: from the ledger, or from files in the import format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from walstream.errors import UnknownSession

if TYPE_CHECKING:
    from collections.abc import Iterator

    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings
    from walstream.ledger.fold import Fold, Foldable
    from walstream.testing.purity_runs import Recorded


def from_file(file: Path) -> Iterator[Recorded]:
    """The events of a JSON Lines file; the number of the line stands for the seq.

    Raises:
        BadLine: a line is no event.
        LedgerError: the file cannot be read.
    """
    from walstream.errors import LedgerError
    from walstream.ledger.json_lines import read_events
    from walstream.testing.purity_runs import Recorded

    try:
        with file.open("rb") as stream:
            for line, event in read_events(stream, str(file)):
                session, agent, event_type, payload = event
                yield Recorded(line, session, agent, event_type, payload.encode(), f"{file}:{line}")
    except OSError as error:
        raise LedgerError(f"cannot read {file}: {error.strerror}") from None


def session_of_file(word: str) -> list[Foldable] | None:
    """What ``FILE`` or ``FILE#SESSION`` stands for; ``None`` if there is no such file.

    Raises:
        UnknownSession: the file has no such session, or several and none was chosen.
        BadLine, LedgerError: see :func:`from_file`.
    """
    name, mark, wanted = word, "", ""
    if not Path(word).is_file():
        name, mark, wanted = word.rpartition("#")
        if not mark or not Path(name).is_file():
            return None
    events = list(from_file(Path(name)))
    sessions = sorted({event.session_id for event in events})
    if mark and wanted not in sessions:
        raise UnknownSession(f"{name} holds no session {wanted}", hint=f"it holds {_some(sessions)}")
    if not mark and len(sessions) != 1:
        raise UnknownSession(
            f"{name} holds {len(sessions)} sessions", hint=f"choose one: {name}#SESSION; it holds {_some(sessions)}"
        )
    return [event.fresh() for event in events if not mark or event.session_id == wanted]


def session_of_ledger(
    conn: Connection, settings: Settings, session: str, fold: Fold, upto_seq: int | None = None
) -> Iterator[Foldable]:
    """A session's events from the very beginning: those of the sessions that it was forked from come first.

    Raises:
        UnknownSession: no event has this session id.
    """
    from walstream.ledger.inflight import lineage
    from walstream.ledger.session_rows import read_session

    with conn.cursor() as cur:
        line = lineage(cur, settings, session, upto_seq)
    for place, part in reversed(list(enumerate(line))):
        # A fork's own birth is left out: what it stands for has just been read. If it was not, it is an error there.
        after = part.after if place + 1 < len(line) else None
        yield from read_session(conn, settings, part.session_id, after=after, upto_seq=part.upto, fold=fold)


def _some(sessions: list[str]) -> str:
    shown = ", ".join(sessions[:3])
    return f"{shown}, …" if len(sessions) > 3 else shown or "none"
