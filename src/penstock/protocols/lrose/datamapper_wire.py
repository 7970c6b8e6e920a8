"""What do the DataMapper and its clients send to each other, and what is an entry?

An entry has 864 bytes. One request and one reply for each connection (docs/specs/lrose.md 4).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.ds_message import DsMessage, Part, text_part

__all__ = [
    "DATAMAPPER_TYPE",
    "INFO_SIZE",
    "NO_LEAD",
    "DataSetInfo",
    "MapReply",
    "MapRequest",
    "ReplyKind",
    "RequestKind",
]

# --- entries ------------------------------------------------------------------------------------

#: The numbers at the start: big-endian, as is everything that is swapped (docs/specs/lrose.md 4).
_NUMBERS: Final = struct.Struct(">4i2f2i")
_INT32: Final = range(-(2**31), 2**31)

#: No forecast.
NO_LEAD: Final = -1

INFO_SIZE: Final = 864


class _Text(NamedTuple):
    """A fixed-size text field, terminated by a NUL."""

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
    """One entry of the DataMapper. The fields have LROSE's names.

    Times are seconds since 1970, 0 when unknown. Text that is not UTF-8 is kept as `os.fsdecode`
    would give it.
    """

    #: The first and the last time of the data in store.
    start_time: int = 0
    end_time: int = 0
    #: The time of the latest data.
    latest_time: int = 0
    #: Time of the last registration.
    last_reg_time: int = 0
    #: Floats on the wire: large counts are rounded there.
    nfiles: float = 0.0
    total_bytes: float = 0.0
    #: Seconds from the forecast's base time; `NO_LEAD` for what is no forecast.
    forecast_lead_time: int = 0
    #: Time of the server's answer; 0 in stored entries.
    check_time: int = 0
    hostname: str = ""
    ipaddr: str = ""
    datatype: str = ""
    dir: str = ""
    status: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of the entry."""
        return self.datatype, self.dir, self.hostname

    @property
    def sort_key(self) -> bytes:
        """The sort key of listings: the bytes of LROSE's key."""
        return ",".join(self.key).encode(errors="surrogateescape")

    def write(self) -> bytes:
        """Encode the entry in 864 bytes.

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
    def read(
        cls, record: bytes | bytearray | memoryview, what: str = "INFO part", *, cut: bool = False
    ) -> DataSetInfo:
        """Decode 864 bytes. Spare bytes, and those after a NUL in a text, are dropped.

        :param cut: drop the last byte of a text without a NUL, as LROSE's map does
        :raises Malformed: wrong size, a text without a NUL, or an invalid number.
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
            _read_text(record, text, what, cut=cut) for text in _TEXTS
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


def _read_text(record: bytes, text: _Text, what: str, *, cut: bool) -> str:
    end = record.find(b"\0", text.offset, text.offset + text.size)
    if end < 0 and cut:
        end = text.offset + text.size - 1
    if end < 0:
        raise Malformed(what, text.name, f"ended by a NUL within {text.size} bytes", "none")
    return record[text.offset : end].decode(errors="surrogateescape")


# --- requests and replies -----------------------------------------------------------------------

#: The type of every message, and the id of every frame.
DATAMAPPER_TYPE: Final = 3818000

#: `flags` of a reply. LROSE's own client looks for them in the sub-type, and so never sees an
#: error.
_OK: Final = 3818302
_ERROR: Final = 3818303


class RequestKind(IntEnum):
    """The sub-type of a request."""

    REG_STATUS = 3818100
    REG_LATEST_DATA = 3818200
    REG_DATA_SET = 3818201
    REQ_SELECTED = 3818202
    REQ_ALL = 3818203
    DELETE = 3818206
    REG_FULL = 3818207


class ReplyKind(IntEnum):
    """The sub-type of a reply."""

    REG_STATUS = 3818204
    WITH_INFO = 3818205


class _PartType(IntEnum):
    INFO = 3818400
    ERROR_STRING = 3818401
    #: The hosts that a request still has to pass, separated by colons.
    RELAY_HOST = 3818402


#: Requests that may be relayed to another host.
_QUESTIONS: Final = frozenset({RequestKind.REQ_SELECTED, RequestKind.REQ_ALL})


class MapRequest(NamedTuple):
    """A request of a client."""

    kind: RequestKind
    #: One, but for `REQ_ALL`, which has none, and `REG_FULL`, which has any number.
    infos: tuple[DataSetInfo, ...] = ()
    #: The hosts to relay to, in order; the last one answers.
    relay: tuple[str, ...] = ()

    def to_message(self) -> DsMessage:
        """Encode it as a `DsMessage`.

        :raises InvalidOption: an entry does not fit into its record.
        """
        parts = _info_parts(self.infos)
        if self.relay:
            parts += (text_part(_PartType.RELAY_HOST, ":".join(self.relay)),)
        return DsMessage(DATAMAPPER_TYPE, self.kind, parts=parts)

    @classmethod
    def from_message(cls, message: DsMessage) -> MapRequest:
        """Decode a request.

        :raises Malformed: it is not a request, or lacks a part.
        """
        what = "DataMapper request"
        _check_type(message, what)
        try:
            kind = RequestKind(message.sub_type)
        except ValueError:
            known = ", ".join(str(each.value) for each in RequestKind)
            raise Malformed(what, "subType", f"one of {known}", message.sub_type) from None
        infos = message.parts_of(_PartType.INFO)
        needs_one = kind not in {RequestKind.REQ_ALL, RequestKind.REG_FULL}
        if needs_one and len(infos) != 1:
            raise Malformed(what, f"INFO parts of {kind.name}", 1, len(infos))
        relay: tuple[str, ...] = ()
        if kind in _QUESTIONS and (hosts := message.part(_PartType.RELAY_HOST)) is not None:
            relay = tuple(filter(None, hosts.text.split(":")))
        # Parts of a request for all entries are ignored.
        wanted = [] if kind is RequestKind.REQ_ALL else infos
        return cls(kind, tuple(DataSetInfo.read(part.data, cut=True) for part in wanted), relay)


class MapReply(NamedTuple):
    """The reply to a request."""

    kind: ReplyKind
    infos: tuple[DataSetInfo, ...] = ()
    #: What went wrong, or None.
    error: str | None = None

    def to_message(self) -> DsMessage:
        """Encode it as a `DsMessage`.

        :raises InvalidOption: an entry does not fit into its record.
        """
        flags, parts = _OK, _info_parts(self.infos)
        if self.error is not None:
            flags = _ERROR
            parts = (text_part(_PartType.ERROR_STRING, self.error), *parts)
        return DsMessage(DATAMAPPER_TYPE, self.kind, flags=flags, parts=parts)

    @classmethod
    def from_message(cls, message: DsMessage) -> MapReply:
        """Decode a reply.

        :raises Malformed: it is not a reply.
        """
        what = "DataMapper reply"
        _check_type(message, what)
        try:
            kind = ReplyKind(message.sub_type)
        except ValueError:
            known = " or ".join(str(each.value) for each in ReplyKind)
            raise Malformed(what, "subType", known, message.sub_type) from None
        error = None
        if message.flags == _ERROR:
            text = message.part(_PartType.ERROR_STRING)
            error = "it does not say why" if text is None else text.text
        elif message.flags != _OK:
            raise Malformed(what, "flags", f"{_OK} or {_ERROR}", message.flags)
        parts = message.parts_of(_PartType.INFO)
        infos = tuple(DataSetInfo.read(part.data, cut=True) for part in parts)
        return cls(kind, infos, error)


def _info_parts(infos: tuple[DataSetInfo, ...]) -> tuple[Part, ...]:
    return tuple(Part(_PartType.INFO, info.write()) for info in infos)


def _check_type(message: DsMessage, what: str) -> None:
    if message.type != DATAMAPPER_TYPE:
        raise Malformed(what, "type", DATAMAPPER_TYPE, message.type)
