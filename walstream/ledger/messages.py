"""The window of messages within a context, kept valid for a model provider at every step.

Providers refuse a window in which a tool result does not answer a call of the assistant message before it, or answers
one twice, or in which a call has no answer. The functions here put messages into a context so that this never happens,
at a cost that does not depend on the length of the window. Messages have the form of OpenAI's chat interface.

``context["turn"]`` is what they remember: the last assistant message with calls (``at``, its place in the window), its
calls (``calls``: id -> place among them), which of them are answered (``answered``: places, ascending), and whether the
message was made here (``made``) because the agent recorded none.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

from .canonical import canonical

Context = dict[str, Any]
Message = dict[str, Any]

NO_RESULT: Final = "[no result was recorded for this call]"
"""What answers a call that was never answered, where a window must not leave it open."""

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")

SET_ASIDE: Final = 16
"""So many of the last events that have no place in the window are kept in ``context["set_aside"]``."""
_EXCERPT: Final = 200


def add_message(context: Context, message: Message) -> None:
    """Put one message at the end of the window; calls that are still open are answered with ``NO_RESULT`` before it.

    Not for tool results: those belong to their call (:func:`answer`).
    """
    close_turn(context)
    message, calls = well_formed(message)
    context["messages"].append(message)
    context["turn"] = _turn(len(context["messages"]) - 1, calls) if calls else None


def replace_messages(context: Context, messages: list[Message]) -> None:
    """Make the window exactly these messages. The list is copied, its messages are shared and never changed."""
    context["messages"] = list(messages)
    context["turn"] = _turn_of(context["messages"])


def answer(context: Context, call_id: str, content: str) -> bool:
    """Answer an open call of the last turn, in the order of the calls; false if there is no such open call."""
    turn = context.get("turn")
    if turn is None:
        return False
    place = turn["calls"].get(call_id)
    if place is None:
        return False
    answered = turn["answered"]
    index = bisect_left(answered, place)
    if index < len(answered) and answered[index] == place:
        return False
    context["messages"].insert(turn["at"] + 1 + index, {"role": "tool", "tool_call_id": call_id, "content": content})
    answered.insert(index, place)
    return True


def announce(context: Context, call_id: str, name: Any, arguments: Any) -> str | None:
    """A call begins. If the window knows no assistant message that asks for it, one is made.

    Returns:
        Why the window cannot show the call, or ``None`` if it does.
    """
    turn = context.get("turn")
    if turn is not None:
        place = turn["calls"].get(call_id)
        is_open = len(turn["answered"]) < len(turn["calls"])
        if place is not None and (not turn["made"] or place not in turn["answered"]):
            return "the call was answered already" if place in turn["answered"] else None
        if is_open and not turn["made"]:
            return "the assistant's message does not ask for this call"
        if is_open and place is None:
            messages, at = context["messages"], turn["at"]
            calls = [*messages[at]["tool_calls"], _call(call_id, name, arguments)]
            messages[at] = {**messages[at], "tool_calls": calls}
            turn["calls"][call_id] = len(calls) - 1
            return None
    close_turn(context)
    made = {"role": "assistant", "content": None, "tool_calls": [_call(call_id, name, arguments)]}
    context["messages"].append(made)
    context["turn"] = {**_turn(len(context["messages"]) - 1, [call_id]), "made": True}
    return None


def close_turn(context: Context) -> None:
    """Answer every open call of the last turn with ``NO_RESULT``; nothing more is expected of it."""
    turn = context.get("turn")
    if turn is not None and len(turn["answered"]) < len(turn["calls"]):
        done = set(turn["answered"])
        for call_id, place in sorted(turn["calls"].items(), key=lambda item: item[1]):
            if place not in done:
                context["messages"].insert(turn["at"] + 1 + place, _no_result(call_id))
    context["turn"] = None


def set_aside(context: Context, seq: int, event_type: str, why: str, content: Any = None) -> None:
    """Note an event that has no place in the window, visibly, and bounded however many there are."""
    kept = context.setdefault("set_aside", {"count": 0, "last": []})
    kept["count"] += 1
    text = content if isinstance(content, str) else canonical(content).decode()
    kept["last"].append({"seq": seq, "event_type": event_type, "why": why, "excerpt": text[:_EXCERPT]})
    del kept["last"][:-SET_ASIDE]


def rendered(value: Any) -> str:
    """A tool's result as the text of a message: a string as it is, everything else as canonical JSON."""
    return value if isinstance(value, str) else canonical(value).decode()


def sendable(context: Context) -> list[Message]:
    """The window as a provider accepts it, whatever it was loaded with: open calls are answered with ``NO_RESULT``, and
    what no provider takes (results that answer nothing, or answer twice) is left out. The context stays as it is; the
    messages are shared.

    For a worker that goes on although a call is in flight. One that resolves its calls first (``recover``) has nothing
    left open.
    """
    sent: list[Message] = []
    calls: list[str] = []
    results: dict[str, Message] = {}

    def finish() -> None:
        sent.extend(results.get(call_id) or _no_result(call_id) for call_id in calls)

    for message in context["messages"]:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            continue
        if message["role"] == "tool":
            call_id, content = message.get("tool_call_id"), message.get("content")
            if isinstance(call_id, str) and call_id in calls:
                fine = isinstance(content, str | list)
                results.setdefault(call_id, message if fine else {**message, "content": rendered(content)})
            continue
        finish()
        message, calls = well_formed(message)
        results = {}
        sent.append(message)
    finish()
    return sent


def well_formed(message: Message) -> tuple[Message, list[str]]:
    """A message with content and tool calls that a provider takes, and the ids of those calls. The same object if it
    was fine."""
    if "tool_calls" not in message:
        return _worded(message), []
    good: list[Any] = []
    ids: dict[str, None] = {}
    calls = message["tool_calls"] if message.get("role") == "assistant" else None
    calls = calls if isinstance(calls, list) else []
    for call in calls:
        mended = _mended(call)
        if mended is not None and mended["id"] not in ids:
            good.append(mended)
            ids[mended["id"]] = None
    if not good:
        return _worded({key: value for key, value in message.items() if key != "tool_calls"}), []
    if len(good) != len(calls) or any(one is not other for one, other in zip(good, calls, strict=True)):
        message = {**message, "tool_calls": good}
    return _worded(message), list(ids)


def _worded(message: Message) -> Message:
    """The message with text or parts as its content. Only who calls something may say nothing."""
    content = message.get("content")
    if isinstance(content, str | list):
        return message
    if content is not None:
        return {**message, "content": rendered(content)}
    calls = message.get("role") == "assistant" and (
        "tool_calls" in message or isinstance(message.get("function_call"), dict)
    )
    return message if calls else {**message, "content": ""}


def _mended(call: Any) -> dict[str, Any] | None:
    """The call, with arguments as text and a type; ``None`` if nothing could ever answer it."""
    if not isinstance(call, dict) or not isinstance(call.get("id"), str):
        return None
    kind, function = call.get("type"), call.get("function")
    if isinstance(kind, str) and kind != "function":
        return call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    if kind == "function" and isinstance(function.get("arguments"), str):
        return call
    text = rendered(function.get("arguments", {}))
    return {**call, "type": "function", "function": {**function, "arguments": text}}


def _no_result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}


def _call(call_id: str, name: Any, arguments: Any) -> dict[str, Any]:
    function = {
        "name": name if isinstance(name, str) and name else "unknown",
        "arguments": "{}" if arguments is None else rendered(arguments),
    }
    return {"id": call_id, "type": "function", "function": function}


def _turn(at: int, calls: list[str]) -> dict[str, Any]:
    return {"at": at, "calls": {call: place for place, call in enumerate(calls)}, "answered": [], "made": False}


def _turn_of(messages: list[Any]) -> dict[str, Any] | None:
    """The turn with which a loaded window ends, if it ends with one."""
    at = len(messages) - 1
    results = []
    while at >= 0 and isinstance(messages[at], dict) and messages[at].get("role") == "tool":
        results.append(messages[at].get("tool_call_id"))
        at -= 1
    if at < 0 or not isinstance(messages[at], dict):
        return None
    _, calls = well_formed(messages[at])
    if not calls:
        return None
    turn = _turn(at, calls)
    turn["answered"] = sorted({turn["calls"][each] for each in results if isinstance(each, str) and each in calls})
    return turn
