"""What is in a message of the queue of latest_data_info?

The old struct, if the ASCII form is on, and the XML, if that is on (spec lrose 3.4).
"""

from __future__ import annotations

import struct
from typing import Final

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.ldata_info import LatestInfo
from penstock.protocols.lrose.ldata_xml import ROOT, decode_xml, encode_xml

__all__ = ["decode_body", "encode_body", "xml_in_body"]

_WHAT: Final = "latest_data_info message"
#: latest_time, n_fcasts, file_ext, user_info1, user_info2.
_STRUCT: Final = struct.Struct(">Ii64s64s64s")
_LEAD: Final = struct.Struct(">i")
_LONGEST_TEXT: Final = 63


def encode_body(
    info: LatestInfo, directory: str = "", *, ascii_on: bool = True, xml_on: bool = True
) -> bytes:
    """Return the message; `directory` is what an unknown kind of data is guessed from.

    :raises InvalidOption: both forms are off.
    """
    if not ascii_on and not xml_on:
        raise InvalidOption("use_xml", False, "the queue carries the ASCII or the XML form")
    body = b""
    if ascii_on:
        texts = (info.file_ext, info.user_info1, info.user_info2)
        # The time has 32 bits here; the XML has all of it.
        body = _STRUCT.pack(
            info.latest_time & 0xFFFFFFFF,
            int(info.is_forecast),
            *(text.encode(errors="surrogateescape")[:_LONGEST_TEXT] for text in texts),
        )
        if info.is_forecast:
            body += _LEAD.pack(info.forecast_lead_secs)
    if xml_on:
        body += encode_xml(info, directory) + b"\0"
    return body


def xml_in_body(body: bytes) -> bytes | None:
    """Return the XML in a message, without its NUL; None: it has only the struct."""
    for at in (0, _STRUCT.size, _STRUCT.size + _LEAD.size):
        if body.startswith(ROOT, at):
            return body[at:].partition(b"\0")[0]
    return None


def decode_body(body: bytes) -> LatestInfo:
    """Read a message: the XML if there is any, or else the struct.

    :raises Malformed: it is neither.
    """
    xml = xml_in_body(body)
    if xml is not None:
        return decode_xml(xml)
    if len(body) < _STRUCT.size:
        raise Malformed(_WHAT, "size", f"at least {_STRUCT.size} bytes", len(body))
    latest, forecasts, *texts = _STRUCT.unpack_from(body)
    ext, first, second = (
        text.partition(b"\0")[0].decode(errors="surrogateescape") for text in texts
    )
    lead = 0
    if forecasts:
        if len(body) < _STRUCT.size + _LEAD.size:
            raise Malformed(_WHAT, "size", f"{_STRUCT.size + _LEAD.size} bytes", len(body))
        (lead,) = _LEAD.unpack_from(body, _STRUCT.size)
    # LROSE reads it as signed, which ends in 2038; what is below 0 was never meant.
    return LatestInfo.checked(
        latest_time=latest,
        max_time=latest,
        file_ext=ext,
        user_info1=first,
        user_info2=second,
        is_forecast=bool(forecasts),
        forecast_lead_secs=lead,
    )
