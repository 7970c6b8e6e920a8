"""Do messages come faster than a leg, or one entity behind it, may send? (spec uprotocol 10.2)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.clock import Clock

__all__ = ["Rate", "Rates"]

#: Entities of a leg that are remembered. One that is forgotten begins anew.
_MOST: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Messages a second, and as many at once; None: any number.

    :raises InvalidOption: a number is not positive.
    """

    #: Of a leg in all, and of each entity that sends by it.
    leg: float | None = None
    source: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("rate", self.leg), ("source_rate", self.source)):
            if rate is not None and not 0 < rate < float("inf"):
                raise InvalidOption(name, rate, "must be more than 0 messages a second")


class _Bucket:
    """As many messages as there is room for. It fills by itself."""

    __slots__ = ("left", "looked")

    def __init__(self, rate: float, now: float) -> None:
        self.left = max(rate, 1.0)
        self.looked = now

    def fill(self, rate: float, now: float) -> None:
        """Let it be as full as it is by now."""
        # A clock that stands still adds nothing, and one never goes back.
        self.left = min(self.left + max(now - self.looked, 0.0) * rate, max(rate, 1.0))
        self.looked = now


class Rates:
    """Counts the messages of all legs. Whoever calls has a lock for it."""

    def __init__(self, rates: Mapping[str, Rate], clock: Clock) -> None:
        self._rates = {name: rate for name, rate in rates.items() if rate != Rate()}
        self._clock = clock
        self._legs: dict[str, _Bucket] = {}
        self._sources: dict[str, OrderedDict[int, _Bucket]] = {}

    def bounds(self, leg: str) -> bool:
        """Tell whether there is a bound for what comes by a leg."""
        return leg in self._rates

    def refuses(self, leg: str, source: int) -> str | None:
        """Count one more message; say why it is one too many."""
        rate, now = self._rates[leg], self._clock.monotonic()
        own = None if rate.source is None else self._of_source(leg, source, rate.source, now)
        if own is not None and own.left < 1:
            return f"its entity sends more than {rate.source:g} messages a second"
        if rate.leg is not None:
            every = self._legs.get(leg)
            if every is None:
                every = self._legs[leg] = _Bucket(rate.leg, now)
            every.fill(rate.leg, now)
            if every.left < 1:
                return f"more than {rate.leg:g} messages a second come by the leg {leg}"
            every.left -= 1
        if own is not None:
            own.left -= 1
        return None

    def _of_source(self, leg: str, source: int, rate: float, now: float) -> _Bucket:
        buckets = self._sources.setdefault(leg, OrderedDict())
        bucket = buckets.get(source)
        if bucket is None:
            if len(buckets) >= _MOST:
                buckets.popitem(last=False)
            bucket = buckets[source] = _Bucket(rate, now)
        else:
            buckets.move_to_end(source)
        bucket.fill(rate, now)
        return bucket
