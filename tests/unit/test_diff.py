"""Two sessions beside each other: what counts as a difference, and where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import call
from tests.recorded import RUNS, run_events, run_file
from walstream.ledger.diff import Comparison, compare
from walstream.ledger.fold import BUILTIN, FoldEvent
from walstream.ledger.json_paths import ABSENT, first_difference
from walstream.ledger.steps import ASPECTS, steps_of

Step = tuple[str, Any]


def events(*steps: Step, first: int = 1) -> list[FoldEvent]:
    return [FoldEvent.of(seq, "s", "agent", *step) for seq, step in enumerate(steps, start=first)]


def turn(
    n: int, *, prefix: str = "call", name: str = "search", arguments: Any = None, result: Any = "found"
) -> list[Step]:
    """One step of a well-behaved agent, with one tool call."""
    call_id = f"{prefix}_{n}"
    arguments = {"n": n} if arguments is None else arguments
    text = json.dumps(arguments)
    asked = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    return [
        ("model.requested", {"model": "m", "parameters": {"temperature": 0.0}, "prompt_hash": f"{prefix}{n}"}),
        (
            "model.responded",
            {"message": {"role": "assistant", "content": f"step {n}", "tool_calls": [asked]}, "usage": {"n": prefix}},
        ),
        ("tool.invoked", {"call_id": call_id, "name": name, "arguments": arguments}),
        ("tool.observed", {"call_id": call_id, "result": result}),
    ]


LOADED = ("context.loaded", {"messages": [{"role": "user", "content": "Hello"}]})
DONE = ("task.completed", {"result": "ok"})


def session(prefix: str = "call", **changes: Any) -> list[Step]:
    """Three steps; ``changes`` are those of the second."""
    return [LOADED, *turn(1, prefix=prefix), *turn(2, prefix=prefix, **changes), *turn(3, prefix=prefix), DONE]


def compared(left: list[Step], right: list[Step]) -> Comparison:
    return compare(events(*left), events(*right, first=100), BUILTIN)


def parts(left: list[Step], right: list[Step]) -> tuple[int, str, str] | None:
    """Where two sessions part: step, aspect, path."""
    first = compared(left, right).first
    return None if first is None else (first.step, first.aspect, first.difference.path)


def test_the_steps_of_a_session() -> None:
    one, two, three = steps_of(events(*session()), BUILTIN)
    assert (one.seqs, two.seqs, three.seqs) == ([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14])
    assert one.window is not None
    assert two.window is not None
    assert [len(one.window.messages), len(two.window.messages)] == [1, 3]
    assert [(c.name, c.arguments, c.state, c.result) for c in two.calls.values()] == [
        ("search", {"n": 2}, "answered", "found")
    ]
    assert three.outcome == {"status": "completed", "payload": {"result": "ok"}}


def test_ids_hashes_and_token_counts_are_no_difference() -> None:
    assert compared(session(), session("toolu_9f3")).equal


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"name": "fetch"}, (2, "tool", "[0]")),
        ({"arguments": {"n": 2, "deep": True}}, (2, "arguments", "[0].deep")),
        ({"result": "nothing"}, (2, "result", "[0].result")),
    ],
)
def test_tools_arguments_and_results(change: dict[str, Any], where: tuple[int, str, str]) -> None:
    found = compared(session(), session(**change))
    first = found.first
    assert first is not None
    assert (first.step, first.aspect, first.difference.path) == where
    assert first.seqs == ([6, 7, 8, 9], [105, 106, 107, 108])
    # What differed is in the window of the next step.
    assert found.first_by_aspect()["context"].step == 3


def test_the_context_the_model_and_what_it_said() -> None:
    other = ("context.loaded", {"messages": [{"role": "user", "content": "Hi"}]})
    assert parts(session(), [other, *session()[1:]]) == (1, "context", "[0].content")
    requested = ("model.requested", {"model": "n", "parameters": {"temperature": 0.0}})
    assert parts(session(), [LOADED, requested, *session()[2:]]) == (1, "model", "requested.model")
    said = [LOADED, session()[1], ("model.responded", {"message": {"role": "assistant", "content": "no"}})]
    assert parts(said, session()[:3]) == (1, "model", "said.content")


def test_handoffs_outcome_and_events_of_other_types() -> None:
    emitted = ("handoff.emitted", {"to": "b", "message": "x"})
    assert parts([*session(), emitted], [*session(), ("handoff.emitted", {"to": "c", "message": "x"})]) == (
        3,
        "handoff",
        "[0].payload.to",
    )
    assert parts(session(), [*session()[:-1], ("task.failed", {"result": "ok"})]) == (3, "outcome", "status")
    assert parts([*session(), ("note.added", 1)], [*session(), ("note.added", 2)]) == (3, "other events", "[0].payload")


def test_one_session_goes_on() -> None:
    found = compared(session()[:-1], [*session()[:-1], *turn(4)])
    assert found.first is not None
    assert (found.first.step, found.first.seqs) == (4, (None, [113, 114, 115, 116]))
    assert [len(steps) for steps in found.steps] == [3, 4]


def test_arguments_are_compared_as_what_they_mean() -> None:
    left = [LOADED, ("tool.invoked", {"call_id": "a", "name": "f", "arguments": '{"x": 1, "y": [2]}'})]
    right = [LOADED, ("tool.invoked", {"call_id": "b", "name": "f", "arguments": {"y": [2], "x": 1}})]
    assert compared(left, right).equal
    assert parts(left, [LOADED, ("tool.invoked", {"call_id": "b", "name": "f", "arguments": "{'x': 1}"})]) is not None


def test_calls_side_by_side_may_be_answered_in_any_order() -> None:
    asked = [
        {"id": each, "type": "function", "function": {"name": each, "arguments": "{}"}} for each in ("one", "other")
    ]
    both = ("model.responded", {"message": {"role": "assistant", "content": None, "tool_calls": asked}})
    answers = [("tool.observed", {"call_id": each, "result": each}) for each in ("one", "other")]
    assert compared([LOADED, both, *answers, *turn(2)], [LOADED, both, *answers[::-1], *turn(2)]).equal


def test_how_a_call_ended() -> None:
    begun = [LOADED, *turn(1)[:3]]
    ends: list[Step | None] = [
        None,
        ("tool.observed", {"call_id": "call_1", "result": "x"}),
        ("tool.observed", {"call_id": "call_1", "error": "x"}),
        ("tool.abandoned", {"call_id": "call_1", "reason": "x"}),
    ]
    for n, one in enumerate(ends):
        for m, other in enumerate(ends):
            found = parts([*begun, *([one] if one else [])], [*begun, *([other] if other else [])])
            assert (found is None) == (n == m)
            assert found is None or found[:2] == (1, "result")


def test_a_retry_is_no_difference() -> None:
    retried = ("tool.retried", {"call_id": "call_3", "attempt": 2})
    steps = session()
    assert compared(steps, [*steps[:-2], retried, *steps[-2:]]).equal


def test_agents_that_record_no_responses() -> None:
    def minimal(*results: str) -> list[Step]:
        steps: list[Step] = [LOADED]
        for n, result in enumerate(results):
            steps.append(("tool.invoked", {"call_id": str(n), "name": "f", "arguments": {}}))
            steps.append(("tool.observed", {"call_id": str(n), "result": result}))
        return steps

    assert len(steps_of(events(*minimal("a", "b", "c")), BUILTIN)) == 3
    assert parts(minimal("a", "b", "c"), minimal("a", "x", "c")) == (2, "result", "[0].result")


@pytest.mark.parametrize(
    ("left", "right", "path"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a[1].b"),
        ({"a b": 1}, {"a b": 2}, '["a b"]'),
        ([1], [1, 2], "[1]"),
        ({"x": 1, "y": 1}, {"x": 2, "y": 2}, "x"),
        (1, True, ""),
        ("1", 1, ""),
        ({"a": 1}, {}, "a"),
    ],
)
def test_where_two_values_differ_first(left: Any, right: Any, path: str) -> None:
    found = first_difference(left, right)
    assert found is not None
    assert found.path == path
    assert first_difference(left, left) is None


def test_what_is_absent_is_not_null() -> None:
    found = first_difference({"a": None}, {})
    assert found is not None
    assert (found.left, found.right) == (None, ABSENT)
    assert str(found) == "a: null / (absent)"


# -- the command, on files ---------------------------------------------------------------------------------


def write(file: Path, steps: list[Step], session_id: str = "s") -> str:
    lines = [
        json.dumps({"session_id": session_id, "agent_id": "a", "event_type": kind, "payload": payload})
        for kind, payload in steps
    ]
    with file.open("a", encoding="utf-8") as stream:
        stream.write("".join(f"{line}\n" for line in lines))
    return str(file)


def test_equal_files_exit_with_0(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", session()), write(tmp_path / "b.jsonl", session("x"))
    called = call("diff", a, b, dsn="")
    assert (called.exit_code, called.stdout) == (0, "equal: 3 steps\n")
    assert call("diff", a, b, "--json", dsn="").json["equal"] is True


def test_files_that_differ_exit_with_1_and_say_where(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", session())
    b = write(tmp_path / "b.jsonl", session(arguments={"n": 12345678901234567890123}))
    called = call("diff", a, b, dsn="")
    assert called.exit_code == 1
    assert "step 1 is equal\nthey part at step 2, in arguments: [0].n\n" in called.stdout
    assert "12345678901234567890123" in called.stdout
    assert "first in context: step 3" in called.stdout
    found = call("diff", a, b, "--json", dsn="")
    assert found.exit_code == 1
    assert '"b":12345678901234567890123' in found.stdout
    assert (found.json["first"]["step"], found.json["first"]["aspect"]) == (2, "arguments")
    assert found.json["first"]["seqs"] == {"a": [6, 7, 8, 9], "b": [6, 7, 8, 9]}
    assert list(found.json["first_by_aspect"]) == [
        aspect for aspect in ASPECTS if aspect in found.json["first_by_aspect"]
    ]
    assert call("diff", a, b, "--at", "5", dsn="").exit_code == 0


def test_long_values_are_cut_to_where_they_differ(tmp_path: Path) -> None:
    text = "\n".join(f"line {n}" for n in range(1000))
    a = write(tmp_path / "a.jsonl", session(result=text))
    b = write(tmp_path / "b.jsonl", session(result=text.replace("line 700\n", f"line {'x' * 5000}700\n")))
    shown = call("diff", a, b, dsn="").stdout
    assert "… (697 lines alike)" in shown
    assert "line 699" in shown
    assert "line 5 " not in shown
    assert len(shown) < 20_000


def test_a_file_of_several_sessions(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", session(), "one")
    write(tmp_path / "a.jsonl", session(result="other"), "two")
    assert call("diff", f"{file}#one", f"{file}#two", dsn="").exit_code == 1
    for word, says in ((file, "holds 2 sessions"), (f"{file}#three", "no session three")):
        called = call("diff", word, f"{file}#one", dsn="")
        assert called.exit_code == 3
        assert says in called.stderr
        assert "one" in called.stderr


def test_what_an_agent_wrote_cannot_move_the_cursor(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", session())
    b = write(tmp_path / "b.jsonl", session(name="\x1b[2Jfetch", result="\x1b]0;x\x07"))
    assert "\x1b" not in call("diff", a, b, dsn="").stdout


@pytest.mark.recorded
def test_the_two_recorded_runs_part_where_they_do() -> None:
    a, b = (str(run_file(name)) for name in ("marshmallow-tools", "marshmallow-tools-edited"))
    found = call("diff", a, b, "--json", dsn="")
    assert found.exit_code == 1
    assert found.json["first"]["aspect"] == "context"  # they were given other instructions
    assert found.json["first"]["path"] == "[0].content"
    by_aspect = found.json["first_by_aspect"]
    assert (by_aspect["tool"]["step"], by_aspect["tool"]["a"], by_aspect["tool"]["b"]) == (1, "create", "bash")
    assert (found.json["a"]["steps"], found.json["b"]["steps"]) == (11, 13)
    assert "outcome" in by_aspect


@pytest.mark.recorded
@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_equal_to_itself(name: str) -> None:
    assert compare(run_events(name), run_events(name), BUILTIN).equal
