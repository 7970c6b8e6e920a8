"""How does an entity publish to its topics?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocols.uprotocol.communication.options import CallOptions, payload_fields
from penstock.protocols.uprotocol.message import UMessage, publish

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.communication.addresses import LocalUriProvider
    from penstock.protocols.uprotocol.communication.options import UPayload
    from penstock.protocols.uprotocol.transports.interface import UTransport
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["Publisher"]


class Publisher:
    """Publishes for one entity."""

    def __init__(self, transport: UTransport, uris: LocalUriProvider) -> None:
        self._transport = transport
        self._uris = uris

    def publish(
        self,
        topic: int | UUri,
        payload: UPayload | bytes | str | None = None,
        options: CallOptions | None = None,
    ) -> UMessage:
        """Send a message to all who listen to the topic, and return it.

        :raises InvalidMessage: it would violate a rule.
        :raises UStatusError: the transport did not take it.
        """
        message = publish(
            self._uris.own(topic),
            **payload_fields(payload),
            **(options or CallOptions()).of_message(),
        )
        self._transport.send(message)
        return message
