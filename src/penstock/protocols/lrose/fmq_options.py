"""What can be asked of a remote queue in its URL?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.core.options import Duration, Options, Size
from penstock.queue.classic.options import Compression
from penstock.queue.options import Creation, Patience

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CANNOT_CARRY", "READER_OPTIONS", "WRITER_OPTIONS", "FmqOptions"]

#: What the protocol has no place for.
CANNOT_CARRY: Final[Mapping[str, str]] = {
    "time_ns": "kept to the second by a server of ours, else the server's own",
    "stream": "dropped",
    "attributes": "dropped",
}

#: Options that say nothing to a writer, and nothing to a reader.
READER_OPTIONS: Final = frozenset({"type", "filter", "damaged", "poll"})
WRITER_OPTIONS: Final = frozenset(
    {"slots", "size", "compress", "create", "blocking", "doubt", "batch"}
)


def _compression(value: object) -> object:
    """Accept LROSE's on and off: on means gzip there (spec lrose 1.13)."""
    return {"true": "gzip", "on": "gzip", "false": "off"}.get(str(value), value)


class FmqOptions(Options):
    """Options of `fmqp://host:port/path`."""

    #: How long a broken connection is tried again before it is an error.
    retry: Duration = 30.0
    #: How long a connection may take, and a reply.
    timeout: Annotated[Duration, Field(gt=0)] = 30.0
    #: The largest reply that is taken, and the largest message.
    max_message: Annotated[Size, Field(ge=1024, le=(1 << 31) - 1)] = 64 << 20
    #: Wait for the server and the queue to appear: `true`, or for how long.
    wait: Patience = 0.0

    #: Reader: deliver only messages of this type.
    type: int | None = None
    #: Reader: who leaves out the others. Only here can they be told from those that are lost.
    filter: Literal["here", "server"] = "here"
    #: Reader: raise an error at a damaged message, or count it as lost and go on.
    damaged: Literal["fail", "skip"] = "fail"
    #: Reader: the longest pause between two questions to a server that cannot wait.
    poll: Annotated[Duration, Field(ge=0.001, le=60)] = 0.5

    #: Writer: slots and bytes of a queue that is created.
    slots: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    size: Annotated[Size, Field(ge=12, le=(1 << 31) - 1)] = 10 << 20
    #: Writer: compress before sending.
    compress: Annotated[Compression, BeforeValidator(_compression)] = Compression.OFF
    create: Creation = Creation.MISSING
    #: Writer: let the server wait for its reader instead of overwriting.
    blocking: bool = False
    #: Writer: when the answer to a write got lost, raise an error, or write again: maybe twice.
    doubt: Literal["raise", "again"] = "raise"
    #: Writer: messages of `write_many` and `write_batch` in one request, at most.
    batch: Annotated[int, Field(ge=1, le=100_000)] = 500
