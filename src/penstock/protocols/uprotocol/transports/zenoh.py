"""How do entities and dispatchers talk by zenoh? (docs/specs/uprotocol.md 8.1)"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import ConnectionLost, InvalidOption, Unsupported
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UStatus, UStatusError
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage, kind_of
from penstock.protocols.uprotocol.transports.base import BaseTransport, raise_unless_ok
from penstock.protocols.uprotocol.transports.interface import (
    NOT_TRIED,
    Counts,
    Leg,
    Owner,
    Pump,
    Unreadable,
)
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import check_filter, matches
from penstock.protocols.uprotocol.zenoh_wire import (
    decode_attachment,
    encode_attachment,
    key_of,
    key_of_filter,
    named_by_key,
    priority_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.protocols.uprotocol.message import UAttributes
    from penstock.protocols.uprotocol.transports.interface import Ingest
    from penstock.protocols.uprotocol.transports.listeners import ListenerLimits, Pattern

__all__ = ["ZenohLeg", "ZenohLink", "ZenohTransport"]

try:
    import zenoh
except ImportError as missing:
    raise Unsupported(
        "uProtocol over zenoh needs the zenoh library", hint="pip install 'penstock[zenoh]'"
    ) from missing

log = logging.getLogger(__name__)

#: Publishers kept open, at most.
_MOST_PUBLISHERS: Final = 1024
#: Kinds of messages whose key is remembered, at most.
_MOST_KINDS: Final = 4096
#: A receiver that does not read blocks the sender. zenoh's default closes the link after 5 seconds;
#: its lease of 10 seconds should expire first. Not much longer: a put that is blocked when the link
#: is lost stays blocked for this time.
_PATIENCE: Final = "transport/link/tx/queue/congestion_control/block/wait_before_close"
_WAIT_US: Final = 15_000_000
#: How long (seconds) after the loss of a link zenoh may still remove its subscribers.
_AFTERMATH: Final = 10.0


class ZenohLink:
    """One session of zenoh, for one authority. Thread-safe.

    There is no discovery: the addresses to connect to and to listen at must be given.

    :param listen: where others may connect, such as `tcp/127.0.0.1:7447`.
    :param connect: the addresses to connect to, with unlimited retries.
    :param config: further settings of zenoh by their path, such as `transport/link/tls/…`.
    :param echo: whether this session receives its own messages.
    """

    def __init__(
        self,
        authority: str,
        *,
        listen: Sequence[str] = (),
        connect: Sequence[str] = (),
        mode: str = "peer",
        scouting: bool = False,
        echo: bool = False,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.authority = authority
        self._origin = zenoh.Locality.ANY if echo else zenoh.Locality.REMOTE
        settings: dict[str, object] = {
            "mode": mode,
            "scouting/multicast/enabled": scouting,
            "scouting/gossip/enabled": scouting,
            "listen/endpoints": list(listen),
            "connect/endpoints": list(connect),
            _PATIENCE: _WAIT_US,
            **(config or {}),
        }
        wanted = zenoh.Config()
        for name, value in settings.items():
            try:
                wanted.insert_json5(name, json.dumps(value))
            except zenoh.ZError as error:
                raise InvalidOption(name, value, f"zenoh refuses it: {error}") from None
        try:
            self._session = zenoh.open(wanted)
        except zenoh.ZError as error:
            raise ConnectionLost("zenoh", str(error), hint="check listen and connect") from error
        self._owner = Owner()
        self._lock = threading.Lock()
        #: Each with its listener for matching subscribers.
        self._publishers: OrderedDict[tuple[str, str], tuple[Any, Any]] = OrderedDict()
        #: The key and the priority of messages by their kind.
        self._routes: dict[bytes | None, tuple[str, str]] = {}
        self.counts = Counts("undecodable", "mismatched", "put", "links_lost", "receivers_lost")
        self._lost_at = -math.inf
        self._link_events = self._session.info.declare_link_events_listener(self._link_changed)

    def _link_changed(self, event: Any) -> None:
        if event.kind == zenoh.SampleKind.DELETE:
            self._lost_at = time.monotonic()
            self.counts.add("links_lost")

    def _matching_changed(self, status: Any) -> None:
        # zenoh reports a lost link before it removes its subscribers: messages put in between are
        # lost without an error.
        if not status.matching and time.monotonic() - self._lost_at < _AFTERMATH:
            self.counts.add("receivers_lost")

    @property
    def losses(self) -> int:
        """Number of lost links and subscribers that may have cost messages."""
        counts = self.counts.snapshot()
        return counts["links_lost"] + counts["receivers_lost"]

    @property
    def is_connected(self) -> bool:
        """Whether any other session is connected."""
        if self._session.is_closed():
            return False
        info = self._session.info
        return bool(info.peers_zid() or info.routers_zid())

    def put(self, message: UMessage, *, must_be_heard: bool = False) -> UStatus | None:
        """Put a message to its key; wait while the receivers are congested.

        zenoh has no acknowledgements: a message put while a link breaks may be lost.

        :param must_be_heard: whether to return UNAVAILABLE without a subscriber.
        """
        attributes = message.attributes
        if not self._owner.is_here:
            return self._owner.why_not
        try:
            attachment = encode_attachment(attributes)
            key, priority = self._route(attributes)
            publisher = self._publisher(key, priority)
            is_heard = self.is_connected and publisher.matching_status.matching
            if must_be_heard and not is_heard:
                return UStatus(UCode.UNAVAILABLE, f"nobody subscribes to {key}")
            publisher.put(message.payload or b"", attachment=attachment)
        except InvalidMessage as error:
            return UStatus(UCode.INVALID_ARGUMENT, error.reason)
        except zenoh.ZError as error:
            return UStatus(UCode.UNAVAILABLE, f"zenoh: {error}")
        self.counts.add("put")
        return None

    def _route(self, attributes: UAttributes) -> tuple[str, str]:
        """Return the key and the priority of a message: the same for all of its kind.

        :raises InvalidMessage: its addresses are missing, or are patterns.
        """
        kind = kind_of(attributes)
        found = self._routes.get(kind)
        if found is None:
            found = key_of(attributes, self.authority), priority_name(attributes.priority)
            if len(self._routes) >= _MOST_KINDS:
                self._routes.clear()
            if kind is not None:
                self._routes[kind] = found
        return found

    def _publisher(self, key: str, priority: str) -> Any:
        with self._lock:
            found, _ = self._publishers.get((key, priority), (None, None))
            if found is not None:
                self._publishers.move_to_end((key, priority))
                return found
            if len(self._publishers) >= _MOST_PUBLISHERS:
                # Not undeclared here: another thread may be putting to it.
                self._publishers.popitem(last=False)
            found = self._session.declare_publisher(
                key,
                congestion_control=zenoh.CongestionControl.BLOCK,
                priority=getattr(zenoh.Priority, priority),
            )
            listening = found.declare_matching_listener(self._matching_changed)
            self._publishers[key, priority] = found, listening
            return found

    def subscribe(
        self,
        key: str,
        arrived: Callable[[UMessage], object],
        unreadable: Callable[[Unreadable], object] = lambda _: None,
    ) -> Any:
        """Call `arrived` for each message at matching keys; return a handle for `unsubscribe`.

        :param unreadable: called for invalid messages.
        :raises UStatusError: FAILED_PRECONDITION, this process is a fork of the link's process.
        """
        forked = self._owner.why_not
        if forked is not None:
            raise UStatusError(forked.code, forked.message)

        def take(sample: zenoh.Sample) -> None:
            message = self._message(sample)
            if isinstance(message, Unreadable):
                unreadable(message)
            else:
                arrived(message)

        # Called by the thread that reads from the link, not by one for each subscriber: so
        # messages stay in order, and a slow subscriber slows down the sender.
        direct = zenoh.handlers.Callback(take, indirect=False)
        try:
            return self._session.declare_subscriber(key, direct, allowed_origin=self._origin)
        except zenoh.ZError as error:
            raise ConnectionLost("zenoh", str(error)) from error

    def unsubscribe(self, subscriber: Any) -> None:
        """Unsubscribe a handle of `subscribe`; None does nothing."""
        if subscriber is not None and self._owner.is_here:
            subscriber.undeclare()

    def _message(self, sample: zenoh.Sample) -> UMessage | Unreadable:
        found = sample.attachment
        attachment = b"" if found is None else found.to_bytes()
        payload, at = sample.payload.to_bytes(), str(sample.key_expr)
        try:
            attributes = named_by_key(decode_attachment(attachment), at)
            key, _ = self._route(attributes)
        except InvalidMessage as error:
            self.counts.add("undecodable")
            return Unreadable(_raw(at, attachment, payload), error.reason)
        message = UMessage.from_parts(attributes, payload)
        if key != at:
            # zenoh authorizes by key: the addresses of the message must match it.
            self.counts.add("mismatched")
            reason = f"it came at the key {at[:200]!r}, which is not its own"
            raw = _raw(at, attachment, payload)
            return Unreadable(raw, reason, UCode.UNAUTHENTICATED, message)
        return message

    def close(self) -> None:
        if not self._owner.is_here:
            return  # without its threads zenoh would wait for ever
        with self._lock:
            self._publishers.clear()
        if not self._session.is_closed():
            self._link_events.undeclare()  # type: ignore[no-untyped-call]
            self._session.close()  # type: ignore[no-untyped-call]


def _raw(key: str, attachment: bytes, payload: bytes) -> bytes:
    return f"key: {key}\nattachment: {attachment.hex()}\n\n".encode() + payload


class ZenohTransport(BaseTransport):
    """Connects entities by zenoh. It closes its link."""

    def __init__(
        self,
        link: ZenohLink,
        *,
        must_be_heard: bool = False,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(link.authority, limits=limits, clock=clock)
        self.link = link
        self._must_be_heard = must_be_heard
        self._subscribers: dict[Pattern, Any] = {}
        self._pump: Pump[tuple[UMessage, Pattern]] = Pump(
            f"up-zenoh-{link.authority}", self._take, batch=64, size_of=lambda it: it[0].size
        )

    def _take(self, arrived: Sequence[tuple[UMessage, Pattern]]) -> None:
        # A message arrives once for each matching subscriber. The key of any sink also matches the
        # placeholder of publishes.
        for message, pattern in arrived:
            if matches(*pattern, message.attributes):
                self._registry.dispatch(message, (pattern,))

    def _send(self, message: UMessage) -> None:
        raise_unless_ok(self.link.put(message, must_be_heard=self._must_be_heard))

    def _subscribe(self, pattern: Pattern) -> None:
        key = key_of_filter(*pattern, self.authority)
        put = self._pump.put
        self._subscribers[pattern] = self.link.subscribe(key, lambda it: put((it, pattern)))

    def _unsubscribe(self, pattern: Pattern) -> None:
        self.link.unsubscribe(self._subscribers.pop(pattern))

    def close(self) -> None:
        if self._is_closed:
            return
        for subscriber in self._subscribers.values():
            self.link.unsubscribe(subscriber)
        self._subscribers.clear()
        self._pump.stop()
        _tell_abandoned(self.authority, self._pump.abandoned)
        super().close()
        self.link.close()

    def statistics(self) -> Mapping[str, int]:
        counts = {**super().statistics(), **self.link.counts.snapshot()}
        return {**counts, "abandoned": self._pump.abandoned}


class ZenohLeg(Leg):
    """Connects a dispatcher by zenoh. It closes its link.

    zenoh has no acknowledgements. So a delivery needs a subscriber at that moment, and a message
    counts as delivered `settle_after` seconds later, unless the link was lost meanwhile. zenoh
    drops a receiver that hangs after its lease of 10 seconds: a larger `settle_after` covers that.
    """

    scope = "authority"

    def __init__(
        self,
        name: str,
        link: ZenohLink,
        *,
        must_be_heard: bool = True,
        settle_after: float = 0.25,
    ) -> None:
        super().__init__(name)
        self.settle_after = settle_after
        self.link = link
        self._must_be_heard = must_be_heard
        self._pump: Pump[UMessage | Unreadable] | None = None
        self._lock = threading.Lock()
        self._topics: dict[UUri, Any] = {}
        self._subscribers: list[Any] = []
        self._counts = Counts("received", "ingest_failures", "delivered", "failed")

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        counts, authority = self._counts, self.link.authority

        def take(messages: Sequence[UMessage | Unreadable]) -> None:
            self.hand_over(messages, ingest)
            counts.add("received", len(messages))

        with self._lock:
            if self._pump is not None:
                return
            self._pump = Pump(
                f"up-zenoh-{self.name}",
                take,
                on_failure=lambda: counts.add("ingest_failures"),
                size_of=lambda it: it.size,
            )
            for name in ["*"] if "*" in authorities else sorted(set(authorities)):
                key = key_of_filter(UUri.ANY, UUri.ANY.with_authority(name), authority)
                subscriber = self.link.subscribe(key, self._point_to_point, self._unreadable)
                self._subscribers.append(subscriber)
            for topic in self._topics:
                self._topics[topic] = self._subscribed(topic)

    def _point_to_point(self, message: UMessage) -> None:
        # The key of any sink also matches the placeholder of publishes.
        if self._pump is not None and message.attributes.type != UMessageType.PUBLISH:
            self._pump.put(message)

    def _unreadable(self, what: Unreadable) -> None:
        if self._pump is not None and self.on_unreadable is not None:
            self._pump.put(what)

    def _subscribed(self, topic: UUri) -> Any:
        assert self._pump is not None
        key = key_of_filter(topic, None, self.link.authority)
        return self.link.subscribe(key, self._pump.put, self._unreadable)

    def listen(self, topic: UUri) -> None:
        check_filter(topic, None)
        with self._lock:
            if topic not in self._topics:
                self._topics[topic] = None if self._pump is None else self._subscribed(topic)

    def unlisten(self, topic: UUri) -> None:
        with self._lock:
            subscriber = self._topics.pop(topic, None)
        self.link.unsubscribe(subscriber)

    @property
    def is_up(self) -> bool:
        return self.link.is_connected

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        del address  # a message is put to the key of its own addresses
        found: list[UStatus | None] = []
        failed: set[tuple[UUri | None, UUri | None]] = set()
        for message in messages:
            # One entity may be absent, others not: only messages after it have to wait.
            if failed and _between(message) in failed:
                found.append(NOT_TRIED)
                continue
            status = self.link.put(message, must_be_heard=self._must_be_heard)
            found.append(status)
            if status is not None:
                self._counts.add("failed")
                failed.add(_between(message))
                if not self.link.is_connected:
                    break
        self._counts.add("delivered", found.count(None))
        return found + [NOT_TRIED] * (len(messages) - len(found))

    @property
    def links_lost(self) -> int:
        return self.link.losses

    def stop(self) -> None:
        with self._lock:
            subscribers = [*self._subscribers, *self._topics.values()]
            self._subscribers.clear()
            self._topics.clear()
            pump = self._pump
        for subscriber in subscribers:
            self.link.unsubscribe(subscriber)
        if pump is not None:
            pump.stop()

    def close(self) -> None:
        self.stop()
        _tell_abandoned(self.name, self.statistics()["abandoned"])
        self.link.close()

    def statistics(self) -> Mapping[str, int]:
        abandoned = 0 if self._pump is None else self._pump.abandoned
        counts = {**self._counts.snapshot(), **self.link.counts.snapshot()}
        return {**counts, "abandoned": abandoned}


def _tell_abandoned(name: str, count: int) -> None:
    if count:  # zenoh does not deliver them again
        log.warning("zenoh %s: %s messages came and were not taken", name, f"{count:,}")


def _between(message: UMessage) -> tuple[UUri | None, UUri | None]:
    """Return the source of a message and the entity that it goes to."""
    source, sink = message.attributes.source, message.attributes.sink
    return source, sink and sink.with_resource(0)
