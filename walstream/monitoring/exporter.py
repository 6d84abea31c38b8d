"""Metrics in the text that Prometheus reads, from memory alone: a scrape asks neither the server nor another thread."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from walstream.metrics import Metrics, Sample

from .catalogue import CATALOGUE, PREFIX, Described
from .health import Source

log = logging.getLogger("walstream.monitoring")


class Exporter(Collector):
    """Renders a set of metrics and what further sources give.

    Args:
        metrics: counters and gauges.
        sources: asked at each scrape. One that fails is left out, and logged.
    """

    def __init__(self, metrics: Metrics, sources: Iterable[Source]) -> None:
        self._metrics = metrics
        self._sources = tuple(sources)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and body, in the newest form that the scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def collect(self) -> Iterator[Metric]:
        """One family a metric of the catalogue that has samples now."""
        found = gather(self._metrics, self._sources)
        for described in CATALOGUE:
            if described.name in found:
                yield _family(described, found[described.name])


def gather(metrics: Metrics, sources: Iterable[Source]) -> dict[str, list[Sample]]:
    """All samples of the moment, by name. A source that fails is left out, and logged."""
    found: dict[str, list[Sample]] = {}

    def add(samples: Iterable[Sample]) -> None:
        for sample in samples:
            found.setdefault(sample.name, []).append(sample)

    add([Sample("build_info", (("version", _version()),), 1.0, counter=False), *metrics.snapshot()])
    for source in sources:
        try:
            add(list(source()))
        except Exception:
            log.exception("a part of the metrics is missing")
    return found


def _family(described: Described, samples: Iterable[Sample]) -> Metric:
    kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
    family = kind(PREFIX + described.name, described.meaning, labels=described.labels)
    for sample in samples:
        labels = dict(sample.labels)
        family.add_metric([labels.get(name, "") for name in described.labels], sample.value)
    return family


@functools.cache
def _version() -> str:
    try:
        return version("walstream")
    except PackageNotFoundError:
        return "unknown"
