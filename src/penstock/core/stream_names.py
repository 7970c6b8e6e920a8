"""Which path and name does a stream id stand for?

An id holds only filters of its path and name. Two texts can have one filter, and then two streams
share one id (docs/specs/jrtc.md 1.4): the registry remembers the texts and refuses the second.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import (
    InvalidStreamId,
    LockTimeout,
    Malformed,
    StorageError,
    StreamIdCollision,
)
from penstock.core.stream_id import (
    ANY_DEVICE,
    ANY_FILTER,
    CONTROLLER_DEVICE,
    ForwardDestination,
    StreamId,
)
from penstock.core.whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

__all__ = ["MAX_FILE_BYTES", "Explanation", "StreamNames", "advice", "default_names_file"]

#: The largest file of names that is read or written: some 20,000 streams.
MAX_FILE_BYTES = 1 << 20

_FORMAT_VERSION = 1
_SAFE_NAME_BYTES = 8
_LOCK_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Explanation:
    """A stream id, explained."""

    stream: StreamId
    #: `none`, `udp`, `any`, or the number of a destination that has no name.
    destination: str
    #: `the controller`, `any`, or `device 5`.
    device: str
    #: The text behind the path; None when it is left open (ANY) or not known.
    path: str | None
    #: The text behind the name; None when it is left open (ANY) or not known.
    name: str | None


class StreamNames:
    """The paths and names that are in use, by the filters that stand for them.

    Iterating yields each (path, name), sorted.
    """

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        # Names by filter, below the filter of their path.
        self._names: dict[int, dict[int, str]] = {}

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(
            sorted(
                (self._paths[path], name)
                for path, names in self._names.items()
                for name in names.values()
            )
        )

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))

    def register(
        self, fwd_dst: int, device_id: int, path: str, name: str, *, ver: int = 0
    ) -> StreamId:
        """Register a stream's path and name, and return its id. Idempotent.

        Texts that share a filter are refused whatever their destination and device: a request
        may leave those open, and a decoder ignores them (docs/specs/jrtc.md 6).

        :raises StreamIdCollision: another path, or another name of this path, has the same filter
        :raises InvalidStreamId: a field is out of range, or left open
        """
        stream = StreamId.generate(fwd_dst, device_id, path, name, ver)
        if not stream.is_concrete:
            raise InvalidStreamId(
                "text", str(stream), "leaves a field open (ANY): it is a request, not a stream"
            )
        known_path = self._paths.get(stream.path, path)
        if known_path != path:
            raise StreamIdCollision(
                str(stream),
                existing=f"path {known_path!r}",
                refused=f"path {path!r}",
                hint=advice(path) or "choose another path",
            )
        known_name = self._names.get(stream.path, {}).get(stream.name, name)
        if known_name != name:
            raise StreamIdCollision(
                str(stream),
                existing=f"stream {known_name!r} of {path!r}",
                refused=f"stream {name!r} of {path!r}",
                hint=advice(name) or "choose another name",
            )
        self._paths[stream.path] = path
        self._names.setdefault(stream.path, {})[stream.name] = name
        return stream

    def explain(self, stream: StreamId) -> Explanation:
        """Explain an id or a request, with the known names."""
        return Explanation(
            stream=stream,
            destination=_destination_in_words(stream.fwd_dst),
            device=_device_in_words(stream.device_id),
            path=self._paths.get(stream.path),
            name=self._name_of(stream),
        )

    def _name_of(self, stream: StreamId) -> str | None:
        if stream.path != ANY_FILTER:
            return self._names.get(stream.path, {}).get(stream.name)
        # Any path: the filter has a text only if all paths agree on it.
        texts = {names[stream.name] for names in self._names.values() if stream.name in names}
        return texts.pop() if len(texts) == 1 else None

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read the names that `save` wrote; a missing file has no names.

        :raises Malformed: the file is too large or is not a file of names
        :raises StorageError: the file cannot be read
        """
        names = cls()
        try:
            with file.open("rb") as stream:
                content = stream.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return names
        except OSError as error:
            raise StorageError("reading", str(file), error) from error
        for path, name in _parse(file, content):
            try:
                names.register(ForwardDestination.NONE, CONTROLLER_DEVICE, path, name)
            except (StreamIdCollision, InvalidStreamId) as error:
                where = f"name {name!r} of path {path!r}"
                raise _not_names(file, where, "a stream of its own", error) from error
        return names

    def save(self, file: Path) -> None:
        """Write the names atomically: a reader finds the old file or the new one.

        Another process may have added names since the file was read: see `updating`.

        :raises StorageError: the file cannot be written, or would pass `MAX_FILE_BYTES`
        """
        paths: dict[str, list[str]] = {}
        for path, name in self:
            paths.setdefault(path, []).append(name)
        document = {"version": _FORMAT_VERSION, "paths": paths}
        content = json.dumps(document, ensure_ascii=False, indent=1).encode()
        try:
            if len(content) > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))  # noqa: TRY301  # one report
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content, sync=True, is_shared=True)
        except OSError as error:
            hint = f"at most {MAX_FILE_BYTES:,} bytes of names are kept: remove some"
            raise StorageError(
                "writing", str(file), error, hint=hint if error.errno == errno.EFBIG else None
            ) from error

    @classmethod
    @contextmanager
    def updating(cls, file: Path, *, timeout: float = 10.0) -> Iterator[Self]:
        """Load the names, let the caller add to them, and save them, as one transaction.

        No other process updates the file meanwhile. An exception leaves the file as it was.

        :raises LockTimeout: others kept the file locked for `timeout` seconds
        :raises Malformed: as `load`
        :raises StorageError: as `load` and `save`
        """
        with _locked(file, timeout):
            names = cls.load(file)
            known = len(names)
            yield names
            # Names are only ever added.
            if len(names) != known:
                names.save(file)


def advice(name: str) -> str | None:
    """Return a warning about a path or a name, or None."""
    if len(name.encode(errors="replace")) >= _SAFE_NAME_BYTES:
        return None
    return (
        f"{name!r} is under {_SAFE_NAME_BYTES} bytes, and short names easily get the same id"
        " ('one' and 'nne' do): choose a longer one"
    )


def default_names_file() -> Path:
    """Return the path of the names: in $PENSTOCK_HOME, else in the user's state directory."""
    if home := os.environ.get("PENSTOCK_HOME"):
        directory = Path(home)
    elif state := os.environ.get("XDG_STATE_HOME"):
        directory = Path(state, "penstock")
    else:
        directory = Path.home() / ".local" / "state" / "penstock"
    return directory / "stream-names.json"


def _destination_in_words(fwd_dst: int) -> str:
    try:
        return ForwardDestination(fwd_dst).name.lower()
    except ValueError:
        return str(fwd_dst)


def _device_in_words(device_id: int) -> str:
    if device_id == CONTROLLER_DEVICE:
        return "the controller"
    return "any" if device_id == ANY_DEVICE else f"device {device_id}"


def _parse(file: Path, content: bytes) -> Iterator[tuple[str, str]]:
    if len(content) > MAX_FILE_BYTES:
        raise _not_names(file, "its size", f"at most {MAX_FILE_BYTES:,} bytes", "more")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _not_names(file, "its content", "JSON", error) from error
    match document:
        case {"version": version, "paths": dict(paths)}:
            pass
        case _:
            raise _not_names(file, "the document", "an object with version and paths", "another")
    if version != _FORMAT_VERSION:
        raise _not_names(file, "version", _FORMAT_VERSION, repr(version))
    for path, names in paths.items():
        if not isinstance(names, list):
            raise _not_names(file, f"path {path!r}", "a list", type(names).__name__)
        for name in names:
            if not isinstance(name, str):
                raise _not_names(file, f"a name of path {path!r}", "text", type(name).__name__)
            yield path, name


def _not_names(file: Path, where: str, expected: object, found: object) -> Malformed:
    return Malformed(
        f"stream names file {file}",
        where,
        expected,
        found,
        hint="correct the file, or move it away to begin with no names",
    )


@contextmanager
def _locked(file: Path, timeout: float) -> Iterator[None]:
    # A separate lock file, because saving replaces the file itself. It is never removed: another
    # process may be waiting for it.
    lock = file.with_name(f"{file.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("ab")
    except OSError as error:
        raise StorageError("locking", str(lock), error) from error
    with stream:  # closing it releases the lock
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockTimeout(
                        f"{lock} stayed locked for {timeout:g} s",
                        hint="another penstock is registering names, or was stopped meanwhile",
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
