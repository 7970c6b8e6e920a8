"""Where are the dead letters kept, and what can be done with them? (spec uprotocol 10.3)."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Malformed, NotFound
from penstock.core.position import Position
from penstock.dispatch.letters import Letter
from penstock.dispatch.outbox.sidecar import save_notes
from penstock.queue.log.consuming import open_log_reader
from penstock.queue.log.options import LogOptions
from penstock.queue.log.writer import open_log_writer
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.protocols.uprotocol import UUID7
    from penstock.queue.log.writer import LogWriter
    from penstock.queue.options import Sync

__all__ = ["DeadLetters"]

_GONE: Final = "gone"
_AT_ONCE: Final = 256
#: Ids that are known of before; a crash leaves at most those in work written and not settled.
_KNOWN: Final = 10_000
_SMALLEST_SEGMENT: Final = 64 << 10
_LARGEST_SEGMENT: Final = 16 << 20
_SEGMENTS: Final = 8


class DeadLetters:
    """A log of dead letters, of which the oldest go when there are too many.

    Only the dispatcher writes; others may look at it meanwhile, with `writable=False`.
    """

    def __init__(
        self, folder: Path, retain: int = 256 << 20, *, sync: Sync = 1.0, writable: bool = True
    ) -> None:
        """Open it; make it if there is none and it is writable.

        :raises StorageError: the operating system refuses.
        :raises NotFound: there is none.
        """
        self._folder = Path(folder)
        self._url = f"log:{folder}"
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        segment = min(max(retain // _SEGMENTS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        #: Letters that are larger keep only their header.
        self._largest = segment // 2
        if writable:
            options = LogOptions(
                segment=segment, segment_slots=8192, retain=retain, sync=sync, damaged="skip"
            )
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._writer = open_log_writer(self._url, self._folder, options)
        elif not self._folder.exists():
            raise NotFound(f"there are no dead letters in {folder}")
        self._gone: set[int] = self._read_gone()
        self._known: dict[UUID7, None] = {}
        if writable:
            self._known = dict.fromkeys(letter.id for letter in self._read(newest=_KNOWN))

    # --- in -------------------------------------------------------------------------------------

    def knows(self, id: UUID7) -> bool:
        """Tell whether this letter was written."""
        return id in self._known

    def new(self, letters: Iterable[Letter]) -> list[Letter]:
        """Return those that were not written yet, as they will be: without their tokens."""
        return [self._kept(letter)[0] for letter in letters if not self.knows(letter.id)]

    def write(self, letters: Iterable[Letter]) -> list[Letter]:
        """Keep letters, and return those that were not there yet. Their tokens are not kept.

        :raises StorageError: there is no space.
        """
        assert self._writer is not None
        with self._lock:
            kept = [self._kept(letter) for letter in letters if not self.knows(letter.id)]
            if kept:
                self._writer.write_many([record for _, record in kept])
                self._known.update(dict.fromkeys(letter.id for letter, _ in kept))
                while len(self._known) > _KNOWN:
                    del self._known[next(iter(self._known))]
            return [letter for letter, _ in kept]

    def _kept(self, letter: Letter) -> tuple[Letter, bytes]:
        """Return what is kept of a letter, and its bytes."""
        kept = letter.without_token()
        record = kept.to_bytes()
        if len(record) > self._largest:
            kept = kept.without_payload()
            record = kept.to_bytes()
        return kept, record

    # --- for people -----------------------------------------------------------------------------

    def list(self, limit: int | None = None, start: int = 0) -> list[Letter]:
        """Return letters, the oldest first, from a number on."""
        return [*itertools.islice(self.since(start), limit)]

    def since(self, start: int) -> Iterator[Letter]:
        """Yield letters, the oldest first, from a number on."""
        return (letter for letter in self._read(start) if letter.number not in self._gone)

    def __iter__(self) -> Iterator[Letter]:
        return self.since(0)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def show(self, id: UUID7 | int) -> Letter:
        """Return a letter by its id or its number.

        :raises NotFound: it is not there, or not any more.
        """
        for letter in self:
            if id in (letter.id, letter.number):
                return letter
        raise NotFound(f"there is no dead letter {id}", hint="list those that there are")

    def drop(self, letters: Sequence[Letter]) -> None:
        """Let letters be gone; their bytes go with their segment.

        :raises StorageError: the operating system refuses.
        """
        with self._lock:
            oldest = next((letter.number for letter in self._read()), 0)
            gone = {*self._gone, *(letter.number for letter in letters)}
            gone = {number for number in gone if number >= oldest}
            save_notes(self._folder / _GONE, json.dumps(sorted(gone)).encode(), sync=True)
            self._gone = gone

    def _read_gone(self) -> set[int]:
        path = self._folder / _GONE
        with storage_errors("reading", str(path)):
            try:
                return set(json.loads(path.read_bytes()))
            except FileNotFoundError:
                return set()
            except (ValueError, TypeError):
                return set()  # then they are listed again, which is no harm

    def _read(self, start: int = 0, newest: int | None = None) -> Iterator[Letter]:
        options = LogOptions(damaged="skip")
        with open_log_reader(self._url, self._folder, Position.START, options) as reader:
            if newest is not None or start > 0:
                bounds = reader.bounds()
                start = max(start, 0 if newest is None else bounds.end - newest)
                reader.seek(min(max(bounds.oldest, start), bounds.end))
            while messages := reader.read_many(_AT_ONCE):
                for message in messages:
                    try:
                        yield Letter.from_bytes(message.payload, message.seq)
                    except Malformed:
                        continue

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
