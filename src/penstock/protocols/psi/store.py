"""What is in a store that psi wrote? (spec psi 7)"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from penstock.core.closing import Closable
from penstock.core.errors import InvalidOption, Malformed, NotFound
from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.envelope import ENVELOPE_SIZE, Envelope, PsiMessage
from penstock.protocols.psi.errors import Truncated
from penstock.protocols.psi.metadata import decode_record
from penstock.protocols.psi.store_files import MAX_BLOCK_BYTES, ExtentFile, Place
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS, raw_to_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.metadata import StreamMetadata

__all__ = ["IndexEntry", "PsiStoreReader", "StoredMessage", "find_stores"]

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
        self, folder: Path | str, name: str | None = None, *, max_bytes: int = MAX_BLOCK_BYTES
    ) -> None:
        self.folder = Path(folder)
        self.name = self._find(name)
        self.catalog = Catalog()
        self._catalog_end = Place()
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

        :raises Malformed: it is damaged.
        """
        before = self._catalog_end
        for block in self._files["Catalog"].blocks(before):
            self.catalog.add(decode_record(block.data))
            self._catalog_end = block.next
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
    ) -> Iterator[StoredMessage]:
        """Yield messages in the order of the store: of some streams (None: all), by creation time.

        Both ends of the interval are included. `start` goes on from a `StoredMessage.next`; without
        it the index finds the place, so that what lies far before `start_ns` is not read.

        :raises UnknownStream: there is no such stream, or a message is of none.
        :raises Malformed: a file is damaged.
        """
        wanted = None
        if streams is not None:
            wanted = {self.catalog.stream(which).id for which in streams}
        if not self._files["Data"].exists():
            return
        place = start if start is not None else self.find(start_ns)
        for block in self._files["Data"].blocks(place):
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
            yield StoredMessage(stream, PsiMessage(*envelope, payload), block.place, block.next)

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
