"""What can be asked of a classic queue in its URL?"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.core.options import Duration, Options, Size
from penstock.queue.classic.compression import Method
from penstock.queue.classic.layout import FRAME_EXTRA, MAX_BUFFER, MAX_SLOTS
from penstock.queue.options import Creation, Patience

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CANNOT_CARRY", "READER_OPTIONS", "ClassicOptions", "Compression"]

#: What the format has no place for.
CANNOT_CARRY: Final[Mapping[str, str]] = {
    "time_ns": "kept to the second",
    "stream": "dropped",
    "attributes": "dropped",
}

#: Options that say nothing to a writer.
READER_OPTIONS: Final = frozenset({"type", "resume", "damaged", "trace"})


class Compression(StrEnum):
    """How payloads are stored."""

    #: As they are.
    OFF = "off"
    #: As they are, behind LROSE's compression header: its method NONE.
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


def _compression(value: object) -> object:
    """Accept LROSE's on and off: on means gzip there (spec lrose 1.13)."""
    return {"true": "gzip", "on": "gzip", "false": "off"}.get(str(value), value)


class ClassicOptions(Options):
    """Options of `fmq:…?layout=classic`."""

    layout: Literal["classic"] | None = None
    #: Slots of a queue that is created: messages that it holds at most.
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = 1000
    #: Bytes of its buffer.
    size: Annotated[Size, Field(ge=FRAME_EXTRA, le=MAX_BUFFER)] = 10 << 20
    compress: Annotated[Compression, BeforeValidator(_compression)] = Compression.OFF
    create: Creation = Creation.MISSING
    #: Wait for the queue to appear: `true`, or for how long.
    wait: Patience = 0.0
    #: Writer: wait for the (one) reader instead of overwriting.
    blocking: bool = False
    #: Writer: how long to wait for that reader; without it, for ever.
    timeout: Duration | None = None
    #: Writer: how long to wait for another writer.
    lock_timeout: Duration = 30.0
    #: Reader: deliver only messages of this type.
    type: int | None = None
    #: Reader: where to go on after being overrun. LROSE takes the newest.
    resume: Literal["oldest", "newest"] = "oldest"
    #: Reader: raise an error at a damaged message, or count it as lost and go on.
    damaged: Literal["fail", "skip"] = "fail"
    #: Reader: leave marks in the files: who reads, how far, who sleeps. `false`: none at all.
    trace: bool = True
