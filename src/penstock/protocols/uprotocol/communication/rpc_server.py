"""How does an entity answer calls of its methods? (spec uprotocol 5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.closing import Closable
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UStatusError
from penstock.protocols.uprotocol.communication.options import UPayload, payload_fields
from penstock.protocols.uprotocol.communication.workers import Workers
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.expiry import is_expired
from penstock.protocols.uprotocol.message import UMessage, error_response, response
from penstock.protocols.uprotocol.transports.counts import Counts
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.protocols.uprotocol.communication.addresses import LocalUriProvider
    from penstock.protocols.uprotocol.transports.interface import UTransport

__all__ = ["RequestHandler", "RpcServer"]

log = logging.getLogger(__name__)

#: Gets a request and returns the answer's payload. A `UStatusError` becomes the answer's code, any
#: other error INTERNAL.
RequestHandler: TypeAlias = Callable[[UMessage], UPayload | bytes | str | None]

#: Any entity, which is where a request comes from.
_ANYBODY = UUri.ANY.with_resource(0)


class RpcServer(Closable):
    """Answers calls for one entity, in threads of its own.

    :param workers: calls that are answered at once.
    :param waiting: calls that wait for that; more are answered RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        transport: UTransport,
        uris: LocalUriProvider,
        *,
        workers: int = 4,
        waiting: int = 1024,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._transport = transport
        self._uris = uris
        self._clock = clock
        self._lock = threading.Lock()
        self._handlers: dict[UUri, RequestHandler] = {}
        self._pool = Workers(workers, f"up-rpc-server-{uris.ue_id:X}")
        self._room = threading.BoundedSemaphore(workers + waiting)
        self._counts = Counts("requests", "answered", "failed", "expired", "not_sent")

    def register_request_handler(self, method: int | UUri, handler: RequestHandler) -> None:
        """Have calls of a method answered.

        :raises UStatusError: ALREADY_EXISTS, the method has a handler; INVALID_ARGUMENT, it is
            not a method; else as `UTransport.register_listener`.
        """
        address = self._uris.own(method)
        if not address.is_rpc_method or address.has_wildcard:
            raise UStatusError(UCode.INVALID_ARGUMENT, f"{address} is not a method")
        with self._lock:
            if address in self._handlers:
                raise UStatusError(UCode.ALREADY_EXISTS, f"{address} has a handler already")
            self._handlers[address] = handler
        try:
            self._transport.register_listener(_ANYBODY, self._on_request, address)
        except BaseException:
            with self._lock:
                del self._handlers[address]
            raise

    def unregister_request_handler(self, method: int | UUri, handler: RequestHandler) -> None:
        """Have calls of a method answered no more.

        :raises UStatusError: NOT_FOUND, the method has no such handler.
        """
        address = self._uris.own(method)
        with self._lock:
            if self._handlers.get(address) != handler:
                raise UStatusError(UCode.NOT_FOUND, f"{address} has no such handler")
            del self._handlers[address]
        self._transport.unregister_listener(_ANYBODY, self._on_request, address)

    def _on_request(self, message: UMessage) -> None:
        if message.attributes.type != UMessageType.REQUEST or message.attributes.sink is None:
            return
        self._counts.add("requests")
        with self._lock:
            handler = self._handlers.get(self._uris.own(message.attributes.sink))
        if handler is None:
            self._answer(error_response(message, UCode.NOT_FOUND, "the method has no handler"))
        elif not self._room.acquire(blocking=False):
            self._answer(
                error_response(message, UCode.RESOURCE_EXHAUSTED, "too many calls are under way")
            )
        else:
            try:
                self._pool.submit(self._handle, handler, message)
            except RuntimeError:  # closed
                self._room.release()
                self._answer(error_response(message, UCode.UNAVAILABLE, "it is shutting down"))

    def _handle(self, handler: RequestHandler, message: UMessage) -> None:
        try:
            if is_expired(message.attributes, self._clock.now_ns() // 1_000_000):
                self._counts.add("expired")  # nobody waits for its answer any more
                return
            self._answer(self._answer_of(handler, message))
        finally:
            self._room.release()

    def _answer_of(self, handler: RequestHandler, message: UMessage) -> UMessage:
        try:
            return response(message, **payload_fields(handler(message)))
        except UStatusError as error:
            return error_response(message, error.code, error.message)
        except Exception as error:
            log.exception("the handler of %s failed", message.attributes.sink)
            return error_response(message, UCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _answer(self, answer: UMessage) -> None:
        is_error = answer.attributes.commstatus not in (None, UCode.OK)
        try:
            self._transport.send(answer)
        except (UStatusError, InvalidMessage) as error:
            self._counts.add("not_sent")
            log.warning("an answer to %s was not sent: %s", answer.attributes.sink, error)
        else:
            self._counts.add("failed" if is_error else "answered")

    def close(self) -> None:
        """Take no more calls; those under way are answered first. A handler may call this."""
        with self._lock:
            methods = list(self._handlers)
            self._handlers.clear()
        for address in methods:
            with suppress(UStatusError):
                self._transport.unregister_listener(_ANYBODY, self._on_request, address)
        self._pool.end()

    def statistics(self) -> Mapping[str, int]:
        """Return the books: requests are answered, failed, expired or not_sent, when idle."""
        return self._counts.snapshot()
