"""Numbers as a person reads them: bytes and seconds, the same in every table, log line and alarm."""

from __future__ import annotations


def size(count: int | None) -> str:
    """Bytes for a person: ``None`` is said, never shown as 0."""
    if count is None:
        return "an unknown size"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
