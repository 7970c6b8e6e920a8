"""What may a disk hold when the power fails, and what is made of it?

A `Disk` watches a folder while programs write to it: every version of every page since it was
synced, and every file that a name meant since its folder was. An image has one of them for each
page and each name, at random: a system writes back in any order.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.queue.wide.layout import HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Disk", "Image", "another_boot", "unsynced"]

_PAGE = 4096
#: Calls of the operating system, before which the power may fail.
_CALLS = (
    "open",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "link",
    "unlink",
    "ftruncate",
    "posix_fallocate",
    "pwrite",
)


class _File:
    """A file, by its versions since it was synced: pages, and sizes."""

    def __init__(self, path: Path) -> None:
        self.descriptor = _calls["open"](path, os.O_RDONLY | os.O_CLOEXEC)
        self._now = b""
        #: What the disk has for sure, and what it may have instead.
        self._durable: list[bytes] = []
        self._versions: dict[int, list[bytes]] = {}
        self._sizes = [0]

    def look(self) -> None:
        size = os.fstat(self.descriptor).st_size
        now = os.pread(self.descriptor, size, 0)
        if now == self._now:
            return
        before = _pages(self._now)
        for number, page in enumerate(_pages(now)):
            if number >= len(before) or before[number] != page:
                self._versions.setdefault(number, []).append(page)
        if len(now) != len(self._now):
            self._sizes.append(len(now))
        self._now = now

    def sync(self) -> None:
        self.look()
        self._durable = _pages(self._now)
        self._versions.clear()
        self._sizes = [len(self._now)]

    def image(self, chance: random.Random) -> bytes:
        """Return what the disk may have of it."""
        size = chance.choice(self._sizes)
        pages = []
        for number in range(-(-size // _PAGE)):
            durable = self._durable[number] if number < len(self._durable) else bytes(_PAGE)
            pages.append(chance.choice([durable, *self._versions.get(number, ())]))
        return b"".join(pages)[:size]


def _pages(data: bytes) -> list[bytes]:
    return [data[at : at + _PAGE].ljust(_PAGE, b"\0") for at in range(0, len(data), _PAGE)]


class Image(NamedTuple):
    """What a disk had, by name, and what the program had said by then."""

    files: dict[str, bytes]
    said: Any

    def write(self, folder: Path) -> None:
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        another_boot(folder)


class Disk:
    """Watches a folder. What is in it at first is on the disk."""

    def __init__(self, folder: Path, chance: random.Random, cuts: int, events: int) -> None:
        self._folder = folder
        self._chance = chance
        # The power fails at so many of about so many events.
        self._likely = cuts / max(1, events)
        self._files: dict[tuple[int, int], _File] = {}
        #: By name, what it meant since its folder was synced; the first one is on the disk.
        self._names: dict[str, list[tuple[int, int] | None]] = {}
        self._lock = threading.RLock()
        self.events = 0
        self.images: list[Image] = []
        #: What the program has been promised; whoever writes changes it.
        self.said: Callable[[], Any] = lambda: None
        self._look()
        for file in self._files.values():
            file.sync()
        self._names = {name: history[-1:] for name, history in self._names.items()}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Look before every call that may change something."""
        for name, call in _calls.items():
            setattr(os, name, self._watched(name, call))
        try:
            yield
        finally:
            for name, call in _calls.items():
                setattr(os, name, call)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.event()
                if name not in ("fsync", "fdatasync"):
                    return call(*arguments, **options)
                self._sync(arguments[0])  # the disk of the machine need not be waited for
                return None

        return watched

    def event(self) -> None:
        """Look what changed; the power may fail now."""
        with self._lock:
            self.events += 1
            self._look()
            if self._chance.random() < self._likely:
                self.images.append(self._image())

    def take_image(self) -> None:
        """Let the power fail now."""
        with self._lock:
            self._look()
            self.images.append(self._image())

    def _look(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        for root, _, names in os.walk(self._folder):
            for name in names:
                path = Path(root) / name
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    inode = status.st_ino, status.st_dev
                    if inode not in self._files:
                        self._files[inode] = _File(path)
                    found[str(path.relative_to(self._folder))] = inode
        for name in {*self._names, *found}:
            history = self._names.setdefault(name, [None])
            if history[-1] != found.get(name):
                history.append(found.get(name))
        for file in self._files.values():
            file.look()

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        file = self._files.get((status.st_ino, status.st_dev))
        if file is not None:
            file.sync()
            return
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/self/fd/{descriptor}").readlink()
            for name, history in self._names.items():
                if (self._folder / name).parent == folder:
                    del history[:-1]

    def _image(self) -> Image:
        files = {}
        for name, history in sorted(self._names.items()):
            inode = self._chance.choice(history)
            if inode is not None:
                files[name] = self._files[inode].image(self._chance)
        return Image(files, self.said())

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Wait for no disk: no power fails here."""
    os.fsync = os.fdatasync = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync, os.fdatasync = _calls["fsync"], _calls["fdatasync"]


def another_boot(folder: Path) -> None:
    """Let every queue of a folder that is in use have been so in an earlier run of the machine."""
    at = HEADER.fields["boot_id"].offset
    for path in folder.rglob("*.fmq"):
        with path.open("r+b") as file:
            file.seek(at)
            if any(file.read(16)):
                file.seek(at)
                file.write(b"an earlier boot.")


_calls: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CALLS}
