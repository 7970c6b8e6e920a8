"""How are blocks laid out in the files of a psi store? (docs/specs/psi.md 7)

A store file is a chain of extents, each a file of its own: a length of 4 bytes, the block, and so
on. A length of 0 is the end for now; a negative length names the next extent.
"""

from __future__ import annotations

import contextlib
import glob
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.core.errors import Malformed, NotFound
from penstock.core.interfaces import Closable
from penstock.protocols.psi.errors import Truncated
from penstock.protocols.psi.ticks import raw_to_ns
from penstock.protocols.psi.wire import INT32
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


__all__ = ["MAX_BLOCK_BYTES", "Block", "ExtentFile", "FilePosition", "IndexEntry"]

#: A larger block is taken for damage.
MAX_BLOCK_BYTES: Final = 1 << 30
_FILE: Final = "psi store file"
_WINDOW: Final = 1 << 18
_ALIGNMENT: Final = 4
_WHAT: Final = "psi store"
#: ExtentId, Position, CreationTime, OriginatingTime: here creation comes first.
_INDEX: Final = struct.Struct("<iiQQ")
#: An entry that points into the large data has this added to its extent.
_LARGE: Final = -(2**31)


class FilePosition(NamedTuple):
    """The position of a block: its extent, and the byte of its length word there."""

    extent: int = 0
    position: int = 0


class Block(NamedTuple):
    """A block, and the position of the next one."""

    place: FilePosition
    data: bytes
    next: FilePosition


class _Window:
    """A buffered part of an extent.

    It is read, not mapped: a writer that closes the store truncates the file, and access to a
    mapped page behind its end would kill this process.
    """

    def __init__(self) -> None:
        self.start = 0
        self.data = b""

    def take(self, file: int, at: int, size: int) -> bytes:
        """Return up to `size` bytes from an offset; fewer at the end of the file."""
        first = at - self.start
        if first < 0 or first + size > len(self.data):
            self.start, first = at, 0
            self.data = os.pread(file, max(size, _WINDOW), at)
        return self.data[first : first + size]

    def clear(self) -> None:
        """Drop the buffer: the file may have grown since."""
        self.data = b""


class ExtentFile(Closable):
    """A file of a store: Catalog, Data, Index or LargeData."""

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
        """Return the numbers of the existing extents, in order."""
        paths = self._folder.glob(f"{glob.escape(self._stem)}_*.psi")
        numbers = (path.stem.rpartition("_")[2] for path in paths)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def has_block(self, place: FilePosition) -> bool:
        """Tell whether a block can be read at a position, or in the extent that it leads to."""
        try:
            return self.block(place) is not None
        except (Malformed, NotFound):
            return False

    def blocks(self, start: FilePosition = FilePosition()) -> Iterator[Block]:  # noqa: B008 - it never changes
        """Yield the blocks from a position to the end for now.

        :raises Malformed: a length is not valid, or the chain of extents leads back.
        :raises NotFound: an extent is missing.
        """
        place = start
        self._window.clear()
        while (block := self.block(place)) is not None:
            yield block
            place = block.next

    def block(self, place: FilePosition) -> Block | None:
        """Return the block at a position, or the first of the next extent; None: none yet.

        :raises Malformed: the position or a length is not valid, or the chain leads back.
        :raises NotFound: the extent is missing.
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
                raise Malformed(_FILE, self.where(place, "next extent"), expected, -length)
            place = FilePosition(-length, 0)
        at = place.position + INT32.size
        there = size - at
        if length % _ALIGNMENT or length > min(self.max_bytes, there):
            most = min(self.max_bytes, there)
            where = self.where(place, "length of a block")
            raise Malformed(_FILE, where, f"a multiple of 4, at most {most}", length)
        data = self._read(place.extent, at, length)
        if len(data) < length:
            raise Truncated(_FILE, self.where(place, "block"), length, len(data))
        return Block(place, data, FilePosition(place.extent, at + length))

    def _length(self, place: FilePosition, size: int) -> int:
        if place.position < 0 or place.position % _ALIGNMENT or place.position > size:
            where = self.where(place, "position")
            raise Malformed(_FILE, where, f"a multiple of 4 below {size}", place.position)
        length = self._word(place)
        if not length:
            # The buffer may be older than the block, where a writer is active.
            self._window.clear()
            length = self._word(place)
        return length

    def _word(self, place: FilePosition) -> int:
        data = self._read(place.extent, place.position, INT32.size)
        # A closed store is truncated behind its last block.
        return int.from_bytes(data, "little", signed=True) if len(data) == INT32.size else 0

    def _read(self, extent: int, at: int, size: int) -> bytes:
        with storage_errors("read", str(self.path(extent))):
            return self._window.take(self._file, at, size)

    def where(self, place: FilePosition, field: str = "") -> str:
        """Return a position for display."""
        return f"{field} at byte {place.position} of {self.path(place.extent).name}".lstrip()

    def _open(self, extent: int) -> int:
        """Open an extent if it is not, and return its size."""
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
        """Close the file. Idempotent."""
        if self._extent is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._extent = None
            self._window.clear()


class IndexEntry(NamedTuple):
    """A position in a file, and the latest times of all messages before it."""

    place: FilePosition
    is_large: bool
    creation_ns: int
    originating_ns: int

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode an entry.

        :raises Malformed: it is truncated, or its position is negative.
        """
        if len(data) < _INDEX.size:
            raise Truncated(_WHAT, "index entry", _INDEX.size, len(data))
        extent, position, creation, originating = _INDEX.unpack_from(data)
        is_large = extent < 0
        if is_large:
            extent -= _LARGE
        if position < 0:
            raise Malformed(_WHAT, "position of an index entry", "0 or more", position)
        return cls(
            FilePosition(extent, position), is_large, raw_to_ns(creation), raw_to_ns(originating)
        )
