"""How is a batch appended exactly once, whatever dies in between?

The tasks of a batch stage its messages in files. Before the append, a note kept with the stream
records the batch and its writer, its start number, count of messages, source ranges and staged
files. After the append, the note is marked as done. A retried batch is skipped if it is done. If
not, the staged files of the first attempt are used, as a retry may order its rows differently:
messages in the stream from the start number on, which the first attempt appended, are compared, and
the rest is appended. A stream has one writer at a time, so no other writer's messages are among
them.

A batch of the same number with more rows, after the checkpoint fell back, is compared with the
stream, and the rest is appended. A batch of other rows is refused.

A stream that supports `AppendOnce` keeps the note itself. For any other, the note is in a file of
the staging folder: exactly once then holds as long as that file is kept.
"""

from __future__ import annotations

import logging
import os
import secrets
from abc import abstractmethod
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from penstock.core.capabilities import AllOrNone, AppendOnce, Replayable
from penstock.core.endpoints import endpoint_of, open_writer
from penstock.core.errors import NotFound, PenstockError, Unsupported, WriteTimeout
from penstock.core.interfaces import Writer
from penstock.core.position import Position
from penstock.core.provenance import (
    COMPARED,
    AnotherBatch,
    Commit,
    Noted,
    Origin,
    Staged,
    Verdict,
    ends_after,
    in_words,
    judge,
    room_for,
    staged_batches,
)
from penstock.core.url import URL
from penstock.core.whole_files import sync_names
from penstock.queue.notes import (
    DeliveredBatch,
    Note,
    NoteFile,
    Piece,
    StreamNotes,
    WriterNotes,
    noted,
    notes_beside,
)
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader

__all__ = [
    "NotedAppends",
    "Staging",
    "Stranger",
    "append_noted",
    "append_once",
    "check_letters",
    "check_taken",
    "has_batches",
    "known_of",
    "notes_of",
    "read_back",
    "remove_batch",
    "remove_files",
]


log = logging.getLogger(__name__)

#: Messages read at once for comparison.
_AT_ONCE: Final = 10_000


class Stranger(PenstockError):
    """Another writer appended between two attempts to append a batch."""


def append_once(
    url: str,
    files: Sequence[Staged],
    query: str,
    batch: int,
    folder: Path,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> int:
    """Append a batch of a query to a stream, unless done before; return the number of new messages.

    :raises Stranger: another writer appended to the stream in between.
    :raises AnotherBatch: the batch appended under this number had other contents.
    """
    endpoint = endpoint_of(url)
    commit = Commit(query, batch, files, origin, notes_beside(url, folder))
    if isinstance(endpoint, AppendOnce):
        return endpoint.append_once(URL.parse(url), commit)
    with open_writer(url) as writer:
        return append_noted(writer, _notes(commit), commit, lambda: read_back(url), closes=True)


def known_of(
    url: str,
    query: str,
    batch: int,
    folder: Path,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> Noted | None:
    """Return the note of a batch in a stream, or None."""
    endpoint = endpoint_of(url)
    commit = Commit(query, batch, (), origin, notes_beside(url, folder))
    if isinstance(endpoint, AppendOnce):
        return endpoint.noted(URL.parse(url), commit)
    return noted(_notes(commit), batch)


def has_batches(url: str) -> bool:
    """Tell whether a stream has noted batches of any query."""
    endpoint = endpoint_of(url)
    return isinstance(endpoint, AppendOnce) and endpoint.has_batches(URL.parse(url))


def read_back(url: str, start: Position = Position.START) -> Reader:
    """Open the stream of a writer's URL for reading.

    :raises NotFound: the stream does not exist yet.
    :raises Unsupported: its messages cannot be read again.
    """
    reader = endpoint_of(url).reread(URL.parse(url))
    if start != Position.START:
        reader.seek(start)
    return reader


def _notes(commit: Commit) -> WriterNotes:
    assert commit.notes is not None
    return WriterNotes(NoteFile(commit.notes), commit)


# --- into a stream that keeps notes ---------------------------------------------------------------


class NotedAppends(AppendOnce):
    """Appends exactly once, by notes kept beside the stream. Mixin of an `Endpoint`."""

    @abstractmethod
    def open_writer(self, url: URL) -> Writer: ...

    @abstractmethod
    def notes(self, url: URL) -> StreamNotes:
        """Return the notes of a stream, which need not exist yet."""

    def append_once(self, url: URL, commit: Commit) -> int:
        with self.open_writer(url) as writer:  # excludes other writers
            notes = self._notes_for(url, commit)
            return append_noted(writer, notes, commit, lambda: self.reread(url))

    def noted(self, url: URL, commit: Commit) -> Noted | None:
        return noted(self._notes_for(url, commit), commit.batch)

    def _notes_for(self, url: URL, commit: Commit) -> WriterNotes:
        return WriterNotes(self.notes(url), commit)

    def has_batches(self, url: URL) -> bool:
        return bool(self.notes(url).read())


def notes_of(url: str) -> StreamNotes:
    """Return the notes of a stream, which need not exist yet.

    :raises Unsupported: this kind of stream keeps no notes.
    """
    endpoint, parsed = endpoint_of(url), URL.parse(url)
    if not isinstance(endpoint, NotedAppends):
        raise Unsupported(f"{parsed} keeps no notes")
    return endpoint.notes(parsed)


class Appender(Protocol):
    """The part of a writer that appends batches."""

    @property
    def url(self) -> str: ...

    @property
    def cannot_carry(self) -> Mapping[str, str]: ...

    def write_batch(self, batch: Batch) -> object: ...

    def flush(self) -> None: ...


def append_noted(
    writer: Appender,
    notes: WriterNotes,
    commit: Commit,
    reread: Callable[[], Reader],
    *,
    closes: bool = False,
) -> int:
    """Append a batch to a stream, unless it is there already; return the count of new messages.

    :param writer: the only writer of the stream
    :param reread: opens a reader to compare existing messages; `NotFound`, `Unsupported` or a
        reader that is not `Replayable` mean that the stream cannot be read
    :param closes: the writer is closed before the batch is noted as done
    :raises Stranger: another writer appended in between.
    :raises AnotherBatch: another batch was appended under this number.
    :raises Unsupported: there are dead letters in it, and the stream does not keep their reasons.
    :raises WriteTimeout: with `closes`, not all of it was taken before the writer was closed.
    """
    check_letters(writer, commit.batches())  # before a note tells of the batch
    work = _Appending(writer.url, notes, commit, reread)
    work.pin_others()  # before anything is appended behind what they began
    work.settle(writer)
    files, there, note = work.plan()
    if note is None:
        log.warning("%s: batch %d is there already, and skipped", writer.url, commit.batch)
        return 0
    new = _append(writer, _after(staged_batches(files), there))
    is_whole_when_closed = isinstance(writer, AllOrNone)  # only then they are there
    if not is_whole_when_closed:
        writer.flush()
    if (closes or is_whole_when_closed) and isinstance(writer, Writer):
        writer.close()
        check_taken(writer)
    notes.put(note._replace(is_done=True, files=()))
    return new


class _Appending:
    """Finds which messages of a batch are in the stream, and notes the rest as started."""

    def __init__(
        self, url: str, notes: WriterNotes, commit: Commit, reread: Callable[[], Reader]
    ) -> None:
        self._url = url
        self._notes = notes
        self._commit = commit
        self._reread = reread
        self._batch = commit.batch
        self._origin = commit.origin
        self._digest: str | None = None
        #: The fields in which the batch is compared with the stream: those that the stream stores.
        self._fields: Sequence[str] = COMPARED
        self._bounds = self._bounds_now()

    def _bounds_now(self) -> Bounds | None:
        """Return the bounds of the stream; None if it cannot be read."""
        try:
            with self._reread() as reader:
                self._fields = [name for name in COMPARED if name not in reader.cannot_carry]
                return reader.bounds() if isinstance(reader, Replayable) else None
        except (NotFound, Unsupported):
            return None

    def _note(self) -> Note | None:
        note = self._notes.get()
        return note if note is None or self._bounds is None else note.now(self._bounds)

    def settle(self, writer: Appender) -> None:
        """Complete an earlier batch that its writer considers done, but its note does not.

        After a power failure only the note of the start is sure to be on disk.
        """
        note, bounds = self._note(), self._bounds
        if note is None or note.is_done or note.batch >= self._batch or bounds is None:
            return
        begun: Note | None = note
        if note.is_pinned:
            begun = self._begin_rest(note, bounds)
        elif not _may_be_in(note, bounds) or note.delivered(bounds).is_whole(note.count):
            return
        first = [] if begun is None else _first_attempt(self._url, begun)
        if begun is None or (not first and begun.count):
            is_staged = bool(_first_attempt(self._url, note))
            why = (
                "what the stream had of it is gone or changed"
                if is_staged
                else "its files are gone"
            )
            log.error("%s: batch %d is not all there, and %s", self._url, note.batch, why)
            return
        there = self._check_there(begun, first, bounds)
        _append(writer, _after(staged_batches(first), there))
        writer.flush()
        self._notes.put(begun._replace(is_done=True, files=()))
        self._bounds = self._bounds_now()

    def _begin_rest(self, note: Note, bounds: Bounds) -> Note | None:
        """Note a new attempt for what is missing of a pinned batch, and return it.

        None: that cannot be told from its files and the stream.
        """
        earlier, pieces = note.before[: note.begun], _pieces_in(bounds, note.before[note.begun :])
        first = _first_attempt(self._url, note)
        if (
            not first
            or _is_overwritten(bounds, pieces)
            or _pieces_in(bounds, earlier) != [*earlier]
        ):
            return None
        rest = self._rest(first, pieces)
        if rest is None:
            return None
        before = (*earlier, *pieces)
        begun = note._replace(
            count=sum(part.messages for part in rest),
            start=bounds.end,
            epoch=bounds.epoch,
            files=tuple((part.path, part.partition, part.messages) for part in rest),
            before=before,
            begun=len(before),
            is_pinned=False,
        )
        self._notes.put(begun)
        return begun

    def pin_others(self) -> None:
        """Record how far other writers that died got, before this batch follows theirs.

        No other writer appends now: the messages from their start on are theirs.
        """
        bounds = self._bounds
        for name, begun in self._notes.begun_by_others().items() if bounds is not None else ():
            assert bounds is not None
            note = begun.now(bounds)
            if note.start is None or not _may_be_in(note, bounds):
                continue
            there = min(note.count, bounds.end - note.start)
            if there == note.count:
                self._notes.put_for(name, note._replace(is_done=True, files=()))
                continue
            piece = Piece(bounds.epoch, note.start, there)
            before = (*note.before, *([piece] if there else []))
            pinned = note._replace(start=None, epoch=None, before=before, is_pinned=True)
            self._notes.put_for(name, pinned)

    def plan(self) -> tuple[Sequence[Staged], int, Note | None]:
        """Return the files to append, the count already there, and the note (None: complete)."""
        parts = self._commit.files
        if self._origin.ranges is None:
            self._digest = self._commit.digest()
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
        earlier: Sequence[DeliveredBatch] = (),
        before: Sequence[Piece] = (),
    ) -> Note:
        """Store the note of a batch that is about to be appended; `last` is the note before."""
        bounds, base = self._bounds, {} if last is None else last.base
        dropped = room_for([one.to_json() for one in earlier])
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
            begun=len(before),
        )
        self._notes.put(note)
        return note

    def _go_on(
        self, note: Note, parts: Sequence[Staged]
    ) -> tuple[Sequence[Staged], int, Note | None]:
        """Plan the completion of an interrupted attempt."""
        bounds = self._bounds
        if bounds is not None and note.is_pinned:
            begun = self._begin_rest(note, bounds)
            if begun is not None:
                return _first_attempt(self._url, begun), 0, begun
        elif bounds is None or note.start is None or not _may_be_in(note, bounds):
            return parts, 0, self._begin(parts, note, note.earlier)
        else:
            first = _first_attempt(self._url, note)
            if first or not note.count:
                return first, self._check_there(note, first, bounds), note
        known = [*note.earlier, note.delivered(bounds)]
        return self._complete(note, known, len(note.earlier), parts)

    def _complete(
        self, note: Note, known: Sequence[DeliveredBatch], at: int, parts: Sequence[Staged]
    ) -> tuple[Sequence[Staged], int, Note | None]:
        """Find which messages are in the stream, and note the rest as started."""
        pieces = [piece for one in known[at:] for piece in one.pieces]
        rows, bounds = sum(part.messages for part in parts), self._bounds
        there = sum(piece.messages for piece in pieces)
        if bounds is None or _is_overwritten(bounds, pieces):
            if known[at].ranges is None and known[at].digest is None and rows == there:
                return parts, 0, None  # an old note without ranges: compare the count
            raise self._another(known[at:], "they are not in the stream any more to be compared")
        pieces = _pieces_in(bounds, pieces)
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

    def _another(self, known: Sequence[DeliveredBatch], why: str) -> AnotherBatch:
        last = known[-1]
        pieces = [piece for one in known for piece in one.pieces if piece.messages]
        said = in_words(last.ranges)
        if last.ranges is None and pieces:
            end = pieces[-1].start + pieces[-1].messages - 1
            said = f"what is in the stream from {pieces[0].start} to {end}"
        planned = in_words(self._origin.ranges)
        return AnotherBatch(self._url, self._batch, planned, f"{said} (batch {last.batch})", why)

    def _rest(self, parts: Sequence[Staged], pieces: Sequence[Piece]) -> list[Staged] | None:
        """Stage the messages of `parts` that `pieces` do not hold.

        None: `pieces` hold messages that are not in `parts`.
        """
        there: Counter[bytes] = Counter()
        for piece in pieces:
            there.update(self._keys_there(piece))
        if not parts:
            return None if there.total() else []
        import pyarrow as pa  # noqa: PLC0415 - retries are rare

        staging = Staging(Path(parts[0].path).parent, 0)  # removed together with the batch
        try:
            for batch in staged_batches(parts):
                is_new = []
                for key in _keys(batch, self._fields):
                    is_new.append(not there[key])
                    there[key] -= not is_new[-1]
                new = batch.filter(pa.array(is_new, pa.bool_()))
                if new.num_rows:
                    staging.add([self._url], new)
            if there.total():
                staging.discard()
                return None
            return staging.finish(sync=True)
        except BaseException:
            staging.discard()
            raise

    def _keys_there(self, piece: Piece) -> Iterator[bytes]:
        """Yield a digest of each message in a piece of the stream."""
        at, end = piece.start, piece.start + piece.messages
        with self._reread() as reader:
            reader.seek(at)
            while at < end:
                found = reader.read_batch(min(_AT_ONCE, end - at), timeout=0)
                if not found.num_rows or found.column("seq")[0].as_py() != at:
                    raise _stranger(self._url, at)
                yield from _keys(found, self._fields)
                at += found.num_rows

    def _check_there(self, note: Note, parts: Sequence[Staged], bounds: Bounds) -> int:
        """Compare the batch with the stream; return how many of its messages are there."""
        assert note.start is not None
        there = min(bounds.end - note.start, note.count)
        # Overwritten messages were of this batch, or older.
        at = max(note.start, bounds.oldest)
        end = note.start + there
        with self._reread() as reader:
            reader.seek(at)
            for mine in _after(staged_batches(parts), at - note.start):
                left = mine.slice(0, max(0, end - at))
                while left.num_rows:
                    found = reader.read_batch(left.num_rows, timeout=0)
                    if not found.num_rows or found.column("seq")[0].as_py() != at:
                        raise _stranger(self._url, at)
                    same = left.slice(0, found.num_rows)
                    if any(same.column(name) != found.column(name) for name in self._fields):
                        raise _stranger(self._url, at)
                    at += found.num_rows
                    left = left.slice(found.num_rows)
        return there


def _keys(batch: Batch, fields: Sequence[str]) -> Iterator[bytes]:
    """Yield a digest of these fields for each message; the payload is the first of them."""
    columns = [batch.column(name).to_pylist() for name in fields]
    for payload, *header in zip(*columns, strict=True):
        hashed = blake2b(payload, digest_size=16)
        hashed.update(repr(header).encode())
        yield hashed.digest()


def _may_be_in(note: Note, bounds: Bounds) -> bool:
    """Tell whether messages of the attempt may be in the current stream."""
    if note.start is None or note.epoch != bounds.epoch:
        return False
    return note.start <= bounds.end  # a recreated classic queue has no epoch, and starts at 0


def _is_overwritten(bounds: Bounds, pieces: Sequence[Piece]) -> bool:
    return any(
        piece.epoch == bounds.epoch and piece.messages and piece.start < bounds.oldest
        for piece in pieces
    )


def _pieces_in(bounds: Bounds, pieces: Sequence[Piece]) -> list[Piece]:
    """Return what of `pieces` is in the stream.

    Messages of a stream that was recreated since are gone, and so are messages that were not on
    disk at a power failure.
    """
    return [
        piece._replace(messages=max(0, min(piece.messages, bounds.end - piece.start)))
        for piece in pieces
        if piece.epoch == bounds.epoch
    ]


def _first_attempt(url: str, note: Note) -> list[Staged]:
    """Return the staged files of the first attempt; empty if they are incomplete."""
    parts = [Staged(url, path, partition, messages) for path, partition, messages in note.files]
    try:
        rows = sum(batch.num_rows for batch in staged_batches(parts))
    except (NotFound, ValueError, OSError):
        return []
    return parts if rows == note.count else []


def check_letters(writer: Appender, batches: Iterable[Batch]) -> None:
    """Refuse dead letters for a stream that would not keep their reasons.

    :raises Unsupported: there are some among the messages.
    """
    if "attributes" not in writer.cannot_carry:
        return
    import pyarrow.compute as pc  # noqa: PLC0415 - loaded with the batches

    from penstock.core.dead_letter import KEEPS_REASONS, MARK, NO_REASONS  # noqa: PLC0415 - seldom

    for batch in batches:
        if pc.any(pc.starts_with(batch.column("attributes"), MARK)).as_py():
            raise Unsupported(
                f"{writer.url} takes no dead letters: {NO_REASONS}", hint=KEEPS_REASONS
            )


def check_taken(writer: Writer) -> None:
    """Check that a closed writer which is the server of its stream got rid of all messages.

    :raises WriteTimeout: nobody took some of them.
    """
    if untaken := writer.statistics().untaken:
        raise WriteTimeout(
            f"{writer.url}: nobody took {untaken:,} messages before it was closed",
            hint="its writer is its server, which lasts for a batch; write to a log: and copy "
            "that: penstock cp log:/path/name URL --follow",
        )


def _append(writer: Appender, batches: Iterable[Batch]) -> int:
    new = 0
    for batch in batches:
        writer.write_batch(batch)
        new += batch.num_rows
    return new


def _after(batches: Iterable[Batch], there: int) -> Iterator[Batch]:
    """Yield the messages after the first `there`."""
    for batch in batches:
        if there < batch.num_rows:
            yield batch.slice(there)
        there = max(0, there - batch.num_rows)


def _stranger(url: str, at: int) -> Stranger:
    return Stranger(
        f"{url}: messages from {at} on are not those of the batch that was being appended",
        hint="somebody else wrote to it meanwhile; look at what is there, then remove the note "
        "(*.commits.json) to append the whole batch again",
    )


# --- what tasks stage until the batch is complete -------------------------------------------------


class Staging:
    """The staged files of one task. Streams that get the same messages share a file.

    A task may run twice, even concurrently; each attempt has files of its own.
    """

    def __init__(self, folder: Path, partition: int) -> None:
        self._folder = folder
        self._partition = partition
        self._mark = f"{partition:05d}-{os.getpid()}-{secrets.token_hex(4)}"
        self._files: dict[tuple[str, ...], _StagedFile] = {}

    def add(self, urls: Sequence[str], batch: Batch) -> None:
        """Stage a batch once for all of these streams.

        :raises StorageError: there is no space, or no permission.
        """
        streams = tuple(urls)
        with storage_errors("staging in", str(self._folder)):
            if streams not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._files[streams] = _StagedFile(
                    self._folder / f"{self._mark}-{len(self._files)}.arrow"
                )
            self._files[streams].write(batch)

    def finish(self, *, sync: bool = False) -> list[Staged]:
        """Close the files, and return them; with `sync`, sync them to disk."""
        done = []
        with storage_errors("staging in", str(self._folder)):
            for streams, file in self._files.items():
                file.close()
                if sync:
                    _sync_staged(file.path)
                done += [
                    Staged(url, str(file.path), self._partition, file.messages) for url in streams
                ]
        return done

    def discard(self) -> None:
        """Remove the files of a task that failed."""
        remove_files([str(file.path) for file in self._files.values()])


class _StagedFile:
    """A staged file that is being written."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa  # noqa: PLC0415 - not needed to put a message, as all of these

        from penstock.core.batch import BATCH_SCHEMA  # noqa: PLC0415

        self.path = path
        self.messages = 0
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, BATCH_SCHEMA)

    def write(self, batch: Batch) -> None:
        self._writer.write_batch(batch)
        self.messages += batch.num_rows

    def close(self) -> None:
        self._writer.close()
        self._file.close()


def remove_files(paths: Sequence[str]) -> None:
    """Remove staged files, and the folders of batch and query if they are empty."""
    for path in map(Path, paths):
        path.unlink(missing_ok=True)
        _remove_empty(path.parent)
        _remove_empty(path.parent.parent)


def remove_batch(folder: Path, batch: int) -> None:
    """Remove the staged files of a batch and of all earlier ones."""
    if not folder.is_dir():
        return
    import shutil  # noqa: PLC0415

    for old in folder.iterdir():
        if old.name.isdigit() and int(old.name) <= batch:
            shutil.rmtree(old, ignore_errors=True)
    _remove_empty(folder)


def _sync_staged(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_names(path.parent)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # not empty
