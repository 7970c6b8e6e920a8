"""Which store is at a path: ours or psi's, an existing one or a new one?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import NotFound
from penstock.protocols.psi.store.psi_files import PsiFiles, find_stores
from penstock.protocols.psi.store.streams import Place, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_store", "list_places", "open_or_make", "open_store"]


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
