"""Where can a collector's messages go?

As JSON lines to a file, to standard output or to a server; as Arrow batches to a program; or
unchanged to any stream, from which Spark reads them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import time
from abc import abstractmethod
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.batch import messages_from_batch
from penstock.core.dead_letter import Code
from penstock.core.errors import (
    ConnectionLost,
    InvalidOption,
    Malformed,
    MessageTooLarge,
    PenstockError,
)
from penstock.core.interfaces import Closable
from penstock.core.url import URL
from penstock.protocols.connection import is_readable
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.jrtc.destinations import Rejected, StreamDestination
from penstock.protocols.jrtc.wire import LARGEST_DATAGRAM
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.core.batch import Batch
    from penstock.protocols.jrtc.schemas import Schema

__all__ = [
    "ArrowOutput",
    "Collected",
    "JsonOutput",
    "Output",
    "StreamOutput",
    "output_for",
]

#: Seconds that a server of lines may take for them, and after which it is tried again.
_PATIENCE: Final = 5.0
_AGAIN: Final = 1.0
#: Seconds between two looks whether an output was closed.
_LOOK: Final = 0.1


class Collected(NamedTuple):
    """Messages of one schema, in the order of their arrival."""

    schema: Schema
    #: As they came: streams, times and payloads.
    messages: Batch
    #: A row of columns for each; None: the message has itself inside, which no column can.
    rows: pa.RecordBatch | None


class Output(Closable):
    """A target of collected messages. Called from one thread."""

    #: What people call it.
    name: str

    @abstractmethod
    def give(self, collected: Collected) -> Sequence[Rejected]:
        """Store or send messages; return those that are refused for good.

        :raises OSError: the target failed; the messages are not passed again.
        :raises PenstockError: the same.
        """


def output_for(target: str) -> Output:
    """Return the output of a target.

    `-`, `json:FILE`, `json+udp://host:port` and `json+tcp://host:port` get lines of JSON; any
    other URL is a stream that gets the messages.

    :raises PenstockError: it cannot be opened.
    """
    scheme = target.partition(":")[0]
    if target == "-" or scheme in {"json", "json+udp", "json+tcp"}:
        return JsonOutput(target)
    return StreamOutput(target)


# --- lines of JSON -----------------------------------------------------------------------------


class JsonOutput(Output):
    """Writes a line of JSON for each message, as the original's collector does."""

    def __init__(self, target: str) -> None:
        """Open the target; connections are made with the first message.

        :raises PenstockError: it cannot be opened.
        """
        self.name = target
        self._lines = _lines_for(target)

    def give(self, collected: Collected) -> Sequence[Rejected]:
        rows, lines, rejected = [], [], []
        for row, message in enumerate(messages_from_batch(collected.messages)):
            assert message.stream is not None
            try:
                line = collected.schema.json_line(message.stream, message.payload)
                self._lines.check(line)
                rows.append(row)
                lines.append(line)
            except Malformed as error:
                rejected.append(Rejected(row, Code.INVALID_ARGUMENT, str(error)))
            except MessageTooLarge as error:
                rejected.append(Rejected(row, Code.OUT_OF_RANGE, str(error)))
        try:
            self._lines.write(lines)
        except _PartlyWritten as error:
            left = rows[error.written :]
            rejected += [Rejected(row, Code.UNAVAILABLE, str(error)) for row in left]
        return sorted(rejected)

    def close(self) -> None:
        self._lines.close()


class _PartlyWritten(OSError):
    """A target failed after some lines."""

    def __init__(self, written: int, cause: OSError) -> None:
        super().__init__(*cause.args)  # some have a text alone
        #: The lines that are written.
        self.written = written


class _Lines(Closable):
    """A target of lines."""

    def check(self, line: bytes) -> None:
        """Check the size of a line.

        :raises MessageTooLarge: it is too long.
        """

    @abstractmethod
    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines.

        :raises OSError: the target failed. Those that `_PartlyWritten` counts are written.
        """


def _lines_for(target: str) -> _Lines:
    if target == "-":
        return _OutputLines()
    if target.startswith("json:"):
        return _FileLines(Path(target.removeprefix("json:")))
    url = URL.parse(target)
    if not url.host or not url.port:
        hint = f"write {url.scheme}://host:port"
        raise InvalidOption("output", target, "names no host and port", hint=hint)
    kind = _UdpLines if url.scheme == "json+udp" else _TcpLines
    return kind(url.host, url.port)


class _OutputLines(_Lines):
    """Standard output."""

    def write(self, lines: Sequence[bytes]) -> None:
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        pass  # others write to it, too


class _FileLines(_Lines):
    """A file, which has whole lines also after its disk was full."""

    def __init__(self, path: Path) -> None:
        with storage_errors("opening", str(path)):
            # A buffer would keep what it cannot write, and write it later.
            self._file = path.open("ab", buffering=0)

    def write(self, lines: Sequence[bytes]) -> None:
        data = memoryview(b"".join(lines))
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            ends = list(accumulate(map(len, lines)))
            written = bisect_right(ends, done)
            self._cut_off(done - (ends[written - 1] if written else 0))
            if not written:
                raise
            raise _PartlyWritten(written, error) from error

    def _cut_off(self, size: int) -> None:
        """Remove the start of a line that was not finished, unless others wrote behind it."""
        with contextlib.suppress(OSError):  # a pipe, for one, cannot be cut
            end = self._file.tell()
            if size and os.fstat(self._file.fileno()).st_size == end:
                self._file.truncate(end - size)

    def close(self) -> None:
        self._file.close()


class _UdpLines(_Lines):
    """A datagram for each line."""

    def __init__(self, host: str, port: int) -> None:
        with storage_errors("sending to", f"{host}:{port}"):
            self._socket = DatagramSocket.connect(host, port)

    def check(self, line: bytes) -> None:
        if len(line) > LARGEST_DATAGRAM:
            raise MessageTooLarge(len(line), LARGEST_DATAGRAM, hint="json+tcp: takes any")

    def write(self, lines: Sequence[bytes]) -> None:
        left = [(line, None) for line in lines]
        try:
            while left:
                try:
                    taken = self._socket.send(left, _PATIENCE)
                except ConnectionRefusedError:  # nobody heard an earlier one; this says so once
                    continue
                if not taken:
                    raise TimeoutError("the kernel has no room for a datagram")
                del left[:taken]
        except OSError as error:
            if len(left) == len(lines):
                raise
            raise _PartlyWritten(len(lines) - len(left), error) from error

    def close(self) -> None:
        self._socket.close()


class _TcpLines(_Lines):
    """A TCP connection that reconnects."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._not_before = 0.0

    def write(self, lines: Sequence[bytes]) -> None:
        where = "{}:{}".format(*self._address)
        try:
            self._leave_if_ended()
            if self._socket is None:
                if time.monotonic() < self._not_before:
                    raise ConnectionLost(where, "it was not there a moment ago")
                self._not_before = time.monotonic() + _AGAIN
                self._socket = socket.create_connection(self._address, _PATIENCE)
            self._socket.sendall(b"".join(lines))
        except OSError:
            self.close()
            raise

    def _leave_if_ended(self) -> None:
        """Close a connection that the server has ended: the kernel would still take lines for it.

        :raises OSError: the connection broke; some lines may not have arrived.
        """
        while self._socket is not None and is_readable(self._socket):
            if not self._socket.recv(1 << 16):  # else it says something, which nobody asked for
                self.close()

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


# --- programs, and streams ---------------------------------------------------------------------


class ArrowOutput(Output):
    """Hands collected messages to a program as Arrow batches: iterate, or `read`.

    The collector waits while `capacity` batches are unread; the kernel then drops and counts.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self.name = "arrow"
        self._waiting: queue.Queue[Collected] = queue.Queue(capacity)
        self._is_closed = False

    def give(self, collected: Collected) -> Sequence[Rejected]:
        while not self._is_closed:
            try:
                self._waiting.put(collected, timeout=_LOOK)
            except queue.Full:
                continue
            return ()
        raise ConnectionLost(self.name, "it was closed")

    def read(self, timeout: float | None = None) -> Collected | None:
        """Return the next messages; wait `timeout` seconds, for ever (None), or not at all (0)."""
        try:
            return self._waiting.get(timeout != 0, timeout or None)
        except queue.Empty:
            return None

    def __iter__(self) -> Iterator[Collected]:
        """Yield messages until the collector is closed."""
        while True:
            collected = self.read(_LOOK)
            if collected is not None:
                yield collected
            elif self._is_closed:
                return

    def close(self) -> None:
        self._is_closed = True


class StreamOutput(Output):
    """Writes messages unchanged, with their stream ids, to a Penstock URL."""

    def __init__(self, url: str) -> None:
        """Open the stream.

        :raises PenstockError: it cannot be opened.
        """
        self._stream = StreamDestination(url)
        self.name = self._stream.name

    def give(self, collected: Collected) -> Sequence[Rejected]:
        batch, first = collected.messages, 0
        rejected: list[Rejected] = []
        while first < len(batch):
            try:
                done, refused = self._stream.send(batch.slice(first))
            except (OSError, PenstockError) as error:
                if not first:
                    raise
                rows = range(first, len(batch))  # the others are stored, or rejected
                return [*rejected, *(Rejected(row, Code.UNAVAILABLE, str(error)) for row in rows)]
            rejected += [each._replace(row=each.row + first) for each in refused]
            first += done
        return rejected

    def close(self) -> None:
        self._stream.close()
