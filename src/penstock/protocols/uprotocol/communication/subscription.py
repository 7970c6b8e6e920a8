"""How does an entity subscribe to topics, so that a dispatcher brings them?

(docs/specs/uprotocol.md 6.1)
"""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import SubscriptionStatus, UCode, UStatusError
from penstock.protocols.uprotocol.communication.pubsub import UPayload
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.uprotocol.communication.pubsub import CallOptions
    from penstock.protocols.uprotocol.communication.rpc import RpcClient
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Listener, UTransport

__all__ = ["SUBSCRIBE", "UNSUBSCRIBE", "USUBSCRIPTION", "Subscriber"]

#: The service, version 4, and its methods. No authority: that of the caller.
USUBSCRIPTION: Final = UUri("", 0, 4, 0)
SUBSCRIBE: Final = USUBSCRIPTION.with_resource(1)
UNSUBSCRIBE: Final = USUBSCRIPTION.with_resource(2)
#: The resource that its notifications come from.
CHANGES: Final = 0x8000


class Subscriber:
    """Subscribes for one entity, through the service uSubscription.

    The service notifies it of changes of its subscriptions. They are taken even if nobody listens
    to them: otherwise they would wait for a listener, and in the end hold up the transport.

    :param service: the service to call, such as a router's; by default that of its own authority.
    :raises UStatusError: as `UTransport.register_listener`.
    """

    def __init__(
        self, transport: UTransport, client: RpcClient, service: UUri = USUBSCRIPTION
    ) -> None:
        self._transport = transport
        self._client = client
        self._subscribe = service.with_resource(SUBSCRIBE.resource_id)
        self._unsubscribe = service.with_resource(UNSUBSCRIBE.resource_id)
        transport.register_listener(service.with_resource(CHANGES), _take, client.source)

    def subscribe(
        self,
        topic: UUri,
        listener: Listener,
        *,
        expiration_ms: int | None = None,
        sample_period: int | None = None,
        options: CallOptions | None = None,
    ) -> Future[SubscriptionStatus]:
        """Register a listener for a topic, and subscribe at the service.

        The future has the service's response. If it is an error, the listener is unregistered.

        :param expiration_ms: expiry (milliseconds since 1970 UTC); None: until unsubscribed.
        :param sample_period: minimal time between two messages (milliseconds).
        :raises UStatusError: as `UTransport.register_listener`.
        """
        asked = proto.SubscribeRequest(topic=topic.to_proto())
        if expiration_ms is not None:
            asked.expiration.FromMilliseconds(expiration_ms)
        if sample_period is not None:
            asked.sample_period = sample_period
        self._transport.register_listener(topic, listener)

        def give_up() -> None:
            with suppress(UStatusError):  # who tries again wants what comes until then
                self._transport.withdraw_listener(topic, listener)

        try:
            answer = self._client.invoke_method(self._subscribe, UPayload.of_proto(asked), options)
        except BaseException:
            give_up()
            raise
        return _then(answer, _status, give_up)

    def unsubscribe(
        self, topic: UUri, listener: Listener, *, options: CallOptions | None = None
    ) -> Future[None]:
        """Unregister a listener, and unsubscribe at the service.

        :raises UStatusError: NOT_FOUND, the listener is not registered for the topic.
        """
        self._transport.unregister_listener(topic, listener)
        asked = proto.UnsubscribeRequest(topic=topic.to_proto())
        answer = self._client.invoke_method(self._unsubscribe, UPayload.of_proto(asked), options)
        return _then(answer, lambda _: None)

    def listen(self, topic: UUri, listener: Listener) -> None:
        """Register a listener for a topic without subscribing at the service.

        :raises UStatusError: as `UTransport.register_listener`.
        """
        self._transport.register_listener(topic, listener)

    def unlisten(self, topic: UUri, listener: Listener) -> None:
        """Unregister a listener.

        :raises UStatusError: NOT_FOUND, the listener is not registered.
        """
        self._transport.unregister_listener(topic, listener)


def _take(message: UMessage) -> None:
    """Take a notification that nobody else may listen to."""


def _status(payload: UPayload) -> SubscriptionStatus:
    with suppress(*proto.UNDECODABLE):
        encoded = payload.protobuf
        if encoded is not None:
            return SubscriptionStatus(proto.SubscribeResponse.FromString(encoded).status)
    raise UStatusError(UCode.DATA_LOSS, "the service's answer does not decode")


def _then(
    before: Future[UPayload],
    convert: Callable[[UPayload], Any],
    on_failure: Callable[[], None] = lambda: None,
) -> Future[Any]:
    """Return a future with the converted result of another one."""
    after: Future[Any] = Future()

    def done(answer: Future[UPayload]) -> None:
        try:
            result = convert(answer.result())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            on_failure()
            with suppress(InvalidStateError):
                after.set_exception(error)
        else:
            with suppress(InvalidStateError):
                after.set_result(result)

    before.add_done_callback(done)
    return after
