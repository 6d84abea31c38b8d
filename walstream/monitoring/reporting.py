"""All that a process tells others about itself, as its configuration says: asked over HTTP, pushed over OTLP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from walstream.config import Settings

from .health import Health, Source


class Reporter(Protocol):
    """Runs beside the work: :class:`.server.MonitoringServer`, :class:`.otlp.OtlpPush`."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def reporters(settings: Settings, health: Callable[[], Health], *sources: Source) -> list[Reporter]:
    """What the configuration asks for; nothing is imported, and nothing paid for at each start, if it asks for nothing.

    Args:
        health: how the process is; quick, and from memory.
        sources: of samples besides the process's own metrics.

    Raises:
        ConfigError: an address that is none or not to be had, or a package that is not installed.
    """
    made: list[Reporter] = []
    if settings.otlp_endpoint is not None:
        from .otlp import OtlpPush

        made.append(OtlpPush(settings.otlp_endpoint, sources))
    if settings.metrics_listen is not None:
        from .server import MonitoringServer

        made.append(MonitoringServer(settings.metrics_listen, health, sources))
    return made


@contextlib.contextmanager
def reporting(settings: Settings, health: Callable[[], Health], *sources: Source) -> Iterator[None]:
    """Report while the context is open.

    Raises:
        ConfigError: see :func:`reporters`.
    """
    with contextlib.ExitStack() as running:
        for reporter in reporters(settings, health, *sources):
            running.callback(reporter.stop)
            reporter.start()
        yield
