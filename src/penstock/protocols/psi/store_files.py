"""How does psi keep blocks in the files of a store? (spec psi 7)

A file is a chain of extents, each a file of its own: a length of 4 bytes, the block, and so on. A
length of 0 says that nothing more is there yet, and a negative one names the next extent.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.closing import Closable
from penstock.core.errors import Malformed, NotFound
from penstock.protocols.psi.errors import Truncated
from penstock.protocols.psi.wire import INT32
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MAX_BLOCK_BYTES", "Block", "ExtentFile", "Place"]

#: A larger block is taken for damage.
MAX_BLOCK_BYTES: Final = 1 << 30

_WHAT: Final = "psi store file"
_WINDOW: Final = 1 << 18
_ALIGNMENT: Final = 4


class Place(NamedTuple):
    """Where a block begins: an extent, and a byte of its length word."""

    extent: int = 0
    position: int = 0


class Block(NamedTuple):
    """One block, and where the next one will be."""

    place: Place
    data: bytes
    next: Place


class _Window:
    """A part of an extent that was read at once.

    Read, not mapped: a writer that closes the store cuts the file, and to touch what was mapped
    there would end this process.
    """

    def __init__(self) -> None:
        self.start = 0
        self.data = b""

    def take(self, file: int, at: int, size: int) -> bytes:
        """Return up to `size` bytes from a place; fewer at the end of the file."""
        first = at - self.start
        if first < 0 or first + size > len(self.data):
            self.start, first = at, 0
            self.data = os.pread(file, max(size, _WINDOW), at)
        return self.data[first : first + size]

    def clear(self) -> None:
        """Forget it: the file may have grown since."""
        self.data = b""


class ExtentFile(Closable):
    """One of a store's files: Catalog, Data, Index or LargeData."""

    def __init__(
        self, folder: Path, store: str, kind: str, *, max_bytes: int = MAX_BLOCK_BYTES
    ) -> None:
        self._folder = folder
        self._stem = f"{store}.{kind}"
        self.max_bytes = max_bytes
        self._window = _Window()
        self._extent: int | None = None
        self._file = -1

    def path(self, extent: int = 0) -> Path:
        """Return the path of an extent."""
        return self._folder / f"{self._stem}_{extent:06d}.psi"

    def exists(self) -> bool:
        """Tell whether there is such a file."""
        return self.path().is_file()

    def extents(self) -> list[int]:
        """Return the numbers of the extents that are there, in order."""
        paths = self._folder.glob(f"{glob.escape(self._stem)}_*.psi")
        numbers = (path.stem.rpartition("_")[2] for path in paths)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def has_block(self, place: Place) -> bool:
        """Tell whether a block can be read at a place, or the chain goes on there."""
        try:
            return self.block(place) is not None
        except (Malformed, NotFound):
            return False

    def blocks(self, start: Place = Place()) -> Iterator[Block]:  # noqa: B008 - it never changes
        """Yield the blocks that are there now, from a place on.

        :raises Malformed: a length is not one, or the chain leads back.
        :raises NotFound: an extent is not there.
        """
        place = start
        self._window.clear()
        while (block := self.block(place)) is not None:
            yield block
            place = block.next

    def block(self, place: Place) -> Block | None:
        """Return the block at a place, or the first of the next extent; None: nothing yet.

        :raises Malformed: there is none, its length is not one, or the chain leads back.
        :raises NotFound: the extent is not there.
        """
        while True:
            size = self._open(place.extent)
            length = self._length(place, size)
            if length == 0:
                return None
            if length > 0:
                break
            if -length <= place.extent:
                expected = f"an extent behind {place.extent}"
                raise Malformed(_WHAT, self.where(place, "next extent"), expected, -length)
            place = Place(-length, 0)
        at = place.position + INT32.size
        there = size - at
        if length % _ALIGNMENT or length > min(self.max_bytes, there):
            most = min(self.max_bytes, there)
            where = self.where(place, "length of a block")
            raise Malformed(_WHAT, where, f"a multiple of 4, at most {most}", length)
        data = self._read(place.extent, at, length)
        if len(data) < length:
            raise Truncated(_WHAT, self.where(place, "block"), length, len(data))
        return Block(place, data, Place(place.extent, at + length))

    def _length(self, place: Place, size: int) -> int:
        if place.position < 0 or place.position % _ALIGNMENT or place.position > size:
            where = self.where(place, "position")
            raise Malformed(_WHAT, where, f"a multiple of 4 below {size}", place.position)
        length = self._word(place)
        if not length:
            # What was read at once may be older than the block, where somebody still writes.
            self._window.clear()
            length = self._word(place)
        return length

    def _word(self, place: Place) -> int:
        data = self._read(place.extent, place.position, INT32.size)
        # A store that was closed is cut behind its last block.
        return int.from_bytes(data, "little", signed=True) if len(data) == INT32.size else 0

    def _read(self, extent: int, at: int, size: int) -> bytes:
        with storage_errors("read", str(self.path(extent))):
            return self._window.take(self._file, at, size)

    def where(self, place: Place, field: str = "") -> str:
        """Return where a place is, for people."""
        return f"{field} at byte {place.position} of {self.path(place.extent).name}".lstrip()

    def _open(self, extent: int) -> int:
        """Have an extent open, and return its size."""
        path = self.path(extent)
        if self._extent != extent:
            self.close()
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise NotFound(
                    f"{path} is not there", hint="copy all files of the store, and try again"
                ) from None
            except OSError:
                with storage_errors("open", str(path)):
                    raise
            self._extent = extent
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Give the file back. Closing twice is fine."""
        if self._extent is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._extent = None
            self._window.clear()
