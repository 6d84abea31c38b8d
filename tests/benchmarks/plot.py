"""Draw what benchmarks have measured.

    python -m tests.benchmarks drain --json > drain.json
    python -m tests.benchmarks plot drain.json [latency.json …] [--to FOLDER] [--png]

Each RESULT is what one of drain, latency, scale and sustained printed with --json; its chart gets its name. The same
figures give the same file. It needs matplotlib: pip install -e '.[bench]'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.benchmarks.document import Figures
from walstream.errors import ConfigError, ExitCode, WalstreamError


def charts() -> ModuleType:
    """The module that draws.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("tests.benchmarks.charts")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError("drawing needs matplotlib", hint="pip install -e '.[bench]'") from error


def load(file: Path, known: Sequence[str]) -> Figures:
    """The document in a file.

    Args:
        known: names of benchmarks that have a chart.

    Raises:
        ConfigError: the file cannot be read, or is no document of one of these.
    """
    hint = f"give a file with what one of these printed with --json: {', '.join(known)}"
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}", hint=hint) from error
    name = found.get("benchmark") if isinstance(found, dict) else None
    if name not in known:
        what = "is not the result of a benchmark" if name is None else f"is of {name}, which has no chart"
        raise ConfigError(f"{file} {what}", hint=hint)
    return dict(found)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="a file that --json has written")
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="here, if not given")
    parser.add_argument("--png", action="store_true", help="PNG instead of SVG")
    given = parser.parse_args(words)
    try:
        drawing = charts()
        found = {file: load(file, list(drawing.DRAWN)) for file in given.results}
        given.to.mkdir(parents=True, exist_ok=True)
        for source, document in found.items():
            target = given.to / source.with_suffix(".png" if given.png else ".svg").name
            try:
                drawing.draw(document, target)
            except KeyError as error:
                raise ConfigError(
                    f"{source} has no {error}: it was measured by another version",
                    hint=f"python -m tests.benchmarks {document['benchmark']} --json > {source}",
                ) from error
            print(target)
    except WalstreamError as error:
        print(f"{error}\n{error.hint}", file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.OK)
