"""Which files has latest_data_info, where are they, and how are they written?

LROSE's names, and the environment variables that its programs obey (docs/specs/lrose.md 3.1 and
3.4). They are written in its order and under its lock: the catalog, then ASCII, XML and the queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import (
    DamagedQueue,
    InvalidOption,
    InvalidURL,
    Malformed,
    PositionError,
    StorageError,
)
from penstock.core.whole_files import open_new
from penstock.protocols.lrose.ldata_format import (
    UNKNOWN,
    LatestInfo,
    catalog_line,
    decode_body,
    decode_xml,
    encode_ascii,
    encode_body,
    encode_xml,
)
from penstock.queue.classic.device import lock_held, open_lock_file, shared_memory_key
from penstock.queue.classic.layout import ID_COUNT, MAX_BUFFER, STATUS_SIZE
from penstock.queue.classic.options import ClassicOptions, Compression
from penstock.queue.classic.writer import ClassicWriter
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.queue.classic.reader import ClassicReader

__all__ = [
    "DEFAULT_NAME",
    "InfoFiles",
    "LatestSettings",
    "SavedPlace",
    "data_path",
    "expected_path",
    "relative_path",
    "stands_behind",
    "write_files",
    "write_state",
    "writing_is_off",
]

# --- settings -----------------------------------------------------------------------------------

#: Default name of the files, after an underscore.
DEFAULT_NAME: Final = "latest_data_info"
_DEFAULT_SLOTS: Final = 2500
_BYTES_A_SLOT: Final = 500
_MOST_SLOTS: Final = MAX_BUFFER // _BYTES_A_SLOT
_LONGEST_NAME: Final = 200


def writing_is_off() -> bool:
    """Tell whether the environment turns writing off, as for reprocessing old data."""
    return os.environ.get("LDATA_NO_WRITE") == "true"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable) != "false"


def _slots() -> int:
    number = re.match(r"\s*\+?([0-9]{1,9})", os.environ.get("LDATA_FMQ_NSLOTS", ""))
    return int(number[1]) if number else _DEFAULT_SLOTS


def _is_in_shared_memory(name: str) -> bool:
    try:
        return shared_memory_key(name) is not None
    except InvalidURL:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestSettings:
    """The forms that are written and read. Defaults: the environment's, or LROSE's."""

    name: str = DEFAULT_NAME
    use_ascii: bool = field(default_factory=lambda: _is_on("LDATA_AS_ASCII"))
    use_xml: bool = field(default_factory=lambda: _is_on("LDATA_AS_XML"))
    use_fmq: bool = field(default_factory=lambda: _is_on("LDATA_FMQ_ACTIVE"))
    #: Slots of a new queue: how many entries a reader may lag.
    fmq_slots: int = field(default_factory=_slots)
    #: Seconds to wait for another writer.
    lock_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or "\0" in self.name:
            raise InvalidOption("name", self.name, "is the name of a file, without a directory")
        if len(os.fsencode(self.name)) > _LONGEST_NAME:
            raise InvalidOption("name", self.name, f"is longer than {_LONGEST_NAME} bytes")
        if _is_in_shared_memory(f"_{self.name}"):
            raise InvalidOption("name", self.name, "is the name of a queue in shared memory")
        if not 1 <= self.fmq_slots <= _MOST_SLOTS:
            raise InvalidOption("fmq_slots", self.fmq_slots, f"must be from 1 to {_MOST_SLOTS:,}")

    @property
    def fmq_size(self) -> int:
        """Bytes of the buffer of a new queue."""
        return self.fmq_slots * _BYTES_A_SLOT

    def only(self, *, ascii: bool = False, xml: bool = False, fmq: bool = False) -> LatestSettings:
        """Return a copy with these forms on and the others off."""
        return replace(self, use_ascii=ascii, use_xml=xml, use_fmq=fmq)


class InfoFiles:
    """The paths of one set of files."""

    def __init__(self, directory: str | os.PathLike[str], name: str = DEFAULT_NAME) -> None:
        #: As given by the user: LROSE guesses the kind of data from it.
        self.directory = os.fspath(directory)
        self.folder = Path(directory)
        self.ascii = self.folder / f"_{name}"
        self.xml = self.folder / f"_{name}.xml"
        #: The path to open the queue by, and the path of its status file.
        self.queue = str(self.ascii)
        self.stat = self.folder / f"_{name}.stat"
        self.buf = self.folder / f"_{name}.buf"
        self.temporary = self.folder / f"_{name}.tmp.{os.getpid()}"
        #: A catalog is kept for as long as this exists.
        self.catalog_wanted = self.folder / "_ldata_write_catalog"

    def has_queue(self) -> bool:
        """Tell whether both files of the queue exist."""
        return self.stat.exists() and self.buf.exists()

    def has_whole_queue(self) -> bool:
        """Tell whether both files are also complete: the status is written last."""
        try:
            with self.stat.open("rb") as file:
                return bool(file.read(STATUS_SIZE).strip(b"\0")) and self.buf.exists()
        except OSError:
            return False


# --- the file that an entry tells of (docs/specs/lrose.md 3.5) ----------------------------------


def data_path(info: LatestInfo, directory: str) -> str | None:
    """Return the path of the data file, or None if it is in none of the usual places."""
    root = info.displaced_dir_path or directory
    for candidate in _candidates(info):
        path = os.path.join(root, candidate)  # noqa: PTH118 - a Path would change its spelling
        if _is_below(candidate) and os.path.isfile(path):  # noqa: PTH113
            return path
    return None


def expected_path(info: LatestInfo, directory: str) -> str:
    """Return where the file should be, whether it exists or not."""
    root = info.displaced_dir_path or directory
    candidates = (name for name in _candidates(info) if _is_below(name) and name != UNKNOWN)
    return os.path.join(root, next(candidates, UNKNOWN))  # noqa: PTH118


def relative_path(info: LatestInfo, directory: str) -> str:
    """Return the path below the directory; `unknown` if it is neither given nor found."""
    if info.rel_data_path != UNKNOWN:
        return info.rel_data_path
    path = data_path(info, directory)
    root = info.displaced_dir_path or directory
    return UNKNOWN if path is None else os.path.relpath(path, root)


def _candidates(info: LatestInfo) -> Iterator[str]:
    at, ext = info.calendar, info.file_ext
    day, moment = f"{at.year:04d}{at:%m%d}", f"{at:%H%M%S}"
    yield info.rel_data_path
    if not info.is_forecast:  # for which that would be what was observed, another file
        yield f"{day}/{moment}.{ext}"
    yield info.user_info2
    yield f"{info.user_info1}.{ext}"
    yield info.user_info1
    yield f"{info.user_info2}.{ext}"
    if info.is_forecast:
        yield f"{day}/g_{moment}/f_{info.forecast_lead_secs:08d}.{ext}"


def _is_below(name: str) -> bool:
    """Tell whether a name stays below its directory: entries may hold anything."""
    return not name.startswith("/") and ".." not in name.split("/")


# --- writing ------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


def write_files(
    files: InfoFiles,
    settings: LatestSettings,
    info: LatestInfo,
    clock: Clock = SYSTEM_CLOCK,
    *,
    queue_only: bool = False,
) -> int | None:
    """Write all files, and return the number of the queue's message; None: there is no queue.

    `queue_only` writes only the queue.

    :raises LockTimeout: another writer held the lock for the time allowed.
    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", files.queue):
        files.folder.mkdir(parents=True, exist_ok=True)
        if queue_only:
            return _append(files, settings, info, clock)
        _add_to_catalog(files, info)
        lock = open_lock_file(files.queue)
        try:
            with lock_held(lock, f"{files.queue}.lock", settings.lock_timeout):
                if settings.use_ascii:
                    _replace(files, files.ascii, encode_ascii(info))
                if settings.use_xml:
                    _replace(files, files.xml, encode_xml(info, files.directory))
                return _append(files, settings, info, clock) if settings.use_fmq else None
        finally:
            os.close(lock)


def write_state(files: InfoFiles, info: LatestInfo) -> None:
    """Write only the XML: the saved position of a reader, which no other program reads.

    :raises StorageError: the operating system refuses.
    """
    with storage_errors("writing", str(files.xml)):
        files.folder.mkdir(parents=True, exist_ok=True)
        _replace(files, files.xml, encode_xml(info, files.directory))


def _replace(files: InfoFiles, target: Path, content: bytes) -> None:
    # LROSE removes the target first, because of NFS caches; for a moment the file is missing.
    with os.fdopen(open_new(files.temporary), "wb") as file:
        file.write(content)
    files.temporary.replace(target)


def _append(files: InfoFiles, settings: LatestSettings, info: LatestInfo, clock: Clock) -> int:
    """Append to the queue; reopened for each entry, since it may have been removed."""
    body = encode_body(info, files.directory, ascii_on=settings.use_ascii, xml_on=settings.use_xml)
    try:
        writer = _open_queue(files, settings, clock, Creation.MISSING)
    except DamagedQueue as damage:
        # As LROSE does: readers must not have to wait for a manual repair.
        log.warning("%s; making it anew", damage)
        writer = _open_queue(files, settings, clock, Creation.ALWAYS)
    with writer:
        return writer.write(body)


def _open_queue(
    files: InfoFiles, settings: LatestSettings, clock: Clock, creation: Creation
) -> ClassicWriter:
    options = ClassicOptions(
        slots=settings.fmq_slots,
        size=settings.fmq_size,
        compress=Compression.GZIP,
        create=creation,
        lock_timeout=settings.lock_timeout,
    )
    return ClassicWriter(f"fmq:{files.queue}", files.queue, options, clock)


def _add_to_catalog(files: InfoFiles, info: LatestInfo) -> None:
    """Add a line to the day's catalog, if one is kept. Its failure stops nothing else."""
    if not files.catalog_wanted.exists():
        return
    day = files.folder / f"{info.calendar.year:04d}{info.calendar:%m%d}"
    try:
        day.mkdir(parents=True, exist_ok=True)
        with (day / "ldata_file_catalog").open("ab", buffering=0) as catalog:
            catalog.write(catalog_line(info, files.directory))
    except OSError as error:
        log.warning("cannot add to the catalog in %s: %s", day, error.strerror)


# --- the saved place of a reader (docs/specs/lrose.md 3.5) --------------------------------------
# `setSaveLatestReadInfo`: an XML file of the same form in a directory for temporary files, whose
# `user_info1` names the last entry that was read.

_ID: Final = re.compile(r"FMQ_id:([0-9]{1,10})")


class SavedPlace:
    """The file in which a reader of a directory saves its position."""

    def __init__(
        self, label: str, directory: str, place: str | os.PathLike[str] | None = None
    ) -> None:
        """Name the file, by default in `$TMP_DIR` or /var/tmp.

        :raises InvalidOption: the label cannot be part of a file's name.
        """
        if not label or "/" in label or "\0" in label:
            raise InvalidOption("label", label, "is a part of a file's name")
        name = f"latest_read_info.{label}.{directory}".replace("/", "_")
        if place is None:
            place = os.environ.get("TMP_DIR") or "/var/tmp"  # noqa: S108 - where LROSE has it
        self._files = InfoFiles(place, name)
        self._max_time = 0

    @property
    def path(self) -> str:
        """The path of the file."""
        return str(self._files.xml)

    def load(self, clock: Clock, max_age: float | None = None) -> tuple[int, int] | None:
        """Return the id and the valid time of the last entry read; None: none, or too old."""
        try:
            status = self._files.xml.stat()
            age = clock.now_ns() // 1_000_000_000 - int(status.st_mtime)
            if max_age is not None and 0 < max_age < age:
                return None
            kept = decode_xml(self._files.xml.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, Malformed) as error:
            # Not removed: it may be wanted for inspection.
            log.warning("the place kept in %s is not readable: %s", self.path, error)
            return None
        found = _ID.match(kept.user_info1)
        return (int(found[1]), kept.latest_time) if found else None

    def save(self, id: int, info: LatestInfo, rel_data_path: str) -> None:
        """Save the id of an entry that was read. A failure is logged, and reading continues."""
        self._max_time = max(self._max_time, info.valid_time)
        kept = LatestInfo(
            latest_time=info.valid_time, user_info1=f"FMQ_id:{id}", max_time=self._max_time
        )
        with contextlib.suppress(InvalidOption):  # no reader needs it, and a tag in it misleads
            kept = replace(kept, rel_data_path=rel_data_path)
        try:
            write_state(self._files, kept)
        except StorageError as error:
            log.warning("cannot keep the place of this reader: %s", error)


def stands_behind(queue: ClassicReader, id: int, valid_time: int) -> bool:
    """Move after an entry; False: it is gone, or another one has its id now."""
    try:
        queue.seek_after_id(id)
    except PositionError:
        return False
    queue.seek_back()
    message = queue.read(timeout=0)
    if message is None or message.seq % ID_COUNT != id:
        return False
    try:
        return decode_body(message.payload).valid_time == valid_time
    except Malformed:
        return False
