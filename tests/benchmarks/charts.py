"""The charts of `plot`: one function for each benchmark that has one. Only this module knows matplotlib.

Each makes a figure from what the benchmark printed with ``--json``, and nothing else: the same figures give the same
bytes. Text stays text, so that a reader can search it; the background is white and opaque, also on a dark page; kinds
differ by shape as well as by colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tests.benchmarks import document
from tests.benchmarks.document import Figures
from tests.benchmarks.shapes import SHAPES

_STYLE: Final[Mapping[str, Any]] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": "medium",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.color": "0.9",
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "walstream",
}
_NO_DATE: Final[Mapping[str, Mapping[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}
_OURS, _SECOND, _THIRD, _OTHERS = "#0072b2", "#d55e00", "#009e73", "0.35"  # told apart by the colour-blind, too
_KINDS: Final = ((_OURS, "o"), (_SECOND, "s"), (_THIRD, "^"))
_WIDTH: Final = 8.0
_TRANSPORTS: Final = {"unix": "Unix socket", "tcp": "TCP"}
_PERCENTILES: Final = {"p50": "p50", "p99": "p99", "p999": "p99.9"}
_LEAST_LAG: Final = 1e-4  # seconds; it is rounded to that, and zero has no place on a logarithmic axis
_BLANK: Final[Mapping[str, Any]] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,g}")


def drain(found: Figures) -> Figure:
    """Ratio to pg_recvlogical, by shape, transport and contender: the median, and the range of the rounds."""
    panels = [
        (f"{SHAPES[shape].title}, {_TRANSPORTS[transport]}", names)
        for shape, transports in found["shapes"].items()
        for transport, names in transports.items()
    ]
    rows = [len(names) for _, names in panels]
    figure = Figure((_WIDTH, 0.7 + sum(0.4 + 0.24 * each for each in rows)), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[0.6 + each for each in rows])
    longest = max(ratio for _, names in panels for each in names.values() for ratio in each["ratios"])
    for axes, (title, names) in zip(grid.flat, panels, strict=True):
        axes.set_title(title)
        axes.axvline(1, color="0.6", linewidth=1)
        for row, (name, each) in enumerate(names.items()):
            low, high = min(each["ratios"]), max(each["ratios"])
            colour = _OURS if name.startswith("walstream") else _OTHERS
            axes.hlines(row, low, high, color=colour, linewidth=1.5)
            axes.plot([each["ratio"]], [row], color=colour, marker="o", linestyle="none")
            axes.text(high + longest * 0.02, row, f"{each['ratio']:.2f}", color=colour, va="center", bbox=dict(_BLANK))
        axes.set_yticks(range(len(names)), list(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    grid[-1, 0].set_xlim(0, longest * 1.1)
    runs = max(each["runs"] for _, names in panels for each in names.values())
    rounds = f"; median and range of {runs} rounds" if runs > 1 else ""
    grid[-1, 0].set_xlabel(f"events a second, as a ratio to pg_recvlogical in the same round{rounds}", loc="right")
    return figure


def latency(found: Figures) -> Figure:
    """Percentiles by rate, a panel for each way to the handler."""
    ways: Figures = found["ways"]
    figure = Figure((_WIDTH, 3.4), layout="constrained")
    grid = figure.subplots(1, len(ways), sharey=True, squeeze=False)
    for axes, (way, by_rate) in zip(grid.flat, ways.items(), strict=True):
        missing = sum(each["missing"] for each in by_rate.values())
        axes.set_title(f"{way}\n({missing:,g} events never found)" if missing else way)
        for (point, title), (colour, marker) in zip(_PERCENTILES.items(), _KINDS, strict=True):
            axes.plot([each[point] for each in by_rate.values()], color=colour, marker=marker, label=title)
        _named(axes, [_rate(float(rate), each["held_per_second"]) for rate, each in by_rate.items()])
        axes.set_xlabel("events a second")
        _logarithmic(axes)
    grid[0, 0].set_ylabel("insert sent to handler entered, ms")
    grid[0, 0].legend()
    return figure


def scale(found: Figures) -> Figure:
    """Processor time of an event by size of the ledger, by projectors and by sessions."""
    figure = Figure((_WIDTH, 3.2), layout="constrained")
    grid = figure.subplots(1, 3, squeeze=False)
    panels = (("events", "events in the ledger"), ("projectors", "projectors"), ("sessions", "sessions"))
    for axes, (what, label) in zip(grid.flat, panels, strict=True):
        measured: Sequence[Figures] = list(found[what].values())
        shapes = list(dict.fromkeys(each["shape"] for each in measured))
        for shape in shapes:
            colour, marker = _KINDS["AB".index(shape)]
            points = sorted((each[what], each["client_cpu_us"]) for each in measured if each["shape"] == shape)
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=SHAPES[shape].title)
        axes.set_xscale("linear" if what == "projectors" else "log")
        axes.set_xticks(sorted({each[what] for each in measured}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.set_xlabel(label)
        axes.margins(x=0.15)
        _from_zero(axes)
    grid[0, 0].set_ylabel("processor time, µs an event")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def sustained(found: Figures) -> Figure:
    """By rate: what was held, lag and memory. A soak's are over time."""
    return _soak(found["stretches"]) if found["lasting_s"] else _rates(found["stretches"], found["bound_s"])


def _rates(stretches: Sequence[Figures], bound: float) -> Figure:
    figure = Figure((_WIDTH, 3.6), layout="constrained")
    held, lag, memory = figure.subplots(1, 3, squeeze=False).flat
    held.plot([each["held_per_second"] for each in stretches], color=_OURS, marker="o", label="walstream")
    beside = [each["beside_recvlogical"] for each in stretches]
    held.plot(beside, color=_OTHERS, marker="s", label="pg_recvlogical, which writes nothing")
    held.set_title("appends a second, held")
    figure.legend(*held.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    lag.plot([max(_LEAST_LAG, each["lag_s"]) * 1000 for each in stretches], color=_OURS, marker="o")
    lag.axhline(bound * 1000, color="0.6", linewidth=1)
    lag.set_title("lag at the end, ms")
    _logarithmic(lag)
    memory.plot([each["rss_mb"] for each in stretches], color=_OURS, marker="o")
    memory.set_title("resident memory, MB")
    for axes in (held, memory):
        _from_zero(axes)
    for axes in (held, lag, memory):
        _named(axes, [f"{each['rate']:,g}" if each["rate"] else "all" for each in stretches])
        axes.set_xlabel("appends a second, wanted")
    return figure


def _soak(stretches: Sequence[Figures]) -> Figure:
    hours = stretches[-1]["after_s"] >= 3 * 3600
    when = [each["after_s"] / (3600 if hours else 60) for each in stretches]
    figure = Figure((_WIDTH, 5), layout="constrained")
    panels: tuple[tuple[str, Callable[[Figures], float]], ...] = (
        ("appends a second", lambda each: each["held_per_second"]),
        ("lag, ms", lambda each: each["lag_s"] * 1000),
        ("resident memory, MB", lambda each: each["rss_mb"]),
    )
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for axes, (label, figure_of) in zip(grid.flat, panels, strict=True):
        axes.plot(when, [figure_of(each) for each in stretches], color=_OURS, marker="o", markersize=2)
        axes.set_title(label)
        _from_zero(axes)
    grid[-1, 0].set_xlabel("hours since the start" if hours else "minutes since the start")
    grid[-1, 0].set_xlim(left=0)
    return figure


DRAWN: Final[Mapping[str, Callable[[Figures], Figure]]] = {
    "drain": drain,
    "latency": latency,
    "scale": scale,
    "sustained": sustained,
}
"""By the name of the benchmark."""


def draw(found: Figures, file: Path) -> None:
    """Write the chart of a document.

    Args:
        found: what a benchmark of :data:`DRAWN` printed with ``--json``.
        file: where to; its suffix says whether as SVG or as PNG.

    Raises:
        KeyError: the document lacks something.
        OSError: the file cannot be written.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the caller's own matplotlibrc says
        settings: Any = matplotlib.rcParams  # how narrowly their names are typed differs by version
        settings.update(_STYLE)
        figure = DRAWN[found["benchmark"]](found)
        footer = document.described(found["machine"])
        figure.supxlabel(footer, x=0.01, horizontalalignment="left", fontsize="small", color="0.35")
        kind = file.suffix.removeprefix(".")
        figure.savefig(file, format=kind, dpi=150, facecolor="white", metadata=dict(_NO_DATE[kind]))


def _named(axes: Axes, names: Sequence[str]) -> None:
    """Places one beside the other, whatever their numbers."""
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.4, len(names) - 0.6)
    axes.tick_params(axis="x", labelsize="small")


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, axes.dataLim.y1 * 1.1 or 1)
    axes.yaxis.set_major_formatter(_PLAIN)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_PLAIN)


def _rate(wanted: float, held: float) -> str:
    """A rate, and what became of it where the machine did not hold it."""
    return f"{wanted:,g}" if held > 0.95 * wanted else f"{wanted:,g}\n({held:,g} held)"


def _short(number: float, _: int) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:g}{unit}"
    return f"{number:g}"
