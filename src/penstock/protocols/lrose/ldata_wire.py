"""What do a client and DsLdataServer send to each other?

Requests and replies about one directory's latest_data_info, as `DsMessage`s
(docs/specs/lrose.md 3.6). The arguments travel as XML beside the entry itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Self

from penstock.core.errors import Malformed
from penstock.protocols.lrose.ds_message import Category, CommonPart, DsMessage, Part, text_part
from penstock.protocols.lrose.ldata_format import decode_xml, encode_xml, find_number, find_text

if TYPE_CHECKING:
    from penstock.protocols.lrose.ldata_format import LatestInfo

__all__ = ["DEFAULT_PORT", "MESSAGE_TYPE", "Arguments", "LdataMessage", "LdataPart", "Mode"]

_WHAT: Final = "DsLdata message"

#: `type` of all messages, and the id of a request's frame; a reply's has `Mode.REPLY`.
MESSAGE_TYPE: Final = 717000
DEFAULT_PORT: Final = 5447
#: The age that LROSE's server uses, since it ignores the requested one.
_AGE_OF_LROSE: Final = 3600
_LARGEST_ARGUMENTS: Final = 1 << 16


class Mode(IntEnum):
    """Kinds of requests, and the reply."""

    OPEN = 717100
    SET_DISPLACED_DIR_PATH = 717110
    SET_LDATA_FILE_NAME = 717120
    SET_USE_XML = 717130
    SET_USE_ASCII = 717140
    SET_SAVE_LATEST_READ_INFO = 717150
    SET_USE_FMQ = 717160
    SET_FMQ_NSLOTS = 717170
    SET_READ_FMQ_FROM_START = 717180
    READ = 717200
    WRITE = 717220
    CLOSE = 717230
    REPLY = 717240


class LdataPart(IntEnum):
    """Parts of these messages, beside URL and ERR_STRING."""

    ARGS_XML = 717500
    INFO_XML = 717510


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a request. Names are those of the XML."""

    displacedDirPath: str = ""  # noqa: N815 - the names on the wire, here and below
    ldataFileName: str = "latest_data_info"  # noqa: N815
    useXml: bool = True  # noqa: N815
    useAscii: bool = True  # noqa: N815
    saveLatestReadInfo: bool = False  # noqa: N815
    latestReadInfoLabel: str = ""  # noqa: N815
    useFmq: bool = True  # noqa: N815
    fmqNSlots: int = 2500  # noqa: N815
    readFmqFromStart: bool = False  # noqa: N815
    #: Seconds; below 0: no limit.
    maxValidAge: int = _AGE_OF_LROSE  # noqa: N815
    readForced: bool = False  # noqa: N815
    writeFmqOnly: bool = False  # noqa: N815

    def to_xml(self, mode: Mode) -> bytes:
        """Encode the XML for a request or a reply."""
        name, tags = _SAID[mode]
        lines = [f'<DsLdataMsg mode="{name}">\n']
        for tag in tags:
            value = getattr(self, tag)
            shown = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"  <{tag}>{shown}</{tag}>\n")
        lines.append("</DsLdataMsg>\n")
        return "".join(lines).encode(errors="surrogateescape")

    @classmethod
    def from_xml(cls, text: bytes) -> Self:
        """Decode the XML; missing or invalid values get their default.

        :raises Malformed: it is too large.
        """
        if len(text) > _LARGEST_ARGUMENTS:
            raise Malformed(_WHAT, "args XML", f"at most {_LARGEST_ARGUMENTS} bytes", len(text))
        found: dict[str, str | int | bool] = {}
        for tag, kind in _KINDS.items():
            value = find_text(text, tag)
            number = find_number(text, tag)
            if kind == "int" and number is not None:
                found[tag] = number
            elif kind == "bool" and value is not None and value.strip().lower() in _BOOLEANS:
                found[tag] = _BOOLEANS[value.strip().lower()]
            elif kind == "str" and value is not None:
                found[tag] = value
        return cls(**found)  # type: ignore[arg-type]


_KINDS: Final = {name: str(kind) for name, kind in Arguments.__annotations__.items()}
_BOOLEANS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

#: Name of each request in the XML, and its arguments.
_SAID: Final[dict[Mode, tuple[str, tuple[str, ...]]]] = {
    Mode.OPEN: ("open", tuple(_KINDS)[:9]),
    # LROSE leaves these two without a name and without their argument.
    Mode.SET_DISPLACED_DIR_PATH: ("setDisplacedDirPath", ("displacedDirPath",)),
    Mode.SET_SAVE_LATEST_READ_INFO: (
        "setSaveLatestReadInfo",
        ("saveLatestReadInfo", "latestReadInfoLabel", "maxValidAge"),
    ),
    Mode.SET_LDATA_FILE_NAME: ("setLdataFileName", ("ldataFileName",)),
    Mode.SET_USE_XML: ("setUseXml", ("useXml",)),
    Mode.SET_USE_ASCII: ("setUseAscii", ("useAscii",)),
    Mode.SET_USE_FMQ: ("setUseFmq", ("useFmq",)),
    Mode.SET_FMQ_NSLOTS: ("setFmqNSlots", ("fmqNSlots",)),
    Mode.SET_READ_FMQ_FROM_START: ("setReadFmqFromStart", ("readFmqFromStart",)),
    Mode.READ: ("read", ("maxValidAge", "readForced")),
    Mode.WRITE: ("write", ("writeFmqOnly",)),
    Mode.CLOSE: ("close", ()),
    Mode.REPLY: ("reply", ()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LdataMessage:
    """One request or reply."""

    mode: Mode
    arguments: Arguments = field(default_factory=Arguments)
    #: The directory, in a request to open it.
    url: str | None = None
    #: The entry to write, or the one read; None: nothing new.
    info: LatestInfo | None = None
    #: Why the request failed; its presence marks the failure.
    error: str | None = None

    def to_message(self) -> DsMessage:
        """Encode it as a `DsMessage`."""
        parts = [Part(LdataPart.ARGS_XML, self.arguments.to_xml(self.mode) + b"\0")]
        if self.url is not None:
            parts.insert(0, text_part(CommonPart.URL, self.url))
        if self.info is not None:
            parts.append(Part(LdataPart.INFO_XML, encode_xml(self.info) + b"\0"))
        if self.error is not None:
            parts.append(text_part(CommonPart.ERR_STRING, self.error))
        category = Category.START_GET if self.mode is Mode.OPEN else Category.GENERIC
        return DsMessage(MESSAGE_TYPE, 0, self.mode, category=category, parts=tuple(parts))

    @classmethod
    def from_message(cls, message: DsMessage) -> Self:
        """Decode a message.

        :raises Malformed: it is not such a message, or its entry is not valid.
        """
        if message.type != MESSAGE_TYPE:
            raise Malformed(_WHAT, "type", MESSAGE_TYPE, message.type)
        try:
            mode = Mode(message.mode)
        except ValueError:
            raise Malformed(_WHAT, "mode", "one of DsLdata's", message.mode) from None
        url, arguments, info = (
            message.part(type) for type in (CommonPart.URL, LdataPart.ARGS_XML, LdataPart.INFO_XML)
        )
        return cls(
            mode=mode,
            arguments=Arguments() if arguments is None else Arguments.from_xml(arguments.data),
            url=None if url is None else url.text,
            info=None if info is None else decode_xml(info.data),
            error=message.error_text,
        )
