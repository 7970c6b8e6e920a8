"""How are the files of a psi store served to importers, while psi may still write them?"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import Malformed, NotFound, PositionError
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics
from penstock.protocols.psi.errors import DamagedStore
from penstock.protocols.psi.metadata import decode_record
from penstock.protocols.psi.store import DamageBooks, PsiStoreReader
from penstock.protocols.psi.store_books import StreamBooks, uncounted
from penstock.protocols.psi.store_files import ExtentFile, Place
from penstock.protocols.psi.store_streams import StoreStreams
from penstock.protocols.psi.ticks import MIN_NS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.position import PositionLike
    from penstock.protocols.psi.store import Damage, StoredMessage

__all__ = ["PsiFiles", "PsiFilesReader"]

log = logging.getLogger(__name__)


class PsiFiles(StoreStreams):
    """A store that psi wrote, or writes: it is read, and never written.

    Of one whose writer is gone without closing it, all streams are told to be at their end. Of a
    damaged one with `salvage` what can be read is served, and the rest is counted as lost.

    :raises NotFound: there is none of that name.
    :raises DamagedStore: files of it are missing or damaged, and `salvage` is not given.
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
            self._place = Place()
            self.refresh()
            if salvage or not (found.is_live or self.catalog.is_complete()):
                self._end_all(found)

    def _end_all(self, found: PsiStoreReader) -> None:
        """Count what is there, and take that for all."""
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
                # Nobody shall wait for what cannot come.
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

        :raises PositionError: psi's files have no such place.
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
    """Reads the messages of a psi store in order, and those that psi adds.

    What cannot be read is passed over and counted as lost, as far as numbers tell.
    """

    def __init__(self, folder: Path, name: str, start: Position, *, salvage: bool = False) -> None:
        super().__init__(f"{folder}/{name}")
        self._files = PsiStoreReader(folder, name, salvage=salvage)
        self._damage = DamageBooks()
        self._is_whole = False
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
        #: Whether all of the store is read here, so that counts can be compared.
        self._is_whole = place == Position.START

    def _take(self, limit: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < limit:
            if self._coming is None:
                on_damage = self._note_damage
                self._coming = self._files.messages(start=self._place, on_damage=on_damage)
            stored = next(self._coming, None)
            if stored is None:
                self._coming = None  # that is all for now
                if self._is_whole and self._files.catalog.is_complete():
                    self._is_whole = False
                    self._damage.end(self._files.streams)
                break
            self._damage.add(stored)
            found.append(self._message(stored))
        return found

    def _note_damage(self, damage: Damage) -> None:
        if damage.source_id is None:
            log.error("%s: %s; it is passed over", self.url, damage)
        self._damage.damage(damage)

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
            lost=self._damage.lost,
            filtered=0,
            restarts=0,
            next_seq=self._messages,
            backlog=0,
            losses=(),
        )

    def close(self) -> None:
        self._files.close()
