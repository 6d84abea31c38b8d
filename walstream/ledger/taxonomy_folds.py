"""What each event type of the taxonomy does to a context.

Every function takes any JSON: an append-only ledger cannot be mended, so an event that makes no sense is noted in
``context["set_aside"]`` instead of ending every rebuild of its session for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from walstream.errors import LedgerError

from .messages import Context, add_message, announce, answer, rendered, replace_messages, set_aside

if TYPE_CHECKING:
    from .fold import Foldable


_MOST_ATTEMPTS = 999_999_999  # `inflight` reads the same numbers by SQL


def empty_context() -> Context:
    """The context of a session without events."""
    return {
        "messages": [],
        "pending_tools": {},
        "pending_model": None,
        "handoffs": [],
        "handoffs_received": [],
        "outcome": None,
        "turn": None,
    }


def context_loaded(context: Context, event: Foldable) -> None:
    payload = event.payload
    messages = payload.get("messages") if isinstance(payload, dict) else None
    if isinstance(messages, list):
        replace_messages(context, messages)
    elif isinstance(payload, dict) and "message_digests" in payload:
        raise _not_expanded(event, "message_digests", "messages")
    else:
        set_aside(context, event.seq, event.event_type, "it holds no list of messages", payload)


def model_requested(context: Context, event: Foldable) -> None:
    payload = event.payload
    if isinstance(payload, dict):
        context["pending_model"] = {**payload, "seq": event.seq}
    else:
        set_aside(context, event.seq, event.event_type, "it is no object", payload)


def model_responded(context: Context, event: Foldable) -> None:
    context["pending_model"] = None
    message = assistant_message(event.payload)
    if message is not None:
        add_message(context, message)
    elif not isinstance(event.payload, dict):
        set_aside(context, event.seq, event.event_type, "it is no object", event.payload)


def assistant_message(payload: Any) -> dict[str, Any] | None:
    """The assistant's message of a response: ``message``, or the first choice of a raw ``response``."""
    if not isinstance(payload, dict):
        return None
    message = payload.get("message")
    if message is None:
        raw = payload.get("response", payload)
        choices = raw.get("choices") if isinstance(raw, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict):
        return None
    return message if message.get("role") == "assistant" else {**message, "role": "assistant"}


def tool_invoked(context: Context, event: Foldable) -> None:
    payload = event.payload
    call_id = _call_id(context, event, payload)
    if call_id is None:
        return
    context["pending_tools"][call_id] = {**payload, "attempt": 1, "seq": event.seq}
    why = announce(context, call_id, payload.get("name"), payload.get("arguments"))
    if why is not None:
        set_aside(context, event.seq, event.event_type, why, call_id)


def tool_retried(context: Context, event: Foldable) -> None:
    payload = event.payload
    call_id = _call_id(context, event, payload)
    if call_id is None:
        return
    pending = context["pending_tools"].get(call_id)
    if pending is None:
        set_aside(context, event.seq, event.event_type, "no such call is in flight", call_id)
        return
    attempt = payload.get("attempt")
    if type(attempt) is not int or not 1 <= attempt <= _MOST_ATTEMPTS:
        attempt = pending["attempt"] + 1
    context["pending_tools"][call_id] = {**pending, **payload, "attempt": attempt, "seq": pending["seq"]}


def tool_observed(context: Context, event: Foldable) -> None:
    payload = event.payload
    call_id = _call_id(context, event, payload)
    if call_id is None:
        return
    context["pending_tools"].pop(call_id, None)
    error = payload.get("error")
    result = payload.get("result")
    content = rendered(error if result is None and error is not None else result)
    if not answer(context, call_id, content):
        set_aside(context, event.seq, event.event_type, f"no open call {call_id} in the window", content)


def tool_abandoned(context: Context, event: Foldable) -> None:
    payload = event.payload
    call_id = _call_id(context, event, payload)
    if call_id is None:
        return
    context["pending_tools"].pop(call_id, None)
    reason = payload.get("reason")
    content = "[this call was abandoned]" if reason is None else f"[this call was abandoned: {rendered(reason)}]"
    if not answer(context, call_id, content):
        set_aside(context, event.seq, event.event_type, f"no open call {call_id} in the window", content)


def handoff_emitted(context: Context, event: Foldable) -> None:
    context["handoffs"].append(event.payload)


def handoff_received(context: Context, event: Foldable) -> None:
    context.setdefault("handoffs_received", []).append(event.payload)


def approval_requested(context: Context, event: Foldable) -> None:
    payload = event.payload
    if not isinstance(payload, dict) or payload.get("action") is None:
        set_aside(context, event.seq, event.event_type, "it names no action", payload)
        return
    asked = {key: payload[key] for key in ("action", "job_id", "deadline") if key in payload}
    if "reason" in payload:
        asked["request_reason"] = payload["reason"]
    context.setdefault("approvals", {})[str(event.seq)] = {"status": "requested", **asked}


def approval_decided(context: Context, event: Foldable) -> None:
    payload = event.payload
    request = payload.get("request") if isinstance(payload, dict) else None
    approval = context.get("approvals", {}).get(str(request)) if type(request) is int else None
    if approval is None or approval["status"] != "requested":
        why = "no such request is open" if approval is None else "the request was decided already"
        set_aside(context, event.seq, event.event_type, why, payload)
        return
    said = {key: payload[key] for key in ("by", "edit", "reason") if key in payload}
    status = event.event_type.removeprefix("approval.")
    context["approvals"][str(request)] = {**approval, "status": status, **said}


def task_completed(context: Context, event: Foldable) -> None:
    context["outcome"] = {"status": "completed", "seq": event.seq, "payload": event.payload}


def task_failed(context: Context, event: Foldable) -> None:
    context["outcome"] = {"status": "failed", "seq": event.seq, "payload": event.payload}


def session_forked(context: Context, event: Foldable) -> None:
    payload = event.payload
    if not isinstance(payload, dict) or not isinstance(payload.get("context"), dict):
        raise _not_expanded(event, "parent_session", "context")
    context.clear()
    context.update(_owned(payload["context"]))
    context["forked_from"] = {"session": payload.get("parent_session"), "at_seq": payload.get("at_seq")}


def _owned(value: Any) -> Any:
    """A copy that shares nothing that could be changed, without recursion."""
    top: list[Any] = [value]
    todo: list[tuple[Any, Any]] = [(top, 0)]
    while todo:
        holder, place = todo.pop()
        each = holder[place]
        if isinstance(each, dict):
            made: Any = dict(each)
            todo.extend((made, key) for key in made)
        elif isinstance(each, list):
            made = list(each)
            todo.extend((made, index) for index in range(len(made)))
        else:
            continue
        holder[place] = made
    return top[0]


def _call_id(context: Context, event: Foldable, payload: Any) -> str | None:
    call_id = payload.get("call_id") if isinstance(payload, dict) else None
    if isinstance(call_id, str):
        return call_id
    set_aside(context, event.seq, event.event_type, "it names no call_id", payload)
    return None


def _not_expanded(event: Foldable, has: str, lacks: str) -> LedgerError:
    return LedgerError(
        f"the {event.event_type} with seq {event.seq} of session {event.session_id} holds {has} but not {lacks}",
        hint="what it refers to is put in while a session is read: use rebuild_context or read_session",
    )


TAXONOMY = {
    "context.loaded": context_loaded,
    "model.requested": model_requested,
    "model.responded": model_responded,
    "tool.invoked": tool_invoked,
    "tool.retried": tool_retried,
    "tool.observed": tool_observed,
    "tool.abandoned": tool_abandoned,
    "handoff.emitted": handoff_emitted,
    "handoff.received": handoff_received,
    "approval.requested": approval_requested,
    "approval.granted": approval_decided,
    "approval.rejected": approval_decided,
    "task.completed": task_completed,
    "task.failed": task_failed,
    "session.forked": session_forked,
}
