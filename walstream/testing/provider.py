"""What a model provider demands of a window of messages, for tests of folds and of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def check_messages(messages: Sequence[Any], *, open_end: bool = False) -> None:
    """Assert that a provider of OpenAI's chat interface would accept this window.

    Every tool result answers a call of the assistant message before it, once, in the order of the calls; every call has
    its answer before anything else is said.

    Args:
        open_end: calls of the last assistant message may be open still, because they are in flight.

    Raises:
        AssertionError: it would not; names the message by its place, from 0.

    >>> from walstream.testing import check_messages
    >>> check_messages([{"role": "tool", "tool_call_id": "a", "content": "1"}])
    Traceback (most recent call last):
    AssertionError: message 0: a result for 'a', which is no open call
    """
    asked: list[str] = []
    answered: list[int] = []
    for place, message in enumerate(messages):
        where = f"message {place}"
        _demand(isinstance(message, dict) and message.get("role") in ROLES, f"{where}: no role that is known")
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            _demand(call_id in asked, f"{where}: a result for {call_id!r}, which is no open call")
            index = asked.index(call_id)
            _demand(index not in answered, f"{where}: a second result for {call_id!r}")
            _demand(not answered or answered[-1] < index, f"{where}: the result for {call_id!r} is out of order")
            _demand(isinstance(message.get("content"), str | list), f"{where}: a result without content")
            answered.append(index)
            continue
        _demand(len(answered) == len(asked), f"{where}: comes before every call of the message before is answered")
        asked, answered = _calls(message, where), []
    _demand(open_end or len(answered) == len(asked), "the window ends with open calls")


def _calls(message: dict[str, Any], where: str) -> list[str]:
    content = message.get("content")
    _demand(content is None or isinstance(content, str | list), f"{where}: content that is neither text nor parts")
    if "tool_calls" not in message:
        calls = message["role"] == "assistant" and isinstance(message.get("function_call"), dict)
        _demand(content is not None or calls, f"{where}: neither content nor tool calls")
        return []
    _demand(message["role"] == "assistant", f"{where}: only an assistant calls tools")
    calls = message["tool_calls"]
    _demand(isinstance(calls, list) and bool(calls), f"{where}: tool_calls is no list of calls")
    ids = []
    for call in calls:
        _demand(isinstance(call, dict) and isinstance(call.get("id"), str), f"{where}: a call without an id")
        _demand(isinstance(call.get("type"), str), f"{where}: a call without a type")
        if call["type"] == "function":
            function = call.get("function")
            good = isinstance(function, dict) and all(isinstance(function.get(k), str) for k in ("name", "arguments"))
            _demand(good, f"{where}: a call without name and arguments as text")
        ids.append(call["id"])
    _demand(len(set(ids)) == len(ids), f"{where}: two calls with one id")
    return ids


def _demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise AssertionError(complaint)
