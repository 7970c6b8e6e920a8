"""How does an entity notify another, and hear of notifications to itself?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocols.uprotocol.communication.options import CallOptions, payload_fields
from penstock.protocols.uprotocol.message import UMessage, notification

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.communication.addresses import LocalUriProvider
    from penstock.protocols.uprotocol.communication.options import UPayload
    from penstock.protocols.uprotocol.transports.interface import Listener, UTransport
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["Notifier"]


class Notifier:
    """Sends and receives notifications for one entity."""

    def __init__(self, transport: UTransport, uris: LocalUriProvider) -> None:
        self._transport = transport
        self._uris = uris

    def notify(
        self,
        topic: int | UUri,
        destination: UUri,
        payload: UPayload | bytes | str | None = None,
        options: CallOptions | None = None,
    ) -> UMessage:
        """Send a message of a topic to one entity, and return it.

        :raises InvalidMessage: it would violate a rule.
        :raises UStatusError: the transport did not take it.
        """
        message = notification(
            self._uris.own(topic),
            destination,
            **payload_fields(payload),
            **(options or CallOptions()).of_message(),
        )
        self._transport.send(message)
        return message

    def start_listening(self, topic: UUri, listener: Listener) -> None:
        """Have a listener called for notifications of a topic to this entity.

        :raises UStatusError: as `UTransport.register_listener`.
        """
        self._transport.register_listener(topic, listener, self._uris.source)

    def stop_listening(self, topic: UUri, listener: Listener) -> None:
        """Have the listener called no more.

        :raises UStatusError: NOT_FOUND, it is not registered.
        """
        self._transport.unregister_listener(topic, listener, self._uris.source)
