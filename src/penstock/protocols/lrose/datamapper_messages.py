"""What do the DataMapper and its clients say to each other?

One request and one reply for each connection (spec lrose 4).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from penstock.core.errors import Malformed
from penstock.protocols.lrose.datamapper_info import DataSetInfo
from penstock.protocols.lrose.ds_message import DsMessage, Part, text_part

__all__ = ["DATAMAPPER_TYPE", "MapReply", "MapRequest", "ReplyKind", "RequestKind"]

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
    #: The hosts that a request still has to pass, with colons between.
    RELAY_HOST = 3818402


#: Requests that may go on to another host.
_QUESTIONS: Final = frozenset({RequestKind.REQ_SELECTED, RequestKind.REQ_ALL})


class MapRequest(NamedTuple):
    """Something that a client wants."""

    kind: RequestKind
    #: One, but for `REQ_ALL`, which has none, and `REG_FULL`, which has any number.
    infos: tuple[DataSetInfo, ...] = ()
    #: Where it has to go from there, in order; the last one answers.
    relay: tuple[str, ...] = ()

    def to_message(self) -> DsMessage:
        """Return it for a `DsMessage`.

        :raises InvalidOption: an entry does not fit into its record.
        """
        parts = _info_parts(self.infos)
        if self.relay:
            parts += (text_part(_PartType.RELAY_HOST, ":".join(self.relay)),)
        return DsMessage(DATAMAPPER_TYPE, self.kind, parts=parts)

    @classmethod
    def from_message(cls, message: DsMessage) -> MapRequest:
        """Take a request apart.

        :raises Malformed: it is none, or has not the parts that it needs.
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
        # What a question for everything carries besides is not looked at.
        wanted = [] if kind is RequestKind.REQ_ALL else infos
        return cls(kind, tuple(DataSetInfo.read(part.data) for part in wanted), relay)


class MapReply(NamedTuple):
    """What the server says to a request."""

    kind: ReplyKind
    infos: tuple[DataSetInfo, ...] = ()
    #: What went wrong, or None.
    error: str | None = None

    def to_message(self) -> DsMessage:
        """Return it for a `DsMessage`.

        :raises InvalidOption: an entry does not fit into its record.
        """
        flags, parts = _OK, _info_parts(self.infos)
        if self.error is not None:
            flags = _ERROR
            parts = (text_part(_PartType.ERROR_STRING, self.error), *parts)
        return DsMessage(DATAMAPPER_TYPE, self.kind, flags=flags, parts=parts)

    @classmethod
    def from_message(cls, message: DsMessage) -> MapReply:
        """Take a reply apart.

        :raises Malformed: it is none.
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
        infos = tuple(DataSetInfo.read(part.data) for part in message.parts_of(_PartType.INFO))
        return cls(kind, infos, error)


def _info_parts(infos: tuple[DataSetInfo, ...]) -> tuple[Part, ...]:
    return tuple(Part(_PartType.INFO, info.write()) for info in infos)


def _check_type(message: DsMessage, what: str) -> None:
    if message.type != DATAMAPPER_TYPE:
        raise Malformed(what, "type", DATAMAPPER_TYPE, message.type)
