"""Streams in SQLite, `sqlite:/path/name.db`: an endpoint as anybody may write one.

A package of its own: the folder that it is in goes on the path. Its streams can be read again
(`Replayable`), and a batch is appended once (`AppendOnce`), in one transaction with its note.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import Endpoint, NotFound, Position, Reader, Replayable
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.capabilities import AppendOnce
from penstock.core.endpoints import Identity
from penstock.core.interfaces import BookedWriter, Bounds, StreamInfo
from penstock.core.message import Message
from penstock.core.position import check_seek
from penstock.core.provenance import AnotherBatch, Noted
from penstock.core.statistics import ReaderStatistics
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock import Batch, Writer
    from penstock.core.interfaces import BytesLike
    from penstock.core.position import PositionLike
    from penstock.core.provenance import Commit
    from penstock.core.url import URL

__all__ = ["SqliteEndpoint"]

_TABLES = """
CREATE TABLE IF NOT EXISTS life (epoch INTEGER);
CREATE TABLE IF NOT EXISTS messages (
    seq INTEGER PRIMARY KEY, time_ns INTEGER, created_ns INTEGER, type INTEGER, subtype INTEGER,
    stream BLOB, attributes BLOB, payload BLOB
);
CREATE TABLE IF NOT EXISTS batches (
    writer TEXT, batch INTEGER, made_of TEXT, run TEXT, PRIMARY KEY (writer, batch)
);
"""


class SqliteEndpoint(AppendOnce, Endpoint):
    def open_reader(self, url: URL, start: Position) -> Reader:
        return SqliteReader(url, start)

    def open_writer(self, url: URL) -> Writer:
        return SqliteWriter(url)

    def create(self, url: URL, *, replace: bool = False) -> None:
        if replace:
            Path(url.path).unlink(missing_ok=True)
        _Database(url, may_make=True).close()

    def describe(self, url: URL) -> StreamInfo:
        with SqliteReader(url, Position.START) as reader:
            _, oldest, end, _ = reader.bounds()
            size = reader.database.number("SELECT SUM(LENGTH(payload)) FROM messages")
        newest = end - 1 if end else None
        first = oldest if end else None
        return StreamInfo(
            url.text, "table", "SQLite", 0, 0, first, newest, end, size, None, None, 0.0, False, {}
        )

    def identity(self, url: URL) -> Identity:
        return Identity.of(url)  # no option says which stream it is

    # --- AppendOnce -------------------------------------------------------------------------------

    def append_once(self, url: URL, commit: Commit) -> int:
        with SqliteWriter(url) as writer, writer.database.transaction() as database:
            known = database.row(
                "SELECT made_of FROM batches WHERE writer = ? AND batch = ?",
                (commit.writer, commit.batch),
            )
            made_of = commit.made_of()
            if known is not None and known[0] != made_of:
                raise AnotherBatch(url.text, commit.batch, made_of, str(known[0]), "not the same")
            if known is not None:
                return 0
            before = database.end()
            for batch in commit.batches():
                database.append(messages_from_batch(batch))
            note = (commit.writer, commit.batch, made_of, commit.origin.run)
            database.row("INSERT INTO batches VALUES (?, ?, ?, ?)", note)
            return database.end() - before

    def noted(self, url: URL, commit: Commit) -> Noted | None:
        try:
            database = _Database(url)
        except NotFound:
            return None
        asked = "SELECT run FROM batches WHERE writer = ? AND batch = ?"
        found = database.row(asked, (commit.writer, commit.batch))
        database.close()
        return None if found is None else Noted(is_done=True, run=str(found[0] or ""))

    def has_batches(self, url: URL) -> bool:
        try:
            database = _Database(url)
        except NotFound:
            return False
        count = database.number("SELECT COUNT(*) FROM batches")
        database.close()
        return count > 0

    def reread(self, url: URL) -> Reader:
        return SqliteReader(url, Position.START)


class _Database:
    def __init__(self, url: URL, *, may_make: bool = False) -> None:
        path = Path(url.path)
        if not may_make and not path.exists():
            raise NotFound(f"there is no stream at {url}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(
            path, timeout=30, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("PRAGMA journal_mode = WAL")
        if not may_make and self.row("SELECT 1 FROM sqlite_master WHERE name = 'life'") is None:
            self._connection.close()
            raise NotFound(f"there is no stream at {url} yet")
        if may_make:
            with self.transaction():
                for table in filter(str.strip, _TABLES.split(";")):
                    self._connection.execute(table)
                if self.row("SELECT epoch FROM life") is None:
                    self.row("INSERT INTO life VALUES (?)", (secrets.randbits(62) + 1,))

    def row(self, asked: str, values: tuple[object, ...] = ()) -> tuple[object, ...] | None:
        found: tuple[object, ...] | None = self._connection.execute(asked, values).fetchone()
        return found

    def number(self, asked: str) -> int:
        found = self.row(asked)
        return found[0] if found is not None and isinstance(found[0], int) else 0

    def end(self) -> int:
        return self.number("SELECT MAX(seq) + 1 FROM messages")

    @contextmanager
    def transaction(self) -> Iterator[_Database]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def append(self, messages: Iterable[Message]) -> int:
        """Append within a transaction; return the number of the last."""
        first, now = self.end(), time.time_ns()
        rows = [
            (seq, m.time_ns, now, m.type, m.subtype, m.stream, m.attributes,
             bytes(m.payload))
            for seq, m in enumerate(messages, first)
        ]  # fmt: skip
        self._connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return first + len(rows) - 1

    def read(self, first: int, limit: int) -> list[Message]:
        found = self._connection.execute(
            "SELECT * FROM messages WHERE seq >= ? ORDER BY seq LIMIT ?", (first, limit)
        )
        return [
            Message(seq, at, made, kind, subtype, id and StreamId(id), attributes, payload)
            for seq, at, made, kind, subtype, id, attributes, payload in found
        ]

    def close(self) -> None:
        self._connection.close()


class SqliteReader(Replayable, Reader):
    def __init__(self, url: URL, start: Position) -> None:
        super().__init__(url.text)
        self.database = _Database(url)
        self._next = self._messages = self._bytes = 0
        self.seek(start)

    def bounds(self) -> Bounds:
        oldest = self.database.number("SELECT MIN(seq) FROM messages")
        epoch = self.database.number("SELECT epoch FROM life")
        return Bounds(epoch, oldest, self.database.end())

    def newest_seq(self) -> int | None:
        return self.database.end() - 1

    def seek(self, position: PositionLike) -> None:
        place, bounds = Position.of(position), self.bounds()
        match place.anchor:
            case "start":
                self._next = bounds.oldest
            case "end":
                self._next = bounds.end
            case "last":
                self._next = max(bounds.oldest, bounds.end - 1)
            case "time":
                asked = "SELECT MIN(seq) FROM messages WHERE created_ns >= ?"
                (found,) = self.database.row(asked, (place.value,)) or (None,)
                self._next = found if isinstance(found, int) else bounds.end
            case _:
                self._next = check_seek(self.url, place.value, bounds.oldest, bounds.end)

    def _take(self, limit: int) -> list[Message]:
        found = self.database.read(self._next, limit)
        if found:
            self._next = found[-1].seq + 1
            self._messages += len(found)
            self._bytes += sum(message.size for message in found)
        return found

    def statistics(self) -> ReaderStatistics:
        backlog = self.database.end() - self._next
        return ReaderStatistics(self._messages, self._bytes, 0, 0, 0, self._next, backlog, ())

    def close(self) -> None:
        self.database.close()


class SqliteWriter(BookedWriter):
    def __init__(self, url: URL) -> None:
        super().__init__(url.text)
        self.database = _Database(url, may_make=True)

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        del created_ns  # it is the time of the append
        moment = time.time_ns() if time_ns is None else time_ns
        message = Message(0, moment, 0, type, subtype, stream, attributes, bytes(payload))
        last = self.write_batch(batch_from_messages([message]))
        assert last is not None
        return last

    def write_batch(self, batch: Batch) -> int | None:
        self._check_open()
        if not batch.num_rows:
            return None
        messages = list(messages_from_batch(batch))
        with self.database.transaction():
            last = self.database.append(messages)
        self._messages += len(messages)
        self._bytes += sum(message.size for message in messages)
        self._last_seq = last
        return last

    def close(self) -> None:
        self._is_closed = True
        self.database.close()
