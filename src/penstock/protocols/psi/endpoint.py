"""Which stream is behind a `psi://` URL?

As a reader it imports that stream from an exporter; as a writer it is an exporter on that port.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from penstock.core.batch import messages_from_batch
from penstock.core.capabilities import Replayable
from penstock.core.endpoints import Endpoint, Identity
from penstock.core.errors import (
    ConnectionLost,
    InvalidOption,
    InvalidURL,
    Malformed,
    PenstockError,
    PositionError,
)
from penstock.core.interfaces import UNKNOWN_END, BookedWriter, Bounds, Reader, StreamInfo
from penstock.core.message import Message
from penstock.core.options import Duration, Options, Size, parse_options
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics, WriterStatistics
from penstock.protocols.psi.codecs.type_names import plain_name
from penstock.protocols.psi.exporter.server import ExporterOptions, RemoteExporter
from penstock.protocols.psi.exporter.streams import BYTES
from penstock.protocols.psi.handshake import DEFAULT_PORT, ClientHello
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter, unreachable
from penstock.protocols.psi.importer.connection import fetch_stream
from penstock.protocols.psi.store.back_pressure import BackPressure
from penstock.protocols.psi.store.streams import Store
from penstock.protocols.psi.ticks import ns_to_ticks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike, Writer
    from penstock.core.position import PositionLike
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL
    from penstock.protocols.psi.exporter.streams import ExportedStream

__all__ = ["PsiEndpoint", "PsiReader", "PsiReaderOptions", "PsiWriter", "PsiWriterOptions"]

log = logging.getLogger(__name__)


class PsiReaderOptions(Options):
    """Options of `psi://host:port/Stream` as a reader."""

    #: Seconds for the stream to be announced.
    wait: Duration = 10.0
    #: `content`: the bytes of a `byte[]`; `psi`: always psi's encoding.
    payload: Literal["content", "psi"] = "content"
    #: Messages and bytes that wait for the reader.
    slots: Annotated[int, Field(ge=2)] = 16384
    size: Annotated[Size, Field(ge=4096)] = 16 << 20
    silence: Annotated[Duration, Field(gt=0)] = 15.0
    #: Seconds of silence that are taken as the end of what the exporter has: psi does not tell.
    quiet: Duration = 1.0


class PsiWriterOptions(ExporterOptions):
    """Options of `psi://host:port/Stream` as a writer: an exporter on that port."""

    #: Of .NET or C#. Payloads are the content of a `byte[]`, or psi's encoding of other types.
    type: str = "byte[]"
    #: Bytes per second, such as 1MB/s.
    quota: str | None = None
    #: Store messages in a log at this path instead of in memory.
    store: str | None = None
    slots: Annotated[int, Field(ge=2)] = 16384
    size: Annotated[Size, Field(ge=4096)] = 16 << 20
    #: Seconds that clients get for the rest when it is closed, and to come if none did.
    linger: Duration = 5.0


#: Options of a writer that are not the exporter's.
_OF_STREAMS: Final = frozenset(PsiWriterOptions.model_fields) - frozenset(
    ExporterOptions.model_fields
)


class PsiEndpoint(Endpoint):
    """`psi://host:11411/Stream%20Name`: a stream behind a RemoteExporter, ours or psi's."""

    can_be_reread = False

    def open_reader(self, url: URL, start: Position) -> Reader:
        host, port, name = _parse(url)
        kind = WholePsiReader if start == Position.START else PsiReader
        return kind(url.text, host, port, name, start, parse_options(url, PsiReaderOptions))

    def open_writer(self, url: URL) -> Writer:
        host, port, name = _parse(url)
        for option in ("host", "port"):
            if option in url.options:
                raise InvalidOption(option, url.options[option], "is in the URL already")
        options = parse_options(url, PsiWriterOptions)
        options = options.model_copy(update={"host": host, "port": port})
        return PsiWriter(url.text, name, options)

    def identity(self, url: URL) -> Identity:
        return Identity.of(url, port=DEFAULT_PORT)

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return PsiWriter.cannot_carry

    def describe(self, url: URL) -> StreamInfo:
        host, port, name = _parse(url)
        options = parse_options(url, PsiReaderOptions)
        try:
            told = fetch_stream(host, port, name, options.wait)
        except PenstockError:
            raise
        except OSError as error:
            raise unreachable(host, port, error) from error
        return StreamInfo(
            url=url.text,
            layout="psi",
            storage="remote exporter",
            slots=0,
            buffer_size=0,
            oldest_seq=None,
            youngest_seq=None,
            count=told.message_count,
            bytes=told.size_sum,
            oldest_time_ns=None,
            youngest_time_ns=None,
            fill=0.0,
            blocking=False,
            details={"type": told.type_name, "id": told.id, "closed": told.is_closed},
        )


def _parse(url: URL) -> tuple[str, int, str]:
    name = url.path.removeprefix("/")
    if not url.host or not name:
        raise InvalidURL(
            url.text,
            "it names no host and stream",
            hint=f"write psi://host:{DEFAULT_PORT}/Stream%20Name",
        )
    return url.host, DEFAULT_PORT if url.port is None else url.port, name


class _Progress:
    """The position of a reader in its importer's store, for back-pressure."""

    def __init__(self) -> None:
        # From the start: back-pressure holds also before the first read.
        self.next_seq = 0
        self.progress_at = time.monotonic()

    def move(self, seq: int) -> None:
        self.next_seq, self.progress_at = seq, time.monotonic()


class PsiReader(Reader):
    """Reads one stream of an exporter. `type` is its source, `subtype` its sequence number.

    A message's `seq` is its sequence number from 0 on, the same on every connection until the
    stream is recreated. Messages that are not read yet hold up the exporter: none is lost here.
    """

    cannot_carry: ClassVar[Mapping[str, str]] = {
        "stream": "psi's streams have names, not numbers",
        "attributes": "a psi message has none",
    }

    def __init__(
        self,
        url: str,
        host: str,
        port: int,
        name: str,
        start: Position,
        options: PsiReaderOptions,
    ) -> None:
        super().__init__(url)
        self._options = options
        self._address = host, port
        self._name = name
        self._replay = _replay(start)
        self._is_catching_up = True
        self._has_come = False
        self._messages = self._bytes = self._lost = self._restarts = 0
        #: The expected `seq`; None: any.
        self._next: int | None = 0 if self._replay == REPLAY_ALL else None
        #: Taken from the store and not returned yet: the stream was recreated before the first one,
        #: or a signal interrupted a read.
        self._held: list[Message] = []
        #: The `seq` of the first and the last message of this connection.
        self._first: int | None = None
        self._last: int | None = None
        #: Messages that had come when it was closed, and were not read; None: it is open.
        self._unread: int | None = None
        self._connect()
        self._epoch = self._epoch_now()
        #: What the last read has changed, for `_untake`.
        self._before = self._books()

    def _connect(self) -> None:
        options = self._options
        self._store = Store.volatile("reader", slots=options.slots, size=options.size)
        lag = max(1, options.slots // 2), max(1, options.size // 2)
        self._progress = _Progress()
        self._pressure = BackPressure(self._store, *lag, patience=math.inf)
        self._pressure.add(self._progress)
        self._store.gates.append(self._pressure)
        try:
            self._importer = RemoteImporter(
                *self._address,
                self._replay,
                store=self._store,
                streams={self._name},
                silence=options.silence,
            )
        except BaseException:
            self._store.close()
            raise
        try:
            self._stream = self._importer.open_stream(self._name, timeout=options.wait)
        except BaseException:
            self.close()
            raise
        type_name = plain_name(self._store.catalog.stream(self._stream.id).type_name)
        self._is_bytes = options.payload == "content" and type_name == BYTES

    def _epoch_now(self) -> int:
        """Return the epoch of the stream: another one after it was recreated."""
        return ns_to_ticks(self._importer.remote_stream(self._name).opened_ns)

    def _take(self, limit: int) -> list[Message]:
        made: list[Message] = []
        while not made:
            if not self._held:
                self._fetch(limit)
            if not self._held:
                return []
            before = self._books()
            try:
                self._tell_progress()
                wanted, rest = self._wanted(self._held[:limit])
                made = self._made(wanted)
                rest += self._held[limit:]
                count, size = len(made), sum([len(message.payload) for message in made])
            except BaseException:
                self._restore(before)
                raise
            # No call from here on: whoever is interrupted before gets them at the next read.
            self._held = rest
            self._messages += count
            self._bytes += size
            self._before = before
        return made

    def _books(self) -> tuple[Any, ...]:
        """Return what a read changes."""
        counts = self._messages, self._bytes, self._lost, self._restarts
        return self._held, self._next, self._last, self._epoch, counts

    def _restore(self, books: tuple[Any, ...]) -> None:
        self._held, self._next, self._last, self._epoch, counts = books
        self._messages, self._bytes, self._lost, self._restarts = counts

    def _untake(self, messages: list[Message]) -> None:
        if messages:
            self._restore(self._before)

    def _made(self, found: list[Message]) -> list[Message]:
        """Return messages with their numbers and contents; what is no content counts as lost."""
        payloads: list[bytes | None] = [message.payload for message in found]
        if self._is_bytes:
            payloads = self._contents(found)
        return [
            Message(message.subtype - 1, *message[1:-1], payload)
            for message, payload in zip(found, payloads, strict=True)
            if payload is not None
        ]

    def _contents(self, found: list[Message]) -> list[bytes | None]:
        decode = self._stream.codec.decode
        contents: list[bytes | None] = []
        for message in found:
            try:
                contents.append(bytes(decode(message.payload) or b""))
            except Malformed as error:
                contents.append(None)
                self._lost += 1
                log.warning("%s: message %s is left out: %s", self.url, message.subtype - 1, error)
        return contents

    def _fetch(self, limit: int) -> None:
        """Move messages from the store to `_held`."""
        is_over = self._stream.is_over  # before the read: nothing can be appended in between
        # Messages of the past are in flight; the exporter does not mark their end.
        self._held = self._stream.take(limit, self._options.quiet if self._is_catching_up else 0)
        if not self._held:
            if self._is_catching_up:
                self._explain_silence()
            self._is_catching_up = False
            if is_over and self._next is not None:
                end = max(self._next, self._importer.last_sequence(self._name))
                self._lost, self._next = self._lost + end - self._next, end
            return
        self._has_come = True
        if self._first is None:
            self._first = self._held[0].subtype - 1

    def _tell_progress(self) -> None:
        """Let the exporter overwrite in the store what is in `_held`."""
        end = self._held[-1].seq + 1
        if self._progress.next_seq < end:
            self._progress.move(end)
            self._pressure.progress()

    def _explain_silence(self) -> None:
        """Log why no message may have come.

        :raises ConnectionLost: the stream is closed and has messages.
        """
        reason = self._importer.why_nothing_came()
        if self._has_come or reason is None or self._replay != REPLAY_ALL:
            return
        self._has_come = True  # log it once
        told = self._importer.remote_stream(self._name)
        if told.is_closed and told.message_count:
            where = ":".join(map(str, self._address))
            raise ConnectionLost(where, f"{told.message_count:,} messages do not come: {reason}")
        log.warning("%s: nothing came yet: %s", self.url, reason)

    def _wanted(self, found: list[Message]) -> tuple[list[Message], list[Message]]:
        """Return the messages to read now, and those for later; count the missing ones.

        Messages before a position that was sought are dropped; messages after a recreation of the
        stream are for later.
        """
        wanted: list[Message] = []
        for index, message in enumerate(found):
            seq = message.subtype - 1
            if self._last is not None and seq <= self._last:
                if wanted:
                    return wanted, found[index:]
                self._restarts += 1
                self._epoch = self._epoch_now()
                self._next = 0
            self._last = seq
            if self._next is not None:
                if seq < self._next:
                    continue
                self._lost += seq - self._next
            self._next = seq + 1
            wanted.append(message)
        return wanted, []

    def seek(self, position: PositionLike) -> None:
        place = Position.of(position)
        if self._replay != REPLAY_ALL or not (place.anchor == "seq" or place == Position.START):
            raise PositionError(
                f"{self.url} cannot be placed elsewhere", hint="open it again with start=…"
            )
        if self._last is not None and place.value <= self._last:
            self._go_back(place.value)
        self._next = place.value
        self._is_catching_up = True

    def _go_back(self, seq: int) -> None:
        """Rewind to the oldest message that is stored, or ask the exporter for all again."""
        self._held = []
        self._last = None
        if not self._restarts:  # else messages from before the recreation would have these numbers
            self._progress.move(0)
            self._stream.rewind()
            found = self._stream.take(1, 0)
            if found and (found[0].subtype - 1 <= seq or found[0].subtype - 1 == self._first):
                self._held = found
                self._progress.move(found[0].seq + 1)
                return
        self.close()
        self._first = self._unread = None
        self._connect()

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._lost,
            filtered=0,
            restarts=self._restarts,
            next_seq=self._next,
            backlog=self._waiting() if self._unread is None else self._unread,
            losses=(),
        )

    def _waiting(self) -> int:
        stored = max(0, self._store.newest_seq() + 1 - self._progress.next_seq)
        return stored + len(self._held)

    def _has_news(self) -> bool:
        return bool(self._held) or super()._has_news()

    def _idle(self) -> bool:
        return bool(self._held) or not self._stream.is_over

    def close(self) -> None:
        self._pressure.open()
        if hasattr(self, "_stream"):
            self._stream.close()
        self._importer.close()
        if self._unread is None:
            self._unread = self._waiting()
        self._store.close()


class WholePsiReader(Replayable, PsiReader):
    """Reads a stream from its start, and again from any `seq` that was read."""

    def bounds(self) -> Bounds:
        """Return what can be replayed; an exporter does not tell the end of an open stream."""
        told = self._importer.remote_stream(self._name)
        end = max(told.message_count, self._next or 0) if told.is_closed else UNKNOWN_END
        return Bounds(self._epoch, 0, end)


def _replay(start: Position) -> ClientHello:
    match start.anchor:
        case "start":
            return REPLAY_ALL
        case "end":
            return ClientHello()
        case "time":
            return ClientHello.of(start.value)
    raise PositionError(
        f"psi cannot begin at {start}", hint="use start, end, or a time like 2026-05-01T12:00:00Z"
    )


class _SharedExporters:
    """The exporters of this process by address, so that streams can share a port."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exporters: dict[tuple[str, int], tuple[RemoteExporter, PsiWriterOptions, int]] = {}

    def get(self, options: PsiWriterOptions) -> RemoteExporter:
        key = (options.host, options.port)
        with self._lock:
            if key in self._exporters and options.port:
                exporter, before, users = self._exporters[key]
                if before.model_copy(update={"type": options.type}) != options:
                    raise InvalidOption(
                        "options", "", f"another stream at port {options.port} has other options"
                    )
                self._exporters[key] = (exporter, before, users + 1)
                return exporter
            exporter = _make_exporter(options)
            self._exporters[options.host, exporter.port] = (exporter, options, 1)
            return exporter

    def release(self, exporter: RemoteExporter, linger: float) -> None:
        key = (exporter.options.host, exporter.port)
        with self._lock:
            _, options, users = self._exporters[key]
            if users > 1:
                self._exporters[key] = (exporter, options, users - 1)
                return
            del self._exporters[key]
        exporter.close(linger)


_shared = _SharedExporters()


def _make_exporter(options: PsiWriterOptions) -> RemoteExporter:
    given = options.model_dump(exclude=set(_OF_STREAMS))
    store: Store | str | None = options.store
    if store is None:
        store = Store.volatile("writer", slots=options.slots, size=options.size)
    try:
        return RemoteExporter(store, quota=options.quota, owns_store=True, **given)
    except BaseException:
        if isinstance(store, Store):
            store.close()
        raise


class PsiWriter(BookedWriter):
    """Writes one stream of an exporter that listens at the URL's port."""

    cannot_carry: ClassVar[Mapping[str, str]] = {
        "type": "left out: psi's streams have one type",
        "subtype": "left out: psi has none",
        "stream": "left out: psi's streams have names",
        "attributes": "left out: a psi message has none",
    }

    def __init__(self, url: str, name: str, options: PsiWriterOptions) -> None:
        super().__init__(url)
        self._options = options
        self.exporter = _shared.get(options)
        try:
            self._stream: ExportedStream = self.exporter.exporter.write(None, name, options.type)
        except BaseException:
            _shared.release(self.exporter, 0)
            raise

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        del type, subtype, created_ns
        self._check_open()
        data = bytes(payload)
        try:
            self._stream.post_bytes(data, time_ns)
        except BaseException:
            self._refused += 1
            raise
        self._headers_dropped += (stream is not None) + (attributes is not None)
        self._messages += 1
        self._bytes += len(data)
        self._last_seq = newest = self._newest()
        return newest

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        del type, subtype
        return self._post([(bytes(payload), None) for payload in payloads])

    def write_batch(self, batch: Batch) -> int | None:
        messages = list(messages_from_batch(batch))
        before = self._messages
        try:
            return self._post([(message.payload, message.time_ns) for message in messages])
        finally:
            for message in messages[: self._messages - before]:
                self._headers_dropped += message.stream is not None
                self._headers_dropped += message.attributes is not None

    def _post(self, posts: list[tuple[bytes, int | None]]) -> int | None:
        self._check_open()
        if not posts:
            return None
        before = self._newest()
        try:
            self._stream.post_many(posts)
        finally:
            newest = self._newest()
            done = min(newest - before, len(posts))
            self._messages += done
            self._bytes += sum(len(payload) for payload, _ in posts[:done])
            self._refused += len(posts) - done
            if self._messages:
                self._last_seq = newest
        return newest

    def _newest(self) -> int:
        return self._stream.store.last_sequence(self._stream.id)

    def statistics(self) -> WriterStatistics:
        books = super().statistics()._replace(waited=self.exporter.statistics().waited)
        return books._replace(untaken=self.exporter.untaken(self._stream.id))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._stream.close()
        finally:
            self.exporter.exporter.streams.pop(self._stream.name, None)
            _shared.release(self.exporter, self._options.linger)
