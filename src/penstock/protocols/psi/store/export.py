"""How are the streams of a store, psi's or ours, exported to logs, Parquet or CSV files?"""

from __future__ import annotations

import contextlib
import csv
import json
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.endpoints import open_writer
from penstock.core.errors import AlreadyExists, InvalidOption, Malformed, NotFound
from penstock.core.units import format_time
from penstock.protocols.psi.store.catalog import StreamBooks, psi_message, uncounted
from penstock.protocols.psi.store.lookup import find_store, list_places
from penstock.protocols.psi.store.psi_files import PsiStoreReader, StoreCheck, find_stores
from penstock.protocols.psi.store.streams import Store
from penstock.protocols.psi.ticks import DateTime, TimeSpan
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.envelope import PsiMessage
    from penstock.protocols.psi.metadata import StreamMetadata

__all__ = ["FORMATS", "Exported", "StoreSource", "export_streams", "open_sources"]

_ROWS: Final = 10_000
_TICKS_PER_SECOND: Final = 10_000_000
_COLUMNS: Final = ("originating_time", "creation_time", "sequence_id", "value")


class Exported(NamedTuple):
    """An exported stream: each of its messages is a row, or a message of the log."""

    stream: str
    target: str
    messages: int
    #: Messages that are not of the stream's type: an empty value, or all bytes in a log.
    malformed: int


class StoreSource(ABC):
    """A store to read from, psi's or ours."""

    name: str
    folder: Path

    def streams(self) -> list[StreamMetadata]:
        """Return the streams with their counts; those of open streams are counted here."""
        announced = self.announced()
        if all(stream.is_closed for stream in announced):
            return announced
        books = {stream.id: StreamBooks(uncounted(stream)) for stream in announced}
        for message in self.messages(None):
            if message.source_id in books:
                books[message.source_id].add(message)
        return [stream if stream.is_closed else books[stream.id].metadata() for stream in announced]

    @abstractmethod
    def announced(self) -> list[StreamMetadata]:
        """Return the streams as the catalog has them."""

    @abstractmethod
    def codec(self, stream: StreamMetadata) -> Codec:
        """Return the codec of a stream's payloads."""

    @abstractmethod
    def messages(self, stream: StreamMetadata | None) -> Iterator[PsiMessage]:
        """Yield the readable messages of a stream, or of all, in order."""

    @abstractmethod
    def check(self, *, whole: bool = True) -> StoreCheck:
        """Check whether all messages of the catalog are there; see `PsiStoreReader.check`."""

    @abstractmethod
    def close(self) -> None:
        """Close the store."""


class _PsiSource(StoreSource):
    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self._reader = PsiStoreReader(folder, name, salvage=True)

    def announced(self) -> list[StreamMetadata]:
        return self._reader.streams

    def codec(self, stream: StreamMetadata) -> Codec:
        return self._reader.codec(stream)

    def messages(self, stream: StreamMetadata | None) -> Iterator[PsiMessage]:
        wanted = None if stream is None else [stream.id]
        found = self._reader.messages(wanted, on_damage=lambda _: None)  # `check` says it
        return (stored.message for stored in found)

    def check(self, *, whole: bool = True) -> StoreCheck:
        return self._reader.check(whole=whole)

    def close(self) -> None:
        self._reader.close()


class _OwnSource(StoreSource):
    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self._store = Store.open(folder)

    def announced(self) -> list[StreamMetadata]:
        self._store.refresh()
        return [self._store.metadata(id) for id in self._store.catalog.streams]

    def codec(self, stream: StreamMetadata) -> Codec:
        return self._store.catalog.codec(stream)

    def messages(self, stream: StreamMetadata | None) -> Iterator[PsiMessage]:
        with self._store.reader(id=None if stream is None else stream.id) as reader:
            yield from map(psi_message, reader.available())

    def check(self, *, whole: bool = True) -> StoreCheck:
        streams = self.announced()
        with self._store.reader() as reader:
            # What a ring has overwritten, or a log has evicted, is not missing.
            if not whole or reader.bounds().oldest:
                return StoreCheck((), {}, {})
            found = Counter(message.type for message in reader.available())
        missing = {s.name: s.message_count - found[s.id] for s in streams if s.is_closed}
        return StoreCheck(
            (),
            {stream.name: found[stream.id] for stream in streams},
            {name: count for name, count in missing.items() if count > 0},
        )

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def open_sources(root: Path | str, name: str | None = None) -> Iterator[list[StoreSource]]:
    """Open the stores in a directory, psi's and ours, or the one of a name.

    :raises NotFound: the directory holds no store, or none of this name.
    """
    root = Path(root)
    found: list[Callable[[], StoreSource]] = [
        lambda place=place: _OwnSource(place.folder, place.name)  # type: ignore[misc]
        for place in list_places(root)
        if name in {None, place.name, place.folder.name}
    ]
    found += [
        lambda folder=folder, found_name=found_name: _PsiSource(folder, found_name)  # type: ignore[misc]
        for found_name, folder in find_stores(root)
        if name in {None, found_name, folder.name}
    ]
    if not found:
        if name is not None:
            find_store(root, name)  # raises with the names that there are
        raise NotFound(f"{root} has no store", hint="give the directory with the store's files")
    with contextlib.ExitStack() as stack:
        sources: list[StoreSource] = []
        for opened in found:
            source = opened()
            stack.callback(source.close)
            sources.append(source)
        yield sources


def export_streams(
    source: StoreSource,
    target: Path | str,
    format: str,
    streams: Iterable[str] = (),
) -> Iterator[Exported]:
    """Write each stream to a file or a log in a directory, and yield it.

    :raises InvalidOption: there is no such format.
    :raises NotFound: there is no such stream.
    :raises AlreadyExists: a target exists.
    :raises StorageError: the operating system refuses.
    """
    export = FORMATS.get(format)
    if export is None:
        raise InvalidOption("format", format, f"must be one of {', '.join(FORMATS)}")
    known = {stream.name: stream for stream in source.announced()}
    wanted = list(streams) or list(known)
    for name in wanted:
        if name not in known:
            raise NotFound(
                f"the store {source.name} has no stream {name!r}",
                hint=f"there are: {', '.join(list(known)[:8])}",
            )
    folder = Path(target)
    with storage_errors("writing to", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            path = folder / (quote(name, safe=" ()[]") + ("" if format == "log" else f".{format}"))
            if path.exists():
                raise AlreadyExists(f"there is a {path} already", hint="choose another directory")
            yield Exported(name, str(path), *export(source, known[name], path))


def _values(source: StoreSource, stream: StreamMetadata) -> Iterator[tuple[PsiMessage, Any, bool]]:
    codec = source.codec(stream)
    for message in source.messages(stream):
        try:
            yield message, codec.decode(message.payload), True
        except Malformed:
            yield message, None, False


def _to_log(source: StoreSource, stream: StreamMetadata, path: Path) -> tuple[int, int]:
    codec = source.codec(stream)
    count = malformed = 0
    with open_writer(f"log:{quote(str(path.resolve()))}") as writer:
        for message in source.messages(stream):
            id, sequence, originating_ns, creation_ns, payload = message
            try:
                payload = codec.trim(payload)
            except Malformed:
                malformed += 1
            writer.write(payload, id, sequence, originating_ns, creation_ns)
            count += 1
    return count, malformed


def _to_csv(source: StoreSource, stream: StreamMetadata, path: Path) -> tuple[int, int]:
    count = malformed = 0
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for message, value, is_good in _values(source, stream):
            _, sequence, originating_ns, creation_ns, _ = message
            times = format_time(originating_ns), format_time(creation_ns)
            writer.writerow([*times, sequence, _text(value) if is_good else ""])
            count += 1
            malformed += not is_good
    return count, malformed


def _to_parquet(source: StoreSource, stream: StreamMetadata, path: Path) -> tuple[int, int]:
    count = malformed = 0
    codec = source.codec(stream)
    kind = _arrow_type(codec)
    schema = pa.schema(
        [
            ("originating_time", pa.timestamp("ns", "UTC")),
            ("creation_time", pa.timestamp("ns", "UTC")),
            ("sequence_id", pa.int32()),
            ("value", kind),
        ]
    )
    with pq.ParquetWriter(path, schema) as writer:
        rows: list[tuple[int, int, int, Any]] = []

        def flush() -> None:
            columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True)) or [(), (), (), ()]
            arrays = [
                pa.array(list(column), field.type)
                for column, field in zip(columns, schema, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            rows.clear()

        for message, value, is_good in _values(source, stream):
            _, sequence, originating_ns, creation_ns, _ = message
            told = _for_arrow(value, kind) if is_good else None
            rows.append((originating_ns, creation_ns, sequence, told))
            count += 1
            malformed += not is_good
            if len(rows) >= _ROWS:
                flush()
        flush()
    return count, malformed


def _arrow_type(codec: Codec) -> pa.DataType:
    """Return the type of a column: numbers and texts have their own, all else is JSON."""
    name = codec.type_name
    if codec.is_raw or name == "System.Byte[]":
        return pa.binary()
    if name == "System.Boolean":
        return pa.bool_()
    is_number = codec.dtype is not None and codec.dtype.kind in "iuf"
    is_special = name in {"System.Char", "System.DateTime", "System.TimeSpan"}
    if is_number and not is_special:
        return pa.from_numpy_dtype(codec.dtype)
    return pa.string()


def _for_arrow(value: Any, kind: pa.DataType) -> Any:
    if value is None or pa.types.is_binary(kind):
        return None if value is None else bytes(value)
    return _text(value) if pa.types.is_string(kind) else value


def _text(value: Any) -> str:
    """Return a value as text: texts, numbers and times plainly, all else as JSON."""
    try:
        plain = _plain(value)
    except RecursionError:  # an object that holds itself
        return str(value)
    if plain is None:
        return ""
    if isinstance(plain, (list, dict)):
        return json.dumps(plain)
    # Half of a character, which .NET's `char` may be, is none in a file.
    return str(plain).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _plain(value: Any) -> Any:
    """Return a value of types that JSON has.

    :raises RecursionError: it holds itself.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case DateTime() | TimeSpan() | np.ndarray() | np.generic():
            return _plain_time(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case dict():
            return {_text(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return str(value)


def _plain_time(value: DateTime | TimeSpan | NDArray[Any] | np.generic) -> Any:
    """Return a time, a duration or a value of numpy, one or many, as JSON has it."""
    match value:
        case DateTime():
            return value.text
        case TimeSpan():
            return value.ticks / _TICKS_PER_SECOND
        case np.ndarray() if value.dtype.kind == "M":
            return [DateTime.of(each).text for each in value]
        case np.ndarray() if value.dtype.kind == "m":
            return [ticks / _TICKS_PER_SECOND for ticks in value.view(np.int64).tolist()]
        case np.ndarray():
            return _plain(value.tolist())
    return value.item()


#: The function that writes a stream, by the name of the format.
FORMATS: Final[dict[str, Callable[[StoreSource, StreamMetadata, Path], tuple[int, int]]]] = {
    "log": _to_log,
    "parquet": _to_parquet,
    "csv": _to_csv,
}
