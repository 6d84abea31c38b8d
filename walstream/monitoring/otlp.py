"""The same metrics for OpenTelemetry: pushed to a collector over OTLP/HTTP, under the names that Prometheus gets.

A figure that nobody knows, or that is endless, is left out: OTLP has numbers only.

The SDK's own environment variables hold (``OTEL_METRIC_EXPORT_INTERVAL``, ``OTEL_EXPORTER_OTLP_HEADERS``,
``OTEL_RESOURCE_ATTRIBUTES``, …; https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/). A
collector that is away costs its own thread some time, and nobody else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from walstream.errors import ConfigError
from walstream.metrics import METRICS, Metrics, Sample

from .catalogue import CATALOGUE, PREFIX
from .exporter import gather
from .health import Source

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

_FRESH_SECONDS: Final = 1.0  # one look serves all instruments of one collection
_STOP_MILLIS: Final = 3_000.0


class OtlpPush:
    """Pushes metrics until it is stopped, and once more then.

    Args:
        endpoint: of the collector, as ``http://127.0.0.1:4318``; ``/v1/metrics`` is put behind it.
        sources: of samples besides ``metrics``.
        metrics: counters and gauges.

    Raises:
        ConfigError: the packages are not installed.
    """

    def __init__(self, endpoint: str, sources: Sequence[Source] = (), metrics: Metrics = METRICS) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint is set, and OpenTelemetry is not installed: {error}",
                hint="pip install 'walstream[otel]'",
            ) from error
        self._endpoint = f"{endpoint.rstrip('/')}/v1/metrics"
        self._metrics = metrics
        self._sources = sources
        self._looked = float("-inf")
        self._samples: dict[str, list[Sample]] = {}
        self._make: Callable[[], MeterProvider] = lambda: MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=self._endpoint))],
            resource=Resource.create({"service.name": "walstream"}),  # OTEL_SERVICE_NAME goes before it
        )
        self._provider: MeterProvider | None = None

    def start(self) -> None:
        """Begin to push, on a thread of its own."""
        self._provider = self._make()
        meter = self._provider.get_meter("walstream")
        for described in CATALOGUE:
            create = meter.create_observable_counter if described.kind == "counter" else meter.create_observable_gauge
            create(PREFIX + described.name, [self._observer(described.name)], description=described.meaning)

    def stop(self) -> None:
        """Push what there is, and end."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown(timeout_millis=_STOP_MILLIS)

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_options: Any) -> Iterable[Observation]:
            known = (sample for sample in self._now().get(name, ()) if math.isfinite(sample.value))
            return [Observation(sample.value, dict(sample.labels)) for sample in known]

        return observe

    def _now(self) -> dict[str, list[Sample]]:
        if time.monotonic() - self._looked > _FRESH_SECONDS:
            self._samples = gather(self._metrics, self._sources)
            self._looked = time.monotonic()
        return self._samples
