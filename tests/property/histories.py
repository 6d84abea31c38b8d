"""Random histories of a session, as agents that are well-behaved, forgetful, confused or crashed would write them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from walstream.ledger.fold import FoldEvent

SESSION = "00000000-0000-4000-8000-00000000000a"

# Few ids, so that they meet again: as duplicates, out of order, and used anew by a later turn.
call_ids = st.sampled_from(["a", "b", "c", "d"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=4
)


@st.composite
def calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The tool calls of an assistant message, as a provider returns them."""
    ids = draw(st.lists(call_ids, min_size=1, max_size=4, unique=True))
    return [{"id": each, "type": "function", "function": {"name": "search", "arguments": "{}"}} for each in ids]


@st.composite
def windows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A valid window; its last turn may be half answered."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    turns = draw(st.integers(0, 3))
    for turn in range(turns):
        if draw(st.booleans()):
            messages.append({"role": "user", "content": draw(texts)})
        if draw(st.booleans()):
            made = draw(calls())
            messages.append({"role": "assistant", "content": None, "tool_calls": made})
            last = turn == turns - 1
            answered = [c for c in made if not last or draw(st.booleans())]
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": draw(texts)} for c in answered]
    return messages


broken_calls = st.lists(
    st.sampled_from(
        [
            {"id": "a", "type": "function", "function": {"name": "search", "arguments": "{}"}},
            {"id": "b", "function": {"name": "search", "arguments": {"query": 1}}},
            {"id": "a", "type": "function", "function": {"name": "again"}},
            {"id": 7, "type": "function", "function": {"name": "search", "arguments": "{}"}},
            {"id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}},
            {"id": "d", "type": "function"},
            "nonsense",
        ]
    ),
    max_size=4,
)

assistant_messages = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | texts, "tool_calls": calls()}),
    st.fixed_dictionaries({"content": st.none(), "tool_calls": broken_calls}),
    st.just({"role": "assistant", "content": None}),
    st.just({"role": "assistant", "content": None, "function_call": None}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": json_values}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": json_values, "tool_calls": calls()}),
    st.just({"role": "assistant", "content": None, "tool_calls": None}),
)

results = st.one_of(
    st.fixed_dictionaries({"call_id": call_ids, "result": json_values}),
    st.fixed_dictionaries({"call_id": call_ids, "error": json_values}),
    st.fixed_dictionaries({"call_id": call_ids}),
)


def _of(event_type: str, payload: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(event_type), payload)


def _with(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields)


sensible = st.one_of(
    _of("context.loaded", _with(messages=windows())),
    _of("model.requested", _with(model=texts, parameters=json_values)),
    _of("model.responded", _with(message=assistant_messages)),
    _of("model.responded", _with(response=_with(choices=st.lists(_with(message=assistant_messages), max_size=2)))),
    _of("tool.invoked", _with(call_id=call_ids, name=texts, arguments=json_values)),
    _of("tool.invoked", _with(call_id=call_ids, name=texts, arguments=json_values)),
    _of("tool.observed", results),
    _of("tool.observed", results),
    _of("tool.retried", _with(call_id=call_ids, attempt=st.integers(2, 5), idempotency_key=texts)),
    _of("tool.abandoned", _with(call_id=call_ids, reason=st.none() | texts)),
    _of("handoff.emitted", json_values),
    _of("handoff.received", json_values),
    _of("approval.requested", _with(action=json_values, reason=texts)),
    _of("approval.granted", _with(request=st.integers(1, 8).map(lambda n: 7 * n), edit=json_values)),
    _of("approval.rejected", _with(request=st.integers(1, 8).map(lambda n: 7 * n))),
    _of("task.completed", json_values),
    _of("task.failed", json_values),
    _of("somebody.elses", json_values),
)

TYPES = (
    "context.loaded",
    "model.requested",
    "model.responded",
    "tool.invoked",
    "tool.retried",
    "tool.observed",
    "tool.abandoned",
    "approval.requested",
    "approval.granted",
    "approval.rejected",
)
nonsense = st.tuples(
    st.sampled_from(TYPES),
    json_values
    | _with(call_id=json_values)
    | _with(message=json_values)
    | _with(response=json_values)
    | _with(choices=json_values)
    | _with(request=json_values)
    | _with(messages=scalars | texts | st.just({})),
)


def _as_events(steps: list[tuple[str, Any]]) -> list[FoldEvent]:
    return [FoldEvent.of(7 * n, SESSION, "agent", *step) for n, step in enumerate(steps, start=1)]


histories = st.lists(st.one_of(sensible, sensible, sensible, nonsense), max_size=16).map(_as_events)
"""Events in the order of seq."""
