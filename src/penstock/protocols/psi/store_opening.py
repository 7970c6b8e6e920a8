"""Which store is meant by a path and a name: ours or psi's, one that is there or a new one?"""

from __future__ import annotations

from pathlib import Path

from penstock.core.errors import NotFound
from penstock.protocols.psi.store import find_stores
from penstock.protocols.psi.store_places import Place, find_store
from penstock.protocols.psi.store_psi import PsiFiles
from penstock.protocols.psi.store_set import Store

__all__ = ["open_or_make", "open_store"]


def open_store(
    path: Path | str, name: str | None = None, *, writable: bool = False, salvage: bool = False
) -> Store | PsiFiles:
    """Open a store that is there: the one at `path`, or in it the one of that name.

    Of several with psi's numbers behind the name it is the newest. Files of psi are only read;
    `salvage`: also damaged ones, as far as that goes.

    :raises NotFound: there is none.
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
        return PsiFiles(folder, salvage=salvage)  # says what is missing
    raise NotFound(f"there is no store at {folder}", hint="give the directory of a store")


def open_or_make(
    path: Path | str, name: str | None = None, *, subdirectory: bool | None = None
) -> Store | PsiFiles:
    """Open a store to write to it, or make it; psi's own files are read.

    `subdirectory`: always make a new one, in the next free of psi's folders NAME.0000.

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
