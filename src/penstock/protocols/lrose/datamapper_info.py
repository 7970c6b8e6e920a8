"""What is one entry of LROSE's DataMapper, in its 864 bytes?"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed

__all__ = ["INFO_SIZE", "NO_LEAD", "DataSetInfo"]

#: The numbers at the start: big-endian, as is everything that is swapped (spec lrose 4).
_NUMBERS: Final = struct.Struct(">4i2f2i")
_INT32: Final = range(-(2**31), 2**31)

#: No forecast.
NO_LEAD: Final = -1

INFO_SIZE: Final = 864


class _Text(NamedTuple):
    """A field of characters, ended by a NUL within it."""

    name: str
    offset: int
    size: int


_TEXTS: Final = (
    _Text("hostname", 128, 128),
    _Text("ipaddr", 256, 64),
    _Text("datatype", 320, 32),
    _Text("dir", 352, 256),
    _Text("status", 608, 128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetInfo:
    """One data set, as the DataMapper knows it. The fields have the names that LROSE gives them.

    Times are seconds since 1970, 0 when unknown. Text that is not UTF-8 is kept as `os.fsdecode`
    would give it.
    """

    #: The first and the last time of the data in store.
    start_time: int = 0
    end_time: int = 0
    #: The time of the latest data.
    latest_time: int = 0
    #: When somebody last registered it.
    last_reg_time: int = 0
    #: Floats on the wire: large counts are rounded there.
    nfiles: float = 0.0
    total_bytes: float = 0.0
    #: Seconds from the forecast's base time; `NO_LEAD` for what is no forecast.
    forecast_lead_time: int = 0
    #: When the server answered; 0 in what it keeps.
    check_time: int = 0
    hostname: str = ""
    ipaddr: str = ""
    datatype: str = ""
    dir: str = ""
    status: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it an entry of its own."""
        return self.datatype, self.dir, self.hostname

    @property
    def sort_key(self) -> bytes:
        """What listings are sorted by: the bytes of LROSE's key."""
        return ",".join(self.key).encode(errors="surrogateescape")

    def write(self) -> bytes:
        """Return its 864 bytes.

        :raises InvalidOption: a text is too long or has a NUL, or a number does not fit.
        """
        record = bytearray(INFO_SIZE)
        numbers = (
            self.start_time,
            self.end_time,
            self.latest_time,
            self.last_reg_time,
            self.nfiles,
            self.total_bytes,
            self.forecast_lead_time,
            self.check_time,
        )
        try:
            _NUMBERS.pack_into(record, 0, *numbers)
        except (struct.error, OverflowError):
            raise self._misfit() from None
        for text in _TEXTS:
            value: str = getattr(self, text.name)
            encoded = value.encode(errors="surrogateescape")
            if len(encoded) >= text.size or b"\0" in encoded:
                raise InvalidOption(
                    text.name, value, f"must be below {text.size} bytes, without a NUL"
                )
            record[text.offset : text.offset + len(encoded)] = encoded
        return bytes(record)

    def _misfit(self) -> InvalidOption:
        for name in ("start_time", "end_time", "latest_time", "last_reg_time",
                     "forecast_lead_time", "check_time"):  # fmt: skip
            if (value := getattr(self, name)) not in _INT32:
                return InvalidOption(name, value, "must fit in 32 bits")
        return InvalidOption(
            "nfiles, total_bytes", (self.nfiles, self.total_bytes), "must fit in 32-bit floats"
        )

    @classmethod
    def read(cls, record: bytes | bytearray | memoryview, what: str = "INFO part") -> DataSetInfo:
        """Take 864 bytes apart. The spare bytes, and what follows a NUL in a text, are not kept.

        :raises Malformed: it has another size, a text without an end, or a number that is none.
        """
        record = bytes(record)
        if len(record) != INFO_SIZE:
            raise Malformed(what, "size in bytes", INFO_SIZE, len(record))
        start, end, latest, last_reg, nfiles, total_bytes, lead, check = _NUMBERS.unpack_from(
            record
        )
        for name, number in (("nfiles", nfiles), ("total_bytes", total_bytes)):
            if not math.isfinite(number):
                raise Malformed(what, name, "a number", number)
        hostname, ipaddr, datatype, directory, status = (
            _read_text(record, text, what) for text in _TEXTS
        )
        return cls(
            start_time=start,
            end_time=end,
            latest_time=latest,
            last_reg_time=last_reg,
            nfiles=nfiles,
            total_bytes=total_bytes,
            forecast_lead_time=lead,
            check_time=check,
            hostname=hostname,
            ipaddr=ipaddr,
            datatype=datatype,
            dir=directory,
            status=status,
        )


def _read_text(record: bytes, text: _Text, what: str) -> str:
    end = record.find(b"\0", text.offset, text.offset + text.size)
    if end < 0:
        raise Malformed(what, text.name, f"ended by a NUL within {text.size} bytes", "none")
    return record[text.offset : end].decode(errors="surrogateescape")
