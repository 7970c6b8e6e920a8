"""How does a test talk to the services of a dispatcher, on a clock of its own?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.core.clock import ManualClock
from penstock.core.config import parse_config
from penstock.dispatch.bus import build
from penstock.dispatch.config import BusConfig
from penstock.protocols.uprotocol import (
    UUID7,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UStatus,
    UUri,
    proto,
    publish,
    request,
)
from support.dispatching import START_NS, FaultyLeg

__all__ = ["ServiceBus", "connect"]

_TEXT = """
dispatcher: {name}
authority: {name}
state: {state}
legs:
  local: {{in-process: {{}}, authorities: [{name}]}}
  far: {{in-process: {{}}, authorities: [{others}]}}
sync: none
retry: {{jitter: 0}}
{more}
"""


class ServiceBus:
    """A dispatcher with its services, a leg to entities here and one to another authority."""

    def __init__(
        self,
        state: Path,
        *,
        clock: ManualClock | None = None,
        name: str = "here",
        others: str = "there",
        more: str = "",
    ) -> None:
        self.clock = clock or ManualClock(START_NS)
        self.name = name
        self.local = FaultyLeg("local")
        self.far = FaultyLeg("far", "authority")
        text = _TEXT.format(name=name, others=others, state=state, more=more)
        config = parse_config(text, BusConfig, "bus.yaml")
        legs = {"local": self.local, "far": self.far}
        self.bus = build(config, clock=self.clock, threads=False, legs=legs)
        self.bus.start()
        self.table = self.bus.table
        self.dispatcher = self.bus.dispatcher

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    def entity(self, ue_id: int) -> UUri:
        return UUri(self.name, ue_id, 1, 0)

    # --- calls ------------------------------------------------------------------------------------

    def ask(
        self, source: UUri, method: UUri, payload: Any = None, *, leg: str = "local", **form: Any
    ) -> UMessage:
        """Call a method, and return the response."""
        asked = self._send(source, method, payload, leg, **form)
        self.run()
        from_leg = self.local if leg == "local" else self.far
        arrived = [one for those in from_leg.arrived.values() for one in those]
        [answer] = [one for one in arrived if one.attributes.reqid == asked.attributes.id]
        return answer

    def post(self, source: UUri, number: int, payload: Any, *, leg: str = "local") -> None:
        """Call a method of uSubscription, without waiting for the response."""
        self._send(source, self.subscription_method(number), payload, leg)

    def _send(self, source: UUri, method: UUri, payload: Any, leg: str, **form: Any) -> UMessage:
        data = payload if isinstance(payload, bytes) or payload is None else _bytes(payload)
        if data is not None:
            form.setdefault("payload_format", UPayloadFormat.PROTOBUF)
        asked = request(source, method, data, id=UUID7.new(self.now_ms), **form)
        self.dispatcher.ingest(leg, [asked.to_bytes()])
        return asked

    def subscription_method(self, number: int) -> UUri:
        return UUri(self.name, 0, 4, number)

    def subscribe(
        self,
        source: UUri,
        topic: UUri,
        *,
        expires_ms: int | None = None,
        sample_period: int | None = None,
        leg: str = "local",
    ) -> Any:
        """Subscribe, and return the SubscribeResponse, or the code of what went wrong."""
        asked = proto.SubscribeRequest(topic=topic.to_proto(), sample_period=sample_period)
        if expires_ms is not None:
            asked.expiration.FromMilliseconds(expires_ms)
        answer = self.ask(source, self.subscription_method(1), asked, leg=leg)
        return self.result(answer, proto.SubscribeResponse)

    def unsubscribe(self, source: UUri, topic: UUri, *, leg: str = "local") -> Any:
        asked = proto.UnsubscribeRequest(topic=topic.to_proto())
        answer = self.ask(source, self.subscription_method(2), asked, leg=leg)
        return self.result(answer, proto.UnsubscribeResponse)

    def fetch(self, source: UUri, **filters: UUri) -> list[Any]:
        asked = proto.FetchSubscriptionsRequest(
            **{name: uri.to_proto() for name, uri in filters.items()}
        )
        answer = self.ask(source, self.subscription_method(3), asked)
        return list(self.result(answer, proto.FetchSubscriptionsResponse).subscriptions)

    @staticmethod
    def result(answer: UMessage, kind: Any) -> Any:
        """Return what a response has in it: a message of this kind, or the code of an error."""
        code = answer.attributes.commstatus
        if code not in (None, UCode.OK):
            assert UStatus.from_bytes(answer.payload or b"").code == code
            return code
        return kind.FromString(answer.payload or b"")

    # --- what happens -----------------------------------------------------------------------------

    def publish(
        self, topic: UUri, payload: bytes = b"p", *, leg: str = "local", **form: Any
    ) -> None:
        form.setdefault("payload_format", UPayloadFormat.RAW)
        message = publish(topic, payload, id=UUID7.new(self.now_ms), **form)
        self.dispatcher.ingest(leg, [message.to_bytes()])
        self.run()

    def changes(
        self, address: UUri, leg: FaultyLeg | None = None
    ) -> list[tuple[UMessageType, Any]]:
        """Return what an entity was told of subscriptions, and take it away."""
        arrived = (leg or self.local).arrived
        told = [
            (one.attributes.type, proto.Subscription.FromString(one.payload or b""))
            for one in arrived[address]
            if one.attributes.source is not None and one.attributes.source.resource_id == 0x8000
        ]
        arrived[address].clear()
        return told

    def payloads(self, address: UUri) -> list[bytes | None]:
        return [
            one.payload
            for one in self.local.arrived[address]
            if one.attributes.type == UMessageType.PUBLISH
        ]

    def step(self) -> float | None:
        return self.bus.step()

    def run(self, seconds: float = 0.0) -> None:
        run_all([self], seconds)

    def reopen(self, **options: Any) -> ServiceBus:
        state = self.bus.config.state
        self.close()
        return ServiceBus(state, clock=self.clock, name=self.name, **options)

    def close(self) -> None:
        assert self.dispatcher.books().problems() == []
        self.bus.close()


def run_all(buses: list[ServiceBus], seconds: float = 0.0) -> None:
    """Let time pass for dispatchers that share a clock."""
    clock = buses[0].clock
    end = clock.monotonic() + seconds
    while True:
        # What one delivers may be something to do for another.
        dues = [due for _ in range(3) for bus in buses if (due := bus.step()) is not None]
        dues = [due for bus in buses if (due := bus.step()) is not None]
        due = min(dues, default=end)
        if due >= end:
            break
        clock.advance(max(due - clock.monotonic(), 1e-6))
    clock.advance(max(end - clock.monotonic(), 0.0))
    for _ in range(4):
        for bus in buses:
            bus.step()


def connect(one: ServiceBus, other: ServiceBus) -> None:
    """Let what one delivers to the other come there, and back."""

    def by(receiver: ServiceBus) -> Any:
        def judge(address: UUri, message: UMessage) -> UStatus | None:
            del address
            receiver.dispatcher.ingest("far", [message.to_bytes()])
            return None

        return judge

    one.far.judge = by(other)
    other.far.judge = by(one)


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
