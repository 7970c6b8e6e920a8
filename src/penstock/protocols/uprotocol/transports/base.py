"""What do all transports do alike: check, resolve, register, and keep books?"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.protocols.uprotocol.codes import UCode, UStatusError
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import is_expired
from penstock.protocols.uprotocol.transports.interface import Counts, UTransport
from penstock.protocols.uprotocol.transports.listeners import ListenerLimits, ListenerRegistry
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.protocols.uprotocol.codes import UStatus
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import Listener
    from penstock.protocols.uprotocol.transports.listeners import Acknowledging, Pattern

__all__ = ["BaseTransport", "raise_unless_ok", "resolved"]


def resolved(message: UMessage, authority: str) -> UMessage:
    """Fill in the authority of local addresses, so that they are valid elsewhere."""
    attributes = message.attributes
    source, sink = attributes.source, attributes.sink
    changes: dict[str, UUri] = {}
    if source is not None and not source.authority_name:
        changes["source"] = source.resolved(authority)
    if sink is not None and not sink.authority_name:
        changes["sink"] = sink.resolved(authority)
    return message.with_attributes(**changes) if changes else message


def raise_unless_ok(status: UStatus | None) -> None:
    """Raise the error of a batch of one message, if any.

    :raises UStatusError: the message failed.
    """
    if status is not None and not status.is_ok:
        raise UStatusError(status.code, status.message)


class BaseTransport(UTransport):
    """A transport with listeners. Subclasses implement sending and subscribing."""

    def __init__(
        self,
        authority: str,
        *,
        limits: ListenerLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
        acknowledging: Acknowledging | None = None,
    ) -> None:
        problem = UUri.unchecked(authority, 0, 0, 0).problem
        if problem or authority in ("", "*"):
            raise UStatusError(
                UCode.INVALID_ARGUMENT,
                f"{authority!r} is not the name of an authority: {problem or 'it is not one'}",
            )
        self.authority = authority
        self.clock = clock
        self._registry = ListenerRegistry(authority, limits, clock, acknowledging)
        # One lock for the registry and the transport: first and last listener are decided together.
        self._registering = threading.RLock()
        self._pulled: set[Pattern] = set()
        self._is_closed = False
        self._counts = Counts("sent", "not_sent")

    # --- for the kinds of transports --------------------------------------------------------------

    @abstractmethod
    def _send(self, message: UMessage) -> None:
        """Send a valid message.

        :raises UStatusError: sending failed.
        """

    def _subscribe(self, pattern: Pattern) -> None:
        """Subscribe to a pattern, before its first listener is registered."""

    def _unsubscribe(self, pattern: Pattern) -> None:
        """Unsubscribe from a pattern, after its last listener."""

    # --- the interface ----------------------------------------------------------------------------

    def send(self, message: UMessage) -> None:
        self._check_open()
        try:
            check(message.attributes, message.payload is not None)
            self._check_alive(message)
            self._send(resolved(message, self.authority))
        except InvalidMessage as error:
            self._counts.add("not_sent")
            raise UStatusError(UCode.INVALID_ARGUMENT, error.reason, hint=error.hint) from error
        except UStatusError:
            self._counts.add("not_sent")
            raise
        self._counts.add("sent")

    def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        self._check_open()
        pattern = self._registry.pattern(source_filter, sink_filter)
        with self._registering:
            if pattern not in self._pulled:
                self._subscribe(pattern)
                self._pulled.add(pattern)
        return self._registry.take(pattern)

    def register_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        pattern = self._registry.pattern(source_filter, sink_filter)
        with self._registering:
            if not self._registry.add(pattern, listener) or pattern in self._pulled:
                return
            try:
                self._subscribe(pattern)
            except BaseException:
                self._registry.remove(pattern, listener, is_wanted=True)
                raise
        self._registry.serve()

    def unregister_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        self._remove(source_filter, listener, sink_filter, is_wanted=False)

    def withdraw_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        self._remove(source_filter, listener, sink_filter, is_wanted=True)

    def _remove(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None, *, is_wanted: bool
    ) -> None:
        self._check_open()
        pattern = self._registry.pattern(source_filter, sink_filter)
        with self._registering:
            was_last, await_calls = self._registry.remove(pattern, listener, is_wanted=is_wanted)
            if was_last and pattern not in self._pulled:
                self._unsubscribe(pattern)
        await_calls()  # without the lock, which those calls may need

    def close(self) -> None:
        self._is_closed = True
        self._registry.clear()

    def statistics(self) -> Mapping[str, int]:
        return {**self._counts.snapshot(), **self._registry.statistics()}

    def _check_alive(self, message: UMessage) -> None:
        if is_expired(message.attributes, self.clock.now_ns() // 1_000_000):
            raise UStatusError(UCode.DEADLINE_EXCEEDED, "the message is expired")

    def _check_open(self) -> None:
        if self._is_closed:
            raise UStatusError(UCode.FAILED_PRECONDITION, "the transport is closed")
