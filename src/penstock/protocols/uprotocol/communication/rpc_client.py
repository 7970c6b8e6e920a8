"""How does an entity call a method of another? (spec uprotocol 5)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.closing import Closable
from penstock.core.retry import RetryPolicy, retry
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UStatus, UStatusError
from penstock.protocols.uprotocol.communication.deadlines import Deadlines
from penstock.protocols.uprotocol.communication.options import (
    CallOptions,
    UPayload,
    payload_fields,
)
from penstock.protocols.uprotocol.communication.workers import Workers
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import request
from penstock.protocols.uprotocol.uuri import UUri

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.retry import Backoff
    from penstock.protocols.uprotocol.communication.addresses import LocalUriProvider
    from penstock.protocols.uprotocol.message import UMessage
    from penstock.protocols.uprotocol.transports.interface import UTransport
    from penstock.protocols.uprotocol.uuid7 import UUID7

__all__ = ["RpcClient"]

#: Calls that are retried wait in threads, this many at once.
_RETRYING = 16


class RpcClient(Closable):
    """Calls methods for one entity.

    :param backoff: to call again, with these delays and as long as the call may take, when the
        other side is UNAVAILABLE. Without it a call is made once.
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

    def invoke_method(
        self,
        method: UUri,
        payload: UPayload | bytes | str | None = None,
        options: CallOptions | None = None,
    ) -> Future[UPayload]:
        """Call a method; its answer, or why there is none, is in the future.

        The future has a `UStatusError`: DEADLINE_EXCEEDED if no answer came in time, what the
        transport said if it did not take the request, or else the code of the answer.

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
        # An answer that comes late, or for a second time, is nobody's; nor is a cancelled one.
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
        """Receive no more answers. Calls under way end as CANCELLED."""
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
    """Listens to what is sent to an entity, and leaves its notifications to others."""

    def __init__(self, on_receive: Callable[[UMessage], None]) -> None:
        self.on_receive = on_receive

    def accepts(self, message: UMessage) -> bool:
        return message.attributes.type == UMessageType.RESPONSE


def _is_unavailable(error: Exception) -> bool:
    return isinstance(error, UStatusError) and error.code == UCode.UNAVAILABLE


def _failure(message: UMessage) -> UStatusError:
    """Make the error of an answer that says so; its payload should be a UStatus."""
    code = message.attributes.commstatus
    assert code is not None
    status = UStatus(code)
    with suppress(InvalidMessage):
        status = UStatus.from_bytes(message.payload or b"")
    return UStatusError(code, status.message)
