"""What was last published on a topic? The service uTwin, version 2."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.dispatch.access import Access
from penstock.dispatch.services.leg import Service, decoded
from penstock.protocols.uprotocol import InvalidMessage, UCode, UMessage, UUri, is_expired, proto

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.clock import Clock

__all__ = ["UTwin"]


class UTwin(Service):
    """A cache of the last publish of each topic; the least recently published is evicted.

    Expired messages are not returned. The cache does not survive a restart.
    """

    service_id = 3
    version = 2
    name = "uTwin"

    def __init__(
        self,
        authority: str,
        clock: Clock,
        *,
        access: Access | None = None,
        topics: int = 10_000,
        size: int = 64 << 20,
        response: int = 1 << 20,
    ) -> None:
        """Create an empty cache.

        :param topics: number of topics, at most
        :param size: bytes of all cached messages, at most
        :param response: bytes of a response, at most
        """
        super().__init__(authority, clock)
        self._authority = authority
        self._access = access or Access()
        self._most = topics
        self._most_bytes = size
        self._largest = response
        self._lock = threading.Lock()
        self._last: OrderedDict[UUri, bytes] = OrderedDict()
        self._bytes = 0
        self.methods = {1: self._get_last_messages}

    def published(self, last: Mapping[UUri, bytes]) -> None:
        """Store the last publish of some topics."""
        with self._lock:
            for topic, raw in last.items():
                self._bytes += len(raw) - len(self._last.pop(topic, b""))
                self._last[topic] = raw
            while self._last and (len(self._last) > self._most or self._bytes > self._most_bytes):
                self._bytes -= len(self._last.popitem(last=False)[1])

    def __len__(self) -> int:
        return len(self._last)

    def _get_last_messages(self, source: UUri, payload: bytes) -> bytes:
        found = proto.GetLastMessagesResponse()
        size = 0
        for uri in _topics(payload):
            one = found.responses.add()
            one.topic.CopyFrom(uri)
            code, text, message = self._find(source, UUri.from_proto_unchecked(uri))
            if message is not None:
                size += message.ByteSize()
                if size > self._largest:
                    code, text = UCode.RESOURCE_EXHAUSTED, "the response is full: ask again"
                else:
                    one.message.CopyFrom(message)
            one.status.code = int(code)
            if text:
                one.status.message = text
        data: bytes = found.SerializeToString()
        return data

    def _find(self, source: UUri, topic: UUri) -> tuple[UCode, str, Any]:
        if not topic.is_valid or not topic.is_topic or topic.has_wildcard:
            return UCode.INVALID_ARGUMENT, f"{topic} is not a topic", None
        topic = topic.resolved(self._authority)
        if not self._access.may("subscribe", source, topic):
            return UCode.PERMISSION_DENIED, f"no rule allows {source} to have {topic}", None
        with self._lock:
            raw = self._last.get(topic)
        try:
            if raw is None or is_expired(UMessage.attributes_of(raw), self.now_ms):
                return UCode.NOT_FOUND, f"nothing is known of {topic}", None
            return UCode.OK, "", proto.UMessage.FromString(raw)
        except (InvalidMessage, *proto.UNDECODABLE):
            return UCode.INTERNAL, f"the last message of {topic} does not decode", None


def _topics(payload: bytes) -> list[Any]:
    """Return the requested topics.

    In the .proto file of the specification a request is a message with the batch of topics, in its
    text it is the batch itself.

    :raises UStatusError: INVALID_ARGUMENT, the payload is neither.
    """
    with suppress(*proto.UNDECODABLE):
        uris = proto.UUriBatch.FromString(payload).uris
        # Of a message read as a batch, each topic has an authority only.
        if any(uri.ue_id or uri.ue_version_major or uri.resource_id for uri in uris):
            return list(uris)
    return list(decoded(proto.GetLastMessagesRequest, payload).topics.uris)
