"""What does a stream hold now?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["StreamInfo"]


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A look at a stream: its shape, what is in it, how full it is."""

    url: str
    #: `classic`, `wide`, …
    layout: str
    #: Where the bytes are: `files`, `shared memory`, …
    storage: str
    slots: int
    buffer_size: int
    #: None when the stream is empty.
    oldest_seq: int | None
    youngest_seq: int | None
    count: int
    #: Bytes that the messages occupy, framing included.
    bytes: int
    #: The range of the times at which they were appended.
    oldest_time_ns: int | None
    youngest_time_ns: int | None
    #: The fuller of slots and buffer, 0 to 1.
    fill: float
    #: True when the writer waits for its reader.
    blocking: bool
    #: What only this kind of stream has.
    details: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)
