"""What does a server answer to each request? Knows records and streams, and no sockets."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from penstock.core.batch import check_batch
from penstock.core.endpoints import create, describe, storage_of
from penstock.core.errors import DamagedQueue, Malformed, NotFound, PenstockError, PositionError
from penstock.core.position import Position
from penstock.protocols.flight.access import check_size
from penstock.protocols.flight.errors import AccessRefused, ServerStopping, UnknownWriter
from penstock.protocols.flight.shared_writers import Writers
from penstock.protocols.flight.sources import Holds, Readers, Source
from penstock.protocols.flight.staging import Commits, StagingArea
from penstock.protocols.flight.wire import (
    EMPTY,
    Acknowledge,
    ActionKind,
    CloseWriter,
    CommitStaged,
    Committed,
    Create,
    Described,
    Failure,
    Forget,
    Identified,
    Locate,
    Located,
    Noted,
    OpenWriter,
    Record,
    Stream,
    Unstage,
    WriteNote,
    WriterOpened,
    check_buffers,
    decode_name,
)
from penstock.queue.append_once import notes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.batch import Batch
    from penstock.protocols.flight.access import Place, Root
    from penstock.protocols.flight.server import ServerOptions
    from penstock.protocols.flight.wire import Hold, Outcome, Piece, Put, Stage, Take, Told

__all__ = ["Answers"]

log = logging.getLogger(__name__)

#: Readers kept open between calls, for each client allowed. A closed one is reopened on demand.
_READERS_PER_CLIENT: Final = 4
#: Most readers, cursors or files in the description of a stream.
_MOST_DETAILS: Final = 50
#: Seconds between two checks that the client of a held name is still connected.
_LOOK_FOR_CLIENT: Final = 0.1


class Answers:
    """Handles all requests to a server."""

    def __init__(
        self,
        root: Root,
        options: ServerOptions,
        is_stopping: Callable[[], bool],
        on_appended: Callable[[Batch, Outcome], None],
        on_committed: Callable[[int, int], None],
    ) -> None:
        self._root = root
        self._options = options
        self.is_stopping = is_stopping
        self._instance = secrets.token_hex(16)
        self.readers = Readers(options.max_clients * _READERS_PER_CLIENT)
        self.holds = Holds()
        self.writers = Writers(is_stopping, on_appended)
        self._staging = StagingArea(root, options)
        self._commits = Commits(self._staging, self.writers)
        self._on_committed = on_committed
        self._actions: dict[str, Callable[[bytes, str], Record]] = {
            ActionKind.LOCATE: self._locate,
            ActionKind.ACKNOWLEDGE: self._acknowledge,
            ActionKind.FORGET: self._forget,
            ActionKind.DESCRIBE: self._describe,
            ActionKind.CREATE: self._create,
            ActionKind.OPEN_WRITER: self._open_writer,
            ActionKind.CLOSE_WRITER: self._close_writer,
            ActionKind.IDENTIFY: self._identify,
            ActionKind.READ_NOTES: self._read_notes,
            ActionKind.WRITE_NOTE: self._write_note,
            ActionKind.COMMIT: self._commit,
            ActionKind.UNSTAGE: self._unstage,
        }

    def act(self, kind: str, body: bytes, peer: str) -> bytes:
        """Answer an action.

        :raises Malformed: the action is unknown, or its body is not valid.
        """
        answer = self._actions.get(kind)
        if answer is None:
            raise Malformed("flight action", "type", ", ".join(ActionKind), kind[:60])
        return answer(body, peer).to_bytes()

    def offer(self, kind: ActionKind, answer: Callable[[bytes, str], Record]) -> None:
        """Register the handler of one more action."""
        self._actions[kind] = answer

    def expire(self) -> None:
        for each in (self.readers, self.holds, self.writers):
            each.expire(self._options.idle)
        if not self._options.read_only:
            self._staging.expire()

    def close(self) -> None:
        self._commits.close()
        self._staging.clean()
        for each in (self.writers, self.holds, self.readers):
            each.close()

    def hide(self, failure: Failure) -> Failure:
        """Return a failure without the paths of this machine."""
        hide = self._root.hide
        fields = {k: hide(v) if isinstance(v, str) else v for k, v in failure.fields.items()}
        hint = None if failure.hint is None else hide(failure.hint)
        changed = {"message": hide(failure.message), "hint": hint, "fields": fields}
        return failure.model_copy(update=changed)

    def hidden(self, outcome: Outcome) -> Outcome:
        if outcome.failure is None:
            return outcome
        return outcome.model_copy(update={"failure": self.hide(outcome.failure)})

    # --- reading ----------------------------------------------------------------------------------

    def _locate(self, body: bytes, peer: str) -> Located:
        asked = Locate.from_bytes(body)
        place = self._place(asked)
        position = None if asked.at is None else asked.at.position()
        start = position or Position.END
        source = self._source(place, asked.reader, self._reading(asked.options), start)
        try:
            if position is not None:
                log.info("%s reads %s from %s", peer, place.name, position)
                source.seek(position)
            located = source.located()
            if position is not None and asked.hold is not None:
                self.holds.move(place, asked.hold, asked.reader, located.mark)
        except BaseException:
            source.close()
            raise
        self.readers.keep(asked.reader, source)
        return located

    def take(self, asked: Take, is_cancelled: Callable[[], bool]) -> Iterator[tuple[Batch, Told]]:
        """Yield the existing messages from the client's mark on."""
        place = self._place_read(asked, asked.reader)
        if asked.hold is not None:
            self.holds.move(place, asked.hold, asked.reader, asked.done)
        start = Position.START if asked.at is None else Position.sequence(asked.at.seq)
        source = self._source(place, asked.reader, self._reading(asked.options), start)
        is_whole = False
        try:
            source.stand_at(asked.at)
            yield from source.chunks(
                asked.wait, asked.chunk, lambda: self.is_stopping() or is_cancelled()
            )
            is_whole = True
        finally:
            if is_whole and not self.is_stopping():
                self.readers.keep(asked.reader, source)
            else:
                source.close()

    def _source(
        self, place: Place, reader: str, options: dict[str, str], start: Position
    ) -> Source:
        """Return the kept reader of a client, or open one at `start`.

        Not at the oldest message: older segments may be damaged.
        """
        kept = self.readers.take(reader, place, options)
        if kept is not None:
            return kept
        try:
            return Source(place, options, start)
        except (DamagedQueue, PositionError):
            # `start` is of an earlier epoch, or unreadable. Open at the oldest; `stand_at` or
            # `seek` checks the position.
            return Source(place, options, Position.START)

    def _reading(self, options: dict[str, str]) -> dict[str, str]:
        """Return the options of a reader that this server allows.

        :raises AccessRefused: the reader would store its position, and the server is read-only.
        """
        if not self._options.read_only:
            return options
        if {"hold", "cursor"} & options.keys():
            self._may_write("hold a name")
        return {**options, "trace": "false"}

    def _forget(self, body: bytes, peer: str) -> Record:
        del peer
        reader = Forget.from_bytes(body).reader
        self.holds.forget(reader)
        self.readers.forget(reader)
        return Record()

    # --- named places -----------------------------------------------------------------------------

    def hold(self, asked: Hold, is_cancelled: Callable[[], bool]) -> Iterator[tuple[Batch, Told]]:
        """Hold a name until the client ends the call."""
        self._may_write("hold a name")
        place = self._place(asked)
        lease, told = self.holds.take(place, asked)
        try:
            yield EMPTY, told
            pause = threading.Event()
            while not is_cancelled() and not self.is_stopping():
                if not self.holds.is_current(place, asked.name, lease):
                    return
                pause.wait(_LOOK_FOR_CLIENT)
        finally:
            self.holds.release(place, asked.name, lease)

    def _acknowledge(self, body: bytes, peer: str) -> Record:
        del peer
        asked = Acknowledge.from_bytes(body)
        place = self._place_read(asked, asked.reader)
        self.holds.move(place, asked.name, asked.reader, asked.done)
        return Record()

    # --- writing ----------------------------------------------------------------------------------

    def _open_writer(self, body: bytes, peer: str) -> WriterOpened:
        asked = OpenWriter.from_bytes(body)
        self._may_write("write")
        if self.is_stopping():
            raise ServerStopping
        place = self._place(asked, may_make=asked.options.get("create") != "never")
        check_size(asked.options, self._options.max_queue)
        opened = self.writers.open(asked.writer, place, asked.options)
        log.info("%s writes to %s", peer, place.name)
        return WriterOpened(
            instance=self._instance,
            max_message=self._options.max_message,
            cannot_carry=opened.cannot_carry,
            syncs=opened.syncs,
        )

    def put(self, asked: Put) -> Callable[[Batch, Piece], Outcome]:
        """Return the function that appends the batches of one call.

        :raises UnknownWriter: the writer was not opened at this server, or has expired.
        """
        if asked.instance != self._instance:
            raise UnknownWriter("the server was started anew since this writer was opened")
        writer = self.writers.find(asked.writer)
        writer.begin(asked.attempt)

        def append(batch: Batch, piece: Piece) -> Outcome:
            if batch.nbytes > self._options.max_message:
                return writer.refuse(piece, batch.nbytes, self._options.max_message)
            check_buffers(batch)
            check_batch(batch)
            return writer.append(asked.attempt, batch, piece)

        return append

    @contextmanager
    def staging(self, asked: Stage) -> Iterator[Callable[[Batch, Piece], Outcome]]:
        """Yield the function that stages the batches of one call until they are committed."""
        self._may_write("write")
        with self._staging.staging(self._place(asked, may_make=True), asked) as add:
            yield add

    def _commit(self, body: bytes, peer: str) -> Committed:
        del peer
        asked = CommitStaged.from_bytes(body)
        self._may_write("write")
        place = self._place(asked, may_make=asked.options.get("create") != "never")
        check_size(asked.options, self._options.max_queue)
        return self._commits.commit(place, asked, self._on_committed)

    def _unstage(self, body: bytes, peer: str) -> Record:
        del peer
        asked = Unstage.from_bytes(body)
        self._may_write("write")
        self._staging.remove(self._place(asked, may_make=True), asked)
        return Record()

    def _close_writer(self, body: bytes, peer: str) -> Record:
        del peer
        self.writers.forget(CloseWriter.from_bytes(body).writer)
        return Record()

    def _read_notes(self, body: bytes, peer: str) -> Noted:
        del peer
        place = self._place(Stream.from_bytes(body), may_make=True)
        return Noted(notes=json.dumps(notes_of(place.url).read()))

    def _write_note(self, body: bytes, peer: str) -> Record:
        del peer
        asked = WriteNote.from_bytes(body)
        self._may_write("write")
        note = None if asked.note is None else _note_from(asked.note)
        place = self._place(asked, may_make=True)
        notes_of(place.url).write(asked.name, note, sync=asked.sync)
        return Record()

    # --- streams themselves -----------------------------------------------------------------------

    def _create(self, body: bytes, peer: str) -> Record:
        asked = Create.from_bytes(body)
        self._may_write("create")
        place = self._place(asked, may_make=True)
        check_size(asked.options, self._options.max_queue)
        create(place.url, replace=asked.replace, **asked.options)
        log.info("%s created %s", peer, place.name)
        return Record()

    def _describe(self, body: bytes, peer: str) -> Described:
        del peer
        asked = Stream.from_bytes(body)
        return self.described(asked.stream)

    def described(self, name: str) -> Described:
        """Describe a stream."""
        place = self._root.place(name, None)
        info = describe(place.url).as_dict()
        info["url"] = place.name
        details = {"kind": place.kind, **info["details"]}
        # A list of readers or of damaged files may be long: only its beginning is sent.
        info["details"] = {
            k: v[:_MOST_DETAILS] if isinstance(v, list) else v for k, v in details.items()
        }
        return Described(info=self._root.hide(json.dumps(info, default=str)))

    def _identify(self, body: bytes, peer: str) -> Identified:
        del peer
        place = self._place(Stream.from_bytes(body))
        return Identified(storage=storage_of(place.url))

    def streams(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, messages and bytes of every stream; -1 where it cannot be read."""
        for place in self._root.streams():
            try:
                info = describe(place.url)
                yield place.name, info.count, info.bytes
            except PenstockError:
                yield place.name, -1, -1

    def _place_read(self, asked: Stream, reader: str) -> Place:
        """Return the place of a stream for a reader, even if the stream was removed meanwhile.

        Its unread messages are still delivered, then those of the stream that replaces it.
        """
        try:
            return self._place(asked)
        except NotFound:
            place = self.readers.place_of(reader)
            if place is None or decode_name(place.name) != decode_name(asked.stream):
                raise
            return place

    def _place(self, asked: Stream, *, may_make: bool = False) -> Place:
        return self._root.place(asked.stream, asked.kind, may_make=may_make)

    def _may_write(self, what: str) -> None:
        if self._options.read_only:
            raise AccessRefused(f"nobody may {what} here: the server is read-only")


def _note_from(text: str) -> dict[str, Any]:
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, dict):
        raise Malformed("flight WriteNote", "note", "a JSON object", text[:60])
    return note
