"""What is in a store that psi wrote, and how is it served while psi writes it?

`PsiStoreReader` reads the files and reports damage. `PsiFiles` serves them to importers. The format
is in docs/specs/psi.md 7.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed, NotFound, PositionError
from penstock.core.interfaces import Closable, Reader
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics
from penstock.core.units import format_time
from penstock.protocols.psi.envelope import ENVELOPE_SIZE, Envelope, PsiMessage
from penstock.protocols.psi.errors import DamagedStore, UnknownStream
from penstock.protocols.psi.metadata import decode_record
from penstock.protocols.psi.store.catalog import Catalog, StoreStreams, StreamBooks, uncounted
from penstock.protocols.psi.store.extents import (
    MAX_BLOCK_BYTES,
    Block,
    ExtentFile,
    FilePosition,
    IndexEntry,
)
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.core.position import PositionLike
    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.metadata import StreamMetadata

__all__ = [
    "Damage",
    "DamageBooks",
    "PsiFiles",
    "PsiFilesReader",
    "PsiStoreReader",
    "StoreCheck",
    "StoredMessage",
    "find_stores",
]

log = logging.getLogger(__name__)

_WHAT: Final = "psi store"
_CATALOG_NAME: Final = re.compile(r"(?P<name>.+)\.Catalog_000000\.psi")


class StoredMessage(NamedTuple):
    """A message, and its position in the store."""

    stream: StreamMetadata
    #: With the padding after its payload; see `PsiStoreReader.trimmed`.
    message: PsiMessage
    #: Its position, and that of the next one.
    place: FilePosition
    next: FilePosition


class Damage(NamedTuple):
    """A part of a store that cannot be read."""

    #: The file, and the byte in it.
    where: str
    what: str
    #: The source of a readable message whose stream is not in the catalog.
    source_id: int | None = None

    def __str__(self) -> str:
        return self.what if self.where in self.what else f"{self.where}: {self.what}"


class StoreCheck(NamedTuple):
    """What of a store can be read, and what is damaged or missing."""

    #: The parts that cannot be read.
    damages: tuple[Damage, ...]
    #: By stream: messages that were read, and messages known to be missing.
    found: dict[str, int]
    missing: dict[str, int]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is known to be missing."""
        return not self.damages and not self.missing

    @property
    def lost(self) -> int:
        """The number of messages known to be missing."""
        return sum(self.missing.values())

    def lines(self) -> list[str]:
        """Return the damage for display."""
        there = [
            f"{name}: {count:,} of {count + self.found.get(name, 0):,} messages are missing"
            for name, count in self.missing.items()
        ]
        return [*map(str, self.damages), *there]


class DamageBooks:
    """Counts missing messages by the sequence numbers around each damage."""

    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self._found: Counter[int] = Counter()
        self._missing: Counter[int] = Counter()
        self._strangers: Counter[int] = Counter()
        self._sequence: dict[int, int] = {}
        #: Streams with a message after the last damage.
        self._since: set[int] = set()

    @property
    def lost(self) -> int:
        """The number of messages known to be missing so far."""
        return self._missing.total() + self._strangers.total()

    def damage(self, damage: Damage) -> None:
        """Note a damaged part; all messages of one unknown source are one damage."""
        if damage.source_id is not None:
            self._strangers[damage.source_id] += 1
            if self._strangers[damage.source_id] > 1:
                return
        self.damages.append(damage)
        self._since.clear()

    def add(self, stored: StoredMessage) -> None:
        """Count a message that was read."""
        id, sequence = stored.message[:2]
        self._found[id] += 1
        if self.damages and id not in self._since:
            # psi also drops messages on purpose: only a gap at a damage counts.
            self._missing[id] += max(0, sequence - self._sequence.get(id, 0) - 1)
            self._since.add(id)
        self._sequence[id] = sequence

    def end(self, streams: Iterable[StreamMetadata]) -> None:
        """Compare the counts with the catalog's of closed streams, after all was read."""
        for stream in streams:
            if stream.is_closed:
                lacking = stream.message_count - self._found[stream.id]
                self._missing[stream.id] = max(0, lacking)

    def result(self, streams: Iterable[StreamMetadata]) -> StoreCheck:
        """Return the counts by stream names."""
        names = {stream.id: stream.name for stream in streams}
        missing = {name: self._missing[id] for id, name in names.items() if self._missing[id]}
        missing |= {f"(unknown source {id})": count for id, count in self._strangers.items()}
        found = {name: self._found[id] for id, name in names.items()}
        return StoreCheck(tuple(self.damages), found, missing)


def find_stores(folder: Path | str) -> list[tuple[str, Path]]:
    """Return the names and folders of all psi stores in a folder and its subfolders.

    psi creates each in a folder of its own, named NAME.0000 and so on.

    :raises NotFound: there is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NotFound(f"{root} is no folder", hint="give the folder with the store's files")
    found = []
    for path in sorted(root.rglob("*.Catalog_000000.psi")):
        match = _CATALOG_NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            found.append((match["name"], path.parent))
    return found


class PsiStoreReader(Closable):
    """Lists the streams of a psi store and reads their messages. It never writes.

    `folder` has the files; `name` is needed only if there is more than one store in it. A store
    that is being written can be read: `messages` ends at the end for now, and a later call resumes
    at `StoredMessage.next`; `refresh` reads new records of the catalog.
    """

    def __init__(
        self,
        folder: Path | str,
        name: str | None = None,
        *,
        max_bytes: int = MAX_BLOCK_BYTES,
        salvage: bool = False,
    ) -> None:
        """`salvage`: read a damaged catalog as far as possible; see also `messages`.

        :raises NotFound: there is no such store.
        :raises DamagedStore: its catalog is damaged or empty.
        """
        self.folder = Path(folder)
        self.name = self._find(name)
        self.catalog = Catalog()
        self._catalog_end = FilePosition()
        self._is_salvaging = salvage
        #: The end of the index that was read, and the last position in the data that it has.
        self._index_end = self._last_indexed = FilePosition()
        #: The damage of the catalog, if `salvage` was given.
        self.catalog_damage: Damage | None = None
        self._files = {
            kind: ExtentFile(self.folder, self.name, kind, max_bytes=max_bytes)
            for kind in ("Catalog", "Index", "Data", "LargeData")
        }
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def _find(self, name: str | None) -> str:
        if name is not None:
            if "/" in name or not (self.folder / f"{name}.Catalog_000000.psi").is_file():
                raise NotFound(f"{self.folder} has no psi store {name!r}", hint="see find_stores")
            return name
        names = [found for found, folder in find_stores(self.folder) if folder == self.folder]
        if not names:
            raise NotFound(
                f"{self.folder} has no psi store",
                hint="give the folder with the file NAME.Catalog_000000.psi",
            )
        if len(names) > 1:
            raise InvalidOption("name", None, f"there are several stores: {', '.join(names)}")
        return names[0]

    @property
    def is_live(self) -> bool:
        """Whether the marker of an active writer is there; a killed writer leaves it."""
        return (self.folder / f"{self.name}.Live").exists()

    @property
    def streams(self) -> list[StreamMetadata]:
        """All streams, in the order of their first records."""
        return list(self.catalog.streams.values())

    def refresh(self) -> bool:
        """Read new records of the catalog; tell whether there were any.

        :raises DamagedStore: it is damaged, or empty without an active writer.
        """
        before = self._catalog_end
        what = None
        try:
            for block in self._files["Catalog"].blocks(before):
                self.catalog.add(decode_record(block.data))
                self._catalog_end = block.next
        except (Malformed, NotFound) as error:
            what = str(error)
        if self._catalog_end == FilePosition() and not self.is_live:
            what = what or "the catalog holds nothing"
        if what is not None:
            damage = Damage(self._files["Catalog"].where(self._catalog_end), what)
            if not self._is_salvaging:
                raise DamagedStore(self.name, [str(damage)])
            self.catalog_damage = damage
        return self._catalog_end != before

    def index(self) -> Iterator[IndexEntry]:
        """Yield the entries of the index; a store without one can be read, too.

        :raises Malformed: it is damaged.
        """
        if self._files["Index"].exists():
            for block in self._files["Index"].blocks():
                yield IndexEntry.from_bytes(block.data)

    def codec(self, stream: StreamMetadata | int | str) -> Codec:
        """Return the codec of a stream's messages.

        :raises UnknownStream: there is no such stream.
        """
        return self.catalog.codec(stream)

    def trimmed(self, stored: StoredMessage) -> PsiMessage:
        """Return a message without the padding after its value, if its type is known.

        :raises Malformed: the payload is not of the stream's type.
        """
        payload = self.codec(stored.stream).trim(stored.message.payload)
        return stored.message._replace(payload=payload)

    def value(self, stored: StoredMessage) -> Any:
        """Return the value of a message.

        :raises Malformed: the payload is not of the stream's type.
        """
        return self.codec(stored.stream).decode(stored.message.payload)

    def messages(
        self,
        streams: Iterable[int | str] | None = None,
        *,
        start_ns: int = MIN_NS,
        end_ns: int = MAX_NS,
        start: FilePosition | None = None,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> Iterator[StoredMessage]:
        """Yield messages in the order of the store: of some streams (None: all), by creation time.

        The interval includes both ends. `start` resumes at a `StoredMessage.next`; without it the
        index finds the position, so that messages long before `start_ns` are not read.

        `on_damage` is called for each damaged part, and reading resumes at the next position that
        the index has. Without it damage is raised.

        :raises UnknownStream: there is no such stream, or a message is of none.
        :raises Malformed: a file is damaged, or ends before a position that the index has.
        :raises NotFound: a file is missing.
        """
        wanted = None
        if streams is not None:
            wanted = {self.catalog.stream(which).id for which in streams}
        place = start if start is not None else self.find(start_ns)
        while (block := self._next_block(place, on_damage)) is not None:
            place = block.next
            try:
                envelope = Envelope.from_bytes(block.data)
                if wanted is not None and envelope.source_id not in wanted:
                    continue
                if not start_ns <= envelope.creation_ns <= end_ns:
                    continue
                if envelope.source_id not in self.catalog.streams:
                    self.refresh()
                stream = self.catalog.stream(envelope.source_id)
                payload = block.data[ENVELOPE_SIZE:]
                if stream.is_indexed:
                    payload = self._large(envelope, payload)
            except (Malformed, NotFound) as error:
                if on_damage is None:
                    raise
                source = envelope.source_id if isinstance(error, UnknownStream) else None
                where = self._files["Data"].where(block.place)
                on_damage(Damage(where, str(error), source))
                # An entry of the index is the start of a message: a length cannot skip it.
                behind = self._place_behind(block.place)
                place = block.next if behind is None else min(block.next, behind)
                continue
            yield StoredMessage(stream, PsiMessage(*envelope, payload), block.place, block.next)

    def _next_block(
        self, place: FilePosition, on_damage: Callable[[Damage], None] | None
    ) -> Block | None:
        """Return the block at a position, or the first one after damage; None: none yet."""
        is_told = False
        while True:
            try:
                return self._block(place)
            except (Malformed, NotFound) as error:
                if on_damage is None:
                    raise
                if not is_told:
                    is_told = True
                    on_damage(Damage(self._files["Data"].where(place), str(error)))
                behind = self._place_behind(place)
                if behind is None:
                    return None
                place = behind

    def _block(self, place: FilePosition) -> Block | None:
        data = self._files["Data"]
        block = data.block(place)
        if block is None and self._is_behind(place):
            block = data.block(place)  # a live store may have grown: the index was read later
            if block is None:
                where = data.where(place)
                raise Malformed(_WHAT, where, "a message", "nothing, before the end")
        return block

    def _is_behind(self, place: FilePosition) -> bool:
        """Tell whether the index or another extent has data behind a position."""
        with contextlib.suppress(Malformed, NotFound):  # a damaged index has nothing to tell
            for block in self._files["Index"].blocks(self._index_end):
                self._last_indexed = max(
                    self._last_indexed, IndexEntry.from_bytes(block.data).place
                )
                self._index_end = block.next
        return place < self._last_indexed or bool(self._extents_behind(place))

    def _extents_behind(self, place: FilePosition) -> list[FilePosition]:
        """Return the starts of later extents that have a message."""
        data = self._files["Data"]
        starts = [FilePosition(extent, 0) for extent in data.extents() if extent > place.extent]
        return [start for start in starts if data.has_block(start)]

    def _place_behind(self, place: FilePosition) -> FilePosition | None:
        """Return the next known start of a message behind a position."""
        places = self._extents_behind(place)[:1]
        extents = set(self._files["Data"].extents())
        with contextlib.suppress(Malformed, NotFound):
            for entry in self.index():
                if entry.place > place and entry.place.extent in extents:
                    places.append(entry.place)
                    break
        return min(places, default=None)

    def check(self, *, whole: bool = True) -> StoreCheck:
        """Check whether all messages of the catalog are there.

        `whole`: read all messages. Otherwise check the last ones, and that no file is missing.
        """
        books = DamageBooks()
        if self.catalog_damage is not None:
            books.damage(self.catalog_damage)
        page = IndexEntry(FilePosition(), is_large=False, creation_ns=MIN_NS, originating_ns=MIN_NS)
        if not whole:
            page = self._late_page() or page
        newest: dict[int, int] = {}
        for stored in self.messages(start=page.place, on_damage=books.damage):
            newest[stored.stream.id] = max(
                stored.message.creation_ns, newest.get(stored.stream.id, MIN_NS)
            )
            books.add(stored)
        if whole:
            books.end(self.streams)
            return books.result(self.streams)
        data = self._files["Data"]
        for extent in sorted(set(range(page.place.extent)) - set(data.extents())):
            books.damage(Damage(data.path(extent).name, "is missing"))
        for stream in self.streams:
            # All messages before the page are older: a later one must be behind it.
            last_ns = stream.last_creation_ns
            if not stream.is_closed or not page.creation_ns < last_ns != newest.get(stream.id):
                continue
            what = f"ends before the last message of {stream.name!r}, of {format_time(last_ns)}"
            books.damage(Damage(data.path(page.place.extent).name, what))
        return books.result(())

    def _late_page(self) -> IndexEntry | None:
        """Return the last entry but one of the index: messages follow it."""
        pages: deque[IndexEntry] = deque(maxlen=2)
        with contextlib.suppress(Malformed, NotFound):
            pages.extend(self.index())
        return pages[0] if pages else None

    def find(self, start_ns: int) -> FilePosition:
        """Return the last position of the index before which all messages are too early."""
        place = FilePosition()
        if start_ns > MIN_NS:
            for entry in self.index():
                if entry.creation_ns >= start_ns:
                    break
                place = entry.place
        return place

    def _large(self, envelope: Envelope, payload: bytes) -> bytes:
        entry = IndexEntry.from_bytes(payload)
        if not entry.is_large:
            raise Malformed(_WHAT, "entry of a large message", "in LargeData", entry.place)
        block = self._files["LargeData"].block(entry.place)
        if block is None:
            raise Malformed(_WHAT, "large message", "a block", f"none at {entry.place}")
        if Envelope.from_bytes(block.data) != envelope:
            raise Malformed(_WHAT, "envelope of a large message", envelope, "another")
        return block.data[ENVELOPE_SIZE:]

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()


class PsiFiles(StoreStreams):
    """Serves a store that psi wrote or writes. It never writes.

    The streams of a store whose writer was killed are announced as closed. With `salvage` the
    readable part of a damaged store is served, and the rest is counted as lost.

    :raises NotFound: there is no store of that name.
    :raises DamagedStore: files are missing or damaged, and `salvage` is not given.
    """

    def __init__(
        self, folder: Path | str, name: str | None = None, *, salvage: bool = False
    ) -> None:
        with PsiStoreReader(folder, name, salvage=salvage) as found:
            super().__init__(found.name, writable=False)
            self.folder = Path(folder)
            self.is_salvaging = salvage
            if not salvage and not (check := found.check(whole=False)).is_whole:
                raise DamagedStore(found.name, check.lines())
            self._file = ExtentFile(self.folder, self.name, "Catalog")
            self._place = FilePosition()
            try:
                self.refresh()
                if salvage or not (found.is_live or self.catalog.is_complete()):
                    self._end_all(found)
            except BaseException:
                self._file.close()
                raise

    def _end_all(self, found: PsiStoreReader) -> None:
        """Count the messages that are there, and close all streams with these counts."""
        books = {id: StreamBooks(uncounted(one)) for id, one in found.catalog.streams.items()}
        damage = DamageBooks()
        for stored in found.messages(on_damage=damage.damage):
            books[stored.stream.id].add(stored.message)
            damage.add(stored)
        if damage.damages and not self.is_salvaging:
            raise DamagedStore(found.name, damage.result(found.streams).lines())
        for each in books.values():
            announced = each.announced
            if announced.is_closed and self.is_salvaging:
                # An importer must not wait for messages that are gone.
                self._take_in(each.metadata(closed_ns=announced.closed_ns))
            elif not announced.is_closed:
                last_ns = max(each.last_creation_ns, announced.opened_ns)
                self._take_in(each.metadata(closed_ns=last_ns))

    def refresh(self) -> None:
        with self._changed:
            try:
                for block in self._file.blocks(self._place):
                    self._place = block.next
                    self._take_in(decode_record(block.data))
            except (Malformed, NotFound) as error:
                if not self.is_salvaging:
                    raise DamagedStore(self.name, [str(error)]) from error

    def reader(self, start: Position = Position.START) -> PsiFilesReader:
        """Open a reader of all messages.

        :raises PositionError: psi's files have no such position.
        """
        return PsiFilesReader(self.folder, self.name, start, salvage=self.is_salvaging)

    def newest_seq(self) -> int:
        return -1

    def capacity(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        with self._changed:
            self._file.close()


class PsiFilesReader(Reader):
    """Reads the messages of a psi store in order, and those that psi appends.

    Damaged parts are skipped; missing messages are counted by their sequence numbers.
    """

    def __init__(self, folder: Path, name: str, start: Position, *, salvage: bool = False) -> None:
        super().__init__(f"{folder}/{name}")
        self._files = PsiStoreReader(folder, name, salvage=salvage)
        self._damage = DamageBooks()
        self._is_whole = False
        self._messages = self._bytes = 0
        self._place = FilePosition()
        self._coming: Iterator[StoredMessage] | None = None
        try:
            self.seek(start)
        except BaseException:
            self._files.close()
            raise

    def seek(self, position: PositionLike) -> None:
        place = Position.of(position)
        if place == Position.START:
            self._place = self._files.find(MIN_NS)
        elif place.anchor == "time":
            # Earlier messages of the same page are read, too: the exporter skips them.
            self._place = self._files.find(place.value)
        else:
            raise PositionError(f"{self.url} has no {place}", hint="use start, or a time")
        self._coming = None
        #: Whether the store is read from its start, so that counts can be compared.
        self._is_whole = place == Position.START

    def _take(self, limit: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < limit:
            if self._coming is None:
                on_damage = self._note_damage
                self._coming = self._files.messages(start=self._place, on_damage=on_damage)
            stored = next(self._coming, None)
            if stored is None:
                self._coming = None  # the end for now
                if self._is_whole and self._files.catalog.is_complete():
                    self._is_whole = False
                    self._damage.end(self._files.streams)
                break
            self._damage.add(stored)
            found.append(self._message(stored))
        return found

    def _note_damage(self, damage: Damage) -> None:
        if damage.source_id is None:
            log.error("%s: %s; it is skipped", self.url, damage)
        self._damage.damage(damage)

    def _message(self, stored: StoredMessage) -> Message:
        self._place = stored.next
        source, sequence, originating_ns, creation_ns, payload = stored.message
        with contextlib.suppress(Malformed):  # then with its padding
            payload = self._files.codec(stored.stream).trim(payload)
        self._messages += 1
        self._bytes += len(payload)
        return Message(
            self._messages - 1, originating_ns, creation_ns, source, sequence, None, None, payload
        )

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._damage.lost,
            filtered=0,
            restarts=0,
            next_seq=self._messages,
            backlog=0,
            losses=(),
        )

    def close(self) -> None:
        self._files.close()
