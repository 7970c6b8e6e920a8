"""How is a file written so that under its name there is never half of one?"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "keep_whole",
    "make_as_folder",
    "make_folder",
    "make_whole",
    "open_new",
    "share_as_folder",
    "sync_file",
    "sync_files",
    "sync_names",
    "write_whole",
]


def write_whole(
    path: Path, content: bytes, *, sync: bool, is_shared: bool = False, as_folder: bool = False
) -> None:
    """Write or replace a file atomically: readers find the old one or the new one.

    :param sync: whether that also holds after a power failure. The new one is certain only after
        `sync_names`.
    :param is_shared: whether other processes may write it at the same time
    :param as_folder: whether it gets the permissions of its folder; see `share_as_folder`
    :raises OSError: the operating system refuses; nothing has changed.
    """
    # One fixed name if possible, so that files of killed processes do not accumulate.
    unfinished = _name_of_its_own(path) if is_shared else path.with_name(f"{path.name}.new")
    with _written(unfinished, content, sync=sync, as_folder=as_folder):
        unfinished.replace(path)


def keep_whole(unfinished: Path, path: Path) -> None:
    """Rename a finished file; return when file and name are on the disk.

    :raises OSError: the operating system refuses.
    """
    sync_file(unfinished)
    unfinished.replace(path)
    sync_names(path.parent)


def make_whole(path: Path, content: bytes, *, as_folder: bool = False) -> None:
    """Create a file, and its folder; return when it is on the disk.

    An existing file stays as it is.

    :param as_folder: whether it gets the permissions of its folder; see `share_as_folder`
    :raises OSError: the operating system refuses.
    """
    make_folder(path.parent)
    unfinished = _name_of_its_own(path)
    # A link, since a rename would replace the file of a quicker process.
    with (
        _written(unfinished, content, sync=True, as_folder=as_folder),
        contextlib.suppress(FileExistsError),
    ):
        os.link(unfinished, path)
    sync_names(path.parent)


def make_folder(folder: Path, mode: int = 0o777) -> bool:
    """Create a folder, and those above it; return when their names are on the disk.

    Otherwise a power failure could take a file with its folder, though the file was synced.

    :returns: whether it was missing
    :raises OSError: the operating system refuses.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for made in missing:
        sync_names(made.parent)
    return bool(missing)


def sync_names(folder: Path) -> None:
    """Return when the names in a folder are on the disk.

    :raises OSError: the operating system refuses.
    """
    names = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(names)
    finally:
        os.close(names)


def sync_files(folder: Path) -> None:
    """Return when the files of a folder are on the disk; not those in folders below it.

    :raises OSError: the operating system refuses.
    """
    for path in folder.iterdir():
        if path.is_file():
            sync_file(path)


def sync_file(path: Path) -> None:
    """Return when a file is on the disk; not its name.

    :raises OSError: the operating system refuses.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def open_new(path: Path, mode: int = 0o666) -> int:
    """Create a new file, and return its descriptor, open for writing and reading.

    An existing file or link of this name is removed first, such as one of a killed process.

    :raises OSError: the operating system refuses.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        path.unlink(missing_ok=True)
    return os.open(path, flags, mode)


def make_as_folder(path: Path) -> None:
    """Create an empty file with the permissions of its folder; an existing file stays as it is.

    :raises OSError: the operating system refuses.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_EXCL, 0o666)
    except FileExistsError:
        os.close(os.open(path, flags, 0o666))  # raises if it is a link, or of somebody else
        return
    try:
        share_as_folder(descriptor, path.parent)
    finally:
        os.close(descriptor)


def share_as_folder(descriptor: int, folder: Path) -> None:
    """Give a new file the read and write permissions of its folder, whatever the umask.

    :raises OSError: the operating system refuses.
    """
    os.fchmod(descriptor, folder.stat().st_mode & 0o666)


def _name_of_its_own(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")


@contextlib.contextmanager
def _written(unfinished: Path, content: bytes, *, sync: bool, as_folder: bool) -> Iterator[None]:
    try:
        with os.fdopen(open_new(unfinished), "wb") as file:
            if as_folder:
                share_as_folder(file.fileno(), unfinished.parent)
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        yield
    finally:
        unfinished.unlink(missing_ok=True)
