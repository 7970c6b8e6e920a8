"""How are the files of a psi store served to importers, while psi may still write them?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import Malformed, PositionError
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics
from penstock.protocols.psi.metadata import decode_record
from penstock.protocols.psi.store import PsiStoreReader
from penstock.protocols.psi.store_books import StreamBooks, uncounted
from penstock.protocols.psi.store_files import ExtentFile, Place
from penstock.protocols.psi.store_streams import StoreStreams
from penstock.protocols.psi.ticks import MIN_NS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.position import PositionLike
    from penstock.protocols.psi.store import StoredMessage

__all__ = ["PsiFiles", "PsiFilesReader"]


class PsiFiles(StoreStreams):
    """A store that psi wrote, or writes: it is read, and never written.

    Of one whose writer is gone without closing it, all streams are told to be at their end.

    :raises NotFound: there is none of that name.
    :raises Malformed: its catalog is damaged.
    """

    def __init__(self, folder: Path | str, name: str | None = None) -> None:
        with PsiStoreReader(folder, name) as found:
            super().__init__(found.name, writable=False)
            self.folder = Path(folder)
            self._file = ExtentFile(self.folder, self.name, "Catalog")
            self._place = Place()
            self.refresh()
            if not found.is_live and not self.catalog.is_complete():
                self._end_all(found)

    def _end_all(self, found: PsiStoreReader) -> None:
        """Count what is there, and take that for all."""
        books = {id: StreamBooks(uncounted(one)) for id, one in found.catalog.streams.items()}
        for stored in found.messages():
            books[stored.stream.id].add(stored.message)
        for each in books.values():
            if not each.announced.is_closed:
                last_ns = max(each.last_creation_ns, each.announced.opened_ns)
                self._take_in(each.metadata(closed_ns=last_ns))

    def refresh(self) -> None:
        with self._changed:
            for block in self._file.blocks(self._place):
                self._place = block.next
                self._take_in(decode_record(block.data))

    def reader(self, start: Position = Position.START) -> PsiFilesReader:
        """Open a reader of all messages.

        :raises PositionError: psi's files have no such place.
        """
        return PsiFilesReader(self.folder, self.name, start)

    def newest_seq(self) -> int:
        return -1

    def capacity(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        with self._changed:
            self._file.close()


class PsiFilesReader(Reader):
    """Reads the messages of a psi store in order, and those that psi adds."""

    def __init__(self, folder: Path, name: str, start: Position) -> None:
        super().__init__(f"{folder}/{name}")
        self._files = PsiStoreReader(folder, name)
        self._messages = self._bytes = 0
        self._place = Place()
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
            # What lies before it in the same page is read, too: the exporter passes over it.
            self._place = self._files.find(place.value)
        else:
            raise PositionError(f"{self.url} has no {place}", hint="use start, or a time")
        self._coming = None

    def _take(self, limit: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < limit:
            if self._coming is None:
                self._coming = self._files.messages(start=self._place)
            stored = next(self._coming, None)
            if stored is None:
                self._coming = None  # that is all for now
                break
            found.append(self._message(stored))
        return found

    def _message(self, stored: StoredMessage) -> Message:
        self._place = stored.next
        source, sequence, originating_ns, creation_ns, payload = stored.message
        with contextlib.suppress(Malformed):  # then with the padding behind it
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
            lost=0,
            filtered=0,
            restarts=0,
            next_seq=self._messages,
            backlog=0,
            losses=(),
        )

    def close(self) -> None:
        self._files.close()
