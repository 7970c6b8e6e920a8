"""How are the messages of a named set of streams stored, written and read again?

A store is a directory with a catalog (a log) and one queue for the messages of all streams, so that
their order is kept: a log, or a ring in a volatile store. `counts.json` beside it saves how far the
streams have come, so that a writer does not read all messages again. psi's own files: `psi_files`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote

from penstock.core.endpoints import describe, open_reader, open_writer
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    InvalidOption,
    MessageTooLarge,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Closable
from penstock.core.position import Position
from penstock.core.whole_files import write_whole
from penstock.protocols.psi.envelope import CLOSING_SEQUENCE_ID, MAX_PAYLOAD_BYTES, PsiMessage
from penstock.protocols.psi.metadata import RuntimeInfo
from penstock.protocols.psi.store.catalog import (
    COUNTS,
    StoreStreams,
    StreamBooks,
    creation_attribute,
    psi_message,
    to_tick,
    uncounted,
)
from penstock.protocols.psi.ticks import MIN_NS, NS_PER_TICK
from penstock.queue.log.segments import is_log
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.interfaces import Bounds, BytesLike, Reader, Writer

__all__ = [
    "KEEP_EVERY",
    "KeptCounts",
    "Place",
    "Store",
    "keep_counts",
    "load_counts",
    "new_place",
    "temporary_place",
]

_CATALOG: Final = "catalog"
_DATA: Final = "data"
_RING_SUFFIX: Final = ".fmq"
_NAME: Final = re.compile(r"[^/\0]{1,200}")
_NUMBERS: Final = 10_000
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - private directories below it
#: Messages between two saves of the counts: the most that is read again after a kill.
KEEP_EVERY: Final = 65_536
_COUNTS_FILE: Final = "counts.json"
_LARGEST_COUNTS: Final = 16 << 20
_T = TypeVar("_T", bound="Sequence[Any]")
#: A catalog is small: so are the segments of its log.
_CATALOG_OPTIONS: Final = {"segment": 4 << 20, "segment_slots": 4096, "sync": "batch"}
_READ_AT_ONCE: Final = 4096
#: A batch that passes the gates at once is at most this part of a ring.
_PARTS: Final = 8


class Place(NamedTuple):
    """The directory of a store."""

    folder: Path

    @property
    def name(self) -> str:
        """The directory's name without psi's number."""
        stem, dot, number = self.folder.name.rpartition(".")
        return stem if dot and number.isdigit() and stem else self.folder.name

    @property
    def is_volatile(self) -> bool:
        """Its messages are in a ring, which overwrites the oldest."""
        return (self.folder / f"{_DATA}{_RING_SUFFIX}").exists()

    @property
    def exists(self) -> bool:
        return (self.folder / _CATALOG).is_dir()

    @property
    def is_whole(self) -> bool:
        """Both its catalog and its messages are there: no other directory looks like that."""
        data = self.folder / _DATA
        return is_log(self.folder / _CATALOG) and (self.is_volatile or is_log(data))

    @property
    def catalog_url(self) -> str:
        return f"log:{quote(str(self.folder.resolve() / _CATALOG))}"

    def data_url(self, *, volatile: bool) -> str:
        return f"{'fmq' if volatile else 'log'}:{quote(str(self.folder.resolve() / _DATA))}"

    def make(self) -> None:
        """Create the directory, readable by its owner only.

        :raises StorageError: the operating system refuses.
        """
        with storage_errors("creating", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove(self) -> None:
        """Remove the store and its messages; none is fine."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def size_on_disk(self) -> int:
        """Return the bytes that its files take."""
        return sum(file.stat().st_blocks * 512 for file in self.folder.rglob("*") if file.is_file())


def new_place(root: Path | str, name: str, *, subdirectory: bool = False) -> Place:
    """Return the place of a new store; `subdirectory`: the next free of psi's NAME.0000.

    :raises InvalidOption: the name has a slash, or all numbers are taken.
    """
    if _NAME.fullmatch(name) is None or name in {".", ".."}:
        raise InvalidOption("name", name, "is no name of a store: it has a slash, or is too long")
    root = Path(root)
    if not subdirectory:
        return Place(root / name)
    for number in range(_NUMBERS):
        folder = root / f"{name}.{number:04}"
        if not folder.exists():
            return Place(folder)
    raise InvalidOption("name", name, f"{root} has {_NUMBERS:,} stores of that name already")


def temporary_place(name: str) -> Place:
    """Create a private directory in memory, or in the folder for temporary files."""
    root = _MEMORY if _MEMORY.is_dir() else None
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
    with storage_errors("creating a store in", str(root or tempfile.gettempdir())):
        return Place(Path(tempfile.mkdtemp(prefix=f"penstock-psi-{safe}-", dir=root)))


class KeptCounts(NamedTuple):
    """The saved counts of all streams, up to a message."""

    #: The epoch of the queue, and the number of the first message that is not counted.
    epoch: int
    next: int
    #: The latest append time.
    last_ns: int
    #: See `StreamBooks.counts`.
    streams: dict[int, tuple[int, ...]]


def keep_counts(folder: Path, counts: KeptCounts) -> None:
    """Save the counts; the file is replaced as a whole.

    :raises StorageError: the operating system refuses.
    """
    body = json.dumps([*counts[:3], {str(id): each for id, each in counts.streams.items()}])
    path = folder / _COUNTS_FILE
    with storage_errors("writing", str(path)):
        text = f"{zlib.crc32(body.encode()):08x} {body}\n"
        write_whole(path, text.encode("ascii"), sync=False)


def load_counts(folder: Path, bounds: Bounds) -> KeptCounts | None:
    """Return the saved counts, if they are of this queue and its messages are still there."""
    path = folder / _COUNTS_FILE
    try:
        if path.stat().st_size > _LARGEST_COUNTS:
            return None
        crc, _, body = path.read_text(encoding="ascii").rstrip("\n").partition(" ")
        if int(crc, 16) != zlib.crc32(body.encode()):
            return None
        counts = _parsed(json.loads(body))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    # A queue that ends earlier lost its last messages in a power cut.
    is_whole = bounds.successor(counts.epoch, counts.next) == counts.next
    fits = is_whole and bounds.oldest <= counts.next <= bounds.end
    return counts if fits else None


def _parsed(found: Any) -> KeptCounts:
    epoch, seq, last_ns, streams = found
    kept = {int(id): tuple(map(int, each)) for id, each in streams.items()}
    if any(len(each) != COUNTS for each in kept.values()):
        raise ValueError("another number of counts")
    return KeptCounts(int(epoch), int(seq), int(last_ns), kept)


class Store(StoreStreams, Closable):
    """A named set of streams. Any thread may append and add streams.

    One process writes; others may open it to read at the same time. Use `create`, `open` or
    `volatile`.
    """

    def __init__(
        self,
        place: Place,
        *,
        writable: bool,
        volatile: bool,
        temporary: bool = False,
        started: bool = True,
    ) -> None:
        super().__init__(place.name, writable=writable, started=started)
        self.place = place
        self.is_volatile = volatile
        self._is_temporary = temporary
        #: Messages whose originating time was moved behind that of the message before.
        self.times_moved = 0
        self._capacity: tuple[int, int] | None = None
        self._is_closed = False
        self._last_ns = MIN_NS
        self._writer: Writer | None = None
        #: Messages until the counts are saved again.
        self._until_kept = KEEP_EVERY

    # --- create and open --------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str,
        *,
        subdirectory: bool = False,
        volatile: bool = False,
        runtime: RuntimeInfo | None = None,
        started: bool = True,
        **options: object,
    ) -> Self:
        """Create a store; `options` are those of the log, or of the ring, for its messages.

        `started=False`: streams are announced as not opened yet, until `start`.

        :raises AlreadyExists: there is one.
        :raises StorageError: the operating system refuses.
        """
        place = new_place(root, name, subdirectory=subdirectory)
        if place.exists:
            raise AlreadyExists(
                f"there is a store at {place.folder}", hint="open it, or choose another name"
            )
        return cls._make(place, volatile, runtime, options, started=started)

    @classmethod
    def volatile(
        cls,
        name: str = "store",
        *,
        runtime: RuntimeInfo | None = None,
        started: bool = True,
        **options: object,
    ) -> Self:
        """Create a store in memory, a ring that is removed when it is closed."""
        place = temporary_place(name)
        try:
            return cls._make(
                place,
                True,
                runtime,
                {"sparse": True} | options,
                started=started,
                temporary=True,
            )
        except BaseException:
            place.remove()
            raise

    @classmethod
    def _make(
        cls,
        place: Place,
        volatile: bool,
        runtime: RuntimeInfo | None,
        options: dict[str, object],
        *,
        started: bool,
        temporary: bool = False,
    ) -> Self:
        place.make()
        open_writer(place.data_url(volatile=volatile), **options).close()
        store = cls(place, writable=True, volatile=volatile, temporary=temporary, started=started)
        with contextlib.ExitStack() as undo:
            undo.callback(store._let_go)
            store._open_to_write()
            store._tell(runtime or RuntimeInfo())
            undo.pop_all()
        return store

    @classmethod
    def open(cls, folder: Path | str, *, writable: bool = False) -> Self:
        """Open an existing store; a writer counts its messages first.

        :raises NotFound: the folder holds no store.
        :raises LockTimeout: another process writes to it.
        """
        place = Place(Path(folder))
        if not place.exists:
            raise NotFound(
                f"there is no store at {folder}",
                hint="a store of psi's own is read by penstock psi-store",
            )
        store = cls(place, writable=writable, volatile=place.is_volatile)
        with contextlib.ExitStack() as undo:
            undo.callback(store._let_go)
            store._catalog_reader = open_reader(place.catalog_url)
            store.refresh()
            if writable:
                store._catalog_reader.close()
                store._catalog_reader = None
                store._open_to_write()
                store._count_again()
            undo.pop_all()
        return store

    def _open_to_write(self) -> None:
        self._writer = open_writer(self.place.data_url(volatile=self.is_volatile))
        self._catalog_writer = open_writer(self.place.catalog_url, **_CATALOG_OPTIONS)

    def _count_again(self) -> None:
        """Count the messages of each stream: the saved counts, and the messages after them."""
        told = {id: books.announced for id, books in self._books.items()}
        self._books = {id: StreamBooks(uncounted(announced)) for id, announced in told.items()}
        with self.reader() as reader:
            kept = load_counts(self.place.folder, reader.bounds())
            if kept is not None and all(id in told for id in kept.streams):
                self._last_ns = kept.last_ns
                for id, counts in kept.streams.items():
                    self._books[id].restore(counts)
                reader.seek(kept.next)
            while messages := reader.read_many(_READ_AT_ONCE):
                for message in messages:
                    self._last_ns = max(self._last_ns, message.created_ns)
                    books = self._books.get(message.type)
                    if books is not None:
                        books.add(psi_message(message))
        for id, books in self._books.items():
            if not books.count:  # else its last number is known: a stream may be begun anew at 1
                books.last_sequence = told[id].message_count
            books.count = max(books.count, told[id].message_count)
        self._keep_counts()

    def _keep_counts(self) -> None:
        """Save the counts of all streams."""
        if self._writer is None or self._is_temporary:
            return
        self._until_kept = KEEP_EVERY
        with self.reader() as reader:
            bounds = reader.bounds()
        streams = {id: books.counts() for id, books in self._books.items()}
        keep_counts(self.place.folder, KeptCounts(bounds.epoch, bounds.end, self._last_ns, streams))

    # --- messages ---------------------------------------------------------------------------

    def append(
        self,
        id: int,
        payload: BytesLike,
        originating_ns: int | None = None,
        creation_ns: int | None = None,
    ) -> PsiMessage:
        """Append a message with the next sequence number of its stream, and return it.

        Originating times of a psi stream increase: one that does not is moved behind the time of
        the message before, and counted in `times_moved`.

        :raises MessageTooLarge: psi, or the ring, cannot hold it.
        :raises UnknownStream: there is no such stream.
        :raises Closed: the stream was ended, or the store closed.
        """
        for gate in self.gates:
            gate.wait(1, len(payload))
        with self._lock:
            books = self._open_books(id)
            message = self._next_message(books, payload, originating_ns, creation_ns)
            self._append(message, books)
            return message

    def append_many(self, id: int, posts: Sequence[tuple[bytes, int | None]]) -> None:
        """Append many as `append` does, each a payload and its originating time.

        :raises MessageTooLarge: psi, or the ring, cannot hold one; those before it are appended.
        """
        for part in self._parts(posts, payload_at=0) if self.gates else (posts,):
            for gate in self.gates:
                gate.wait(len(part), sum(len(payload) for payload, _ in part))
            with self._lock:
                books = self._open_books(id)
                for payload, originating_ns in part:
                    self._append(self._next_message(books, payload, originating_ns, None), books)

    def _open_books(self, id: int) -> StreamBooks:
        self.catalog.stream(id)
        books = self._books[id]
        if books.announced.is_closed:
            raise Closed(
                f"the stream {books.announced.name!r} was ended", hint="add it again first"
            )
        return books

    def _next_message(
        self,
        books: StreamBooks,
        payload: BytesLike,
        originating_ns: int | None,
        creation_ns: int | None,
    ) -> PsiMessage:
        if books.last_sequence + 1 >= CLOSING_SEQUENCE_ID:
            raise Unsupported("psi cannot count more messages", hint="begin another stream")
        now_ns = to_tick(time.time_ns() if creation_ns is None else creation_ns)
        moment = to_tick(now_ns if originating_ns is None else originating_ns)
        if books.last_originating_ns != MIN_NS and moment <= books.last_originating_ns:
            moment = books.last_originating_ns + NS_PER_TICK
            self.times_moved += 1
        # Creation times increase although the clock may be set back: psi seeks by them.
        now_ns = max(now_ns, to_tick(self._last_ns)) if creation_ns is None else now_ns
        sequence = books.last_sequence + 1
        return PsiMessage(books.announced.id, sequence, moment, now_ns, bytes(payload))

    def append_messages(
        self, messages: Sequence[PsiMessage], done: list[PsiMessage] | None = None
    ) -> None:
        """Append messages of another exporter, with their sequence numbers and times.

        `done` gets the messages that were appended, also when it raises.
        """
        for part in self._parts(messages) if self.gates else (messages,):
            for gate in self.gates:
                gate.wait(len(part), sum(len(message.payload) for message in part))
            with self._lock:
                for message in part:
                    self._append(message, self._books[message.source_id])
                    if done is not None:
                        done.append(message)

    def _parts(self, messages: Sequence[_T], payload_at: int = -1) -> Iterator[Sequence[_T]]:
        """Yield batches so small that a gate can block before the ring overwrites messages."""
        slots, size = self.capacity()
        first = held = 0
        for index, message in enumerate(messages):
            held += len(message[payload_at])
            if (index + 1 - first) * _PARTS >= slots or held * _PARTS >= size:
                yield messages[first : index + 1]
                first, held = index + 1, 0
        if first < len(messages):
            yield messages[first:]

    def _append(self, message: PsiMessage, books: StreamBooks) -> None:
        if self._writer is None:
            raise Closed(f"the store {self.name} is not open to be written")
        id, sequence, originating_ns, creation_ns, payload = message
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise MessageTooLarge(len(payload), MAX_PAYLOAD_BYTES)
        appended_ns = max(creation_ns, self._last_ns)
        self._writer.write(
            payload,
            id,
            sequence,
            originating_ns,
            appended_ns,
            None,
            creation_attribute(creation_ns, appended_ns),
        )
        self._last_ns = appended_ns
        books.add(message)
        self._until_kept -= 1
        if self._until_kept <= 0:
            with contextlib.suppress(PenstockError):  # the next opening then reads more
                self._keep_counts()

    def reader(
        self, start: Position = Position.START, *, id: int | None = None, **options: object
    ) -> Reader:
        """Open a reader of all messages, or of those of one stream; see `psi_message`."""
        url = self.place.data_url(volatile=self.is_volatile)
        return open_reader(url, start, type=id, **options)

    def newest_seq(self) -> int:
        """Return the newest message's number in the queue; -1 if the store is empty."""
        with self._lock:
            seq = None if self._writer is None else self._writer.statistics().last_seq
        return -1 if seq is None else seq

    def reached(self, id: int) -> tuple[int, int, int | None]:
        """Return the end of the queue, and a stream's last and first sequence numbers."""
        with self._lock:
            books = self._books[id]
            return self.newest_seq() + 1, books.last_sequence, books.first_sequence

    def capacity(self) -> tuple[int, int]:
        """Return the messages and bytes that a ring, or a segment of a log, holds."""
        if self._capacity is None:
            info = describe(self.place.data_url(volatile=self.is_volatile))
            self._capacity = info.slots, info.buffer_size
        return self._capacity

    def flush(self) -> None:
        """Flush the queue to the disk, and save the counts."""
        with self._lock:
            if self._writer is not None:
                self._writer.flush()
                self._keep_counts()

    def close(self) -> None:
        """Close the store; one in memory is removed. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            with contextlib.suppress(PenstockError):  # the next opening then reads more
                self._keep_counts()
            self._let_go()

    def _let_go(self) -> None:
        """Close all parts, also when one of them fails."""
        with self._changed, contextlib.ExitStack() as closing:
            self._is_closed = True
            self._changed.notify_all()
            if self._is_temporary:
                closing.callback(self.place.remove)
            for part in (self._catalog_reader, self._catalog_writer, self._writer):
                if part is not None:
                    closing.callback(part.close)
            self._writer = self._catalog_writer = self._catalog_reader = None
