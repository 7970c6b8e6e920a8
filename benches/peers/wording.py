"""How are figures written for people?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers.results import LATENCY

if TYPE_CHECKING:
    from peers.results import Figure

__all__ = ["gigabytes", "measured", "microseconds", "rate", "times"]


def rate(value: float) -> str:
    """Write messages a second, with three digits."""
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if value >= limit:
            return _three_digits(value / limit) + unit
    return f"{value:.0f}"


def microseconds(value: float) -> str:
    return f"{_three_digits(value)} µs"


def gigabytes(value: float) -> str:
    """Write bytes a second."""
    return f"{value / 1e9:.1f} GB/s"


def times(ratio: float) -> str:
    """Write a ratio, with two digits or a little more."""
    return f"{ratio:.2f}x" if ratio < 1 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def measured(figure: Figure) -> str:
    """Say what a figure came to, in its own unit."""
    if figure.value is None:
        return figure.short or ""
    if figure.case == LATENCY:
        return microseconds(figure.value)
    return (gigabytes if figure.case.startswith("into Arrow") else rate)(figure.value)


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
