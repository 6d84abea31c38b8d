"""A session as the steps of its agent: what the model saw and said, which tools it called, what came back.

Call ids are random, so they are replaced by what they mean: the first call of the assistant's message, the second one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from walstream.errors import PayloadError
from walstream.event import parse_payload

from .canonical import canonical
from .fold import Fold, Foldable
from .taxonomy_folds import assistant_message

# Of a request and a response, what is another one each time even if nothing else is.
_INCIDENTAL: Final = frozenset({"prompt_hash", "request_id", "id", "usage", "created", "system_fingerprint", "tokens"})
_SAID: Final = ("finish_reason", "stop_reason")
_OF_THIS_RUN: Final = frozenset({"request", "job_id", "deadline", "by"})  # of what approvals say


@dataclass
class Call:
    """One tool call of a step.

    Attributes:
        state: ``in flight``, ``answered``, ``failed`` or ``abandoned``.
        result: what came back: the result, the error, or the reason for which it was abandoned.
    """

    name: Any = None
    arguments: Any = None
    state: str = "in flight"
    result: Any = None
    attempts: int = 1


class Window:
    """The messages that a model was given, normalized. Windows that only grow share one list."""

    __slots__ = ("_all", "_length")

    def __init__(self, messages: list[Any]) -> None:
        self._all = messages
        self._length = len(messages)

    @property
    def messages(self) -> list[Any]:
        """The messages, in a list of their own."""
        return self._all[: self._length]


@dataclass
class Step:
    """From one request to the model to the next.

    Attributes:
        seqs: of its events.
        window: what the model was given; ``None`` if it was not asked.
        model: what was requested: name and parameters.
        said: the assistant's message without its calls, and why it ended.
        calls: its tool calls, in the order in which the model asked for them.
        handoffs: those emitted and received, in order.
        outcome: how the task ended, if it did here.
        others: approvals, and events of other types, as (type, payload).
    """

    seqs: list[int] = field(default_factory=list)
    window: Window | None = None
    model: dict[str, Any] | None = None
    said: dict[str, Any] | None = None
    calls: dict[str, Call] = field(default_factory=dict)
    handoffs: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    others: list[dict[str, Any]] = field(default_factory=list)

    def aspects(self) -> dict[str, Any]:
        """What two steps are compared by, as JSON, in the order in which it comes about."""
        calls = list(self.calls.values())
        return {
            "context": None if self.window is None else self.window.messages,
            "model": {"requested": self.model, "said": self.said},
            "tool": [call.name for call in calls],
            "arguments": [call.arguments for call in calls],
            "result": [{"state": call.state, "result": call.result} for call in calls],
            "handoff": self.handoffs,
            "other events": self.others,
            "outcome": self.outcome,
        }


ASPECTS: Final = tuple(Step().aspects())


def steps_of(events: Iterable[Foldable], fold: Fold, shared: dict[bytes, Any] | None = None) -> list[Step]:
    """Divide a session's events, in the order of seq, into steps.

    Args:
        shared: given for two sessions, equal messages of their windows are one object: compared at once, and held once.

    Raises:
        PayloadError: an event of ours cannot be parsed.
        LedgerError: an event refers to something that was not put in.
    """
    return _Divider(fold, {} if shared is None else shared).divide(events)


class _Divider:
    def __init__(self, fold: Fold, shared: dict[bytes, Any]) -> None:
        self._fold = fold
        self._shared = shared
        self._context = fold.empty()
        self._step = Step()
        self._steps = [self._step]
        self._calls: dict[str, Call] = {}  # the last call of each id, in whichever step it is
        self._seen: list[Any] = []  # the messages of the last window, and what is compared of them
        self._normalized: list[Any] = []

    def divide(self, events: Iterable[Foldable]) -> list[Step]:
        for event in events:
            if self._begins_a_step(event.event_type):
                self._step = Step()
                self._steps.append(self._step)
            if event.event_type == "model.responded" and self._step.window is None:
                self._step.window = self._window()
            self._fold.apply(self._context, event)
            self._step.seqs.append(event.seq)
            self._note(event)
        return [step for step in self._steps if step.seqs]

    def _begins_a_step(self, event_type: str) -> bool:
        step = self._step
        begun = step.said is not None or bool(step.calls)
        if event_type == "context.loaded":
            return begun or step.model is not None
        if event_type == "model.requested":
            return begun or step.model is not None
        if event_type == "model.responded":
            return begun
        if event_type == "tool.invoked" and step.said is None and step.calls:
            # An agent that records no responses: what it calls after everything was answered is its next step.
            return all(call.state != "in flight" for call in step.calls.values())
        return False

    def _note(self, event: Foldable) -> None:
        step, kind = self._step, event.event_type
        if kind in ("context.loaded", "session.forked"):
            return
        payload = event.payload
        if kind.startswith(("model.", "tool.")) and not isinstance(payload, dict):
            step.others.append({"type": kind, "payload": payload})
        elif kind == "model.requested":
            step.model = {key: value for key, value in payload.items() if key not in _INCIDENTAL}
            step.window = self._window()
        elif kind == "model.responded":
            self._responded(payload)
        elif kind in ("tool.invoked", "tool.retried", "tool.observed", "tool.abandoned"):
            self._tool(kind, payload)
        elif kind in ("handoff.emitted", "handoff.received"):
            step.handoffs.append({"type": kind, "payload": payload})
        elif kind.startswith("approval.") and isinstance(payload, dict):
            said = {key: value for key, value in payload.items() if key not in _OF_THIS_RUN}
            step.others.append({"type": kind, "payload": said})
        elif kind in ("task.completed", "task.failed"):
            step.outcome = {"status": kind.partition(".")[2], "payload": payload}
        else:
            step.others.append({"type": kind, "payload": payload})

    def _responded(self, payload: dict[str, Any]) -> None:
        message = assistant_message(payload)
        said: dict[str, Any] = {key: payload[key] for key in _SAID if key in payload}
        if message is None:
            self._step.said = {**{k: v for k, v in payload.items() if k not in _INCIDENTAL}, **said}
            return
        self._step.said = {**{k: v for k, v in message.items() if k not in ("tool_calls", "role", "id")}, **said}
        for call in _tool_calls(message):
            function = call.get("function")
            function = function if isinstance(function, dict) else {}
            self._add(call["id"], Call(function.get("name"), parsed(function.get("arguments"))))

    def _tool(self, kind: str, payload: dict[str, Any]) -> None:
        call_id = str(payload.get("call_id"))
        if kind == "tool.invoked":
            known = self._step.calls.get(call_id)
            if known is None:
                known = Call()
                self._add(call_id, known)
            known.name = payload.get("name", known.name)
            known.arguments = parsed(payload.get("arguments", known.arguments))
            return
        call = self._calls.get(call_id)
        if call is None:
            self._step.others.append({"type": kind, "payload": {k: v for k, v in payload.items() if k != "call_id"}})
        elif kind == "tool.retried":
            call.attempts += 1
        elif call.state != "in flight":
            return  # a second answer, which nobody sees
        elif kind == "tool.abandoned":
            call.state, call.result = "abandoned", payload.get("reason")
        elif payload.get("result") is None and payload.get("error") is not None:
            call.state, call.result = "failed", payload["error"]
        else:
            call.state, call.result = "answered", payload.get("result")

    def _add(self, call_id: str, call: Call) -> None:
        self._step.calls[call_id] = self._calls[call_id] = call

    def _window(self) -> Window:
        """The messages as they are now, with ids replaced. Only those that came since the last window are looked at."""
        messages = self._context["messages"]
        known = len(self._seen)
        # Elements that are the same object are not compared any further, so this is quick.
        if messages[:known] != self._seen:
            known = 0
            self._seen, self._normalized = [], []
        calls = _places(messages, known)
        for message in messages[known:]:
            place = None
            if isinstance(message, dict) and message.get("role") == "tool":
                place = calls.get(str(message.get("tool_call_id")))
            else:
                calls = {call["id"]: n for n, call in enumerate(_tool_calls(message))}
            shown = normalized(message, place)
            self._normalized.append(self._shared.setdefault(canonical(shown), shown))
            self._seen.append(message)
        return Window(self._normalized)


def _places(messages: list[Any], before: int) -> dict[str, int]:
    """The calls that a tool result at this place may answer, with their places among each other."""
    while before and isinstance(messages[before - 1], dict) and messages[before - 1].get("role") == "tool":
        before -= 1
    return {call["id"]: n for n, call in enumerate(_tool_calls(messages[before - 1]))} if before else {}


def normalized(message: Any, answers: int | None = None) -> Any:
    """A message without the ids of its calls, and with their arguments parsed; a tool result says which call it answers
    by the place of that among the calls."""
    if isinstance(message, dict) and message.get("role") == "tool":
        return {**{key: value for key, value in message.items() if key != "tool_call_id"}, "call": answers}
    calls = _tool_calls(message)
    if not calls:
        return message
    shown = []
    for call in calls:
        function = call.get("function")
        rest = {key: value for key, value in call.items() if key not in ("id", "function", "type")}
        if isinstance(function, dict):
            rest["function"] = {**function, "arguments": parsed(function.get("arguments"))}
        shown.append(rest)
    return {**message, "tool_calls": shown}


def _tool_calls(message: Any) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return []
    return [call for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)]


def parsed(arguments: Any) -> Any:
    """Arguments that are JSON text as the value that they stand for: spaces do not make a difference."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_payload(arguments.encode())
    except (PayloadError, UnicodeEncodeError):
        return arguments
