"""Where can forwarded streams go?

To a collector by UDP, as jrt-controller's go; to a web server as JSON; or to any Penstock URL. A
class for another protocol is about twenty lines: see `HttpDestination`.
"""

from __future__ import annotations

import http.client
import json
import logging
import urllib.parse
from abc import abstractmethod
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.batch import messages_from_batch
from penstock.core.dead_letter import Code
from penstock.core.endpoints import open_writer
from penstock.core.errors import (
    InvalidOption,
    InvalidURL,
    Malformed,
    MessageTooLarge,
    StorageError,
)
from penstock.core.interfaces import Closable
from penstock.core.message import Message, UnfitPayload
from penstock.core.redaction import shown
from penstock.core.url import URL
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.jrtc.wire import DATA_PORT, ID_SIZE, LARGEST_DATAGRAM, payload_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from penstock.core.batch import Batch
    from penstock.protocols.jrtc.schemas import Schemas

__all__ = [
    "Destination",
    "HttpDestination",
    "Outcome",
    "Rejected",
    "StreamDestination",
    "UdpDestination",
    "destination_for",
]

log = logging.getLogger(__name__)

#: Packages add a scheme by an entry point of this group: it is called with a URL and the schemas,
#: and returns a `Destination`.
ENTRY_POINT_GROUP: Final = "penstock.jrtc.destinations"
#: Seconds that the kernel may have no room for a datagram.
_SENDING: Final = 1.0
#: Seconds that a web server has for an answer.
_ANSWERING: Final = 10.0
#: What stays as it is in the path and the query of a URL; anything else has to be encoded.
_IN_A_PATH: Final = "/?%:@!$&'()*+,;=[]~"
#: Answers that are no verdict on what was sent: the same may be taken later.
_LATER: Final = frozenset({408, 425, 429})


class Rejected(NamedTuple):
    """A message that a destination refuses for good."""

    #: Its place in the batch.
    row: int
    code: Code
    reason: str


class Outcome(NamedTuple):
    """The outcome of a batch: its first `done` messages are sent or rejected, the rest waits."""

    done: int
    rejected: Sequence[Rejected] = ()


class Destination(Closable):
    """Where the streams of one `fwd_dst` go; the class to write for another protocol."""

    #: What people call it.
    name: str

    @abstractmethod
    def send(self, batch: Batch) -> Outcome:
        """Send messages with their streams and protobuf payloads. Called from one thread.

        Anything else that is raised rejects the batch.

        :raises OSError: nothing can be sent now; the batch is retried later.
        :raises PenstockError: the same.
        """

    def close(self) -> None:
        """Release all resources."""


def destination_for(url: str, schemas: Schemas) -> Destination:
    """Return the destination of a URL: `jrtc+udp://host:port`, `http://…`, or any writable URL.

    :raises PenstockError: it cannot be opened.
    """
    scheme = url.partition(":")[0]
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        made: Destination = entry.load()(url, schemas)
        return made
    if scheme in {"http", "https"}:
        return HttpDestination(url, schemas)
    if scheme == "jrtc+udp":
        parsed = URL.parse(url)
        if not parsed.host or parsed.path.strip("/") or parsed.options:
            hint = f"write jrtc+udp://host:{DATA_PORT}"
            raise InvalidURL(url, "it names no host alone", hint=hint)
        return UdpDestination(parsed.host, parsed.port or DATA_PORT)
    return StreamDestination(url)


class UdpDestination(Destination):
    """A collector, ours or jrt-controller's; it gets one datagram per message."""

    def __init__(self, host: str = "127.0.0.1", port: int = DATA_PORT) -> None:
        """Resolve the collector's address; it need not be running.

        :raises StorageError: the host name does not resolve.
        """
        self.name = f"jrtc+udp://{host}:{port}"
        #: How often its machine said that nobody listens: at least so many were not heard.
        self.unheard = 0
        try:
            self._socket = DatagramSocket.connect(host, port)
        except OSError as error:
            raise StorageError("sending to", self.name, error) from error

    def send(self, batch: Batch) -> Outcome:
        streams, payloads = batch.column("stream"), batch.column("payload")
        sizes = payload_sizes(payloads) + ID_SIZE
        large = np.flatnonzero(sizes > LARGEST_DATAGRAM).tolist()
        rejected = [
            Rejected(
                row,
                Code.OUT_OF_RANGE,
                f"{sizes[row]:,} bytes do not fit a datagram: it has {LARGEST_DATAGRAM:,}",
            )
            for row in large
        ]
        done = 0
        for end in [*large, len(batch)]:
            rows = done, end - done
            try:
                done += self._send(streams.slice(*rows), payloads.slice(*rows))
            except OSError:
                if not done:
                    raise
                break  # the next call raises it
            if done < end:
                break
            done = min(end + 1, len(batch))  # past the one that is too large
        return Outcome(done, [each for each in rejected if each.row < done])

    def _send(self, streams: pa.Array, payloads: pa.Array) -> int:
        sent = 0
        while sent < len(payloads):
            try:
                taken = self._socket.send_columns(
                    streams.slice(sent), payloads.slice(sent), None, _SENDING
                )
            except ConnectionRefusedError:  # of an earlier one; this says so once
                self.unheard += 1
                continue
            except OSError:
                if not sent:
                    raise
                break
            if not taken:
                break
            sent += taken
        return sent

    def close(self) -> None:
        self._socket.close()


class StreamDestination(Destination):
    """Any writable Penstock URL: a queue, a log, a topic, a stream on another machine."""

    def __init__(self, url: str) -> None:
        """Open the stream.

        :raises PenstockError: it cannot be opened.
        """
        self.name = shown(url)
        self._writer = open_writer(url)

    def send(self, batch: Batch) -> Outcome:
        done, error = self._write(batch)
        if error is not None and _is_refusal(error):
            return self._send_singly(batch, done)
        return self._outcome(batch, done, error)

    def _send_singly(self, batch: Batch, done: int) -> Outcome:
        """Send messages one by one, up to the first that is refused.

        A writer may refuse a whole batch for one message, and does not say for which.
        """
        error: Exception | None = None
        while done < len(batch) and error is None:
            written, error = self._write(batch.slice(done, 1))
            if error is not None and not written and _is_refusal(error):
                is_large = isinstance(error, MessageTooLarge)
                code = Code.OUT_OF_RANGE if is_large else Code.INVALID_ARGUMENT
                return Outcome(done + 1, [Rejected(done, code, str(error))])
            done += written
        return self._outcome(batch, done, error)

    def _write(self, batch: Batch) -> tuple[int, Exception | None]:
        """Write messages; return how many are written, and why not all."""
        before = self._writer.statistics().messages
        try:
            self._writer.write_batch(batch)
            self._writer.flush()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return self._writer.statistics().messages - before, error
        return len(batch), None

    def _outcome(self, batch: Batch, done: int, error: Exception | None) -> Outcome:
        if error is not None:
            if not done:
                raise error
            log.warning("%s took %d of %d messages", self.name, done, len(batch), exc_info=error)
        return Outcome(done)

    def close(self) -> None:
        self._writer.close()


def _is_refusal(error: Exception) -> bool:
    """Tell whether an error of a writer is a verdict on a message; others are about the stream.

    A damaged queue, an answer that is not valid or a URL option that fits no more may be mended.
    """
    if isinstance(error, InvalidOption):
        return error.option in Message._fields
    return isinstance(error, MessageTooLarge | UnfitPayload)


class HttpDestination(Destination):
    """A web server, such as an SMO's: it gets a POST with a JSON array per batch."""

    def __init__(self, url: str, schemas: Schemas) -> None:
        """Check and keep the address.

        :raises InvalidURL: this is no http or https URL.
        """
        hint = "write http://host:port/path"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidURL(url, str(error), hint=hint) from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidURL(url, "it names no web server", hint=hint)
        self.name = shown(url)
        self._schemas = schemas
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._path = urllib.parse.quote(path, safe=_IN_A_PATH)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname, port, timeout=_ANSWERING)

    def send(self, batch: Batch) -> Outcome:
        objects, rejected = [], []
        for row, message in enumerate(messages_from_batch(batch)):
            assert message.stream is not None
            schema = self._schemas.find(message.stream)
            try:
                if schema is None:
                    rejected.append(Rejected(row, Code.FAILED_PRECONDITION, "it has no schema"))
                else:
                    objects.append((row, schema.json_object(message.stream, message.payload)))
            except Malformed as error:
                rejected.append(Rejected(row, Code.INVALID_ARGUMENT, str(error)))
        if objects:
            status = self._post(json.dumps([each for _, each in objects]).encode())
            if status in _LATER or not 200 <= status < 500:  # noqa: PLR2004
                raise ConnectionError(f"{self.name} answers {status}")
            if status >= 300:  # noqa: PLR2004
                reason = f"{self.name} answers {status}"
                rejected += [Rejected(row, Code.INVALID_ARGUMENT, reason) for row, _ in objects]
        return Outcome(len(batch), sorted(rejected))

    def _post(self, body: bytes) -> int:
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", self._path, body, headers)
            answer = self._connection.getresponse()
            answer.read(1 << 16)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens it again
            raise ConnectionError(f"{self.name}: {error}") from error
        if not answer.isclosed():  # it has more to say than anybody wants to hear
            self._connection.close()
        return answer.status

    def close(self) -> None:
        self._connection.close()
