"""How the figures of a benchmark's rounds are written."""

from __future__ import annotations

from statistics import median


def spread(values: list[float], digits: int) -> str:
    """`median (smallest to largest)`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
