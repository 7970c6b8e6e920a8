"""What was measured, and what do the rounds come to?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CASES", "FAN_OUT", "LATENCY", "REPLAY", "SIZES", "Figure", "Results", "arrow_case"]

#: Bytes of a message, and how people call them.
SIZES = {64: "64 B", 1 << 10: "1 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB"}

FAN_OUT = "1 KiB to 4 readers"
LATENCY = "latency"
REPLAY = "replay"


def arrow_case(size: int) -> str:
    """Name the case of reading messages of a size into Arrow."""
    return f"into Arrow, {SIZES[size]}"


#: Cases whose figures are messages a second for each reader.
CASES = (*SIZES.values(), FAN_OUT)


@dataclass(slots=True)
class Figure:
    """One way in one case: a value for each round that counts.

    Messages a second, microseconds for latency, or bytes a second for copies into Arrow.
    """

    case: str
    name: str
    storage: str
    values: list[float] = field(default_factory=list)
    #: For latency: the 99th percentile of each round.
    high_values: list[float] = field(default_factory=list)
    #: Rounds that do not count, and why.
    problems: list[str] = field(default_factory=list)
    #: Why there is nothing at all.
    missing: str | None = None

    @property
    def value(self) -> float | None:
        """The median."""
        return median(self.values) if self.values else None

    @property
    def high_value(self) -> float | None:
        return median(self.high_values) if self.high_values else None

    @property
    def spread(self) -> float:
        """From the smallest round to the largest, as a part of the median."""
        if not self.values:
            return 0.0
        return (max(self.values) - min(self.values)) / median(self.values)

    @property
    def short(self) -> str | None:
        """Say in a word or two why there is no value."""
        if self.missing is not None:
            return self.missing.partition(":")[0]
        if self.problems and not self.values:
            return "lossy" if self.problems[0].startswith("lossy") else "failed"
        return None


class Results:
    """All figures, in the order in which they were first measured."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str, str], Figure] = {}

    def figure(self, case: str, name: str, storage: str) -> Figure:
        """Return the figure, a new one if there is none yet."""
        key = (case, name, storage)
        return self._figures.setdefault(key, Figure(case, name, storage))

    def value(self, case: str, name: str, storage: str) -> float | None:
        """Return the median, or None if nothing counts."""
        found = self._figures.get((case, name, storage))
        return None if found is None else found.value

    def of(self, *cases: str) -> list[Figure]:
        """Return the figures of some cases."""
        return [figure for figure in self if figure.case in cases]

    def by_way(self, *cases: str) -> dict[tuple[str, str], dict[str, Figure]]:
        """Return the figures of some cases: for each way, by case."""
        ways: dict[tuple[str, str], dict[str, Figure]] = defaultdict(dict)
        for figure in self.of(*cases):
            ways[figure.name, figure.storage][figure.case] = figure
        return dict(ways)

    def spread(self) -> float | None:
        """Return by how much the rounds of a figure differ, in the middle of all figures."""
        spreads = [figure.spread for figure in self if len(figure.values) > 1]
        return median(spreads) if spreads else None

    def remarks(self) -> list[str]:
        """Say what is missing and what went wrong, each once."""
        said: dict[str, list[str]] = defaultdict(list)
        for figure in self:
            for text in dict.fromkeys([figure.missing or "", *figure.problems]):
                if text:
                    said[f"{figure.name} ({figure.storage}): {text}"].append(figure.case)
        return [f"{text} [{'; '.join(cases)}]" for text, cases in said.items()]

    def plain(self) -> list[dict[str, Any]]:
        """Return everything in a form for JSON."""
        return [asdict(figure) | {"value": figure.value} for figure in self]

    def __iter__(self) -> Iterator[Figure]:
        return iter(self._figures.values())
