"""Which queue or log is behind the name of a stream, and is it below the root?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

from penstock.core.errors import InvalidOption, InvalidURL, NotFound
from penstock.core.units import parse_size
from penstock.protocols.flight.wire import MAX_NAME, Kind, decode_name, encode_name
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.log.segments import is_log
from penstock.queue.wide.layout import SLOT, Geometry
from penstock.queue.wide.queue_file import SUFFIX, file_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


__all__ = ["Place", "Root"]

#: Bytes of a file's name, and how deep streams may lie.
_LONGEST_PART: Final = 255
_DEEPEST: Final = 32
#: Streams in one list.
_MOST_LISTED: Final = 10_000
#: Where the bytes of a queue may be, by the ending of its name.
_FILES: Final = ("", SUFFIX, ".stat", ".buf")

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class Place(NamedTuple):
    """A stream below the root."""

    #: As clients name it: relative to the root, percent-encoded.
    name: str
    kind: Kind
    path: Path
    #: Whether there is something now.
    exists: bool

    @property
    def url(self) -> str:
        """The stream's own URL on this machine."""
        return f"{self.kind}:{quote(os.fsencode(self.path))}"


class Root:
    """The directory that a server serves, and nothing beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def place(self, name: str, kind: Kind | None, *, may_make: bool = False) -> Place:
        """Find the stream of a name, as it came from a client.

        :raises InvalidURL: the name leads out of the root, or no stream can have it.
        :raises InvalidOption: it is of another kind than asked for.
        :raises NotFound: there is none, and none may be made.
        """
        parts = _parts(name)
        path = self.folder.joinpath(*parts)
        self._check_inside(name, path)
        found = _kind_of(path)
        if found is not None and kind is not None and found != kind:
            raise InvalidOption("kind", kind, f"{name} is a stream of kind {found}")
        if found is None and not may_make:
            raise NotFound(f"there is no stream {name}", hint="penstock create makes one")
        decided = Kind(found or kind or Kind.QUEUE)
        if decided is Kind.QUEUE:
            _check_queue(name, path)
        return Place(encode_name("/".join(parts)), decided, path, found is not None)

    def _check_inside(self, name: str, path: Path) -> None:
        """Make sure that no link on the way, or at its end, leads out of the root."""
        for ending in _FILES:
            file = f"{path}{ending}"
            real = os.path.realpath(file)
            if not Path(real).is_relative_to(self.folder):
                raise InvalidURL(name, "it leads out of the directory that is served")
        if _kind_of(path) is Kind.LOG:
            with os.scandir(path) as entries:
                if any(entry.is_symlink() for entry in entries):
                    raise InvalidURL(name, "a link is among its segments")

    def streams(self) -> Iterator[Place]:
        """Yield the streams that are there, in the order of their names, up to a limit."""
        count = 0
        for folder, below, files in os.walk(self.folder):
            path = Path(folder)
            below.sort()
            if path != self.folder and is_log(path):
                names, below[:] = [path], []
            else:
                stems = {os.path.splitext(f)[0] for f in files if f.endswith((SUFFIX, ".stat"))}  # noqa: PTH122
                names = [path / stem for stem in sorted(stems)]
            if len(path.relative_to(self.folder).parts) >= _DEEPEST - 1:
                below.clear()
            for each in names:
                try:
                    yield self.place(encode_name(str(each.relative_to(self.folder))), None)
                except (InvalidURL, NotFound, OSError):
                    continue  # no stream that clients could name
                count += 1
                if count >= _MOST_LISTED:
                    return

    def hide(self, text: str) -> str:
        """Return a text without the path of the root, which is no client's business."""
        if self.folder == self.folder.parent:
            return text  # all of the machine: there is nothing to hide
        return text.replace(f"{self.folder}/", "").replace(str(self.folder), "the root")


def _parts(name: str) -> list[str]:
    path = decode_name(name)
    if len(os.fsencode(path)) > MAX_NAME:
        raise InvalidURL(name[:60] + "…", f"a name has at most {MAX_NAME} bytes")
    if _CONTROL.search(path):
        raise InvalidURL(name, "it has a control character")
    parts = path.split("/")
    if len(parts) > _DEEPEST:
        raise InvalidURL(name, f"it is deeper than {_DEEPEST} levels")
    for part in parts:
        if part in {"", ".", ".."} or len(os.fsencode(part)) > _LONGEST_PART:
            raise InvalidURL(name, f"{part[:60]!r} cannot be a part of a stream's name")
    return parts


def _check_queue(name: str, path: Path) -> None:
    if shared_memory_key(str(path)) is not None:
        raise InvalidURL(name, "a queue in shared memory is not below the directory that is served")
    if not file_of(str(path)).endswith(SUFFIX):
        raise InvalidURL(name, "it is not a file")
    if is_log(path.parent):
        raise InvalidURL(name, "it is inside of a log", hint="open the log itself")


def _kind_of(path: Path) -> Kind | None:
    if path.is_dir() and is_log(path):
        return Kind.LOG
    is_queue = Path(file_of(str(path))).is_file() or Path(f"{path}.stat").is_file()
    return Kind.QUEUE if is_queue else None


def check_size(options: Mapping[str, str], limit: int) -> None:
    """Make sure that a stream with these options, its slots included, is not larger than allowed.

    :raises InvalidOption: it is.
    """
    for of_size, of_slots in (("size", "slots"), ("segment", "segment_slots")):
        asked = {name: parse_size(options[name]) for name in (of_size, of_slots) if name in options}
        if not asked:
            continue
        slots = asked.get(of_slots)
        # Slots that nobody asked for are few.
        table = 0 if slots is None else Geometry.fitting(slots, 0, 0).slots * SLOT.itemsize
        if asked.get(of_size, 0) + table > limit:
            name = of_size if of_size in asked else of_slots
            raise InvalidOption(
                name, options[name], f"this server makes at most {limit:,} bytes, slots included"
            )
