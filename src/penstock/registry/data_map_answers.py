"""What does a data map say to a request of LROSE's?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import Malformed, PenstockError
from penstock.protocols.lrose.datamapper_messages import (
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)

if TYPE_CHECKING:
    from penstock.protocols.lrose.ds_message import DsMessage
    from penstock.registry.data_map import DataMap

__all__ = ["MapAnswers", "MapStatistics", "refusal"]

_NS_PER_SECOND: Final = 1_000_000_000
_LATEST_SECOND: Final = 2**31 - 1
#: An error is told in so many characters at most.
_LONGEST_ERROR: Final = 1000


class MapStatistics(NamedTuple):
    """Books of a map. Every request was answered in one of these ways."""

    #: Requests that came.
    requests: int
    #: Those that registered something.
    registered: int
    #: Those that asked to delete something.
    deleted: int
    #: Those that asked for entries, and got them from this map.
    asked: int
    #: Those that asked for the entries of another host, and got them.
    relayed: int
    #: Those that got an error: not understood, no room, not allowed, the other host is away.
    refused: int


def refusal(error: PenstockError) -> DsMessage:
    """Return the reply that tells an error."""
    text = str(error) if error.hint is None else f"{error} ({error.hint})"
    return MapReply(ReplyKind.REG_STATUS, error=text[:_LONGEST_ERROR]).to_message()


class MapAnswers:
    """Answers requests from one map, and counts them. For one thread at a time."""

    def __init__(self, data_map: DataMap, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.map = data_map
        self._clock = clock
        self._counts = dict.fromkeys(MapStatistics._fields, 0)

    def statistics(self) -> MapStatistics:
        return MapStatistics(**self._counts)

    def count(self, what: str) -> None:
        """Count a request, and how it was answered: a field of the statistics."""
        self._counts["requests"] += 1
        self._counts[what] += 1

    def reply_to(self, message: DsMessage) -> DsMessage:
        """Answer one message from this map; what is wrong with it is told to the client."""
        try:
            request = MapRequest.from_message(message)
        except Malformed as fault:
            return self.refuse(fault)
        return self.reply_to_request(request)

    def reply_to_request(self, request: MapRequest) -> DsMessage:
        """Answer one request from this map, wherever it wants to go; tell the client of errors."""
        try:
            reply = self._answer(request).to_message()
        except PenstockError as error:
            return self.refuse(error)
        self.count(_COUNTED.get(request.kind, "registered"))
        return reply

    def refuse(self, error: PenstockError) -> DsMessage:
        """Return the reply that tells an error, and count it."""
        self.count("refused")
        return refusal(error)

    def _answer(self, request: MapRequest) -> MapReply:
        map_, kind = self.map, request.kind
        if kind is RequestKind.REQ_ALL:
            return self._with_entries("", "")
        if kind is RequestKind.REG_FULL:
            map_.register_full(request.infos)
            return MapReply(ReplyKind.REG_STATUS)
        (info,) = request.infos
        if kind is RequestKind.REQ_SELECTED:
            return self._with_entries(info.datatype, info.dir)
        if kind is RequestKind.REG_LATEST_DATA:
            map_.register_latest(info)
        elif kind is RequestKind.REG_STATUS:
            map_.register_status(info)
        elif kind is RequestKind.REG_DATA_SET:
            map_.register_data_set(info)
        else:
            map_.delete(*info.key)
        return MapReply(ReplyKind.REG_STATUS)

    def _with_entries(self, datatype: str, directory: str) -> MapReply:
        now = min(self._clock.now_ns() // _NS_PER_SECOND, _LATEST_SECOND)
        infos = self.map.selected(datatype, directory)
        return MapReply(ReplyKind.WITH_INFO, tuple(replace(info, check_time=now) for info in infos))


#: How a request that was answered is counted; the others registered something.
_COUNTED: Final = {
    RequestKind.REQ_ALL: "asked",
    RequestKind.REQ_SELECTED: "asked",
    RequestKind.DELETE: "deleted",
}
