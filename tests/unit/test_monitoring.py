"""Names that others build on: the catalogue, the table in the documentation, alerts, dashboard; and the HTTP side."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.test_docs import anchors, section, table_rows, ticked
from walstream.config import GuardSettings, Settings
from walstream.engine.host_samples import PROJECTOR_STATES
from walstream.engine.ingest_supervisor import INGEST_STATES
from walstream.engine.runner_group import NOT_WELL
from walstream.errors import ConfigError
from walstream.guard.policy import CAUSES, SlotReading, State, judge
from walstream.guard.samples import samples
from walstream.guard.storms import Storm
from walstream.guard.watch import Report
from walstream.metrics import Metrics, Sample
from walstream.monitoring.catalogue import BY_NAME, CATALOGUE, PREFIX
from walstream.monitoring.exporter import Exporter
from walstream.monitoring.health import Health
from walstream.monitoring.otlp import OtlpPush
from walstream.monitoring.reporting import reporters, reporting
from walstream.monitoring.server import MonitoringServer, parse_address
from walstream.worker.standing import HAND_STATES, OUTCOMES

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yaml"
DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"

VALUES = {
    ("ingest_state", "state"): set(INGEST_STATES),
    ("projector_state", "state"): set(PROJECTOR_STATES),
    ("slot_state", "state"): {state.word for state in State},
    ("slot_cause", "cause"): set(CAUSES),
    ("worker_hands", "state"): set(HAND_STATES),
    ("worker_turns_total", "outcome"): set(OUTCOMES),
}
"""Labels of which every value is known."""


# -- names ------------------------------------------------------------------------------------------


def test_the_table_in_the_documentation_is_the_catalogue() -> None:
    listed = [
        (ticked(row[0])[0], row[1], tuple(ticked(row[2])), row[3])
        for row in table_rows(section("docs/operations.md", "Metrics"))
    ]
    assert listed == [
        (PREFIX + each.name, each.kind, each.labels, each.meaning.replace("|", "\\|")) for each in CATALOGUE
    ]


def test_names_follow_the_conventions() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    for each in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z_]*", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every expression of both files, with where it stands."""
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]


QUERIES = list(queries())


@pytest.mark.parametrize(("place", "expression"), QUERIES, ids=[place for place, _ in QUERIES])
def test_what_is_asked_for_exists(place: str, expression: str) -> None:
    assert expression.count("(") == expression.count(")"), place
    asked = re.findall(r"walstream_(\w+)(?:\{([^}]*)\})?", expression)
    assert asked or "process_" in expression
    for name, selectors in asked:
        assert name in BY_NAME, f"{place}: {name}"
        for label, operator, value in re.findall(r"(\w+)(=~|=)\"([^\"]*)\"", selectors):
            if label == "job":  # Prometheus adds it
                continue
            assert label in BY_NAME[name].labels, f"{place}: {name} has no label {label}"
            values = set(value.split("|")) if operator == "=~" else {value}
            assert values <= VALUES[name, label], f"{place}: {label}={value}"
    labels = {label for name, _ in asked for label in BY_NAME[name].labels}
    for grouping in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", expression):
        assert {label.strip() for label in grouping.split(",")} <= labels, f"{place}: {grouping}"
    for name, _ in asked:
        raised = re.search(rf"(?:rate|increase)\(walstream_{name}\b", expression)
        assert bool(raised) == (BY_NAME[name].kind == "counter"), f"{place}: {name}"


def test_alerts_lead_to_a_section_of_the_runbook() -> None:
    known = anchors(ROOT / "docs" / "operations.md")
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) >= 12
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in known, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert re.search(rf"by \([^)]*\b{label}\b", rule["expr"]), f"{rule['alert']}: {label}"


def test_every_cause_has_a_section_of_the_runbook() -> None:
    known = anchors(ROOT / "docs" / "operations.md")
    assert set(CAUSES) <= known


def test_panels_of_the_dashboard_stand_beside_each_other() -> None:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])


# -- what is exported ------------------------------------------------------------------------------------------


def exported(metrics: Metrics, *sources: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    _, body = Exporter(metrics, sources).render("")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def test_counters_gauges_and_sources_are_exported_and_what_has_no_name_is_not() -> None:
    metrics = Metrics()
    metrics.add("projector_events_total", 3, projector='a "b"\\\n')
    metrics.add("nobody_promised_this_total", 3)
    found = exported(metrics, lambda: [Sample("order_head", (), 7.0, counter=False)])
    assert found["walstream_projector_events_total", (("projector", 'a "b"\\\n'),)] == 3
    assert found["walstream_order_head", ()] == 7
    assert not any("nobody" in name for name, _ in found)


def test_a_source_that_fails_costs_its_own_samples_only() -> None:
    def broken() -> Iterator[Sample]:
        yield Sample("ingest_buffer_bytes", (), 1.0, counter=False)
        raise RuntimeError("a source failed")

    found = exported(Metrics(), broken, lambda: [Sample("order_head", (), 7.0, counter=False)])
    assert ("walstream_order_head", ()) in found
    assert ("walstream_ingest_buffer_bytes", ()) not in found


@pytest.mark.parametrize("state", [None, *State])
def test_what_the_guard_knows_and_what_it_does_not(state: State | None) -> None:
    readings = {
        None: None,
        State.OK: SlotReading("s", active=True, wal_status="reserved", retained=1, behind=1, safe=9, bound=10),
        State.WARN: SlotReading("s", active=True, wal_status="reserved", retained=6, behind=6, safe=4, bound=10),
        State.CRITICAL: SlotReading("s", active=True, wal_status="reserved", retained=9, behind=9, safe=1, bound=10),
        State.LOST: SlotReading("s", wal_status="lost", bound=10),
    }
    reading = readings[state]
    report = None
    if reading is not None:
        storm = Storm("agent", "a", 90.0, 10.0)
        report = Report(5.0, (judge(reading, GuardSettings()),), (storm,), wal_rate=3.0)
    found = exported(Metrics(), lambda: samples(report))
    assert found["walstream_guard_up", ()] == (state is not None)
    if state is None:
        assert not any(name.startswith("walstream_slot") for name, _ in found)
        return
    for each in State:
        assert found["walstream_slot_state", (("slot", "s"), ("state", each.word))] == (each is state)
    retained = found["walstream_slot_retained_bytes", (("slot", "s"),)]
    assert (retained != retained) == (state is State.LOST)  # NaN, not zero
    assert found["walstream_slot_seconds_to_loss", (("slot", "s"),)] == (0 if state is State.LOST else float("inf"))
    assert found["walstream_storm_ratio", (("agent", "a"), ("kind", "agent"))] == 9
    failed = Report(6.0, error=ConfigError("it is gone"))
    assert set(exported(Metrics(), lambda: samples(failed))) == {
        ("walstream_build_info", next(labels for name, labels in found if name == "walstream_build_info")),
        ("walstream_guard_up", ()),
        ("walstream_guard_looked_timestamp_seconds", ()),
    }


# -- over HTTP ------------------------------------------------------------------------------------------


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.getheader("Content-Type", ""), body


@contextlib.contextmanager
def serving(health: Callable[[], Health]) -> Iterator[MonitoringServer]:
    server = MonitoringServer("127.0.0.1:0", health)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def part(ready: bool, state: str = "hot") -> dict[str, Any]:
    return {"ready": ready, "state": state, "error": None}


def test_health_tells_the_parts_apart() -> None:
    now = Health(live=True, starting=True)
    with serving(lambda: now) as server:
        assert get(server.port, "/healthz")[0] == 200
        assert get(server.port, "/readyz")[0] == 503
        assert json.loads(get(server.port, "/readyz")[2])["status"] == "starting"
        now = Health(live=True, parts={"ingest": part(True, "streaming"), "projector:a/b": part(False, "halted")})
        status, kind, body = get(server.port, "/readyz")
        assert (status, kind) == (503, "application/json")
        assert json.loads(body) == {"status": "not ready", "parts": now.parts}
        assert get(server.port, "/readyz/ingest")[0] == 200
        assert get(server.port, "/readyz/projector:a%2Fb")[0] == 503
        assert get(server.port, "/readyz/other")[0] == 404
        assert get(server.port, "/healthz")[0] == 200
        now = Health(live=False, parts={"ingest": part(True)})
        assert get(server.port, "/healthz")[0] == get(server.port, "/readyz")[0] == 503
        assert get(server.port, "/nothing")[0] == 404
        assert get(server.port, "/healthz", "POST")[0] == 501
        assert get(server.port, "/metrics", "HEAD")[2] == ""
        assert "openmetrics" in get(server.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]
    with pytest.raises(ConnectionRefusedError):
        get(server.port, "/healthz")


def test_what_is_not_asked_for_does_not_run() -> None:
    assert reporters(Settings(), lambda: Health(live=True)) == []


class Collector(BaseHTTPRequestHandler):
    """Takes what is pushed, and keeps the newest value of each series."""

    found: ClassVar[dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}

    def do_POST(self) -> None:
        assert self.path == "/v1/metrics"
        request = ExportMetricsServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                assert metric.HasField("sum") == metric.name.endswith("_total")
                for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
                    labels = tuple(sorted((each.key, each.value.string_value) for each in point.attributes))
                    self.found[metric.name, labels] = point.as_double
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


def test_open_telemetry_gets_the_same(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.add("projector_events_total", 3, projector="router")
    gauge = Sample("order_head", (), 7.0, counter=False)
    endless = [Sample("slot_seconds_to_loss", (), number, counter=False) for number in (math.inf, math.nan)]
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        push = OtlpPush(f"http://127.0.0.1:{server.server_port}/", [lambda: [gauge, *endless]], metrics)
        push.start()
        push.stop()  # with a last push
        server.shutdown()
    assert Collector.found[f"{PREFIX}projector_events_total", (("projector", "router"),)] == 3
    assert Collector.found[f"{PREFIX}order_head", ()] == 7
    assert Collector.found.keys() == exported(metrics, lambda: [gauge]).keys()
    assert caplog.text == "", "the SDK would complain of each number that is none, every minute"


def test_a_collector_that_is_away_ends_nothing() -> None:
    settings = Settings(otlp_endpoint="http://127.0.0.1:9")
    with reporting(settings, lambda: Health(live=True)):
        pass


def test_a_port_that_is_taken_is_a_matter_of_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="metrics_listen"):
            MonitoringServer(address, lambda: Health(live=True))


@pytest.mark.parametrize("wrong", ["", "localhost", "9187", "host:", "host:port", "host:70000", "::1:9187", "h:-1"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(wrong)


def test_scrapers_that_hang_cost_a_bounded_number_of_threads() -> None:
    with serving(lambda: Health(live=True)) as server:
        before = threading.active_count()
        hanging = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        time.sleep(0.3)
        assert threading.active_count() - before <= 8
        for each in hanging:
            each.close()
        deadline = time.monotonic() + 60
        while True:  # and it answers again as soon as they are gone
            try:
                assert get(server.port, "/healthz")[0] == 200
                break
            except (ConnectionError, http.client.HTTPException):
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_states_of_projectors_that_are_not_well_are_states() -> None:
    assert set(PROJECTOR_STATES) >= NOT_WELL
