"""Which store is at a path: ours or psi's, an existing one or a new one?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.endpoints import describe
from penstock.core.errors import NotFound
from penstock.core.interfaces import StreamInfo
from penstock.protocols.psi.store.psi_files import PsiFiles, PsiStoreReader, find_stores
from penstock.protocols.psi.store.streams import Place, Store
from penstock.protocols.psi.ticks import MIN_NS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "describe_store",
    "find_store",
    "is_store",
    "list_places",
    "open_or_make",
    "open_store",
]


def open_store(
    path: Path | str, name: str | None = None, *, writable: bool = False, salvage: bool = False
) -> Store | PsiFiles:
    """Open an existing store: the one at `path`, or the one of that name below it.

    Of several named NAME.0000 and so on, the newest is opened. psi's files are read-only; `salvage`
    also opens damaged ones.

    :raises NotFound: no such store exists.
    :raises DamagedStore: files of psi are missing or damaged.
    :raises InvalidOption: psi has several there, and no name is given.
    :raises LockTimeout: it is to be written, and another process does.
    """
    folder = Path(path)
    if name is None and Place(folder).exists:
        return Store.open(folder, writable=writable)
    if name is not None and folder.is_dir():
        try:
            return Store.open(find_store(folder, name).folder, writable=writable)
        except NotFound:
            of_psi = [where for found, where in find_stores(folder) if found == name]
            if of_psi:
                return PsiFiles(of_psi[-1], name, salvage=salvage)
            raise
    if name is None and folder.is_dir():
        return PsiFiles(folder, salvage=salvage)  # raises what is missing
    raise NotFound(f"there is no store at {folder}", hint="give the directory of a store")


def open_or_make(
    path: Path | str, name: str | None = None, *, subdirectory: bool | None = None
) -> Store | PsiFiles:
    """Open a store to write, or create it; psi's own files are opened to read.

    `subdirectory`: always create a new one, in the next free of psi's folders NAME.0000.

    :raises StorageError: the operating system refuses.
    """
    folder = Path(path)
    if subdirectory:
        root, own = (folder.parent, folder.name) if name is None else (folder, name)
        return Store.create(root, own, subdirectory=True)
    try:
        return open_store(folder, name, writable=True)
    except NotFound:
        root, own = (folder.parent, folder.name) if name is None else (folder, name)
        return Store.create(root, own)


def list_places(root: Path | str) -> Iterator[Place]:
    """Yield the stores in a directory, by name, or the directory itself if it is a store.

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
    """Return the store of that name; of several NAME.0000 and so on, the newest.

    :raises NotFound: no such store exists.
    """
    found = [place for place in list_places(root) if name in {place.name, place.folder.name}]
    if not found:
        names = ", ".join(sorted({place.name for place in list_places(root)})[:8])
        raise NotFound(
            f"{root} has no store {name!r}", hint=f"there are: {names}" if names else None
        )
    return found[-1]


def is_store(folder: Path) -> bool:
    """Tell whether a directory is a store, ours or psi's; one that may not be read is none."""
    try:
        return Place(folder).is_whole or any(folder.glob("*.Catalog_000000.psi"))
    except OSError:
        return False


def describe_store(folder: Path) -> StreamInfo:
    """Describe the messages of a store, of all its streams together; psi's by their catalog.

    :raises NotFound: the directory is no store.
    :raises DamagedStore: the catalog of psi is damaged.
    """
    place = Place(folder)
    if place.is_whole:
        found = describe(place.data_url(volatile=place.is_volatile))
        return dataclasses.replace(found, url=str(folder), layout="store")
    count = 0
    times: list[int] = []
    for name in [name for name, where in find_stores(folder) if where == folder]:
        with PsiStoreReader(folder, name) as reader:
            for stream in reader.streams:
                count += stream.message_count
                times += [stream.first_creation_ns, stream.last_creation_ns]
    known = [time for time in times if time != MIN_NS]
    return StreamInfo(
        url=str(folder),
        layout="psi store",
        storage="files",
        slots=0,
        buffer_size=0,
        oldest_seq=None,
        youngest_seq=None,
        count=count,
        bytes=place.size_on_disk(),
        oldest_time_ns=min(known, default=None),
        youngest_time_ns=max(known, default=None),
        fill=0.0,
        blocking=False,
        details={},
    )
