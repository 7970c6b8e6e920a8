"""How does an entity call a method of another, and serve its own? (docs/specs/uprotocol.md 5)"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.interfaces import Closable
from penstock.core.retry import RetryPolicy, retry
from penstock.core.worker import Worker
from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UStatus, UStatusError
from penstock.protocols.uprotocol.communication.pubsub import CallOptions, UPayload, payload_fields
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import (
    UMessage,
    error_response,
    is_expired,
    request,
    response,
)
from penstock.protocols.uprotocol.transports.interface import Counts
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.retry import Backoff
    from penstock.protocols.uprotocol.communication.pubsub import LocalUriProvider
    from penstock.protocols.uprotocol.transports.interface import UTransport
    from penstock.protocols.uprotocol.uuid7 import UUID7

__all__ = ["Deadlines", "RequestHandler", "RpcClient", "RpcServer", "Workers"]

log = logging.getLogger(__name__)

#: Number of cancelled entries tolerated in the heap.
_FEW: Final = 64
#: Number of threads for calls with retries.
_RETRYING = 16
#: Takes a request and returns the response payload. A `UStatusError` becomes the response code, any
#: other error INTERNAL.
RequestHandler: TypeAlias = Callable[[UMessage], UPayload | bytes | str | None]
#: Rules without which a request cannot be answered: who violates others is answered.
_UNANSWERABLE: Final = frozenset(
    {"id", "source-uuri", "sink-uuri", "source-wildcard", "sink-wildcard"}
    | {"request-source", "request-sink"}
)
#: Any entity: the source filter of requests.
_ANYBODY = UUri.ANY.with_resource(0)


class Deadlines:
    """Calls functions at set times, in a thread that lives while calls are pending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._worker: Worker | None = None
        self._is_closed = False

    def add(self, seconds: float, call: Callable[[], None]) -> int:
        """Schedule a call. It must not block, and must check whether it is still needed.

        :returns: the number of the call, for `discard`.
        """
        with self._changed:
            number = next(self._numbers)
            if self._is_closed:
                return number
            self._calls[number] = call
            heapq.heappush(self._due, (time.monotonic() + seconds, number))
            if self._worker is None:
                self._worker = Worker(self._name, self._run, log=log, restart=True).start()
            self._changed.notify()
            return number

    def discard(self, number: int) -> None:
        """Cancel a scheduled call. Idempotent."""
        with self._changed:
            self._calls.pop(number, None)
            # Most calls end long before their timeout: remove cancelled entries.
            if len(self._due) > _FEW + 2 * len(self._calls):
                self._due = [it for it in self._due if it[1] in self._calls]
                heapq.heapify(self._due)

    def _run(self, _: Worker) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._worker = None
                    return
                wait = self._due[0][0] - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                call = self._calls.pop(heapq.heappop(self._due)[1], None)
            if call is not None:
                call()

    def close(self) -> None:
        """Cancel all calls."""
        with self._changed:
            self._is_closed = True
            self._due.clear()
            self._calls.clear()
            self._changed.notify()
            worker = self._worker
        if worker is not None:
            worker.join()


class Workers(ThreadPoolExecutor):
    """A thread pool that may be ended by its own tasks without a deadlock."""

    def __init__(self, most: int, name: str) -> None:
        self._here = threading.local()
        super().__init__(most, name, initializer=self._note)

    def _note(self) -> None:
        self._here.is_own = True

    def end(self, *, cancel: bool = False) -> None:
        """Accept no more tasks, and wait for the rest; `cancel` drops those not started."""
        is_own = getattr(self._here, "is_own", False)
        self.shutdown(wait=not is_own, cancel_futures=cancel)


class RpcClient(Closable):
    """Calls methods for one entity.

    :param backoff: delays of retries while the other side is UNAVAILABLE, within the timeout of
        the call. Without it a call is made once.
    :raises UStatusError: as `UTransport.register_listener`.
    """

    def __init__(
        self,
        transport: UTransport,
        uris: LocalUriProvider,
        *,
        backoff: Backoff | None = None,
    ) -> None:
        self._transport = transport
        self._uris = uris
        self._backoff = backoff
        self._lock = threading.Lock()
        self._calls: dict[UUID7, tuple[Future[UPayload], int]] = {}
        self._deadlines = Deadlines(f"up-rpc-{uris.ue_id:X}")
        self._pool = Workers(_RETRYING, f"up-rpc-{uris.ue_id:X}") if backoff else None
        self._is_closed = False
        self._responses = _Responses(self._on_response)
        transport.register_listener(UUri.ANY, self._responses, uris.source)

    @property
    def source(self) -> UUri:
        """The calling entity, which responses go to."""
        return self._uris.source

    def invoke_method(
        self,
        method: UUri,
        payload: UPayload | bytes | str | None = None,
        options: CallOptions | None = None,
    ) -> Future[UPayload]:
        """Call a method; the future has its response, or an error.

        The error is a `UStatusError`: DEADLINE_EXCEEDED after a timeout, the transport's error if
        it rejected the request, or else the code of the response.

        :raises InvalidMessage: the request would violate a rule.
        """
        options = options or CallOptions()
        self._check_open()
        if self._backoff is None or self._pool is None:
            return self._call(method, payload, options)
        end = time.monotonic() + options.call_ttl / 1000
        policy = RetryPolicy(
            retry_on=_is_unavailable,
            backoff=self._backoff,
            max_attempts=None,
            max_elapsed=options.call_ttl / 1000,
        )

        def attempt() -> UPayload:
            left = max(1, round((end - time.monotonic()) * 1000))
            return self._call(method, payload, replace(options, ttl=left)).result()

        return self._pool.submit(retry, attempt, policy)

    def _call(
        self, method: UUri, payload: UPayload | bytes | str | None, options: CallOptions
    ) -> Future[UPayload]:
        message = request(
            self._uris.source,
            method.resolved(self._uris.authority),
            **payload_fields(payload),
            priority=options.call_priority,
            ttl=options.call_ttl,
            permission_level=options.permission_level,
            token=options.token,
            traceparent=options.traceparent,
        )
        id = message.attributes.id
        assert id is not None
        future: Future[UPayload] = Future()
        late = UStatusError(
            UCode.DEADLINE_EXCEEDED, f"no answer from {method} within {options.call_ttl} ms"
        )
        with self._lock:
            self._check_open()
            number = self._deadlines.add(options.call_ttl / 1000, lambda: self._end(id, late))
            self._calls[id] = future, number
        try:
            self._transport.send(message)
        except UStatusError as error:
            self._end(id, error)
        return future

    def _check_open(self) -> None:
        if self._is_closed:
            raise UStatusError(UCode.FAILED_PRECONDITION, "the client is closed")

    def _on_response(self, message: UMessage) -> None:
        attributes = message.attributes
        if attributes.reqid is None:
            return
        if attributes.commstatus in (None, UCode.OK):
            self._end(attributes.reqid, UPayload.of_message(message))
        else:
            self._end(attributes.reqid, _failure(message))

    def _end(self, id: UUID7, outcome: UPayload | UStatusError) -> None:
        with self._lock:
            call = self._calls.pop(id, None)
        # Ignore late, repeated and cancelled responses.
        if call is None:
            return
        future, number = call
        self._deadlines.discard(number)
        with suppress(InvalidStateError):
            if isinstance(outcome, UStatusError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def close(self) -> None:
        """Stop receiving responses. Pending calls end as CANCELLED."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting = list(self._calls)
        with suppress(UStatusError):
            self._transport.unregister_listener(UUri.ANY, self._responses, self._uris.source)
        for id in waiting:
            self._end(id, UStatusError(UCode.CANCELLED, "the client was closed"))
        self._deadlines.close()
        if self._pool is not None:
            self._pool.end(cancel=True)


class _Responses:
    """Listens to the responses to an entity, and leaves notifications to other listeners."""

    def __init__(self, on_receive: Callable[[UMessage], None]) -> None:
        self.on_receive = on_receive

    def accepts(self, message: UMessage) -> bool:
        return message.attributes.type == UMessageType.RESPONSE


def _is_unavailable(error: Exception) -> bool:
    return isinstance(error, UStatusError) and error.code == UCode.UNAVAILABLE


def _failure(message: UMessage) -> UStatusError:
    """Return the error of a failed response; its payload should be a UStatus."""
    code = message.attributes.commstatus
    assert code is not None
    status = UStatus(code)
    with suppress(InvalidMessage, *proto.UNDECODABLE):
        status = UStatus.from_bytes(UPayload.of_message(message).protobuf or b"")
    return UStatusError(code, status.message, details=status.details)


class RpcServer(Closable):
    """Answers calls for one entity, in its own threads.

    :param workers: number of calls processed in parallel.
    :param waiting: number of queued calls; more are answered RESOURCE_EXHAUSTED.
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
        """Register the handler of a method.

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
        """Unregister the handler of a method.

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
        if rules := _UNANSWERABLE.intersection(message.validate()):
            self._counts.add("not_sent")
            source = message.attributes.source
            log.warning("nobody could get an answer to %s: %s", source, ", ".join(sorted(rules)))
            return
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
            try:
                return response(message, **payload_fields(handler(message)))
            except UStatusError as error:
                return error_response(message, error.code, error.message, details=error.details)
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
        """Accept no more calls, and finish pending ones. A handler may call this."""
        with self._lock:
            methods = list(self._handlers)
            self._handlers.clear()
        for address in methods:
            with suppress(UStatusError):
                self._transport.unregister_listener(_ANYBODY, self._on_request, address)
        self._pool.end()

    def statistics(self) -> Mapping[str, int]:
        """Return the counters; when idle, requests = answered + failed + expired + not_sent."""
        return self._counts.snapshot()
