"""Every way of not being pure is found, with the event and the place; what is pure is left alone."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from tests import impure_folds
from tests.impure_folds import EVENT, FOLDS, FORBIDDEN
from tests.recorded import RUNS, run_events
from walstream.errors import ConfigError
from walstream.ledger.fold import BUILTIN, Fold, FoldEvent
from walstream.testing import assert_pure, check_fold, make_event
from walstream.testing.purity_runs import CHECKPOINTS, Finding


def notes(*texts: str, session: str = "s", first: int = 1) -> list[FoldEvent]:
    return [
        FoldEvent.of(seq, session, "agent", EVENT, {"text": text, "more": {"deep": []}})
        for seq, text in enumerate(texts, start=first)
    ]


NOTES = [*notes("some words of a note", "and others", "zebra"), *notes("of another session", "b", session="t", first=9)]


def found(name: str) -> Finding:
    """The first finding, in this process."""
    findings = check_fold(FOLDS[name], NOTES)
    assert findings, f"{name} passes for pure"
    return findings[0]


def by_name(name: str) -> list[Finding]:
    """All findings, in processes of their own."""
    return check_fold(f"tests.impure_folds:fold_{name}", NOTES, hash_seeds=("0", "1"))


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_calls_are_named_with_their_place(name: str) -> None:
    finding = found(name)
    assert finding.kind == "forbidden call"
    assert FORBIDDEN[name] in finding.message
    assert finding.place is not None
    function = "_helper" if name == "in_a_helper" else name
    file, _, rest = finding.place.partition(":")
    line, _, inside = rest.partition(" in ")
    assert (Path(file).name, inside) == ("impure_folds.py", function)
    assert "def" not in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert (finding.session_id, finding.seq, finding.event_type) == ("s", 1, EVENT)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("global_list", "the global tests.impure_folds._seen"),
        ("global_counter", "the global tests.impure_folds._total"),
        ("global_iterator", "the global tests.impure_folds._numbers"),
        ("global_of_another_module", "tests.impure_helpers.seen"),
        ("function_of_another_module", "tests.impure_helpers._remembered"),
        ("default_argument", "__defaults__ of default_argument"),
        ("attribute_of_function", "attribute_of_function"),
        ("attribute_of_class", "_Tally"),
        ("object_with_slots", "the global tests.impure_folds._slotted"),
        ("global_array", "the global tests.impure_folds._array"),
        ("in_a_closure", "the variable calls around"),
    ],
)
def test_state_that_outlives_the_call_is_named(name: str, what: str) -> None:
    finding = found(name)
    assert (finding.kind, finding.seq) == ("changed state", 1)
    assert what in finding.message


def test_a_changed_payload() -> None:
    finding = found("changes_payload")
    assert (finding.kind, finding.seq) == ("changed payload", 1)


def test_a_payload_that_is_kept_and_changed_later_names_the_event_that_did_it() -> None:
    finding = found("changes_kept_payload")
    assert (finding.kind, finding.seq) == ("changed payload", 2)
    assert f"the payload of the {EVENT} with seq 1" in finding.message


def test_a_context_that_is_no_json() -> None:
    finding = found("not_json")
    assert (finding.kind, finding.seq) == ("not JSON", 1)
    assert "set" in finding.message


def test_a_fold_that_raises() -> None:
    finding = found("raises")
    assert (finding.kind, finding.message) == ("error", "KeyError: 'nothing'")


def test_what_no_trap_sees_differs_in_two_runs() -> None:
    finding = found("clock_called_by_c")
    assert (finding.kind, finding.seq) == ("different result", 1)
    assert finding.message.startswith("context.at: ")


def test_what_a_snapshot_would_change() -> None:
    finding = found("shares_within_the_context")
    assert finding.kind == "different result after a restore"
    assert (finding.seq, finding.message) == (2, "context.second[1]: 2 / (absent)")
    order = found("order_of_the_context")
    assert (order.kind, order.seq) == ("different result after a restore", 3)


@pytest.mark.parametrize("name", ["order_of_a_set", "hash_of_a_string"])
def test_other_hash_seeds_are_other_processes(name: str) -> None:
    (finding,) = by_name(name)
    assert finding.kind == "different result with another hash seed"
    assert finding.seq == 1
    assert "context." in finding.message


def test_they_are_in_other_time_zones_too() -> None:
    (finding,) = by_name("local_time")
    assert (finding.kind, finding.seq) == ("different result in another time zone", 1)
    assert "2023-11-14T22:13:21" in finding.message


def test_a_process_of_its_own_finds_the_same() -> None:
    (finding,) = by_name("clock")
    assert (finding.kind, finding.message, finding.seq) == ("forbidden call", "time.time", 1)
    (finding,) = by_name("changes_payload")
    assert finding.kind == "changed payload"


def test_what_is_fair_passes() -> None:
    assert_pure(impure_folds.fair, NOTES)
    assert_pure("tests.impure_folds:fair", NOTES, hash_seeds=("0", "1"))


def test_no_trap_stays_behind() -> None:
    class Thread(threading.Thread):
        pass

    before = (sys.getprofile(), sys.gettrace(), threading.Thread.start, open)
    for name in ("clock", "raises", "thread", "reads"):
        found(name)
    assert (sys.getprofile(), sys.gettrace(), threading.Thread.start, open) == before
    with open(__file__, encoding="utf-8") as file:
        assert file.readline()

    def own(*_: object) -> None:
        pass

    sys.setprofile(own)
    try:
        found("clock")
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)


def test_the_assertion_says_it_all() -> None:
    with pytest.raises(AssertionError, match=r"forbidden call: time\.time at .*impure_folds\.py:\d+ in clock \(note"):
        assert_pure(FOLDS["clock"], NOTES)


def test_each_fault_is_told_once_and_sessions_stand_for_themselves() -> None:
    fold = Fold()

    @fold.on(EVENT)
    def note(context: dict[str, object], event: FoldEvent) -> None:
        if event.session_id == "t":
            context["at"] = time.monotonic()
        else:
            event.payload.clear()

    kinds = [(each.kind, each.session_id) for each in check_fold(fold, [*NOTES, *notes("x", session="u")])]
    assert kinds == [("changed payload", "s"), ("forbidden call", "t")]


@pytest.mark.slow
def test_long_sessions_are_compared_in_places_and_then_exactly() -> None:
    fold = Fold()
    fault = 2 * CHECKPOINTS + 77

    @fold.on(EVENT)
    def note(context: dict[str, object], event: FoldEvent) -> None:
        context["n"] = event.seq
        if event.seq == fault:
            context["at"] = next(iter(time.perf_counter_ns, None))

    events = notes(*("x" for _ in range(4 * CHECKPOINTS)))
    (finding,) = check_fold(fold, events)
    assert (finding.kind, finding.seq) == ("different result", fault)


@pytest.mark.slow
def test_so_are_restored_ones_and_those_of_other_hash_seeds() -> None:
    events = notes(*("x" for _ in range(3 * CHECKPOINTS + 1)))
    (finding,) = check_fold(FOLDS["shares_late"], events)
    assert (finding.kind, finding.seq) == ("different result after a restore", 1333)
    (finding,) = check_fold("tests.impure_folds:fold_order_of_a_set_late", events)
    assert (finding.kind, finding.seq) == ("different result with another hash seed", 1334)
    assert finding.message.startswith("context.words[")


def test_a_payload_that_nobody_can_read_is_not_the_folds_fault() -> None:
    assert check_fold(BUILTIN, [make_event(1, "tool.observed", payload_text="[" * 7000 + "]" * 7000)]) == []


@pytest.mark.parametrize("name", ["tests.impure_folds:nothing", "no_such_module:fold", "tests.impure_folds:EVENT"])
def test_a_name_that_leads_to_no_fold(name: str) -> None:
    with pytest.raises(ConfigError, match=name.partition(":")[0]):
        check_fold(name, NOTES)


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_folds_of_a_test.py").write_text("raise ValueError('half written')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="half written"):
        check_fold("broken_folds_of_a_test:fold", NOTES)


@pytest.mark.recorded
def test_the_builtin_fold_is_pure_over_the_recorded_runs() -> None:
    events = [event for name in RUNS for event in run_events(name)]
    assert_pure("walstream.ledger.fold:BUILTIN", events, hash_seeds=("0", "1"))
