"""Where is a store of ours, and which are there?

A store is a directory with its catalog (a log) and its messages: a log (`persisted`) or a ring
(`volatile`). psi's own store files are another matter: see `store`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

from penstock.core.errors import InvalidOption, NotFound
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Place", "find_store", "list_places", "new_place", "temporary_place"]

_CATALOG: Final = "catalog"
_DATA: Final = "data"
_RING_SUFFIX: Final = ".fmq"
_NAME: Final = re.compile(r"[^/\0]{1,200}")
_NUMBERS: Final = 10_000
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - private directories below it


class Place(NamedTuple):
    """The directory of a store."""

    folder: Path

    @property
    def name(self) -> str:
        """What people call it: the directory's name without psi's number."""
        stem, dot, number = self.folder.name.rpartition(".")
        return stem if dot and number.isdigit() and stem else self.folder.name

    @property
    def is_volatile(self) -> bool:
        """Its messages are in a ring, which forgets the oldest."""
        return (self.folder / f"{_DATA}{_RING_SUFFIX}").exists()

    @property
    def exists(self) -> bool:
        return (self.folder / _CATALOG).is_dir()

    @property
    def catalog_url(self) -> str:
        return f"log:{quote(str(self.folder.resolve() / _CATALOG))}"

    def data_url(self, *, volatile: bool) -> str:
        return f"{'fmq' if volatile else 'log'}:{quote(str(self.folder.resolve() / _DATA))}"

    def make(self) -> None:
        """Make the directory, which only its owner may look into.

        :raises StorageError: the operating system refuses.
        """
        with storage_errors("creating", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove(self) -> None:
        """Remove the store with all that is in it; none is fine."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def size_on_disk(self) -> int:
        """Return the bytes that its files take."""
        return sum(file.stat().st_blocks * 512 for file in self.folder.rglob("*") if file.is_file())


def new_place(root: Path | str, name: str, *, subdirectory: bool = False) -> Place:
    """Return where a store of that name goes; `subdirectory`: the next free of psi's NAME.0000.

    :raises InvalidOption: the name could lead elsewhere, or all numbers are taken.
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
    """Make a directory in memory, or where temporary files go, that nobody else has."""
    root = _MEMORY if _MEMORY.is_dir() else None
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
    with storage_errors("creating a store in", str(root or tempfile.gettempdir())):
        return Place(Path(tempfile.mkdtemp(prefix=f"penstock-psi-{safe}-", dir=root)))


def list_places(root: Path | str) -> Iterator[Place]:
    """Yield the stores in a directory, by name; one that is a store itself is all there is.

    :raises NotFound: there is no such directory.
    """
    root = Path(root)
    if not root.is_dir():
        raise NotFound(f"there is no directory {root}", hint="give the directory with the stores")
    if Place(root).exists:
        yield Place(root)
        return
    for folder in sorted(root.iterdir()):
        if Place(folder).exists:
            yield Place(folder)


def find_store(root: Path | str, name: str) -> Place:
    """Return the store of that name, with psi's numbers the newest of them.

    :raises NotFound: there is none.
    """
    found = [place for place in list_places(root) if name in {place.name, place.folder.name}]
    if not found:
        names = ", ".join(sorted({place.name for place in list_places(root)})[:8])
        raise NotFound(
            f"{root} has no store {name!r}", hint=f"there are: {names}" if names else None
        )
    return found[-1]
