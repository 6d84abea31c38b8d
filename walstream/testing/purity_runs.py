"""Folding recorded sessions several times, and what shows that the fold is not pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from walstream.errors import PayloadError
from walstream.event import parse_payload
from walstream.ledger.canonical import canonical, digest
from walstream.ledger.fold import Fold, Foldable, FoldEvent
from walstream.ledger.json_paths import first_difference
from walstream.ledger.messages import Context

from .purity_state import State
from .purity_traps import ForbiddenCall, Traps

MOST_FINDINGS: Final = 20
CHECKPOINTS: Final = 500
"""Contexts are compared after every event of a session; of a longer one at so many places, and then between two."""


class Recorded(NamedTuple):
    """One event as it was recorded, from which any number of fresh ones can be made.

    Attributes:
        text: the payload as JSON text.
        where: ``file:line`` for a person, or empty.
    """

    seq: int
    session_id: str
    agent_id: str
    event_type: str
    text: bytes
    where: str = ""

    def fresh(self) -> FoldEvent:
        """The event with a payload that shares nothing with that of another."""
        return FoldEvent(self.seq, self.session_id, self.agent_id, self.event_type, self.text)


Session = Sequence[Recorded]


@dataclass(frozen=True)
class Finding:
    """Something that a pure fold would not show.

    Attributes:
        kind: ``forbidden call``, ``changed payload``, ``changed state``, ``not JSON``, ``error``, ``different result``,
            ``different result after a restore``, ``different result with another hash seed``, ``different result in
            another time zone``.
        message: what happened, for a person.
        session_id: of the first event at which it happened.
        seq: of that event.
        event_type: of that event.
        where: ``file:line`` of that event, if it came from a file; empty otherwise.
        place: ``file:line in function`` of the call, where that is known.
    """

    kind: str
    message: str
    session_id: str
    seq: int
    event_type: str
    where: str = ""
    place: str | None = None

    def __str__(self) -> str:
        at = self.where or f"session {self.session_id}, seq {self.seq}"
        return f"{self.kind}: {self.message}{f' at {self.place}' if self.place else ''} ({self.event_type}, {at})"


def recorded(events: Iterable[Foldable | Recorded]) -> list[Recorded]:
    """Events of any kind as :class:`Recorded`."""
    found = []
    for event in events:
        if isinstance(event, Recorded):
            found.append(event)
            continue
        text = getattr(event, "payload_bytes", b"") or canonical(event.payload)
        found.append(Recorded(event.seq, event.session_id, event.agent_id, event.event_type, text))
    return found


def by_session(events: Iterable[Recorded]) -> list[list[Recorded]]:
    """Events sorted into their sessions, each in the order in which they came."""
    sessions: dict[str, list[Recorded]] = {}
    for event in events:
        sessions.setdefault(event.session_id, []).append(event)
    return list(sessions.values())


def stride_of(session: Session) -> int:
    """After how many events contexts are compared."""
    return max(1, len(session) // CHECKPOINTS)


def digests(
    fold: Fold, session: Session, stride: int, *, restore: bool = False, fine: int | None = None
) -> dict[int, bytes]:
    """Place of an event -> digest of the context after it; ends early where the fold raises.

    Args:
        stride: look after so many events, and at the end.
        restore: write the context down at each of these places and go on with what is read back.
        fine: look at every event from this place on, and at none before it.
    """
    return {
        place: digest(context)
        for place, context in _contexts(fold, session, stride, restore, fine)
        if fine is None or place >= fine
    }


def text_at(fold: Fold, session: Session, place: int, stride: int, *, restore: bool = False, fine: int = 0) -> bytes:
    """Canonical text of the context after the event at ``place``; empty where the fold raises before."""
    for at, context in _contexts(fold, session[: place + 1], stride, restore, fine):
        if at == place:
            return canonical(context)
    return b""


def _contexts(
    fold: Fold, session: Session, stride: int, restore: bool, fine: int | None
) -> Iterator[tuple[int, Context]]:
    context = fold.empty()
    for place, event in enumerate(session):
        try:
            fold.apply(context, event.fresh())
        except Exception:
            return
        if place % stride == 0 or place == len(session) - 1 or (fine is not None and place >= fine):
            yield place, context
            if restore:
                context = parse_payload(canonical(context))


def check(fold: Fold, sessions: Sequence[Session]) -> list[Finding]:
    """All checks that one process can make. Nothing is compared if the guarded run found something already."""
    findings = guarded(fold, sessions)
    if findings:
        return findings
    first = [digests(fold, session, stride_of(session)) for session in sessions]
    # The second time in the other order, so that what one session leaves behind meets another one.
    for n in reversed(range(len(sessions))):
        again = digests(fold, sessions[n], stride_of(sessions[n]))
        if again != first[n]:
            findings.insert(0, _different(fold, sessions[n], restore=False, coarse=unequal(first[n], again)))
    for session, straight in zip(sessions, first, strict=True) if not findings else ():
        restored = digests(fold, session, stride_of(session), restore=True)
        if restored != straight:
            findings.append(_different(fold, session, restore=True, coarse=unequal(straight, restored)))
    return findings[:MOST_FINDINGS]


def unequal(one: dict[int, bytes], other: dict[int, bytes]) -> int:
    """The first place at which two runs differ."""
    return min(place for place in one.keys() | other.keys() if one.get(place) != other.get(place))


def different(session: Session, place: int, kind: str, left: bytes, right: bytes) -> Finding:
    """The finding for two runs whose contexts after ``place`` have these canonical texts."""
    found = first_difference(parse_payload(left), parse_payload(right)) if left and right else None
    message = "the contexts differ" if found is None else f"context.{found}"
    return _finding(session[place], kind, message)


def _different(fold: Fold, session: Session, *, restore: bool, coarse: int) -> Finding:
    stride = stride_of(session)
    fine = fine_from(coarse, stride)
    one = digests(fold, session[: coarse + 1], stride, fine=fine)
    other = digests(fold, session[: coarse + 1], stride, restore=restore, fine=fine)
    place = unequal(one, other) if one != other else coarse
    kind = "different result after a restore" if restore else "different result"
    left = text_at(fold, session, place, stride, fine=fine)
    right = text_at(fold, session, place, stride, restore=restore, fine=fine)
    return different(session, place, kind, left, right)


def fine_from(coarse: int, stride: int) -> int:
    """The first place that has to be looked at, if contexts differ at ``coarse`` and did not where they were compared
    before."""
    return max(0, (coarse - 1) // stride * stride + 1) if coarse else 0


def guarded(fold: Fold, sessions: Sequence[Session]) -> list[Finding]:
    """Fold every session once under traps. A session ends at its first finding; each finding is told once."""
    findings: dict[tuple[str, ...], Finding] = {}
    state = State(fold)
    for session in sessions:
        finding = _guarded_session(fold, session, state)
        if finding is not None:
            findings.setdefault((finding.kind, finding.event_type, finding.message, finding.place or ""), finding)
        if len(findings) == MOST_FINDINGS:
            break
    return list(findings.values())


def _guarded_session(fold: Fold, session: Session, state: State) -> Finding | None:
    context, traps = fold.empty(), Traps()
    seen: list[tuple[Any, bytes]] = []
    stride = stride_of(session)
    for place, recorded_event in enumerate(session):
        event = recorded_event.fresh()
        try:
            before = digest(event.payload)
        except PayloadError:
            return None  # what no fold can read, no fold is to blame for
        held = state.frozen()
        error: BaseException | None = None
        try:
            with traps.set():
                fold.apply(context, event)
        except ForbiddenCall as forbidden:
            error = forbidden
        except Exception as failed:
            error = failed
        if traps.caught is not None:
            return _finding(recorded_event, "forbidden call", traps.caught.what, traps.caught.place)
        if error is not None:
            return _finding(recorded_event, "error", f"{type(error).__name__}: {error}")
        if digest(event.payload) != before:
            return _finding(recorded_event, "changed payload", "the fold changed the event's payload")
        changed = state.changed(held)
        if changed is not None:
            return _finding(recorded_event, "changed state", f"{changed} outlives the call, and the fold changed it")
        if place % stride == 0 or place == len(session) - 1:
            try:
                canonical(context)
            except PayloadError as refused:
                return _finding(recorded_event, "not JSON", f"the context cannot be written down: {refused}")
        seen.append((event.payload, before))
    for place, (payload, before) in enumerate(seen):
        if digest(payload) != before:
            return _when_changed(fold, session, place)
    return None


def _when_changed(fold: Fold, session: Session, place: int) -> Finding:
    """The payload of the event at ``place`` was kept, and a later event changed it: which one?"""
    context, watched = fold.empty(), session[place].fresh()
    before = digest(watched.payload)
    for at, each in enumerate(session):
        fold.apply(context, watched if at == place else each.fresh())
        if at > place and digest(watched.payload) != before:
            message = f"the fold kept the payload of the {watched.event_type} with seq {watched.seq} and changed it now"
            return _finding(each, "changed payload", message)
    return _finding(session[place], "changed payload", "the fold kept the payload and changed it later")


def _finding(event: Recorded, kind: str, message: str, place: str | None = None) -> Finding:
    return Finding(kind, message, event.session_id, event.seq, event.event_type, event.where, place)
