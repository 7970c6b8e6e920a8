"""How is a file written so that under its name there is never half of one?"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["make_whole", "open_new", "sync_names", "write_whole"]


def write_whole(path: Path, content: bytes, *, sync: bool, is_shared: bool = False) -> None:
    """Write a file, also over another: whoever opens it finds the old one or the new one.

    :param sync: whether that holds after a power failure, too. Which of them it is then, is known
        after `sync_names`.
    :param is_shared: whether others may write it at the same time
    :raises OSError: the operating system refuses; then all is as before.
    """
    # One name, if it can be: what a killed process left there does not pile up.
    unfinished = _name_of_its_own(path) if is_shared else path.with_name(f"{path.name}.new")
    with _written(unfinished, content, sync=sync):
        unfinished.replace(path)


def make_whole(path: Path, content: bytes) -> None:
    """Make a file that is not there, and its folder; return when it is on the disk.

    If somebody was quicker, theirs stays.

    :raises OSError: the operating system refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _name_of_its_own(path)
    # A link, since a rename would replace the file of somebody who was quicker.
    with _written(unfinished, content, sync=True), contextlib.suppress(FileExistsError):
        os.link(unfinished, path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Return when the names in a folder are on the disk.

    :raises OSError: the operating system refuses.
    """
    names = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(names)
    finally:
        os.close(names)


def open_new(path: Path, mode: int = 0o666) -> int:
    """Make a file that is ours, and return its descriptor, to write and read.

    What is there goes: a killed process left it, or somebody put a link to another file there.

    :raises OSError: the operating system refuses.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        path.unlink(missing_ok=True)
    return os.open(path, flags, mode)


def _name_of_its_own(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")


@contextlib.contextmanager
def _written(unfinished: Path, content: bytes, *, sync: bool) -> Iterator[None]:
    try:
        with os.fdopen(open_new(unfinished), "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        yield
    finally:
        unfinished.unlink(missing_ok=True)
