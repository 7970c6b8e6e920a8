"""What is in a store that psi wrote? (spec psi 7)"""

from __future__ import annotations

import contextlib
import re
import struct
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from penstock.core.closing import Closable
from penstock.core.errors import InvalidOption, Malformed, NotFound
from penstock.core.units import format_time
from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.envelope import ENVELOPE_SIZE, Envelope, PsiMessage
from penstock.protocols.psi.errors import DamagedStore, Truncated, UnknownStream
from penstock.protocols.psi.metadata import decode_record
from penstock.protocols.psi.store_files import MAX_BLOCK_BYTES, Block, ExtentFile, Place
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS, raw_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.metadata import StreamMetadata

__all__ = [
    "Damage",
    "DamageBooks",
    "IndexEntry",
    "PsiStoreReader",
    "StoreCheck",
    "StoredMessage",
    "find_stores",
]

_WHAT: Final = "psi store"
#: ExtentId, Position, CreationTime, OriginatingTime: here creation comes first.
_INDEX: Final = struct.Struct("<iiQQ")
#: An entry that points into the large data has this added to its extent.
_LARGE: Final = -(2**31)
_CATALOG_NAME: Final = re.compile(r"(?P<name>.+)\.Catalog_000000\.psi")


class IndexEntry(NamedTuple):
    """A place in a file, and the latest times of all that was written before it."""

    place: Place
    is_large: bool
    creation_ns: int
    originating_ns: int

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Take it apart.

        :raises Malformed: it is cut off, or points nowhere.
        """
        if len(data) < _INDEX.size:
            raise Truncated(_WHAT, "index entry", _INDEX.size, len(data))
        extent, position, creation, originating = _INDEX.unpack_from(data)
        is_large = extent < 0
        if is_large:
            extent -= _LARGE
        if position < 0:
            raise Malformed(_WHAT, "position of an index entry", "0 or more", position)
        return cls(Place(extent, position), is_large, raw_to_ns(creation), raw_to_ns(originating))


class StoredMessage(NamedTuple):
    """A message of a store."""

    stream: StreamMetadata
    #: With the padding behind its payload; see `PsiStoreReader.trimmed`.
    message: PsiMessage
    #: Where it lies, and where to go on.
    place: Place
    next: Place


class Damage(NamedTuple):
    """A part of a store that cannot be read."""

    #: The file, and the byte in it.
    where: str
    what: str
    #: The source of a message that can be read, but of which the catalog says nothing.
    source_id: int | None = None

    def __str__(self) -> str:
        return self.what if self.where in self.what else f"{self.where}: {self.what}"


class StoreCheck(NamedTuple):
    """What of a store can be read, and what cannot."""

    #: The parts that cannot be read.
    damages: tuple[Damage, ...]
    #: Messages by stream that were read, and those known to be missing.
    found: dict[str, int]
    missing: dict[str, int]

    @property
    def is_whole(self) -> bool:
        """Nothing is known to be missing."""
        return not self.damages and not self.missing

    @property
    def lost(self) -> int:
        """How many messages are known to be missing."""
        return sum(self.missing.values())

    def lines(self) -> list[str]:
        """Return what is wrong, for people."""
        there = [
            f"{name}: {count:,} of {count + self.found.get(name, 0):,} messages are missing"
            for name, count in self.missing.items()
        ]
        return [*map(str, self.damages), *there]


class DamageBooks:
    """Counts what is missing, by the numbers of the messages around each damage."""

    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self._found: Counter[int] = Counter()
        self._missing: Counter[int] = Counter()
        self._strangers: Counter[int] = Counter()
        self._sequence: dict[int, int] = {}
        #: Streams with a message since the last damage.
        self._since: set[int] = set()

    @property
    def lost(self) -> int:
        """How many messages are known to be missing so far."""
        return self._missing.total() + self._strangers.total()

    def damage(self, damage: Damage) -> None:
        """Note a part that cannot be read; messages of one unknown source are one."""
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
            # psi drops messages on purpose, too, so that only a gap at a damage is one.
            self._missing[id] += max(0, sequence - self._sequence.get(id, 0) - 1)
            self._since.add(id)
        self._sequence[id] = sequence

    def end(self, streams: Iterable[StreamMetadata]) -> None:
        """Compare with what the catalog says of streams that are closed: all of it was read."""
        for stream in streams:
            if stream.is_closed:
                lacking = stream.message_count - self._found[stream.id]
                self._missing[stream.id] = max(0, lacking)

    def result(self, streams: Iterable[StreamMetadata]) -> StoreCheck:
        """Return what was found, by the names of the streams."""
        names = {stream.id: stream.name for stream in streams}
        missing = {name: self._missing[id] for id, name in names.items() if self._missing[id]}
        missing |= {f"(unknown source {id})": count for id, count in self._strangers.items()}
        found = {name: self._found[id] for id, name in names.items()}
        return StoreCheck(tuple(self.damages), found, missing)


def find_stores(folder: Path | str) -> list[tuple[str, Path]]:
    """Return the names and folders of all stores in a folder and in its subfolders.

    psi puts each into a folder of its own, with a number behind its name.

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
    that is being written can be read, too: `messages` ends with what is there, and goes on from
    `StoredMessage.next` later; `refresh` takes in what is new in the catalog.
    """

    def __init__(
        self,
        folder: Path | str,
        name: str | None = None,
        *,
        max_bytes: int = MAX_BLOCK_BYTES,
        salvage: bool = False,
    ) -> None:
        """`salvage`: of a damaged catalog take what can be read; see also `messages`.

        :raises NotFound: there is no such store.
        :raises DamagedStore: its catalog is damaged, or holds nothing.
        """
        self.folder = Path(folder)
        self.name = self._find(name)
        self.catalog = Catalog()
        self._catalog_end = Place()
        self._is_salvaging = salvage
        #: How far the index was read, and the last place in the data that it knows.
        self._index_end = self._last_indexed = Place()
        #: What of the catalog could not be read, where that is not raised.
        self.catalog_damage: Damage | None = None
        self._files = {
            kind: ExtentFile(self.folder, self.name, kind, max_bytes=max_bytes)
            for kind in ("Catalog", "Index", "Data", "LargeData")
        }
        self.refresh()

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
        """A writer says that it is at work, or did not live to take that back."""
        return (self.folder / f"{self.name}.Live").exists()

    @property
    def streams(self) -> list[StreamMetadata]:
        """All streams, in the order in which they were announced."""
        return list(self.catalog.streams.values())

    def refresh(self) -> bool:
        """Take in what is new in the catalog; tell whether there was anything.

        :raises DamagedStore: it is damaged, or holds nothing and nobody is writing it.
        """
        before = self._catalog_end
        what = None
        try:
            for block in self._files["Catalog"].blocks(before):
                self.catalog.add(decode_record(block.data))
                self._catalog_end = block.next
        except (Malformed, NotFound) as error:
            what = str(error)
        if self._catalog_end == Place() and not self.is_live:
            what = what or "the catalog holds nothing"
        if what is not None:
            damage = Damage(self._files["Catalog"].where(self._catalog_end), what)
            if not self._is_salvaging:
                raise DamagedStore(self.name, [str(damage)])
            self.catalog_damage = damage
        return self._catalog_end != before

    def index(self) -> Iterator[IndexEntry]:
        """Yield the index, without which a store can be read, too.

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
        """Return a message without the padding behind its value, where its type is known.

        :raises Malformed: the payload is not of the stream's type.
        """
        payload = self.codec(stored.stream).trim(stored.message.payload)
        return stored.message._replace(payload=payload)

    def value(self, stored: StoredMessage) -> Any:
        """Return what a message says.

        :raises Malformed: the payload is not of the stream's type.
        """
        return self.codec(stored.stream).decode(stored.message.payload)

    def messages(
        self,
        streams: Iterable[int | str] | None = None,
        *,
        start_ns: int = MIN_NS,
        end_ns: int = MAX_NS,
        start: Place | None = None,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> Iterator[StoredMessage]:
        """Yield messages in the order of the store: of some streams (None: all), by creation time.

        Both ends of the interval are included. `start` goes on from a `StoredMessage.next`; without
        it the index finds the place, so that what lies far before `start_ns` is not read.

        `on_damage` is told of each part that cannot be read, and reading goes on behind it, at the
        next place that the index knows. Without it damage is raised.

        :raises UnknownStream: there is no such stream, or a message is of none.
        :raises Malformed: a file is damaged, or ends before a place that the index knows.
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
                # Messages begin where the index says: no length leads past such a place.
                behind = self._place_behind(block.place)
                place = block.next if behind is None else min(block.next, behind)
                continue
            yield StoredMessage(stream, PsiMessage(*envelope, payload), block.place, block.next)

    def _next_block(self, place: Place, on_damage: Callable[[Damage], None] | None) -> Block | None:
        """Return the block at a place, or the first one behind damage there; None: no more yet."""
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

    def _block(self, place: Place) -> Block | None:
        data = self._files["Data"]
        block = data.block(place)
        if block is None and self._is_behind(place):
            block = data.block(place)  # a live store may have gone on: the index was read later
            if block is None:
                where = data.where(place)
                raise Malformed(_WHAT, where, "a message", "nothing, before the end")
        return block

    def _is_behind(self, place: Place) -> bool:
        """Tell whether the index, or an extent, says that there is data behind a place."""
        with contextlib.suppress(Malformed, NotFound):  # an index that is damaged tells nothing
            for block in self._files["Index"].blocks(self._index_end):
                self._last_indexed = max(
                    self._last_indexed, IndexEntry.from_bytes(block.data).place
                )
                self._index_end = block.next
        return place < self._last_indexed or bool(self._extents_behind(place))

    def _extents_behind(self, place: Place) -> list[Place]:
        """Return where the extents behind a place begin, of those that have a message."""
        data = self._files["Data"]
        starts = [Place(extent, 0) for extent in data.extents() if extent > place.extent]
        return [start for start in starts if data.has_block(start)]

    def _place_behind(self, place: Place) -> Place | None:
        """Return the next place behind another at which a message begins, as far as is known."""
        places = self._extents_behind(place)[:1]
        extents = set(self._files["Data"].extents())
        with contextlib.suppress(Malformed, NotFound):
            for entry in self.index():
                if entry.place > place and entry.place.extent in extents:
                    places.append(entry.place)
                    break
        return min(places, default=None)

    def check(self, *, whole: bool = True) -> StoreCheck:
        """Find out whether all is there that the store says it has.

        `whole`: read all of it. Otherwise only what shows that the end, and every file, is there.
        """
        books = DamageBooks()
        if self.catalog_damage is not None:
            books.damage(self.catalog_damage)
        page = IndexEntry(Place(), is_large=False, creation_ns=MIN_NS, originating_ns=MIN_NS)
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
            # All that lies before the page is older: what is not must be behind it.
            last_ns = stream.last_creation_ns
            if not stream.is_closed or not page.creation_ns < last_ns != newest.get(stream.id):
                continue
            what = f"ends before the last message of {stream.name!r}, of {format_time(last_ns)}"
            books.damage(Damage(data.path(page.place.extent).name, what))
        return books.result(())

    def _late_page(self) -> IndexEntry | None:
        """Return the last entry but one of the index: there are messages behind it."""
        pages: deque[IndexEntry] = deque(maxlen=2)
        with contextlib.suppress(Malformed, NotFound):
            pages.extend(self.index())
        return pages[0] if pages else None

    def find(self, start_ns: int) -> Place:
        """Return, by the index, the last place before which nothing is as late as wanted."""
        place = Place()
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
        """Give the files back. Closing twice is fine."""
        for file in self._files.values():
            file.close()
