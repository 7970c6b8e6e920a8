"""What does a process that was killed leave behind in a wide queue, and do others go on?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock import open_reader, open_writer
from support.lives import Lives, Report
from support.until import until
from support.wide_lives import LAST_TYPE
from support.wide_oracle import Listing, Stored, list_queue

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.message import Message

__all__ = [
    "LOCK",
    "ROOM_WANTED",
    "SOON",
    "Follower",
    "check",
    "go_on",
    "is_same",
    "word_of",
]

#: Who waits for a message, for room or for a lock goes on this soon (seconds): by a wake in
#: microseconds, after a kill that came before the wake within a second.
SOON = 2.0

#: Where these words are in the header.
SLEEPING = 256
ROOM_WANTED = 320
LOCK = 384

_MANY = 1000


def word_of(path: Path, offset: int) -> int:
    """Return a word of the header, which others may be changing."""
    with path.open("rb") as file:
        file.seek(offset)
        return int.from_bytes(file.read(4), "little")


def check(path: Path) -> Listing:
    """Make sure that the file is as the format says, and that a reader delivers just that."""
    listing = list_queue(path)
    with open_reader(f"fmq:{path}") as reader:
        found = reader.read_many(_MANY)
        assert reader.statistics().lost == 0
    assert [(m.seq, m.type, m.created_ns, m.payload) for m in found] == [
        (s.seq, s.type, s.created_ns, s.payload) for s in listing.messages
    ]
    assert [m.seq for m in found] == list(range(listing.header.tail, listing.header.head))
    return listing


def is_same(stored: Stored, message: Message) -> bool:
    stream = None if message.stream is None else bytes(message.stream)
    return (stored.payload, stored.type, stored.stream, stored.attributes) == (
        message.payload,
        message.type,
        stream,
        message.attributes,
    )


class Follower:
    """A process that waits for messages all the while."""

    def __init__(self, lives: Lives, path: Path, report: Path) -> None:
        report.unlink(missing_ok=True)
        self._path = path
        self._report = Report(report)
        self._life = lives.start("follow", url=f"fmq:{path}", report=str(report))
        self._report.wait_for(b"r")
        self.sleeps()

    def sleeps(self) -> None:
        """Wait until it sleeps."""
        until(lambda: word_of(self._path, SLEEPING))

    def has(self, seq: int, since: float) -> None:
        """Make sure that it got this message soon after that time."""
        late = until(lambda: [at for _, at, got in self._report.records(b"t") if got == seq])[0]
        assert late / 1e9 - since < SOON

    def end(self, first: int, last: int) -> None:
        """Make sure that it knows about every message from `first` to `last`."""
        assert self._life.end() == (False, 0)
        [(_, delivered, lost)] = self._report.records(b"e")
        assert delivered + lost == last - first + 1
        seqs = [seq for *_, seq in self._report.records(b"s")]
        assert seqs == sorted(set(seqs))
        assert seqs[-1] == last


def go_on(path: Path, follower: Follower, head: int) -> None:
    """A new writer continues, and whoever waits hears of it."""
    began = time.monotonic()
    with open_writer(f"fmq:{path}") as writer:
        assert writer.write(b"and on", 5) == head
        assert time.monotonic() - began < SOON
        follower.has(head, began)
        follower.sleeps()
        began = time.monotonic()
        assert writer.write_many([b"and", b"on"], 5) == head + 2
        follower.has(head + 2, began)
        assert writer.write(b"the end", LAST_TYPE) == head + 3
    listing = check(path)
    assert [m.payload for m in listing.messages][-2:] == [b"on", b"the end"][
        -len(listing.messages) :
    ]
