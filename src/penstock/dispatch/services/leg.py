"""How are the services inside the dispatcher reached, and how do they answer?"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from penstock.core.errors import PenstockError
from penstock.core.worker import Worker
from penstock.protocols.uprotocol import (
    UUID7,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UStatus,
    UStatusError,
    UUri,
    error_response,
    proto,
    response,
)
from penstock.protocols.uprotocol.transports import Leg, not_tried_after
from penstock.protocols.uprotocol.transports.interface import Counts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.core.clock import Clock
    from penstock.protocols.uprotocol import UMessage
    from penstock.protocols.uprotocol.transports import Ingest

__all__ = ["Method", "Service", "ServicesLeg", "decoded"]

log = logging.getLogger(__name__)

#: A function of the calling entity and the request payload; returns the response payload.
Method = Callable[[UUri, bytes], bytes]


class Service:
    """An entity that answers requests, one at a time.

    Requests are idempotent: after a crash one may be repeated.
    """

    service_id: ClassVar[int]
    version: ClassVar[int]
    name: ClassVar[str]

    def __init__(self, authority: str, clock: Clock) -> None:
        self.address = UUri(authority, self.service_id, self.version, 0)
        self.clock = clock
        self.methods: Mapping[int, Method] = {}

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    def new_id(self) -> UUID7:
        """Return a new message id with the current time."""
        return UUID7.new(self.now_ms)

    def receive(self, message: UMessage) -> list[UMessage]:
        """Process a message; return the messages to send, the response first.

        :raises StorageError: a change could not be saved; the message is redelivered.
        """
        attributes = message.attributes
        if attributes.type != UMessageType.REQUEST:
            return []
        assert attributes.source is not None
        assert attributes.sink is not None
        try:
            method = self.method(attributes.sink)
            if method is None:
                raise UStatusError(  # noqa: TRY301 - like all that a method raises
                    UCode.UNIMPLEMENTED,
                    f"{self.name} version {self.version} at {self.address} has the methods "
                    f"{', '.join(f'{number:X}' for number in sorted(self.methods))}",
                )
            payload = method(attributes.source.with_resource(0), _payload(message))
        except UStatusError as error:
            return [error_response(message, error.code, error.message, id=self.new_id())]
        return [_answer(message, payload, self.new_id())]

    def method(self, address: UUri) -> Method | None:
        """Return the method at an address, or None."""
        is_own = address.ue_version_major == self.version
        return self.methods.get(address.resource_id) if is_own else None

    def work(self) -> list[UMessage]:
        """Do due work; return the messages to send."""
        return []

    def next_due(self) -> float | None:
        """Return when work is due (monotonic seconds), or None."""
        return None

    def close(self) -> None:
        """Release all resources."""


def decoded(kind: Any, payload: bytes) -> Any:
    """Decode a protobuf message.

    :raises UStatusError: INVALID_ARGUMENT, the payload does not decode.
    """
    try:
        return kind.FromString(payload)
    except proto.UNDECODABLE as error:
        raise UStatusError(
            UCode.INVALID_ARGUMENT, f"the payload is not a {kind.DESCRIPTOR.name}"
        ) from error


def _payload(message: UMessage) -> bytes:
    payload = message.payload or b""
    if message.attributes.payload_format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY:
        value: bytes = decoded(proto.Any_, payload).value
        return value
    plain = (UPayloadFormat.PROTOBUF, UPayloadFormat.UNSPECIFIED)
    if payload and message.attributes.payload_format not in plain:
        raise UStatusError(UCode.INVALID_ARGUMENT, "the payload should be protobuf")
    return payload


def _answer(request: UMessage, payload: bytes, id: UUID7) -> UMessage:
    """Create the response in the form of the request: wrapped in Any, or plain."""
    wrapped = UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY
    if request.attributes.payload_format != wrapped:
        return response(request, payload, payload_format=UPayloadFormat.PROTOBUF, id=id)
    asked = decoded(proto.Any_, request.payload or b"").type_url
    url = asked.replace("Request", "Response") if asked.endswith("Request") else ""
    packed = proto.Any_(type_url=url, value=payload).SerializeToString()
    return response(request, packed, payload_format=wrapped, id=id)


#: Longest wait (seconds), since the wall clock may be set meanwhile.
_LONGEST_WAIT: Final = 0.5
_PAUSE: Final = 1.0


class ServicesLeg(Leg):
    """A leg whose receivers are services of this process.

    It processes one message at a time, so that notifications are sent in the order of changes.
    """

    scope = "entity"

    def __init__(
        self,
        name: str,
        services: Iterable[Service],
        clock: Clock,
        *,
        threads: bool = True,
    ) -> None:
        super().__init__(name)
        self._services = {service.service_id: service for service in services}
        self._clock = clock
        self._has_threads = threads
        self._changed: Callable[[], None] = lambda: None
        self._ingest: Ingest | None = None
        #: Held while a service processes a message and its output is stored.
        self._acting = threading.RLock()
        #: Output that could not be stored; it is sent before anything else.
        self._unsaid: list[UMessage] = []
        self._worker = Worker("services", self._run, log=log)
        self._counts = Counts("received", "delivered", "failed")

    def on_change(self, changed: Callable[[], None]) -> None:
        """Set the callback for possible changes of the subscriptions."""
        self._changed = changed

    # --- the interface ----------------------------------------------------------------------------

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        del authorities
        self._ingest = ingest
        if self._has_threads:
            self._worker.start()

    def listen(self, topic: UUri) -> None:
        """Do nothing: services listen to no topic."""

    def unlisten(self, topic: UUri) -> None:
        """Do nothing: services listen to no topic."""

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        found: list[UStatus | None] = []
        for message in messages:
            status = self._deliver(address, message)
            if status is not None:
                self._counts.add("failed")
                return found + not_tried_after(status, len(messages) - len(found) - 1)
            self._counts.add("delivered")
            found.append(None)
        return found

    def _deliver(self, address: UUri, message: UMessage) -> UStatus | None:
        service = self._services.get(address.service_id)
        if service is None or address.instance_id:
            return UStatus(UCode.NOT_FOUND, f"no service is at {address}")
        try:
            with self._acting:
                if self._ingest is None:
                    return UStatus(UCode.UNAVAILABLE, "the dispatcher has stopped")
                self._say([])
                said = service.receive(message)
                self._changed()  # routes change before the subscriber is told
                self._say(said)
        except PenstockError as error:
            return UStatus(UCode.UNAVAILABLE, str(error))
        self._worker.wake()  # work may be due earlier now
        return None

    def _say(self, messages: list[UMessage]) -> None:
        """Store messages in the dispatcher.

        :raises PenstockError: they could not be stored; they are kept for the next call.
        """
        self._unsaid += messages
        if self._unsaid and self._ingest is not None:
            self._ingest(self._unsaid)
            self._counts.add("received", len(self._unsaid))
            self._unsaid = []

    # --- time -------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Do due work; return when more is due (monotonic seconds), or None.

        :raises PenstockError: a message could not be stored.
        """
        with self._acting:
            if self._ingest is None:
                return None
            said = [message for it in self._services.values() for message in it.work()]
            if said:
                self._changed()
            self._say(said)
        dues = [due for it in self._services.values() if (due := it.next_due()) is not None]
        return min(dues, default=None)

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            wait = _LONGEST_WAIT
            try:
                due = self.step()
                if due is not None:
                    wait = min(max(due - self._clock.monotonic(), 0.0), _LONGEST_WAIT)
            except Exception:
                log.exception("a service could not do what was due")
                wait = _PAUSE
            worker.wait(wait)

    def stop(self) -> None:
        with self._acting:
            self._ingest = None
        self._worker.stop()

    def close(self) -> None:
        self.stop()
        for service in self._services.values():
            service.close()

    def statistics(self) -> Mapping[str, int]:
        return self._counts.snapshot()
