"""What each event makes of a context."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from tests.recorded import RUNS, run_events
from walstream.config import Settings
from walstream.errors import ConfigError, LedgerError, PayloadError
from walstream.ledger.fold import BUILTIN, Fold, Foldable, FoldEvent, apply_event, load_fold, sendable
from walstream.ledger.messages import NO_RESULT, SET_ASIDE, Context, add_message
from walstream.testing import check_messages, make_event

SESSION = "s"


def context_of(*steps: tuple[str, Any], fold: Fold = BUILTIN) -> Context:
    """The context after these events, whose seqs are 1, 2, 3, …"""
    return fold.fold(FoldEvent.of(n, SESSION, "agent", *step) for n, step in enumerate(steps, start=1))


def responded(*ids: str, content: str | None = None) -> tuple[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "search", "arguments": "{}"}} for each in ids]
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return "model.responded", {"message": message}


def invoked(call_id: str, **more: Any) -> tuple[str, Any]:
    return "tool.invoked", {"call_id": call_id, "name": "search", "arguments": {"q": 1}, **more}


def observed(call_id: str, result: Any = "found") -> tuple[str, Any]:
    return "tool.observed", {"call_id": call_id, "result": result}


def shape(context: Context) -> list[str]:
    """The window in short: `user`, `assistant(a b)`, `a=found`."""
    found = []
    for message in context["messages"]:
        if message["role"] == "tool":
            found.append(f"{message['tool_call_id']}={message['content']}")
        elif "tool_calls" in message:
            found.append(f"assistant({' '.join(call['id'] for call in message['tool_calls'])})")
        else:
            found.append(message["role"])
    return found


def whys(context: Context) -> list[tuple[int, str]]:
    return [(each["seq"], each["why"]) for each in context.get("set_aside", {"last": []})["last"]]


CALL = {"id": "a", "type": "function", "function": {"name": "search", "arguments": "{}"}}
LOADED = ("context.loaded", {"messages": [{"role": "user", "content": "Hello"}]})


def test_a_session_without_events() -> None:
    context = BUILTIN.empty()
    assert (context["messages"], context["pending_tools"], context["handoffs"]) == ([], {}, [])
    assert context["outcome"] is None
    assert BUILTIN.empty()["messages"] is not context["messages"]


def test_a_turn() -> None:
    context = context_of(LOADED, responded("a"), invoked("a"))
    assert shape(context) == ["user", "assistant(a)"]
    assert context["pending_tools"] == {
        "a": {"call_id": "a", "name": "search", "arguments": {"q": 1}, "attempt": 1, "seq": 3}
    }
    apply_event(context, FoldEvent.of(4, SESSION, "agent", *observed("a")))
    assert shape(context) == ["user", "assistant(a)", "a=found"]
    assert context["pending_tools"] == {}


def test_results_stand_in_the_order_of_the_calls() -> None:
    steps = [responded("a", "b", "c"), observed("c", "3"), observed("a", "1"), observed("b", "2")]
    assert shape(context_of(*steps[:2])) == ["assistant(a b c)", "c=3"]
    assert shape(context_of(*steps)) == ["assistant(a b c)", "a=1", "b=2", "c=3"]


@pytest.mark.parametrize(
    ("payload", "content"),
    [
        ({"result": "as it is"}, "as it is"),
        ({"result": {"b": 1, "a": [True, None]}}, '{"a":[true,null],"b":1}'),
        ({"result": None}, "null"),
        ({"result": 12345678901234567890123}, "12345678901234567890123"),
        ({"error": "timed out"}, "timed out"),
        ({"error": {"code": 7}}, '{"code":7}'),
        ({"result": None, "error": "timed out"}, "timed out"),
        ({"result": "half", "error": "timed out"}, "half"),
        ({}, "null"),
    ],
)
def test_results_and_errors_become_text(payload: dict[str, Any], content: str) -> None:
    context = context_of(responded("a"), ("tool.observed", {"call_id": "a", **payload}))
    assert context["messages"][-1] == {"role": "tool", "tool_call_id": "a", "content": content}


def test_a_second_result_is_set_aside() -> None:
    context = context_of(responded("a"), observed("a", "1"), observed("a", "2"))
    assert shape(context) == ["assistant(a)", "a=1"]
    assert whys(context) == [(3, "no open call a in the window")]
    assert context["set_aside"]["last"][0]["excerpt"] == "2"


def test_what_is_set_aside_is_bounded_and_counted() -> None:
    context = context_of(*(observed("x", "y" * 10_000) for _ in range(100)))
    assert context["messages"] == []
    assert context["set_aside"]["count"] == 100
    assert [seq for seq, _ in whys(context)] == list(range(101 - SET_ASIDE, 101))
    assert len(json.dumps(context)) < SET_ASIDE * 400


def test_an_unanswered_call_that_was_passed_over_gets_an_explicit_answer() -> None:
    context = context_of(responded("a", "b", "c"), invoked("b"), observed("b"), responded("d"))
    assert shape(context) == ["assistant(a b c)", f"a={NO_RESULT}", "b=found", f"c={NO_RESULT}", "assistant(d)"]
    late = context_of(responded("a"), invoked("a"), responded("b"), observed("a", "late"))
    assert shape(late) == ["assistant(a)", f"a={NO_RESULT}", "assistant(b)"]
    assert whys(late) == [(4, "no open call a in the window")]
    assert late["pending_tools"] == {}


def test_a_call_that_was_passed_over_is_in_flight_all_the_same() -> None:
    assert list(context_of(responded("a"), invoked("a"), responded("b"))["pending_tools"]) == ["a"]


def test_agents_that_record_no_response_get_the_message_that_the_call_needs() -> None:
    # The minimal example of the design: context.loaded, tool.invoked, tool.observed.
    context = context_of(LOADED, invoked("a"), observed("a"), invoked("b"), observed("b"))
    assert shape(context) == ["user", "assistant(a)", "a=found", "assistant(b)", "b=found"]
    assert context["messages"][1]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q":1}'}


def test_such_calls_that_run_side_by_side_share_one_message() -> None:
    steps = [invoked("a"), invoked("b"), observed("b", "2"), invoked("c"), observed("a", "1"), observed("c", "3")]
    context = BUILTIN.empty()
    for n, step in enumerate(steps, start=1):
        apply_event(context, FoldEvent.of(n, SESSION, "agent", *step))
        check_messages(context["messages"], open_end=True)
    assert shape(context) == ["assistant(a b c)", "a=1", "b=2", "c=3"]


def test_such_agents_may_use_an_id_again() -> None:
    context = context_of(invoked("1"), observed("1", "x"), invoked("1"), observed("1", "y"))
    assert shape(context) == ["assistant(1)", "1=x", "assistant(1)", "1=y"]


def test_a_call_that_the_model_did_not_ask_for_stays_out_of_the_window() -> None:
    context = context_of(responded("a"), invoked("inner"), observed("inner"), observed("a"))
    assert shape(context) == ["assistant(a)", "a=found"]
    assert [seq for seq, _ in whys(context)] == [2, 3]


def test_a_call_that_is_invoked_again_after_its_answer_is_in_flight_but_not_shown_twice() -> None:
    context = context_of(responded("a"), invoked("a"), observed("a", "1"), invoked("a"))
    assert context["pending_tools"]["a"]["seq"] == 4
    assert shape(context) == ["assistant(a)", "a=1"]


def test_a_retry_is_the_same_call() -> None:
    retried = ("tool.retried", {"call_id": "a", "attempt": 2, "idempotency_key": "k"})
    context = context_of(responded("a"), invoked("a"), retried)
    assert context["pending_tools"]["a"] == {
        "call_id": "a",
        "name": "search",
        "arguments": {"q": 1},
        "attempt": 2,
        "idempotency_key": "k",
        "seq": 2,
    }
    assert shape(context) == ["assistant(a)"]
    assert context_of(retried)["pending_tools"] == {}


def test_an_abandoned_call_is_answered_as_such() -> None:
    context = context_of(responded("a"), invoked("a"), ("tool.abandoned", {"call_id": "a", "reason": "too late"}))
    assert shape(context) == ["assistant(a)", "a=[this call was abandoned: too late]"]
    assert context["pending_tools"] == {}


def test_loading_replaces_the_window_exactly() -> None:
    window = [{"role": "user", "content": "again"}, {"role": "assistant", "content": None, "tool_calls": []}]
    payload = {"messages": window}
    context = context_of(LOADED, responded("a"), invoked("a"), ("context.loaded", payload), responded("b"))
    assert context["messages"][:2] == window
    assert len(payload["messages"]) == 2  # the event's own list is not the window
    assert list(context["pending_tools"]) == ["a"]


def test_a_loaded_window_may_end_in_the_middle_of_a_turn() -> None:
    call = {"type": "function", "function": {"name": "x", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", **call}, {"id": "b", **call}]}
    window = [asked, {"role": "tool", "tool_call_id": "b", "content": "2"}]
    context = context_of(("context.loaded", {"messages": window}), observed("b", "again"), observed("a", "1"))
    assert shape(context) == ["assistant(a b)", "a=1", "b=2"]
    assert [seq for seq, _ in whys(context)] == [2]


def test_the_messages_of_raw_responses() -> None:
    message = responded("a")[1]["message"]
    raw = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    for payload in ({"message": message}, {"response": raw}, raw):
        assert shape(context_of(("model.responded", payload))) == ["assistant(a)"]
    assert context_of(("model.responded", {"tokens": 3}))["messages"] == []


def test_calls_that_nothing_could_answer_are_mended_or_left_out() -> None:
    calls = [
        {"id": "a", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}},
        {"id": "a", "type": "function", "function": {"name": "again", "arguments": "{}"}},
        {"id": None, "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    payload = {"message": {"content": None, "tool_calls": calls}}
    context = context_of(("model.responded", payload))
    assert context["messages"] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":2,"b":1}'}}],
        }
    ]
    assert payload["message"]["tool_calls"] is calls
    assert len(calls) == 3
    assert context_of(("model.responded", {"message": {"content": None, "tool_calls": calls[2:]}}))["messages"] == [
        {"role": "assistant", "content": ""}
    ]


def test_the_model_that_was_asked_and_has_not_answered() -> None:
    asked = ("model.requested", {"model": "m", "parameters": {}})
    assert context_of(asked)["pending_model"] == {"model": "m", "parameters": {}, "seq": 1}
    assert context_of(asked, responded())["pending_model"] is None


def test_handoffs_and_outcome() -> None:
    context = context_of(
        ("handoff.emitted", {"to": "b"}), ("handoff.received", {"from": "c"}), ("task.failed", {"reason": "x"})
    )
    assert context["handoffs"] == [{"to": "b"}]
    assert context["handoffs_received"] == [{"from": "c"}]
    assert context["outcome"] == {"status": "failed", "seq": 3, "payload": {"reason": "x"}}
    assert context_of(("task.completed", {}))["outcome"]["status"] == "completed"


def test_approvals() -> None:
    asked = ("approval.requested", {"job_id": 7, "action": {"pay": 5}, "deadline": "2100-01-01", "reason": "dear"})
    entry = {"job_id": 7, "action": {"pay": 5}, "deadline": "2100-01-01", "request_reason": "dear"}
    assert context_of(asked)["approvals"] == {"1": {"status": "requested", **entry}}
    granted = ("approval.granted", {"request": 1, "job_id": 7, "by": "alice", "edit": {"pay": 4}, "reason": "less"})
    context = context_of(asked, granted)
    said = {"by": "alice", "edit": {"pay": 4}, "reason": "less"}
    assert context["approvals"] == {"1": {"status": "granted", **entry, **said}}
    rejected = ("approval.rejected", {"request": 1, "job_id": 7, "by": "deadline"})
    assert context_of(asked, rejected)["approvals"] == {"1": {"status": "rejected", **entry, "by": "deadline"}}
    assert "approvals" not in context_of(("task.completed", {}))  # whose digest is what it was


def test_a_decision_counts_once_and_for_its_own_request() -> None:
    asked = ("approval.requested", {"action": "x"})
    granted, rejected = (f"approval.{word}" for word in ("granted", "rejected"))
    context = context_of(asked, (granted, {"request": 2}), (granted, {"request": 1}), (rejected, {"request": 1}))
    assert context["approvals"] == {"1": {"status": "granted", "action": "x"}}
    assert whys(context) == [(2, "no such request is open"), (4, "the request was decided already")]
    for request in (True, 1.0, "1", None):
        assert context_of(asked, (granted, {"request": request}))["approvals"]["1"]["status"] == "requested"
    assert whys(context_of(("approval.requested", {"action": None}))) == [(1, "it names no action")]


@pytest.mark.parametrize("event_type", BUILTIN.event_types)
@pytest.mark.parametrize("payload", [None, 7, "x", [], {}, {"call_id": 7}, {"messages": 7}, {"message": []}])
def test_nonsense_never_ends_a_rebuild(event_type: str, payload: Any) -> None:
    context = BUILTIN.empty()
    event = FoldEvent.of(1, SESSION, "agent", event_type, payload)
    if event_type == "session.forked":
        with pytest.raises(LedgerError, match="seq 1 of session s"):
            apply_event(context, event)
    else:
        apply_event(context, event)
        check_messages(sendable(context))


def test_what_was_not_put_in_is_an_error_and_not_an_empty_window() -> None:
    with pytest.raises(LedgerError, match=r"context\.loaded with seq 1 of session s holds message_digests"):
        context_of(("context.loaded", {"message_digests": ["00"]}))


def test_a_fork_goes_on_from_its_parents_context() -> None:
    parent = context_of(LOADED, responded("a"), invoked("a"))
    before = json.dumps(parent)
    birth = ("session.forked", {"parent_session": "p", "at_seq": 3, "context": parent})
    child = context_of(birth, observed("a"), responded("b"))
    assert shape(child) == ["user", "assistant(a)", "a=found", "assistant(b)"]
    assert child["forked_from"] == {"session": "p", "at_seq": 3}
    assert json.dumps(parent) == before


def test_open_calls_are_answered_for_who_wants_to_go_on_regardless() -> None:
    context = context_of(LOADED, responded("a", "b"), observed("b", "2"))
    sent = sendable(context)
    check_messages(sent)
    assert [m["content"] for m in sent if m["role"] == "tool"] == [NO_RESULT, "2"]
    assert shape(context) == ["user", "assistant(a b)", "b=2"]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user"}, ""),
        ({"role": "system", "content": None}, ""),
        ({"role": "user", "content": {"text": 1.10}}, '{"text":1.1}'),
        ({"role": "assistant", "content": 5, "tool_calls": [CALL]}, "5"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, None),
        ({"role": "assistant", "content": None, "function_call": None}, ""),
        ({"role": "assistant", "content": None, "function_call": {"name": "x", "arguments": "{}"}}, None),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, [{"type": "text", "text": "x"}]),
    ],
)
def test_a_message_says_something_in_words_or_parts(message: dict[str, Any], content: Any) -> None:
    context = context_of(("context.loaded", {"messages": [message]}))
    assert context["messages"] == [message]
    sent = sendable(context)
    assert sent[0]["content"] == content
    check_messages(sent)


def test_what_the_agent_sent_regardless_is_what_the_window_becomes() -> None:
    context = context_of(LOADED, responded("a", "b"), observed("b", "2"))
    sent = sendable(context)
    apply_event(context, FoldEvent.of(4, SESSION, "agent", *responded(content="done")))
    assert context["messages"][:-1] == sent


def test_the_context_of_the_seed_can_be_folded_into() -> None:
    context: Context = {"messages": [], "pending_tools": {}, "handoffs": []}
    for n, step in enumerate([LOADED, invoked("a"), observed("a"), observed("a"), ("task.completed", {})], start=1):
        apply_event(context, FoldEvent.of(n, SESSION, "agent", *step))
    assert shape(context) == ["user", "assistant(a)", "a=found"]


def test_events_of_the_stream_can_be_folded_too() -> None:
    context = BUILTIN.fold(
        [make_event(1, *LOADED[:1], payload=LOADED[1]), make_event(2, "x.y", payload_text="[" * 2000)]
    )
    assert shape(context) == ["user"]


def test_a_payload_that_cannot_be_parsed_is_a_problem_only_if_it_is_read() -> None:
    huge = b'{"call_id": "a", "result": ' + b"7" * 5000 + b"}"
    context = BUILTIN.empty()
    apply_event(context, FoldEvent(8, "s", "a", "somebody.elses", huge))
    with pytest.raises(PayloadError, match=r"tool\.observed with seq 9 of session s"):
        apply_event(context, FoldEvent(9, "s", "a", "tool.observed", huge))


# -- an application's own types --------------------------------------------------------------------------


def test_an_own_event_type() -> None:
    fold = Fold()

    @fold.on("user.said", version=3)
    def user_said(context: Context, event: Foldable) -> None:
        add_message(context, {"role": "user", "content": event.payload["text"]})

    steps = [responded("a"), ("user.said", {"text": "stop"}), observed("a")]
    assert shape(context_of(*steps, fold=fold)) == ["assistant(a)", f"a={NO_RESULT}", "user"]
    assert shape(context_of(*steps)) == ["assistant(a)", "a=found"]
    assert (fold.version, BUILTIN.version) == ("2+user.said=3", "2")
    assert fold.event_types == tuple(sorted([*BUILTIN.event_types, "user.said"]))


def test_an_own_function_replaces_ours_and_the_version_says_so() -> None:
    fold = Fold()

    @fold.on("task.failed", "task.completed")
    def ended(context: Context, event: Foldable) -> None:
        context["outcome"] = event.event_type

    assert context_of(("task.failed", {}), fold=fold)["outcome"] == "task.failed"
    assert fold.version == "2+task.completed=1+task.failed=1"


def test_registrations_that_make_no_sense() -> None:
    fold = Fold()
    fold.on("x")(lambda _context, _event: None)
    with pytest.raises(ConfigError, match="two functions fold 'x'"):
        fold.on("y", "x")
    with pytest.raises(ConfigError, match="at least one"):
        fold.on()
    with pytest.raises(ConfigError, match="everybody's"):
        BUILTIN.on("y")


def test_the_settings_may_name_a_fold(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_folds_of_a_test.py").write_text(
        "import walstream.ledger.fold\nfold = walstream.ledger.fold.Fold()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_fold(Settings()) is BUILTIN
    assert isinstance(load_fold(Settings(fold="own_folds_of_a_test:fold")), Fold)
    for name in ("own_folds_of_a_test", "own_folds_of_a_test:nothing", "no_such_module_here:fold", "json:dumps"):
        with pytest.raises(ConfigError, match=name.partition(":")[0]):
            load_fold(Settings(fold=name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('half written')", r"RuntimeError: half written \(.*:1\)$"),
        ("x = = 1", "SyntaxError: .*line 1"),
    ],
)
def test_a_module_that_fails_is_a_mistake_in_the_configuration(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    module = f"failing_folds_of_a_test_{len(text)}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        load_fold(Settings(fold=f"{module}:fold"))


def test_a_function_that_fails_fails_with_the_event() -> None:
    fold = Fold()
    fold.on("x")(lambda context, _event: context["nothing"])
    with pytest.raises(KeyError) as caught:
        fold.fold([FoldEvent.of(7, SESSION, "agent", "x", {})])
    assert caught.value.__notes__ == [f"while folding the x with seq 7 of session {SESSION}"]


# -- cost ------------------------------------------------------------------------------------------------


def test_the_cost_of_an_event_does_not_grow_with_the_session() -> None:
    def seconds(turns: int) -> float:
        steps = [step for n in range(turns) for step in (responded(f"c{n}"), invoked(f"c{n}"), observed(f"c{n}"))]
        events = [FoldEvent.of(n, SESSION, "agent", *step) for n, step in enumerate(steps)]
        best = float("inf")
        for _ in range(3):
            started = time.thread_time()  # not of the clock on the wall: the machine may have other work
            BUILTIN.fold(events)
            best = min(best, time.thread_time() - started)
        return best / turns

    assert seconds(8_000) < 6 * seconds(500)


# -- recorded runs ---------------------------------------------------------------------------------------

# Those that stopped while a call was in flight, as a crash leaves it.
STOPPED_IN = {
    "human-eval-fix": ["call_0005"],
    "marshmallow-text-actions": ["call_0014"],
    "marshmallow-xml": ["call_0011"],
    "pydicom": ["call_0012"],
    "test-repo": ["call_0005"],
}


@pytest.mark.recorded
@pytest.mark.parametrize("name", RUNS)
def test_every_prefix_of_a_recorded_run_is_a_window_that_a_provider_accepts(name: str) -> None:
    context = BUILTIN.empty()
    for event in run_events(name):
        if event.event_type == "context.loaded" and event.seq > 1:
            # What the agent sent is what the fold had made of the events before, but for what the agent left out.
            assert context["messages"][-1] == event.payload["messages"][-1]
        BUILTIN.apply(context, event)
        check_messages(context["messages"], open_end=True)
        check_messages(sendable(context))
    assert list(context["pending_tools"]) == STOPPED_IN.get(name, [])
    assert "set_aside" not in context
    assert context["outcome"]["status"] == ("failed" if name == "simple-function-calling" else "completed")


def test_deep_payloads_survive_a_fork() -> None:
    deep: Any = []
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    birth = ("session.forked", {"parent_session": "p", "at_seq": 1, "context": {**BUILTIN.empty(), "deep": deep}})
    assert len(context_of(birth)["deep"]) == 1
