"""How does a receiver start and stop topics itself?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from penstock.dispatch.dead_letters import STREAMER, STREAMER_VERSION
from penstock.dispatch.services.leg import Service, decoded
from penstock.protocols.uprotocol import InvalidUUri, UCode, UStatusError, UUri, proto

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.clock import Clock

__all__ = ["START", "STOP", "TopicControl"]

#: The methods of the service, at the entity that publishes the dead letters.
START = 1
STOP = 2

#: How long stopping a topic waits for a delivery in progress (seconds).
_PATIENCE = 1.0


class Switched(Protocol):
    """A dispatcher that can stop and start topics."""

    def stop_topic(
        self, topic: UUri, receiver: UUri, *, queue: bool = True, timeout: float = 5.0
    ) -> bool: ...

    def start_topic(self, topic: UUri, receiver: UUri) -> bool: ...

    def receiver_of(self, entity: UUri) -> UUri | None: ...


class TopicControl(Service):
    """Starts and stops topics, for the calling receiver only.

    :param dispatcher: returns the dispatcher, which is created after its services.
    """

    service_id = STREAMER
    version = STREAMER_VERSION
    name = "the dispatcher"

    def __init__(self, authority: str, clock: Clock, dispatcher: Callable[[], Switched]) -> None:
        super().__init__(authority, clock)
        self._dispatcher = dispatcher
        self.methods = {START: self._start, STOP: self._stop}

    def _start(self, source: UUri, payload: bytes) -> bytes:
        asked = decoded(proto.StartRequest, payload)
        topic, receiver = self._what(asked, source)
        was_stopped = self._dispatcher().start_topic(topic, receiver)
        data: bytes = proto.StartResponse(was_stopped=was_stopped).SerializeToString()
        return data

    def _stop(self, source: UUri, payload: bytes) -> bytes:
        asked = decoded(proto.StopRequest, payload)
        topic, receiver = self._what(asked, source)
        queue = not asked.no_queue
        # Wait only briefly: the caller's own delivery may be the one in progress, and cannot end
        # before this returns.
        self._dispatcher().stop_topic(topic, receiver, queue=queue, timeout=_PATIENCE)
        return b""

    def _what(self, asked: Any, source: UUri) -> tuple[UUri, UUri]:
        """Return the requested topic, and the caller's receiver."""
        try:
            topic = UUri.from_proto(asked.topic)
        except InvalidUUri as error:
            raise UStatusError(UCode.INVALID_ARGUMENT, str(error)) from error
        if not asked.HasField("topic"):
            raise UStatusError(UCode.INVALID_ARGUMENT, "there is no topic")
        receiver = self._dispatcher().receiver_of(source)
        if receiver is None:
            raise UStatusError(UCode.UNAVAILABLE, f"no leg leads to {source}")
        return topic.resolved(self.address.authority_name), receiver
