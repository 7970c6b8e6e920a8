"""Which options has a classic queue in its URL?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from penstock.core.units import parse_duration, parse_patience
from penstock.queue.classic.compression import Method
from penstock.queue.classic.layout import FRAME_EXTRA, MAX_BUFFER, MAX_SLOTS
from penstock.queue.options import Creation, QueueOptions, byte_size, choice, flag, option, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CANNOT_CARRY", "READER_OPTIONS", "ClassicOptions", "Compression"]

#: Message fields that the format cannot store.
CANNOT_CARRY: Final[Mapping[str, str]] = {
    "time_ns": "kept to the second",
    "stream": "dropped",
    "attributes": "dropped",
}

#: Options for readers only.
READER_OPTIONS: Final = frozenset({"type", "resume", "damaged", "trace"})


class Compression(StrEnum):
    """How payloads are stored."""

    #: Uncompressed.
    OFF = "off"
    #: Uncompressed, after LROSE's compression header: its method NONE.
    NONE = "none"
    GZIP = "gzip"
    BZIP2 = "bzip2"

    @property
    def method(self) -> Method | None:
        """The method of LROSE's compression buffers, or None for plain payloads."""
        return _METHODS.get(self)


_METHODS = {
    Compression.NONE: Method.NONE,
    Compression.GZIP: Method.GZIP,
    Compression.BZIP2: Method.BZIP,
}


_one_compression = choice(*Compression)


def _compression(value: str) -> str:
    """Accept LROSE's on and off: on means gzip there (docs/specs/lrose.md 1.13)."""
    return _one_compression({"true": "gzip", "on": "gzip", "false": "off"}.get(value, value))


@dataclass(frozen=True, kw_only=True)
class ClassicOptions(QueueOptions):
    """Options of `fmq:…?layout=classic`."""

    layout: Literal["classic"] | None = option(choice("classic"), None)
    #: Creating: slots, the most messages it holds.
    slots: int = option(whole(1, MAX_SLOTS), 1000)
    #: Creating: bytes of the buffer.
    size: int = option(byte_size(FRAME_EXTRA, MAX_BUFFER), 10 << 20)
    compress: Compression = option(_compression, Compression.OFF)
    create: Creation = option(choice(*Creation), Creation.MISSING)
    #: Wait for the queue to appear: `true`, or a duration.
    wait: float = option(parse_patience, 0.0)
    #: Writer: wait for the (one) reader instead of overwriting.
    blocking: bool = option(flag, default=False)
    #: Writer: how long to wait for that reader; default: forever.
    timeout: float | None = option(parse_duration, None)
    #: Writer: how long to wait for another writer.
    lock_timeout: float = option(parse_duration, 30.0)
    #: Reader: deliver only messages of this type.
    type: int | None = option(whole(), None)
    #: Reader: where to resume after an overrun. LROSE resumes at the newest.
    resume: Literal["oldest", "newest"] = option(choice("oldest", "newest"), "oldest")
    #: Reader: raise an error at a damaged message, or count it as lost and skip it.
    damaged: Literal["fail", "skip"] = option(choice("fail", "skip"), "fail")
    #: Reader: report its position to a blocking writer; `false`: write nothing.
    trace: bool = option(flag, default=True)
