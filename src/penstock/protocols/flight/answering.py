"""What does a server answer to each question? Knows records and streams, and no sockets."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from penstock.core.batch import check_batch
from penstock.core.endpoints import create, describe, storage_of
from penstock.core.errors import Malformed, NotFound, PenstockError
from penstock.core.position import Position
from penstock.protocols.flight.appending import Writers
from penstock.protocols.flight.arrivals import check_buffers
from penstock.protocols.flight.errors import AccessRefused, UnknownWriter
from penstock.protocols.flight.holds import Holds
from penstock.protocols.flight.places import check_size
from penstock.protocols.flight.sources import EMPTY, Source
from penstock.protocols.flight.wire import (
    Acknowledge,
    ActionKind,
    CloseWriter,
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
    WriteNote,
    WriterOpened,
    decode_name,
)
from penstock.queue.append_once import notes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.batch import Batch
    from penstock.protocols.flight.options import ServerOptions
    from penstock.protocols.flight.places import Place, Root
    from penstock.protocols.flight.wire import Hold, Mark, Outcome, Piece, Put, Take, Told

__all__ = ["Answers", "Readers"]

log = logging.getLogger(__name__)

#: Readers kept open between two calls, for each client allowed. One that is closed is opened again.
_READERS_PER_CLIENT: Final = 4
#: Readers, cursors or files told of a stream.
_MOST_DETAILS: Final = 50
#: A held name looks this often (seconds) whether its client is still there.
_LOOK_FOR_CLIENT: Final = 0.1


class Readers:
    """Readers kept open between the calls of their clients. Safe to share between threads.

    Nothing depends on them: a client says with each call where it is.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, tuple[float, Source]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, id: str, place: Place, options: dict[str, str]) -> Source | None:
        """Return the reader of a client, for it alone, if it is kept and is the same."""
        with self._lock:
            _, source = self._idle.pop(id, (0.0, None))
        if source is not None and (source.place.path, source.options) != (place.path, options):
            source.close()
            return None
        return source

    def place_of(self, id: str) -> Place | None:
        """Return what the reader of a client reads, if it is kept."""
        with self._lock:
            _, source = self._idle.get(id, (0.0, None))
        return None if source is None else source.place

    def keep(self, id: str, source: Source) -> None:
        with self._lock:
            before = self._idle.pop(id, None)
            self._idle[id] = (time.monotonic(), source)
            late = [] if before is None else [before]
            while len(self._idle) > self._limit:
                late.append(self._idle.popitem(last=False)[1])
        for _, each in late:
            each.close()

    def forget(self, id: str) -> None:
        with self._lock:
            kept = self._idle.pop(id, None)
        if kept is not None:
            kept[1].close()

    def expire(self, idle: float) -> None:
        before = time.monotonic() - idle
        with self._lock:
            late = [id for id, (since, _) in self._idle.items() if since < before]
        for id in late:
            self.forget(id)

    def close(self) -> None:
        with self._lock:
            kept, self._idle = list(self._idle.values()), OrderedDict()
        for _, each in kept:
            each.close()


class Answers:
    """Everything that a server can be asked."""

    def __init__(self, root: Root, options: ServerOptions, is_stopping: Callable[[], bool]) -> None:
        self._root = root
        self._options = options
        self._is_stopping = is_stopping
        self._instance = secrets.token_hex(16)
        self.readers = Readers(options.max_clients * _READERS_PER_CLIENT)
        self.holds = Holds()
        self.writers = Writers()
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
        }

    def act(self, kind: str, body: bytes, peer: str) -> bytes:
        """Answer an action.

        :raises Malformed: there is no such action, or its body is not right.
        """
        answer = self._actions.get(kind)
        if answer is None:
            raise Malformed("flight action", "type", ", ".join(ActionKind), kind[:60])
        return answer(body, peer).to_bytes()

    def offer(self, kind: ActionKind, answer: Callable[[bytes, str], Record]) -> None:
        """Answer one more action."""
        self._actions[kind] = answer

    def expire(self) -> None:
        for each in (self.readers, self.holds, self.writers):
            each.expire(self._options.idle)

    def close(self) -> None:
        for each in (self.writers, self.holds, self.readers):
            each.close()

    def hide(self, failure: Failure) -> Failure:
        """Return what went wrong without the paths of this machine."""
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
        position = Position.START if asked.at is None else asked.at.position()
        options = self._reading(asked.options)
        source = self.readers.take(asked.reader, place, options) or Source(place, options, position)
        try:
            if asked.at is not None:
                log.info("%s reads %s from %s", peer, place.name, position)
                source.seek(position)
            located = source.located()
            if asked.hold is not None:
                self.holds.move(place, asked.hold, asked.reader, located.mark)
        except BaseException:
            source.close()
            raise
        self.readers.keep(asked.reader, source)
        return located

    def take(self, asked: Take, is_cancelled: Callable[[], bool]) -> Iterator[tuple[Batch, Told]]:
        """Yield the messages that are there, from the client's mark on."""
        place = self._place_read(asked, asked.reader)
        if asked.hold is not None:
            self.holds.move(place, asked.hold, asked.reader, asked.done)
        source = self._source(place, asked.reader, self._reading(asked.options), asked.at)
        is_whole = False
        try:
            source.stand_at(asked.at)
            yield from source.chunks(
                asked.wait, asked.chunk, lambda: self._is_stopping() or is_cancelled()
            )
            is_whole = True
        finally:
            if is_whole and not self._is_stopping():
                self.readers.keep(asked.reader, source)
            else:
                source.close()

    def _source(
        self, place: Place, reader: str, options: dict[str, str], at: Mark | None
    ) -> Source:
        kept = self.readers.take(reader, place, options)
        if kept is not None:
            return kept
        start = Position.START if at is None else Position.sequence(at.seq)
        return Source(place, options, start)

    def _reading(self, options: dict[str, str]) -> dict[str, str]:
        """Return a reader's options as far as this server allows them.

        :raises AccessRefused: it would write down how far it is.
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
        """Hold a name for as long as the client keeps the call open."""
        self._may_write("hold a name")
        place = self._place(asked)
        lease, told = self.holds.take(place, asked)
        try:
            yield EMPTY, told
            pause = threading.Event()
            while not is_cancelled() and not self._is_stopping():
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
        place = self._place(asked, may_make=asked.options.get("create") != "never")
        check_size(asked.options, self._options.max_queue)
        lacking = self.writers.open(asked.writer, place, asked.options)
        log.info("%s writes to %s", peer, place.name)
        return WriterOpened(
            instance=self._instance,
            max_message=self._options.max_message,
            cannot_carry=lacking,
        )

    def put(self, asked: Put) -> Callable[[Batch, Piece], Outcome]:
        """Return what appends the batches of one call.

        :raises UnknownWriter: this server never heard of the writer, or has forgotten it.
        """
        if asked.instance != self._instance:
            raise UnknownWriter("the server was started anew since this writer was opened")
        pen = self.writers.pen(asked.writer)
        pen.begin(asked.attempt)

        def append(batch: Batch, piece: Piece) -> Outcome:
            if self.writers.pen(asked.writer) is not pen:
                raise UnknownWriter("the server has forgotten this writer")
            if batch.nbytes > self._options.max_message:
                return pen.refuse(piece, batch.nbytes, self._options.max_message)
            check_buffers(batch)
            check_batch(batch)
            return pen.append(asked.attempt, batch, piece, self._is_stopping)

        return append

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
        """Tell what a stream holds."""
        place = self._root.place(name, None)
        info = describe(place.url).as_dict()
        info["url"] = place.name
        details = {"kind": place.kind, **info["details"]}
        # A list of readers or of damaged files may be long; its beginning has to do.
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
        """Return the place of a stream that somebody reads; it may have been removed meanwhile.

        What its reader has not read yet is delivered all the same, and then what comes in its
        place.
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
