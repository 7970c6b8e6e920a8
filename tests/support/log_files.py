"""How does a test open a log, look at its files, and let its machine go down?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import open_reader, open_writer
from penstock.queue.log.reader import LogReader
from penstock.queue.log.writer import LogWriter
from penstock.queue.wide.file import check_header
from penstock.queue.wide.layout import HEADER, PAGE

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.position import PositionLike

__all__ = [
    "SMALL",
    "after_power_failure",
    "disk",
    "log_reader",
    "log_writer",
    "segment_files",
    "slot_offset",
    "stored",
    "url_of",
]

#: Options of a log whose segments have 8 messages, or 8 KiB. Nothing is synced: that takes long.
SMALL = "segment=8k&segment_slots=8&sync=none"


def url_of(path: Path, options: str = "") -> str:
    return f"log:{path}?{options}".rstrip("?")


def log_writer(path: Path, options: str = SMALL) -> LogWriter:
    writer = open_writer(url_of(path, options))
    assert isinstance(writer, LogWriter)
    return writer


def log_reader(path: Path, options: str = "", start: PositionLike = "start") -> LogReader:
    reader = open_reader(url_of(path, options), start)
    assert isinstance(reader, LogReader)
    return reader


def stored(path: Path, options: str = "") -> list[bytes]:
    """Return every payload that a log holds now."""
    with log_reader(path, options) as reader:
        return [message.payload for message in reader.available()]


def segment_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.fmq"))


def disk(*paths: Path) -> int:
    """Return the bytes that files have on the disk."""
    return sum(path.stat().st_blocks * 512 for path in paths)


def after_power_failure(path: Path) -> None:
    """Let every segment that may not be on the disk look as if its machine had gone down."""
    at = HEADER.fields["boot_id"].offset
    for file in segment_files(path):
        with file.open("r+b") as segment:
            segment.seek(at)
            if any(segment.read(16)):
                segment.seek(at)
                segment.write(b"an earlier boot.")


def slot_offset(file: Path, seq: int) -> int:
    """Return where in a segment the slot of a message is."""
    with file.open("rb") as segment:
        geometry = check_header(str(file), segment.read(PAGE), file.stat().st_size)
    return geometry.slot_offset(seq)
