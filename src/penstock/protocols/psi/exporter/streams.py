"""How do a program's values get into the streams of a store?"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.delivery_policy import DeliveryPolicy, DeliveryQueue
from penstock.core.errors import (
    Closed,
    InvalidOption,
    Malformed,
    MessageTooLarge,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Closable, Reader
from penstock.core.worker import Worker
from penstock.protocols.psi.codecs import CodecLibrary, parse_type_name
from penstock.protocols.psi.store.streams import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.overflow import BufferStatistics
    from penstock.protocols.psi.metadata import StreamMetadata, TypeSchema
    from penstock.protocols.psi.store.catalog import StoreStreams

__all__ = ["ExportedStream", "Exporter", "Posted"]

log = logging.getLogger(__name__)

BYTES: Final = "System.Byte[]"
_TAKEN_AT_ONCE: Final = 256
#: Seconds between checks for the end while a source is silent.
_PATIENCE: Final = 0.2


class Posted(NamedTuple):
    """A value and its originating time, for a source that knows it."""

    value: Any
    originating_ns: int


class _Waiting(NamedTuple):
    payload: bytes
    originating_ns: int


class ExportedStream(Closable):
    """One stream that is written to. Any thread may post.

    Without a policy a message goes straight to the store, and `post` blocks under back-pressure.
    With a policy it goes to a queue, which a thread of its own empties into the store.
    """

    def __init__(
        self, store: Store, metadata: StreamMetadata, policy: DeliveryPolicy | None
    ) -> None:
        self.store = store
        self.name = metadata.name
        self.id = metadata.id
        self.type_name = parse_type_name(metadata.type_name).canonical
        self._codec = store.catalog.codec(metadata)
        self._queue: DeliveryQueue[_Waiting] | None = None
        self._worker: Worker | None = None
        #: Why the last message was not stored.
        self.last_error: Exception | None = None
        #: Messages from the queue that the store did not take.
        self.refused = 0
        #: No more is taken, and the end was announced.
        self._is_closed = self._is_ended = False
        if policy is not None:
            self._queue = DeliveryQueue(
                policy, time_of=lambda waiting: waiting.originating_ns, receive=self._append
            )
            self._worker = Worker(f"psi-export-{self.name}", self._empty, log=log).start()

    def post(self, value: Any, originating_ns: int | None = None) -> bool:
        """Write a value; False if the policy dropped it.

        :raises InvalidOption: it is not of the stream's type.
        :raises Closed: the stream was ended.
        """
        return self.post_payload(self._codec.encode(value), originating_ns)

    def post_payload(self, payload: bytes, originating_ns: int | None = None) -> bool:
        """Write a payload in psi's encoding.

        :raises MessageTooLarge: it does not fit.
        :raises Closed: the stream was ended.
        """
        if self._queue is None:
            if self._is_closed:
                raise Closed(f"the stream {self.name!r} was ended")
            self.store.append(self.id, payload, originating_ns)
            return True
        moment = time.time_ns() if originating_ns is None else originating_ns
        return self._queue.put(_Waiting(payload, moment))

    def post_bytes(self, payload: bytes, originating_ns: int | None = None) -> bool:
        """Write bytes: the content of a `byte[]`; for other types, a payload in psi's encoding."""
        if self.type_name == BYTES:
            return self.post(payload, originating_ns)
        return self.post_payload(payload, originating_ns)

    def post_many(self, posts: Sequence[tuple[bytes, int | None]]) -> None:
        """Write many as `post_bytes` does, each with its originating time; None is now."""
        if self._queue is not None:
            for payload, originating_ns in posts:
                self.post_bytes(payload, originating_ns)
            return
        if self._is_closed:
            raise Closed(f"the stream {self.name!r} was ended")
        if self.type_name == BYTES:
            encode = self._codec.encode
            posts = [(encode(payload), originating_ns) for payload, originating_ns in posts]
        self.store.append_many(self.id, posts)

    def statistics(self) -> BufferStatistics | None:
        """Return the counts of the policy; None without one."""
        return None if self._queue is None else self._queue.statistics()

    def close(self) -> None:
        """Write what is queued, and announce the end of the stream. Idempotent.

        :raises StorageError: the end cannot be stored; another call tries again.
        """
        if self._is_ended:
            return
        self._is_closed = True
        if self._queue is not None and self._worker is not None:
            self._queue.close()
            self._worker.join()
        self.store.end_stream(self.id)
        self._is_ended = True

    def _append(self, waiting: _Waiting) -> None:
        try:
            self.store.append(self.id, waiting.payload, waiting.originating_ns)
        except PenstockError as error:
            self.refused += 1
            self.last_error = error
            if not isinstance(error, MessageTooLarge):
                raise
            log.warning("a message of %s is left out: %s", self.name, error)

    def _append_all(self, taken: Sequence[_Waiting]) -> None:
        for number, waiting in enumerate(taken, 1):
            try:
                self._append(waiting)
            except PenstockError:
                self.refused += len(taken) - number  # nobody has the rest of them, either
                raise

    def _empty(self, _: Worker) -> None:
        assert self._queue is not None
        try:
            while True:
                if self._queue.delivery.is_synchronous:
                    self._queue.receive(_PATIENCE)
                    continue
                self._append_all(self._queue.get_many(_TAKEN_AT_ONCE, _PATIENCE))
        except PenstockError as error:
            if error is not self.last_error:
                return  # the queue was closed, and not the store
            log.exception("the stream %s of %s ended", self.name, self.store.name)
            self._queue.close()


class Exporter:
    """Writes streams into a store; streams may be added at any time."""

    def __init__(self, store: StoreStreams) -> None:
        self.store = store
        self.streams: dict[str, ExportedStream] = {}
        self._pumps: list[Worker] = []
        self._lock = threading.Lock()

    def write(
        self,
        source: Reader | Iterable[Any] | None,
        name: str,
        type: str | None = None,
        *,
        policy: DeliveryPolicy | str | None = None,
        id: int | None = None,
        schemas: Iterable[TypeSchema] | None = None,
    ) -> ExportedStream:
        """Write a stream under a name.

        A source is a reader (its payloads are of `type`, by default bytes), or an iterable of
        values or of `Posted`. A thread of its own reads it; the stream ends with it. None: the
        program posts.

        :raises InvalidOption: the type is missing or unknown, or the exporter writes a stream of
            that name already.
        :raises Unsupported: the store is read-only.
        """
        if type is None:
            if not isinstance(source, Reader):
                raise InvalidOption("type", None, "is needed: float, string, byte[], …")
            type = "byte[]"
        store = self.store
        if not isinstance(store, Store) or not store.is_writable:
            raise Unsupported(
                f"the store {store.name} is only read",
                hint="open one of ours writable=True; psi's own files are never written",
            )
        schemas = None if schemas is None else list(schemas)
        _check_type(type, schemas or ())
        if isinstance(policy, str):
            policy = DeliveryPolicy.parse(policy)
        with self._lock:
            if name in self.streams:
                raise InvalidOption("name", name, "this exporter writes that stream already")
            metadata = store.add_stream(name, type, id=id, schemas=schemas)
            stream = self.streams[name] = ExportedStream(store, metadata, policy)
        if source is not None:
            pump = Worker(
                f"psi-source-{name}",
                lambda worker: self._pump(source, stream, worker),
                log=log,
            )
            self._pumps.append(pump.start())
        return stream

    def _pump(self, source: Reader | Iterable[Any], stream: ExportedStream, worker: Worker) -> None:
        try:
            if isinstance(source, Reader):
                while not worker.is_stopping:
                    for message in source.read_many(_TAKEN_AT_ONCE, _PATIENCE):
                        stream.post_bytes(message.payload, message.time_ns)
                    source.acknowledge()
                return
            for item in source:
                if worker.is_stopping:
                    return
                if isinstance(item, Posted):
                    stream.post(*item)
                else:
                    stream.post(item)
            stream.close()
        except Exception as error:
            # A source may raise anything, and no caller waits on this thread.
            if not worker.is_stopping:
                stream.last_error = error
                log.exception("the source of %s failed", stream.name)

    def close(self) -> None:
        """End all streams of this exporter. Idempotent."""
        for pump in self._pumps:
            pump.ask_to_stop()
        for pump in self._pumps:
            pump.join(5)
        for stream in list(self.streams.values()):
            stream.close()


def _check_type(name: str, schemas: Iterable[TypeSchema]) -> None:
    """Refuse a type that no psi program can read; a name with an assembly is accepted.

    :raises InvalidOption: it is no type of .NET, and there is no schema of it.
    """
    hint = (
        "write float, int, string, byte[], double[], System.DateTime, "
        "System.Collections.Generic.List`1[[System.Int32]], …; of a type of your own its name with "
        "the assembly, or its schema"
    )
    try:
        type = parse_type_name(name)
    except Malformed as error:
        raise InvalidOption("type", name, f"is no name of a type: {error}", hint=hint) from None
    if type.assembly is None and not CodecLibrary(schemas).is_known(type):
        raise InvalidOption("type", name, "is no type of .NET", hint=hint)
