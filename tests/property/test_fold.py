"""Whatever happened to a session: at every event the context is one that a model provider accepts, it can be written
down and gone on from, and the events are left as they were."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.property.histories import SESSION, histories, json_values
from walstream.event import parse_payload
from walstream.ledger.canonical import canonical, digest
from walstream.ledger.fold import BUILTIN, FoldEvent, sendable
from walstream.testing import check_messages


@given(histories)
def test_at_every_event_the_window_is_valid(events: list[FoldEvent]) -> None:
    context = BUILTIN.empty()
    for event in events:
        BUILTIN.apply(context, event)
        check_messages(context["messages"], open_end=True)
        check_messages(sendable(context))


def in_flight(events: list[FoldEvent]) -> dict[str, int]:
    """call id -> seq of the invocation that nothing answered since: by counting, not by folding."""
    found: dict[str, int] = {}
    for event in events:
        call_id = event.payload.get("call_id") if isinstance(event.payload, dict) else None
        if isinstance(call_id, str) and event.event_type == "tool.invoked":
            found[call_id] = event.seq
        elif isinstance(call_id, str) and event.event_type in ("tool.observed", "tool.abandoned"):
            found.pop(call_id, None)
    return found


@settings(max_examples=50)
@given(histories)
def test_what_is_pending_is_what_nothing_answered(events: list[FoldEvent]) -> None:
    pending = BUILTIN.fold(events)["pending_tools"]
    assert {call_id: call["seq"] for call_id, call in pending.items()} == in_flight(events)


@settings(max_examples=50)
@given(histories, st.data())
def test_a_context_that_was_written_down_goes_on_like_the_one_that_was_not(
    events: list[FoldEvent], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(events)))
    whole = BUILTIN.fold(events)
    stored = parse_payload(canonical(BUILTIN.fold(events[:cut])))
    assert digest(BUILTIN.fold(events[cut:], stored)) == digest(whole)


@settings(max_examples=50)
@given(histories)
def test_no_event_is_changed_and_a_second_fold_gives_the_same(events: list[FoldEvent]) -> None:
    before = copy.deepcopy([event.payload for event in events])
    first = digest(BUILTIN.fold(events))
    assert [event.payload for event in events] == before
    assert digest(BUILTIN.fold(events)) == first


@settings(max_examples=50)
@given(histories, histories)
def test_a_fork_leaves_its_parent_alone(parent: list[FoldEvent], child: list[FoldEvent]) -> None:
    context = BUILTIN.fold(parent)
    before = canonical(context)
    birth = FoldEvent.of(
        1, "child", "a", "session.forked", {"parent_session": SESSION, "at_seq": 9, "context": context}
    )
    forked = BUILTIN.fold([birth, *child])
    check_messages(forked["messages"], open_end=True)
    assert canonical(context) == before


messages = st.one_of(
    json_values,
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": json_values}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": st.sampled_from("ab"), "content": st.just("1")}),
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["assistant", "user"]),
            "content": st.none(),
            "tool_calls": st.lists(
                st.fixed_dictionaries({"id": st.sampled_from("ab"), "function": st.just({"name": "search"})}),
                max_size=3,
            ),
        }
    ),
)


@settings(max_examples=50)
@given(st.lists(messages, max_size=8), histories)
@example([{"role": "tool", "tool_call_id": "a", "content": "1"}], [])
def test_whatever_was_loaded_stands_there_exactly_and_what_is_sent_is_valid(
    window: list[Any], later: list[FoldEvent]
) -> None:
    loaded = FoldEvent.of(1, SESSION, "agent", "context.loaded", {"messages": window})
    context = BUILTIN.fold([loaded])
    assert context["messages"] == window
    check_messages(sendable(context))
    for event in later:
        BUILTIN.apply(context, event)
        check_messages(sendable(context))
