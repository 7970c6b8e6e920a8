"""How are messages put to zenoh and taken from it? (spec uprotocol 8.1)."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import ConnectionLost, InvalidOption, Unsupported
from penstock.protocols.uprotocol.codes import UCode, UStatus, UStatusError
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UMessage
from penstock.protocols.uprotocol.transports.counts import Counts
from penstock.protocols.uprotocol.transports.forking import Owner
from penstock.protocols.uprotocol.transports.interface import Unreadable
from penstock.protocols.uprotocol.zenoh_wire import (
    decode_attachment,
    encode_attachment,
    key_of,
    priority_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.protocols.uprotocol.attributes import UAttributes

try:
    import zenoh
except ImportError as missing:
    raise Unsupported(
        "uProtocol over zenoh needs the zenoh library", hint="pip install 'penstock[zenoh]'"
    ) from missing

__all__ = ["ZenohLink"]

#: Keys that have been put to, and are ready to be put to again.
_MOST_PUBLISHERS: Final = 1024
_MOST_KEYS: Final = 4096

#: A receiver that does not read makes a sender wait. After 5 seconds of that zenoh would close the
#: link; it should find out by its lease, 10 seconds, that nobody is there. Not much longer: a put
#: that waits when the link is lost goes on waiting for this time.
_PATIENCE: Final = "transport/link/tx/queue/congestion_control/block/wait_before_close"
_WAIT_US: Final = 15_000_000
#: For so long (seconds) after a link was lost zenoh may find out who was behind it.
_AFTERMATH: Final = 10.0


class ZenohLink:
    """One session of zenoh, for one authority. Safe to share between threads.

    Nothing is found by itself: whom to connect to, and where to listen, has to be said.

    :param listen: where others may connect, such as `tcp/127.0.0.1:7447`.
    :param connect: whom to connect to. Who is not there is tried again for ever.
    :param config: further settings of zenoh by their path, such as `transport/link/tls/…`.
    :param echo: whether what this session puts comes back to its own subscriptions.
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
        #: Each with what listens to who subscribes to it.
        self._publishers: OrderedDict[tuple[str, str], tuple[Any, Any]] = OrderedDict()
        self.counts = Counts("undecodable", "mismatched", "put", "links_lost", "receivers_lost")
        self._lost_at = -math.inf
        self._link_events = self._session.info.declare_link_events_listener(self._link_changed)

    def _link_changed(self, event: Any) -> None:
        if event.kind == zenoh.SampleKind.DELETE:
            self._lost_at = time.monotonic()
            self.counts.add("links_lost")

    def _matching_changed(self, status: Any) -> None:
        # zenoh tells that a link is gone before it takes its subscribers off the tables: what is
        # put between the two goes nowhere, and nobody else says so.
        if not status.matching and time.monotonic() - self._lost_at < _AFTERMATH:
            self.counts.add("receivers_lost")

    @property
    def losses(self) -> int:
        """How often something was lost that messages may have been on their way by."""
        counts = self.counts.snapshot()
        return counts["links_lost"] + counts["receivers_lost"]

    @property
    def is_connected(self) -> bool:
        """Whether there is another session that messages could come from or go to."""
        if self._session.is_closed():
            return False
        info = self._session.info
        return bool(info.peers_zid() or info.routers_zid())

    def put(self, message: UMessage, *, must_be_heard: bool = False) -> UStatus | None:
        """Put a message to its key, waiting while the receivers are congested.

        zenoh acknowledges nothing: what was put as a link broke may be lost.

        :param must_be_heard: to be told UNAVAILABLE if nobody subscribes to it now.
        """
        attributes = message.attributes
        if not self._owner.is_here:
            return self._owner.why_not
        try:
            key = _key(attributes, self.authority)
            attachment = encode_attachment(attributes)
            publisher = self._publisher(key, priority_name(attributes.priority))
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
        """Call `arrived` for each message at keys that match; returned is what `unsubscribe` takes.

        :param unreadable: called for what is not a message.
        :raises UStatusError: FAILED_PRECONDITION, this process was forked from that of the link.
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

        # Called by the thread that reads from the link, not by one for each subscriber: so all
        # that comes is in order, and who does not keep up slows the sender, not fills the memory.
        direct = zenoh.handlers.Callback(take, indirect=False)
        try:
            return self._session.declare_subscriber(key, direct, allowed_origin=self._origin)
        except zenoh.ZError as error:
            raise ConnectionLost("zenoh", str(error)) from error

    def unsubscribe(self, subscriber: Any) -> None:
        """Undo what `subscribe` returned; None is fine."""
        if subscriber is not None and self._owner.is_here:
            subscriber.undeclare()

    def _message(self, sample: zenoh.Sample) -> UMessage | Unreadable:
        found = sample.attachment
        attachment = b"" if found is None else found.to_bytes()
        payload, at = sample.payload.to_bytes(), str(sample.key_expr)
        try:
            attributes = decode_attachment(attachment)
            key = _key(attributes, self.authority)
        except InvalidMessage as error:
            self.counts.add("undecodable")
            return Unreadable(_raw(at, attachment, payload), error.reason)
        message = UMessage.from_parts(attributes, payload)
        if key != at:
            # Who may put what is decided by keys: a message must not claim to be from another.
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


#: Keys by the addresses that they are of: the messages of a topic all have one.
_keys: dict[tuple[object, ...], str] = {}


def _raw(key: str, attachment: bytes, payload: bytes) -> bytes:
    return f"key: {key}\nattachment: {attachment.hex()}\n\n".encode() + payload


def _key(attributes: UAttributes, authority: str) -> str:
    which = attributes.source, attributes.sink, attributes.type, authority
    key = _keys.get(which)
    if key is None:
        key = key_of(attributes, authority)
        if len(_keys) >= _MOST_KEYS:
            _keys.clear()
        _keys[which] = key
    return key
