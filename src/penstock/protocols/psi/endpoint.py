"""Which stream is behind a `psi://` URL?

As a reader it imports that stream from an exporter; as a writer it is an exporter on that port.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.core.batch import messages_from_batch
from penstock.core.books import BookedWriter
from penstock.core.endpoints import Endpoint
from penstock.core.errors import InvalidOption, InvalidURL, PositionError
from penstock.core.info import StreamInfo
from penstock.core.interfaces import Reader
from penstock.core.options import parse_options
from penstock.core.statistics import ReaderStatistics, WriterStatistics
from penstock.protocols.psi.codecs.type_names import parse_type_name
from penstock.protocols.psi.exporter import RemoteExporter
from penstock.protocols.psi.exporter_pressure import BackPressure
from penstock.protocols.psi.exporter_streams import BYTES
from penstock.protocols.psi.handshake import DEFAULT_PORT, ClientHello
from penstock.protocols.psi.importer import REPLAY_ALL, RemoteImporter, unreachable
from penstock.protocols.psi.importer_receiving import fetch_stream
from penstock.protocols.psi.options import ExporterOptions, PsiReaderOptions, PsiWriterOptions
from penstock.protocols.psi.store_set import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike, Writer
    from penstock.core.message import Message
    from penstock.core.position import Position, PositionLike
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL
    from penstock.protocols.psi.exporter_streams import ExportedStream

__all__ = ["PsiEndpoint", "PsiReader", "PsiWriter"]

#: Options of a writer that are not the exporter's.
_OF_STREAMS: Final = frozenset(PsiWriterOptions.model_fields) - frozenset(
    ExporterOptions.model_fields
)


class PsiEndpoint(Endpoint):
    """`psi://host:11411/Stream%20Name`: a stream behind a RemoteExporter, ours or psi's."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        host, port, name = _parse(url)
        return PsiReader(url.text, host, port, name, start, parse_options(url, PsiReaderOptions))

    def open_writer(self, url: URL) -> Writer:
        host, port, name = _parse(url)
        for option in ("host", "port"):
            if option in url.options:
                raise InvalidOption(option, url.options[option], "is in the URL already")
        options = parse_options(url, PsiWriterOptions)
        options = options.model_copy(update={"host": host, "port": port})
        return PsiWriter(url.text, name, options)

    def describe(self, url: URL) -> StreamInfo:
        host, port, name = _parse(url)
        options = parse_options(url, PsiReaderOptions)
        try:
            told = fetch_stream(host, port, name, options.wait)
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


class PsiReader(Reader):
    """Reads one stream of an exporter. `type` is its source, `subtype` its number in the stream.

    What is not read yet holds up the exporter: nothing is lost here.
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
        self._is_catching_up = True
        self._bytes = 0
        # From the beginning: it holds up the exporter also before its first read.
        self.next_seq = 0
        self.progress_at = time.monotonic()
        self._store = Store.volatile("reader", slots=options.slots, size=options.size)
        lag = max(1, options.slots // 2), max(1, options.size // 2)
        self._pressure = BackPressure(self._store, *lag, patience=math.inf)
        self._store.gates.append(self._pressure)
        try:
            self._importer = RemoteImporter(
                host,
                port,
                _replay(start),
                store=self._store,
                streams={name},
                silence=options.silence,
            )
        except BaseException:
            self._store.close()
            raise
        try:
            self._stream = self._importer.open_stream(name, timeout=options.wait)
        except BaseException:
            self.close()
            raise
        self._pressure.add(self)
        type_name = parse_type_name(self._store.catalog.stream(self._stream.id).type_name).canonical
        self._is_bytes = options.payload == "content" and type_name == BYTES

    def _take(self, limit: int) -> list[Message]:
        # What the exporter has is on its way; nothing tells when that is all.
        found = self._stream.take(limit, self._options.quiet if self._is_catching_up else 0)
        if not found:
            self._is_catching_up = False
            return []
        self.next_seq, self.progress_at = found[-1].seq + 1, time.monotonic()
        self._pressure.progress()
        if self._is_bytes:
            decode = self._stream.codec.decode
            found = [
                message._replace(payload=bytes(decode(message.payload) or b"")) for message in found
            ]
        self._bytes += sum(message.size for message in found)
        return found

    def seek(self, position: PositionLike) -> None:
        del position
        raise PositionError(
            f"{self.url} cannot be placed elsewhere", hint="open it again with start=…"
        )

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._stream.messages,
            bytes=self._bytes,
            lost=self._stream.lost,
            filtered=0,
            restarts=self._importer.statistics().restarts,
            next_seq=self.next_seq,
            backlog=max(0, self._store.newest_seq() + 1 - self.next_seq),
            losses=(),
        )

    def _idle(self) -> bool:
        return not self._stream.is_over

    def close(self) -> None:
        self._pressure.open()
        if hasattr(self, "_stream"):
            self._stream.close()
        self._importer.close()
        self._store.close()


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


class _Shared:
    """Exporters of this process by their address, so that many streams can be at one port."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there: dict[tuple[str, int], tuple[RemoteExporter, PsiWriterOptions, int]] = {}

    def get(self, options: PsiWriterOptions) -> RemoteExporter:
        key = (options.host, options.port)
        with self._lock:
            if key in self._there and options.port:
                exporter, before, users = self._there[key]
                if before.model_copy(update={"type": options.type}) != options:
                    raise InvalidOption(
                        "options", "", f"another stream at port {options.port} has other options"
                    )
                self._there[key] = (exporter, before, users + 1)
                return exporter
            exporter = _make_exporter(options)
            self._there[options.host, exporter.port] = (exporter, options, 1)
            return exporter

    def give_back(self, exporter: RemoteExporter, linger: float) -> None:
        key = (exporter.options.host, exporter.port)
        with self._lock:
            _, options, users = self._there[key]
            if users > 1:
                self._there[key] = (exporter, options, users - 1)
                return
            del self._there[key]
        exporter.close(linger)


_shared = _Shared()


def _make_exporter(options: PsiWriterOptions) -> RemoteExporter:
    given = options.model_dump(exclude=set(_OF_STREAMS))
    store: Store | str | None = options.store
    if store is None:
        store = Store.volatile("writer", slots=options.slots, size=options.size)
    try:
        exporter = RemoteExporter(store, quota=options.quota, **given)
    except BaseException:
        if isinstance(store, Store):
            store.close()
        raise
    exporter.owns_store = True
    return exporter


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
            _shared.give_back(self.exporter, 0)
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
        return super().statistics()._replace(waited=self.exporter.statistics().waited)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stream.close()
        self.exporter.exporter.streams.pop(self._stream.name, None)
        _shared.give_back(self.exporter, self._options.linger)
