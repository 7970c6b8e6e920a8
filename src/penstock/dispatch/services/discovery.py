"""Which services and topics are there? The service uDiscovery, version 3."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.dispatch.access import Access
from penstock.dispatch.services.leg import Service, decoded
from penstock.protocols.uprotocol import InvalidUUri, UCode, UStatusError, UUri, proto

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.clock import Clock

__all__ = ["KnownTopic", "UDiscovery"]

#: Seconds for which an observed topic that is not configured is listed.
_SEEN_FOR: Final = 3600
_MOST_SEEN: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTopic:
    """A topic with a description."""

    topic: UUri
    name: str = ""
    message: str = ""
    permission_level: int = 0

    def to_proto(self, ttl: int = 0) -> Any:
        return proto.ServiceTopicInfo(
            topic=self.topic.to_proto(),
            info=proto.UServiceTopic(
                id=self.topic.resource_id,
                name=self.name,
                message=self.message,
                permission_level=self.permission_level,
            ),
            ttl=ttl,
        )


class UDiscovery(Service):
    """Lists the configured topics and services, the recently published topics, and itself.

    It queries no other service: of other authorities it knows only topics published here.
    """

    service_id = 1
    version = 3
    name = "uDiscovery"

    def __init__(
        self,
        authority: str,
        clock: Clock,
        *,
        access: Access | None = None,
        services: Iterable[UUri] = (),
        topics: Iterable[KnownTopic] = (),
        seen_for: int = _SEEN_FOR,
    ) -> None:
        super().__init__(authority, clock)
        self._authority = authority
        self._access = access or Access()
        self._topics = {one.topic: one for one in topics}
        entities = [one.topic for one in self._topics.values()]
        self._services = dict.fromkeys(
            [self.address, *(one.with_resource(0) for one in (*services, *entities))]
        )
        self._seen_for = seen_for
        self._lock = threading.Lock()
        self._seen: OrderedDict[UUri, float] = OrderedDict()
        self.methods = {1: self._find_services, 2: self._get_topics}

    def published(self, last: Mapping[UUri, bytes]) -> None:
        """Note topics that have a new publish."""
        now = self.clock.monotonic()
        with self._lock:
            for topic in last:
                self._seen[topic] = now
                self._seen.move_to_end(topic)
            while len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)

    def _alive(self) -> dict[UUri, int]:
        """Return the observed topics, and for how many more seconds each is listed."""
        with self._lock:
            now = self.clock.monotonic()
            while self._seen and now - next(iter(self._seen.values())) >= self._seen_for:
                self._seen.popitem(last=False)
            return {
                topic: max(int(self._seen_for - (now - at)), 1) for topic, at in self._seen.items()
            }

    def _find_services(self, source: UUri, payload: bytes) -> bytes:
        del source
        asked = decoded(proto.FindServicesRequest, payload)
        wanted = self._wanted(asked.uri, recursive=asked.recursive).with_resource(0)
        known = dict.fromkeys(
            [*self._services, *(topic.with_resource(0) for topic in self._alive())]
        )
        found = [service for service in known if wanted.matches(service)]
        if not found:
            raise UStatusError(UCode.NOT_FOUND, f"no service is known at {wanted}")
        batch = proto.UUriBatch(uris=[service.to_proto() for service in found])
        data: bytes = proto.FindServicesResponse(uris=batch).SerializeToString()
        return data

    def _get_topics(self, source: UUri, payload: bytes) -> bytes:
        asked = decoded(proto.GetServiceTopicsRequest, payload)
        wanted = self._wanted(asked.topic, recursive=asked.recursive)
        known = {topic: one.to_proto() for topic, one in self._topics.items()}
        for topic, ttl in self._alive().items():
            known.setdefault(topic, KnownTopic(topic=topic).to_proto(ttl))
        found = {topic: info for topic, info in known.items() if wanted.matches(topic)}
        if not found:
            raise UStatusError(UCode.NOT_FOUND, f"no topic is known at {wanted}")
        allowed = [
            info for topic, info in found.items() if self._access.may("subscribe", source, topic)
        ]
        if not allowed:
            raise UStatusError(
                UCode.PERMISSION_DENIED, f"no rule allows {source} to subscribe to {wanted}"
            )
        data: bytes = proto.GetServiceTopicsResponse(topics=allowed).SerializeToString()
        return data

    def _wanted(self, uri: Any, *, recursive: bool) -> UUri:
        try:
            wanted = UUri.from_proto(uri)
        except InvalidUUri as error:
            raise UStatusError(UCode.INVALID_ARGUMENT, str(error)) from error
        if wanted.is_empty:
            raise UStatusError(UCode.INVALID_ARGUMENT, "the URI is empty")
        if recursive and not wanted.has_wildcard_authority:
            raise UStatusError(
                UCode.INVALID_ARGUMENT, "a recursive search has the authority * (any)"
            )
        return wanted.resolved(self._authority)
