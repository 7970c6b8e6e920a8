"""How do entities of one machine talk to each other and to a dispatcher, across processes?

Every participant receives from its own ring. A sender appends to the ring of the receiver or of the
dispatcher. A full ring is not overwritten: the sender gets UNAVAILABLE.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.url import URL
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage
from penstock.protocols.uprotocol.transports.base import BaseTransport, raise_unless_ok
from penstock.protocols.uprotocol.transports.interface import Counts, Leg, not_tried_after
from penstock.protocols.uprotocol.transports.listeners import Acknowledging
from penstock.protocols.uprotocol.transports.ring_files import (
    RingReceiver,
    RingSender,
    UntakenMessages,
)
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.core.message import Message
    from penstock.protocols.uprotocol.transports.interface import Ingest
    from penstock.protocols.uprotocol.transports.listeners import ListenerLimits

__all__ = ["RingLeg", "RingTransport"]


class RingTransport(BaseTransport):
    """Connects entities to a dispatcher, or to each other, by rings.

    :param send: the URL of the ring to append to; it may have {authority}, {ue_id} and
        {ue_version} of the sink.
    :param receive: the URL of the ring to read from, created if missing; None: receive nothing.
        Messages that no listener took stay in it, also for another process.
    """

    def __init__(
        self,
        authority: str,
        *,
        send: str | None = None,
        receive: str | None = None,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(
            authority,
            limits=limits,
            clock=clock,
            acknowledging=Acknowledging(self._taken, self._is_void),
        )
        self._undecodable = Counts("undecodable")
        self._sender = None if send is None else RingSender(send)
        self._left: UntakenMessages | None = None
        self._receiver: RingReceiver | None = None
        if receive is not None:
            self._left = UntakenMessages(Path(f"{URL.parse(receive).path}.unheard"))
            self._receiver = RingReceiver(
                f"up-ring-{authority}", receive, self._take, self._left, self._take_old
            )

    def _send(self, message: UMessage) -> None:
        sender, sink = self._sender, message.attributes.sink
        if sender is None:
            raise UStatusError(UCode.UNIMPLEMENTED, "this transport has no ring to send to")
        if not sender.is_shared and (sink is None or sink.has_wildcard):
            raise UStatusError(
                UCode.INVALID_ARGUMENT,
                "a publish goes to nobody's ring in particular",
                hint="send to a dispatcher's ring",
            )
        raise_unless_ok(sender.send(sink or UUri(), [message.to_bytes()])[1])

    def _take_old(self) -> None:
        """Process the messages that no listener took in an earlier process."""
        assert self._left is not None
        for token, payload in self._left.load():
            self._take_one(token, payload)

    def _take(self, messages: Sequence[Message]) -> None:
        assert self._left is not None
        for message in messages:
            self._take_one(self._left.add(message), message.payload)

    def _take_one(self, token: int, payload: bytes) -> None:
        try:
            message = UMessage.from_bytes(payload)
        except InvalidMessage:
            self._undecodable.add("undecodable")
            self._taken(token)
            return
        if not self._registry.dispatch(message, token=token).is_kept:
            self._taken(token)

    def _taken(self, token: object) -> None:
        assert self._left is not None
        assert isinstance(token, int)
        self._left.forget(token)

    def _is_void(self, token: object) -> bool:
        return self._left is None or token not in self._left

    def close(self) -> None:
        self._registry.end()
        if self._receiver is not None:
            self._receiver.stop()
        super().close()
        if self._sender is not None:
            self._sender.close()

    def statistics(self) -> Mapping[str, int]:
        return {**super().statistics(), **self._undecodable.snapshot()}


class RingLeg(Leg):
    """Connects a dispatcher to entities that append to one ring, and each read from their own.

    :param receive: the URL of the ring that entities append to, created if missing. The
        dispatcher's position in it is persistent.
    :param send: the URL of the receivers' rings, with {authority}, {ue_id} or {ue_version} if
        there are several. A receiver creates its own ring.
    """

    scope = "entity"

    def __init__(self, name: str, *, receive: str | None = None, send: str | None = None) -> None:
        super().__init__(name)
        self._receive = receive
        self._sender = None if send is None else RingSender(send)
        self._receiver: RingReceiver | None = None
        self._counts = Counts("received", "delivered", "failed")

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        del authorities  # whoever appends to the ring wants it dispatched
        counts = self._counts

        def take(messages: Sequence[Message]) -> None:
            ingest([message.payload for message in messages])
            counts.add("received", len(messages))

        if self._receive is not None and self._receiver is None:
            self._receiver = RingReceiver(f"up-ring-{self.name}", self._receive, take)

    def listen(self, topic: UUri) -> None:
        """Do nothing: all publishes are received anyway."""

    def unlisten(self, topic: UUri) -> None:
        """Do nothing: all publishes are received anyway."""

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        if not messages:
            return []
        if self._sender is None:
            status: UStatus | None = UStatus(UCode.UNIMPLEMENTED, "the leg has no ring to send to")
            done = 0
        else:
            done, status = self._sender.send(address, [it.to_bytes() for it in messages])
        self._counts.add("delivered", done)
        found: list[UStatus | None] = [None] * done
        if status is None:
            return found
        self._counts.add("failed")
        return found + not_tried_after(status, len(messages) - done - 1)

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()

    def close(self) -> None:
        self.stop()
        if self._sender is not None:
            self._sender.close()

    def statistics(self) -> Mapping[str, int]:
        receiver = self._receiver
        return {
            **self._counts.snapshot(),
            "ingest_failures": 0 if receiver is None else receiver.failures,
        }
