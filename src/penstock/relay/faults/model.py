"""Which faults are there, and how are they written?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import InvalidOption
from penstock.core.units import format_duration, format_size, parse_duration

__all__ = ["NO_FAULTS", "Cut", "Direction", "Faults", "parse_delay", "parse_share"]

#: `up` is from a client to the target, `down` is from the target to a client.
Direction = Literal["up", "down"]
#: How a connection is cut: `rst` by a reset, `fin` by an orderly close.
Cut = Literal["rst", "fin"]

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,15})?|\.[0-9]{1,15})\s*(%?)")
_SHARES = ("drop", "duplicate", "reorder", "garble", "refuse")
_PERCENT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a router; by default none.

    Shares are from 0 to 1 and times are in seconds. For UDP, a share is of datagrams. For TCP, it
    is of the stream's kilobytes, by their offset, so that the segmentation of the network makes no
    difference.
    """

    #: Share that is dropped.
    drop: float = 0.0
    #: Share that is forwarded twice. UDP.
    duplicate: float = 0.0
    #: Share that is overtaken by one to three later datagrams. UDP.
    reorder: float = 0.0
    #: Share in which one byte is changed.
    garble: float = 0.0
    #: Delay of everything.
    delay: float = 0.0
    #: The delay varies uniformly by plus or minus this. It may reorder UDP datagrams.
    jitter: float = 0.0
    #: Bytes per second for each client and direction.
    rate: int | None = None
    #: The faults apply to this direction only.
    one_way: Direction | None = None
    #: A client's connection is cut when it is this old; for UDP, its port at the target changes.
    cut_every: float | None = None
    #: A connection is cut after this many bytes in one direction. TCP.
    cut_after: int | None = None
    #: How connections are cut. TCP.
    cut: Cut = "rst"
    #: Connections stay open, but nothing is forwarded: from the first byte, or, with `cut_every` or
    #: `cut_after`, from where they would have been cut. TCP.
    half_open: bool = False
    #: Share of connections that are reset as soon as they are made; at 1 they are refused. TCP.
    refuse: float = 0.0

    def __post_init__(self) -> None:
        for name in _SHARES:
            share = getattr(self, name)
            if not 0 <= share <= 1:  # written so that NaN is refused too
                raise InvalidOption(name, share, "must be from 0 to 1 (or 0% to 100%)")
        for name in ("delay", "jitter"):
            parse_duration(getattr(self, name))
        if self.jitter > self.delay:
            raise InvalidOption(
                "jitter",
                self.jitter,
                f"cannot be more than the delay of {format_duration(self.delay)}",
                hint="nothing arrives before it was sent",
            )
        for name in ("rate", "cut_every", "cut_after"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidOption(name, value, "must be above 0")
        if self.one_way not in (None, "up", "down"):
            raise InvalidOption("one_way", self.one_way, "must be up or down")
        if self.cut not in ("rst", "fin"):
            raise InvalidOption("cut", self.cut, "must be rst or fin")

    def affects(self, direction: Direction) -> bool:
        """Tell whether the faults apply to this direction."""
        return self.one_way is None or self.one_way == direction

    @property
    def is_silent_from_the_start(self) -> bool:
        """Whether connections are half open from their first byte."""
        return self.half_open and self.cut_every is None and self.cut_after is None

    def refuse_for(self, transport: Literal["udp", "tcp"]) -> None:
        """Check that the transport supports these faults.

        :raises InvalidOption: it does not.
        """
        names, reason, hint = (
            (
                ("duplicate", "reorder"),
                "TCP repairs it before anybody sees it",
                "drop, garble, delay, cut and half_open are faults of TCP",
            )
            if transport == "tcp"
            else (
                ("cut_after", "half_open", "refuse"),
                "UDP has no connections",
                "a drop of 1 (100%) lets nothing pass; one_way says in which direction",
            )
        )
        for name in names:
            if value := getattr(self, name):
                raise InvalidOption(name, value, reason, hint=hint)

    def __str__(self) -> str:
        return ", ".join(self._words()) or "no faults"

    def _words(self) -> list[str]:
        words = [
            f"{name} {getattr(self, name) * _PERCENT:g}%" for name in _SHARES if getattr(self, name)
        ]
        if self.delay:
            spread = f" ± {format_duration(self.jitter)}" if self.jitter else ""
            words.append(f"delay {format_duration(self.delay)}{spread}")
        if self.rate is not None:
            words.append(f"at most {format_size(self.rate)}/s")
        if self.half_open:
            words.append("half open")
        if self.cut_every is not None:
            words.append(f"cut every {format_duration(self.cut_every)}")
        if self.cut_after is not None:
            words.append(f"cut after {self.cut_after:,} bytes")
        if self.one_way is not None and words:
            words.append(f"on the way {self.one_way} only")
        return words


#: No faults: everything is forwarded.
NO_FAULTS = Faults()


def parse_share(text: str) -> float:
    """Return the share meant by `5%`, `0.5 %` or `0.05`.

    :raises InvalidOption: it is not a share of 0 to 1
    """
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        raise InvalidOption("share", text, "expected a share such as 5% or 0.05")
    share = float(match[1]) / (_PERCENT if match[2] else 1)
    if share > 1:
        hint = None if match[2] else f"write {text.strip()}% for percent"
        raise InvalidOption("share", text, "must be from 0% to 100%", hint=hint)
    return share


def parse_delay(text: str) -> tuple[float, float]:
    """Return delay and jitter in seconds, as meant by `10ms`, `10ms±5ms` or `10ms+-5ms`.

    :raises InvalidOption: one of them is not a duration
    """
    delay, spread, jitter = text.replace("+-", "±").partition("±")
    try:
        return parse_duration(delay), parse_duration(jitter) if spread else 0.0
    except InvalidOption as error:
        raise InvalidOption("delay", text, "expected a delay such as 10ms or 10ms±5ms") from error
