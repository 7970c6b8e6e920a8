"""What comes to an importer on the meta connection? (spec psi 2)

First the exporter's hello, then records of metadata, in bursts that each end with an intermission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.decoding import StepDecoder
from penstock.protocols.psi.handshake import LARGEST_SERVER_HELLO, ServerHello
from penstock.protocols.psi.metadata import INTERMISSION, Record, decode_record, frame_record
from penstock.protocols.psi.wire import INT32

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

__all__ = [
    "MAX_RECORD_BYTES",
    "Intermission",
    "MetaDecoder",
    "MetaEvent",
    "encode_burst",
]

#: A record of metadata that is larger is refused.
MAX_RECORD_BYTES: Final = 1 << 20

_WHAT: Final = "psi meta connection"


class Intermission(NamedTuple):
    """A burst of records is over; after the first, the data connection may be opened."""

    #: Records in the burst.
    records: int


MetaEvent: TypeAlias = ServerHello | Record | Intermission


class MetaDecoder(StepDecoder[MetaEvent]):
    """Gives the hello, then each record and each intermission.

    `hello=False`: only records, for bytes that begin behind the hello.
    """

    what = _WHAT

    def __init__(self, max_bytes: int = MAX_RECORD_BYTES, *, hello: bool = True) -> None:
        if max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "must be at least 1")
        self.max_bytes = max_bytes
        self._with_hello = hello
        super().__init__()

    def _read(self) -> Generator[int, bytes, None]:
        if self._with_hello:
            size = self._length((yield INT32.size), 1, LARGEST_SERVER_HELLO)
            self._give(ServerHello.from_bytes((yield size)))
        records = 0
        while True:
            size = self._length((yield INT32.size), 0, self.max_bytes)
            if size:
                self._give(decode_record((yield size)))
                records += 1
            else:
                self._give(Intermission(records))
                records = 0

    @staticmethod
    def _length(data: bytes, least: int, most: int) -> int:
        size: int = INT32.unpack(data)[0]
        if not least <= size <= most:
            raise Malformed(_WHAT, "length of a record", f"{least} to {most}", size)
        return size


def encode_burst(records: Iterable[Record]) -> bytes:
    """Return records as they travel, with the intermission behind them."""
    return b"".join(map(frame_record, records)) + INTERMISSION
