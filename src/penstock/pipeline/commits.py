"""How is a batch appended exactly once, whatever dies in between?

Before anything is appended, a note that the stream keeps says which batch of which query begins at
which number, how many messages it has, what it is made of, and in which files they are staged.
After it, the note says that it is done. A batch that Spark replays is skipped if it is done. If it
is not, the files of the first attempt are taken, since rows may come in another order the second
time; what follows that number in the stream is what the earlier attempt appended, which is
compared, and the rest is appended. A stream of ours has one writer at a time, so nobody else's
messages are among them.

A batch of the same number that has more in it, since the checkpoint has fallen back, is compared
with what is in the stream, and the rest is appended; one that is made of something else is refused.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core import endpoints
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.pipeline.file_names import file_name
from penstock.pipeline.provenance import (
    AnotherBatch,
    Ends,
    Origin,
    Ranges,
    Verdict,
    ends_after,
    in_words,
    judge,
    ranges_from_json,
    ranges_to_json,
    room_for,
)
from penstock.pipeline.staging import Staged, Staging, staged_batches
from penstock.queue.notes import NoteFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader, Writer
    from penstock.core.notes import StreamNotes

__all__ = ["Note", "Notes", "Stranger", "append_once", "notes_of"]

log = logging.getLogger(__name__)

#: Options of writers mean nothing to a reader; `hold` would make it one that is waited for.
_WRITERS_ONLY: Final = frozenset(
    {"policy", "timeout", "keep", "lock_timeout", "sync", "retain", "retain_age", "hold", "create"}
)
#: What of a message has to be the same. Its time may be the time of the attempt.
_COMPARED: Final = ("payload", "type", "subtype", "stream", "attributes")
_ENDING: Final = ".commits.json"
#: Messages that are read from a stream at once, to be compared.
_AT_ONCE: Final = 10_000


class Stranger(PenstockError):
    """Somebody else wrote between two attempts to append a batch."""


class Piece(NamedTuple):
    """Messages in the stream: which life of it, the number of the first, and how many."""

    epoch: int
    start: int
    messages: int

    def now(self, bounds: Bounds) -> Piece:
        """Return what is left of it, by the numbers of a stream that a power failure cut."""
        end = bounds.successor(self.epoch, self.start + self.messages)
        if end is None:
            return self
        start = min(self.start, end)
        return Piece(bounds.epoch, start, end - start)


class Delivered(NamedTuple):
    """What is known of a batch that is in the stream."""

    batch: int
    #: Where its messages are.
    pieces: tuple[Piece, ...]
    ranges: Ranges | None = None
    digest: str | None = None
    run: str | None = None

    def is_whole(self, messages: int) -> bool:
        """Tell whether the last part of it, of so many messages, is all there."""
        return not self.pieces or self.pieces[-1].messages == messages


class Note(NamedTuple):
    """What a query did last to a stream."""

    batch: int
    #: How many messages of the batch are appended here; some may have been there before.
    count: int  # type: ignore[assignment]
    #: The number of the first of them, and the life of the stream that it counts in; None where
    #: the stream cannot be read.
    start: int | None
    epoch: int | None
    is_done: bool
    #: Where the messages are until then: path, partition and number of each file.
    files: tuple[tuple[str, int, int], ...] = ()
    #: What the batch is made of; if that is not known, a digest of its rows.
    ranges: Ranges | None = None
    digest: str | None = None
    #: The name of the query from its start to its end, and where Spark keeps how far it is.
    run: str | None = None
    checkpoint: str | None = None
    #: What Spark called the query before, when its checkpoint had lost the name.
    names: tuple[str, ...] = ()
    #: Messages of the batch that were there before: of others, which it includes.
    before: tuple[Piece, ...] = ()
    #: Batches before this one, and how far each stream was delivered before those.
    earlier: tuple[Delivered, ...] = ()
    base: Ends = {}  # noqa: RUF012 - never changed

    def now(self, bounds: Bounds) -> Note:
        """Return the note by the numbers of a stream that a power failure cut since."""
        note = self
        if self.start is not None and self.epoch is not None:
            epoch, start, _ = Piece(self.epoch, self.start, 0).now(bounds)
            note = note._replace(epoch=epoch, start=start)
        return note._replace(
            before=tuple(piece.now(bounds) for piece in self.before),
            earlier=tuple(
                one._replace(pieces=tuple(piece.now(bounds) for piece in one.pieces))
                for one in self.earlier
            ),
        )

    def delivered(self, bounds: Bounds | None) -> Delivered:
        """Return what is in the stream of the batch."""
        pieces = self.before
        if self.start is not None and self.epoch is not None:
            there = self.count
            if not self.is_done and bounds is not None and bounds.epoch == self.epoch:
                there = max(0, min(there, bounds.end - self.start))
            pieces = (*pieces, Piece(self.epoch, self.start, there))
        return Delivered(self.batch, pieces, self.ranges, self.digest, self.run)

    def to_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "ranges": ranges_to_json(self.ranges),
            "earlier": [_delivered_to_json(one) for one in self.earlier],
            "base": {key: [str(epoch), end] for key, (epoch, end) in self.base.items()},
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Note:
        """Read a note, also one of before there were ranges in it.

        :raises ValueError: it is none; or a `KeyError` or `TypeError`.
        """
        note = cls(**fields)
        base = {key: (int(epoch), int(end)) for key, (epoch, end) in note.base.items()}
        return note._replace(
            files=tuple((str(p), int(n), int(m)) for p, n, m in note.files),
            names=tuple(map(str, note.names)),
            ranges=ranges_from_json(note.ranges),
            before=tuple(Piece(*map(int, piece)) for piece in note.before),
            earlier=tuple(_delivered_from_json(one) for one in fields.get("earlier", ())),
            base=base,
        )


def _delivered_to_json(one: Delivered) -> dict[str, Any]:
    return {**one._asdict(), "ranges": ranges_to_json(one.ranges)}


def _delivered_from_json(fields: dict[str, Any]) -> Delivered:
    one = Delivered(**fields)
    pieces = tuple(Piece(*map(int, piece)) for piece in one.pieces)
    return one._replace(pieces=pieces, ranges=ranges_from_json(fields["ranges"]))


class Notes:
    """What was appended to a stream by which query. The stream keeps it, wherever that is."""

    def __init__(self, url: str, folder: Path) -> None:
        """Read it.

        :raises DamagedQueue: it is not what `put` wrote.
        """
        self._local = NoteFile(notes_of(url, folder))
        self._kept: StreamNotes = self._local
        self._suffix = ""
        #: Under which name the note was found, if that was another.
        self._old: str | None = None
        self._queries = None if is_here(url) else self._read_there(url)
        if self._queries is None:
            self._queries = self._local.read()

    def _read_there(self, url: str) -> dict[str, dict[str, Any]] | None:
        """Read the notes that a stream of another machine keeps; None: it does not."""
        try:
            kept = endpoints.notes_of(url)
        except Unsupported:
            return None
        try:
            found = kept.read()
        except Unsupported as error:
            log.warning("%s: its notes are kept in %s: %s", url, self._local.path.parent, error)
            return None
        # Whoever names the stream in another way has another note of it, as with files.
        self._kept, self._suffix = kept, f" {self._local.path.name.removesuffix(_ENDING)[-12:]}"
        return found

    def get(self, query: str, origin: Origin = Origin()) -> Note | None:  # noqa: B008
        """Return the note of a query.

        One that Spark knows under a new name, since its checkpoint has lost the old one, is found
        by where that is.
        """
        assert self._queries is not None
        found = self._queries.get(f"{query}{self._suffix}")
        if found is None and self._kept is not self._local:  # of before servers kept notes
            found = self._local.read().get(query)
        if found is None:
            found = self._renamed(query, origin)
        if found is None:
            return None
        try:
            return Note.from_json(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._local.damaged(found) from error

    def _renamed(self, query: str, origin: Origin) -> dict[str, Any] | None:
        """Return the note of a query that had another name, or has the one of before again."""
        assert self._queries is not None
        is_new = origin.has_new_name()
        others = {
            name: note
            for name, note in self._queries.items()
            if name.endswith(self._suffix)
            and origin.checkpoint is not None
            and note.get("checkpoint") == origin.checkpoint
            and (is_new or query in note.get("names", ()))
        }
        if not others:
            return None
        self._old = max(others, key=lambda name: int(others[name].get("batch", 0)))
        note = others[self._old]
        name = self._old.removesuffix(self._suffix)
        return {**note, "names": [*dict.fromkeys((*note.get("names", ()), name))]}

    def put(self, query: str, note: Note) -> None:
        """Keep a note: one that is not done is there also after a power failure.

        Without one that is done the batch would be compared once more, and found.

        :raises StorageError: there is no space, or no permission.
        """
        self._kept.write(f"{query}{self._suffix}", note.to_json(), sync=not note.is_done)
        if self._old is not None:
            self._kept.write(self._old, None, sync=False)
            self._old = None


def is_here(url: str) -> bool:
    """Tell whether a stream is on this machine."""
    parsed = URL.parse(url)
    return parsed.scheme in {"fmq", "log"} and parsed.host is None


def notes_of(url: str, folder: Path) -> Path:
    """Return where the notes of a stream are: beside it, or in `folder` if it keeps none itself.

    Each stream has its own, however its URL is written.
    """
    parsed = URL.parse(url)
    if is_here(url):
        notes = endpoints.notes_of(url)
        assert isinstance(notes, NoteFile)
        return notes.path
    if parsed.scheme.startswith("flight"):  # all other options are about how to get there
        url = f"{url.partition('?')[0]}?kind={parsed.options.get('kind', '')}"
    return folder / f"{file_name(url)}{_ENDING}"


def append_once(
    url: str,
    parts: Sequence[Staged],
    query: str,
    batch: int,
    folder: Path,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> int:
    """Append a batch of a query to a stream, unless it is there already; return how many were new.

    :raises Stranger: somebody else wrote to the stream in between.
    :raises AnotherBatch: what was appended under this number was made of something else.
    """
    with open_writer(url) as writer:  # from here on nobody else appends
        work = _Appending(url, query, batch, folder, origin)
        work.settle(writer)
        parts, there, note = work.plan(parts)
        if note is None:
            log.warning("%s: batch %d is there already, and skipped", url, batch)
            return 0
        new = _append(writer, _after(staged_batches(parts), there))
        writer.flush()
        work.notes.put(query, note._replace(is_done=True, files=()))
        return new


class _Appending:
    """Finds out what of a batch is in the stream already, and notes the rest as begun."""

    def __init__(self, url: str, query: str, batch: int, folder: Path, origin: Origin) -> None:
        self.notes = Notes(url, folder)
        self._folder = folder
        self._url = url
        self._query = query
        self._batch = batch
        self._origin = origin
        self._digest: str | None = None
        self._bounds = _bounds(url)

    def _note(self) -> Note | None:
        note = self.notes.get(self._query, self._origin)
        return note if note is None or self._bounds is None else note.now(self._bounds)

    def settle(self, writer: Writer) -> None:
        """Bring an attempt at an earlier batch to its end, which Spark takes for done.

        Its note says that it is not, after a power failure; only that is on the disk for sure.
        """
        note, bounds = self._note(), self._bounds
        if note is None or note.is_done or note.batch >= self._batch or bounds is None:
            return
        if not _may_be_in(note, bounds) or note.delivered(bounds).is_whole(note.count):
            return
        first = _first_attempt(self._url, note)
        if not first:
            log.error(
                "%s: batch %d is not all there, and its files are gone", self._url, note.batch
            )
            return
        there = _check_there(self._url, note, first, bounds)
        _append(writer, _after(staged_batches(first), there))
        writer.flush()
        self.notes.put(self._query, note._replace(is_done=True, files=()))
        self.notes, self._bounds = Notes(self._url, self._folder), _bounds(self._url)

    def plan(self, parts: Sequence[Staged]) -> tuple[Sequence[Staged], int, Note | None]:
        """Return what to append, how many of it are there, and the note; None: it is all there."""
        if self._origin.ranges is None:
            self._digest = _digest(parts)
        note = self._note()
        if note is None:
            return parts, 0, self._begin(parts)
        if not note.is_done and self._is_attempt_at_it(note):
            return self._go_on(note, parts)
        known = [*note.earlier, note.delivered(self._bounds)]
        ranges = self._origin.ranges
        verdict, at = judge(self._url, known, note.base, self._batch, ranges, self._digest)
        if verdict is Verdict.NEW:
            return parts, 0, self._begin(parts, note, known)
        if verdict is Verdict.SAME and (note.is_done or at < len(known) - 1):
            return parts, 0, None
        return self._complete(note, known, at, parts)

    def _is_attempt_at_it(self, note: Note) -> bool:
        ranges = self._origin.ranges
        return note.batch == self._batch and (
            ranges is None or note.ranges is None or note.ranges == ranges
        )

    def _begin(
        self,
        parts: Sequence[Staged],
        last: Note | None = None,
        earlier: Sequence[Delivered] = (),
        before: Sequence[Piece] = (),
    ) -> Note:
        """Note that a batch is about to be appended, after the note that is there."""
        bounds, base = self._bounds, {} if last is None else last.base
        dropped = room_for([_delivered_to_json(one) for one in earlier])
        for one in earlier[:dropped]:
            base = ends_after(base, one.ranges)
        note = Note(
            self._batch,
            sum(part.messages for part in parts),
            None if bounds is None else bounds.end,
            None if bounds is None else bounds.epoch,
            is_done=False,
            files=tuple((part.path, part.partition, part.messages) for part in parts),
            ranges=self._origin.ranges,
            digest=self._digest,
            run=self._origin.run,
            checkpoint=self._origin.checkpoint,
            names=() if last is None else last.names,
            before=tuple(before),
            earlier=tuple(earlier[dropped:]),
            base=base,
        )
        self.notes.put(self._query, note)
        return note

    def _go_on(
        self, note: Note, parts: Sequence[Staged]
    ) -> tuple[Sequence[Staged], int, Note | None]:
        """Bring an attempt to its end."""
        bounds = self._bounds
        if bounds is None or note.start is None or not _may_be_in(note, bounds):
            return parts, 0, self._begin(parts, note, note.earlier)
        first = _first_attempt(self._url, note)
        if first or not note.count:
            return first, _check_there(self._url, note, first, bounds), note
        known = [*note.earlier, note.delivered(bounds)]
        return self._complete(note, known, len(note.earlier), parts)

    def _complete(
        self, note: Note, known: Sequence[Delivered], at: int, parts: Sequence[Staged]
    ) -> tuple[Sequence[Staged], int, Note | None]:
        """Find out which of the messages are in the stream, and note the rest."""
        pieces = [piece for one in known[at:] for piece in one.pieces]
        rows, bounds = sum(part.messages for part in parts), self._bounds
        there = sum(piece.messages for piece in pieces)
        is_gone = bounds is None or any(
            piece.epoch == bounds.epoch and piece.messages and piece.start < bounds.oldest
            for piece in pieces
        )
        if is_gone:
            if known[at].ranges is None and known[at].digest is None and rows == there:
                return parts, 0, None  # a note of before there were ranges in it: as many
            raise self._another(known[at:], "they are not in the stream any more to be compared")
        assert bounds is not None
        # What was in a stream that is created anew by now is gone with it. So is what was not on
        # the disk when the power failed.
        pieces = [
            piece._replace(messages=max(0, min(piece.messages, bounds.end - piece.start)))
            for piece in pieces
            if piece.epoch == bounds.epoch
        ]
        there = sum(piece.messages for piece in pieces)
        rest = self._rest(parts, pieces)
        if rest is None:
            if known[at].batch == self._batch and not note.is_done and at == len(known) - 1:
                raise _stranger(self._url, pieces[0].start)
            raise self._another(known[at:], "not all of that is among it")
        log.warning(
            "%s: of batch %d, %d messages are there already, and %d are new",
            *(self._url, self._batch, there, sum(part.messages for part in rest)),
        )
        return rest, 0, self._begin(rest, note, known[:at], pieces)

    def _another(self, known: Sequence[Delivered], why: str) -> AnotherBatch:
        last = known[-1]
        pieces = [piece for one in known for piece in one.pieces if piece.messages]
        said = in_words(last.ranges)
        if last.ranges is None and pieces:
            end = pieces[-1].start + pieces[-1].messages - 1
            said = f"what is in the stream from {pieces[0].start} to {end}"
        planned = in_words(self._origin.ranges)
        return AnotherBatch(self._url, self._batch, planned, f"{said} (batch {last.batch})", why)

    def _rest(self, parts: Sequence[Staged], pieces: Sequence[Piece]) -> list[Staged] | None:
        """Stage those messages that are not in the stream; None: others are there."""
        there: Counter[bytes] = Counter()
        for piece in pieces:
            there.update(_keys_there(self._url, piece))
        if not parts:
            return None if there.total() else []
        staging = Staging(Path(parts[0].path).parent, 0)  # where they are removed with the batch
        try:
            for batch in staged_batches(parts):
                is_new = []
                for key in _keys(batch):
                    is_new.append(not there[key])
                    there[key] -= not is_new[-1]
                new = batch.filter(pa.array(is_new, pa.bool_()))
                if new.num_rows:
                    staging.add(self._url, new)
            if there.total():
                staging.discard()
                return None
            return staging.finish(sync=True)
        except BaseException:
            staging.discard()
            raise


def _keys_there(url: str, piece: Piece) -> Iterator[bytes]:
    """Yield what tells apart the messages of a piece of a stream."""
    at, end = piece.start, piece.start + piece.messages
    with _reader(url) as reader:
        reader.seek(at)
        while at < end:
            found = reader.read_batch(min(_AT_ONCE, end - at), timeout=0)
            if not found.num_rows or found.column("seq")[0].as_py() != at:
                raise _stranger(url, at)
            yield from _keys(found)
            at += found.num_rows


def _keys(batch: Batch) -> Iterator[bytes]:
    columns = [batch.column(name).to_pylist() for name in _COMPARED]
    for payload, *header in zip(*columns, strict=True):
        hashed = blake2b(payload, digest_size=16)
        hashed.update(repr(header).encode())
        yield hashed.digest()


def _digest(parts: Sequence[Staged]) -> str:
    """Return a digest of rows in their order; however they are cut into batches."""
    hashes = {name: (blake2b(digest_size=16), blake2b(digest_size=16)) for name in _COMPARED}
    for batch in staged_batches(parts):
        for name, (sizes, data) in hashes.items():
            column = batch.column(name)
            if pa.types.is_integer(column.type):
                data.update(column.to_numpy().tobytes())
                continue
            column = column.cast(pa.large_binary())
            sizes.update(json.dumps(pc.binary_length(column).to_pylist()).encode())
            data.update(b"".join(value for value in column.to_pylist() if value is not None))
    whole = blake2b(digest_size=16)
    for sizes, data in hashes.values():
        whole.update(sizes.digest() + data.digest())
    return whole.hexdigest()


def _may_be_in(note: Note, bounds: Bounds) -> bool:
    """Tell whether what was begun may be in the stream that is there now."""
    if note.start is None or note.epoch != bounds.epoch:
        return False
    return note.start <= bounds.end  # classic queues have no epoch, and begin anew with 0


def _first_attempt(url: str, note: Note) -> list[Staged]:
    """Return what was to be appended the first time, if it is all there still."""
    parts = [Staged(url, path, partition, messages) for path, partition, messages in note.files]
    try:
        rows = sum(batch.num_rows for batch in staged_batches(parts))
    except (NotFound, pa.ArrowInvalid, OSError):
        return []
    return parts if rows == note.count else []


def _append(writer: Writer, batches: Iterable[Batch]) -> int:
    new = 0
    for batch in batches:
        writer.write_batch(batch)
        new += batch.num_rows
    return new


def _after(batches: Iterable[Batch], there: int) -> Iterator[Batch]:
    """Yield what follows the first so many messages."""
    for batch in batches:
        if there < batch.num_rows:
            yield batch.slice(there)
        there = max(0, there - batch.num_rows)


def _bounds(url: str) -> Bounds | None:
    """Return what is in a stream; None where it cannot be read."""
    try:
        with _reader(url) as reader:
            return reader.bounds()
    except (NotFound, Unsupported):
        return None


def _reader(url: str) -> Reader:
    path, _, options = url.partition("?")
    kept = [o for o in options.split("&") if o and o.partition("=")[0] not in _WRITERS_ONLY]
    return open_reader(f"{path}?{'&'.join(kept)}" if kept else path, start=Position.START)


def _check_there(url: str, note: Note, parts: Sequence[Staged], bounds: Bounds) -> int:
    """Return how many messages of the batch are in the stream, after a look at each of them."""
    assert note.start is not None
    there = min(bounds.end - note.start, note.count)
    # What is overwritten by now was ours or older.
    at = max(note.start, bounds.oldest)
    end = note.start + there
    with _reader(url) as reader:
        reader.seek(at)
        for mine in _after(staged_batches(parts), at - note.start):
            left = mine.slice(0, max(0, end - at))
            while left.num_rows:
                found = reader.read_batch(left.num_rows, timeout=0)
                if not found.num_rows or found.column("seq")[0].as_py() != at:
                    raise _stranger(url, at)
                same = left.slice(0, found.num_rows)
                if any(same.column(name) != found.column(name) for name in _COMPARED):
                    raise _stranger(url, at)
                at += found.num_rows
                left = left.slice(found.num_rows)
    return there


def _stranger(url: str, at: int) -> Stranger:
    return Stranger(
        f"{url}: messages from {at} on are not those of the batch that was being appended",
        hint="somebody else wrote to it meanwhile; look at what is there, then remove the note "
        "(*.commits.json) to append the whole batch again",
    )
