"""Which queue is behind `lhhttt://host:port`, `lhhttt+tcp://host:port` and `lhhttt+unix:/path`?"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import pyarrow as pa
from pydantic import Field, StringConstraints

from penstock.core.batch import check_batch, count_headers
from penstock.core.capabilities import Grouped
from penstock.core.endpoints import Endpoint
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    InvalidURL,
    LeaseLost,
    MessageTooLarge,
    PenstockError,
    PositionError,
    Unsupported,
)
from penstock.core.interfaces import LONGEST_PAUSE, BookedWriter, Reader, StreamInfo
from penstock.core.message import Message, UnfitPayload
from penstock.core.options import Duration, Options, parse_options
from penstock.core.position import Position
from penstock.core.statistics import ReaderStatistics
from penstock.protocols.host_port import host_alone
from penstock.protocols.lhhttt.client import DatagramLink, QueueClient, StreamLink
from penstock.protocols.lhhttt.frames import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.core.capabilities import Delivered, GroupStatistics
    from penstock.core.interfaces import BytesLike, Writer
    from penstock.core.position import PositionLike
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL

__all__ = ["LhhtttEndpoint", "LhhtttReader", "LhhtttWriter", "UrlOptions"]

log = logging.getLogger(__name__)

#: What the protocol has no place for.
_CANNOT_CARRY: Final = {
    "time_ns": "left out: a message has no time, and a reader gives that of reading",
    "type": "left out: a message has none",
    "subtype": "left out: a message has none",
    "stream": "left out: a queue has an address",
    "attributes": "left out: a reader gives the message's tag",
}
#: Messages that are sent as one call, so that an error tells how far it came.
_AT_ONCE: Final = 10_000
#: Longest pause (seconds) between two looks at a queue whose messages nobody gets yet.
_LONGEST_IDLE_PAUSE: Final = 0.05


class UrlOptions(Options):
    """Options of `lhhttt://host:port`."""

    #: A request without an answer is given up after so long, and so is a queue that stays full.
    timeout: Annotated[Duration, Field(gt=0)] = 10.0
    #: Which verbs are used: `auto` asks the queue.
    mode: Literal["auto", "reliable", "legacy"] = "auto"
    #: What its name at the queue begins with.
    client: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{0,40}$")] = ""


_WHAT_INSTEAD: Final = "info tells how many wait; copy it to a log: to look anywhere"


class LhhtttEndpoint(Endpoint):
    """A queue that speaks LHHTTT, ours or stream-py's."""

    can_be_reread = False

    def open_reader(self, url: URL, start: Position) -> Reader:
        if start != Position.START:
            raise PositionError(
                f"{url}: a queue gives its oldest message next, not {start}", hint=_WHAT_INSTEAD
            )
        return LhhtttReader(url.text, _client(url))

    def open_writer(self, url: URL) -> Writer:
        return LhhtttWriter(url.text, _client(url))

    def describe(self, url: URL) -> StreamInfo:
        with _client(url) as client:
            return StreamInfo(
                url=url.text,
                layout="lhhttt",
                storage="a server",
                slots=0,
                buffer_size=0,
                oldest_seq=None,
                youngest_seq=None,
                count=client.size(),
                bytes=0,
                oldest_time_ns=None,
                youngest_time_ns=None,
                fill=0.0,
                blocking=False,
                details={"reliable": client.is_reliable},
            )

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return _CANNOT_CARRY

    def storage_of(self, url: URL) -> str | None:
        return f"{url.scheme}:{url.host}:{url.port or DEFAULT_PORT}{url.path.rstrip('/')}"


def _client(url: URL) -> QueueClient:
    options = parse_options(url, UrlOptions)
    link: DatagramLink | StreamLink
    if url.scheme == "lhhttt+unix":
        if not url.path:
            raise InvalidURL(url.text, "it names no path", hint="write lhhttt+unix:/path")
        link = StreamLink(url.text, url.path, options.timeout)
    elif url.scheme == "lhhttt+tcp":
        link = StreamLink(url.text, host_alone(url, DEFAULT_PORT), options.timeout)
    else:
        link = DatagramLink(url.text, *host_alone(url, DEFAULT_PORT))
    is_reliable = {"auto": None, "reliable": True, "legacy": False}[options.mode]
    try:
        return QueueClient(
            link, timeout=options.timeout, is_reliable=is_reliable, name=options.client
        )
    except BaseException:
        link.close()
        raise


class LhhtttReader(Reader, Grouped):
    """Takes messages from a queue that other consumers share.

    In the reliable mode messages are leased: `acknowledge` or `ack` settles them, and the others
    are redelivered. A message's `seq` is the number in its tag, which is in `attributes`; a
    redelivered message has the same. From a queue of the prototype, reading takes messages away.
    """

    cannot_carry: ClassVar[Mapping[str, str]] = _CANNOT_CARRY

    def __init__(self, url: str, client: QueueClient) -> None:
        super().__init__(url)
        self._client = client
        self._is_closed = False
        self._messages = self._bytes = 0
        #: Leased, and not handed out.
        self._arrived: list[Message] = []
        #: Epoch and number of the leased messages that are not settled, by their tags: behind a
        #: balancer, the queues number their messages alike.
        self._open: dict[bytes | None, tuple[int, int]] = {}
        self._next_seq: int | None = None
        #: The queue has said that it holds messages. It also counts those whose delay is not over.
        self._is_promised = False
        #: After a read in vain, it is asked again only then; each pause is longer.
        self._idle_pause = self._ask_again_at = 0.0
        #: Of the prototype: why messages behind those that arrived did not come, and messages that
        #: arrived and were never handed out.
        self._failure: ConnectionLost | None = None
        self._lost = 0
        if not client.is_reliable:
            log.warning("%s: what is read is taken away from the queue", url)

    # --- reading ------------------------------------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        self._check_open()
        if not self._arrived:
            self._fetch(limit, 0.0)
        taken, rest = self._arrived[:limit], self._arrived[limit:]
        count, size = len(taken), _size([message.payload for message in taken])
        # Last, with no call behind it: whoever is interrupted before it gets them at the next read.
        self._arrived = rest
        if taken:
            self._next_seq = taken[-1].seq + 1
        self._messages += count
        self._bytes += size
        return taken

    def _untake(self, messages: list[Message]) -> None:
        count, size = len(messages), _size([message.payload for message in messages])
        arrived = messages + self._arrived
        self._messages -= count
        self._bytes -= size
        self._arrived = arrived

    def _fetch(self, limit: int, wait: float) -> None:
        now = time.time_ns()
        if not self._client.is_reliable:
            self._take_away(limit, now)
            return
        tags, payloads = self._client.get(limit, wait)
        if tags:
            self._idle_pause = 0.0
        elif self._is_promised:
            self._idle_pause = min(max(self._idle_pause * 2, LONGEST_PAUSE), _LONGEST_IDLE_PAUSE)
            self._ask_again_at = time.monotonic() + self._idle_pause
        self._is_promised = False
        rest = iter(payloads)
        for epoch, first, last in tags:
            named = b"%x.%%d" % epoch
            tagged: dict[bytes | None, tuple[int, int]] = {
                named % number: (epoch, number) for number in range(first, last + 1)
            }
            # First: one that is open and did not arrive counts as handed out.
            self._arrived += [
                Message(number, now, now, 0, 0, None, tag, next(rest))
                for tag, (_, number) in tagged.items()
            ]
            self._open |= tagged

    def _take_away(self, limit: int, now: int) -> None:
        """Take messages from a queue of the prototype, which keeps none of them.

        :raises ConnectionLost: an answer is lost, after all before it were handed out.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        for _ in range(limit):
            try:
                payload = self._client.get_legacy()
            except ConnectionLost as error:
                if not self._arrived:
                    raise
                self._failure = error
                return
            if not payload:
                return
            number = self._messages + len(self._arrived)
            self._arrived.append(Message(number, now, now, 0, 0, None, None, payload))

    def _wait_and_take(self, limit: int, timeout: float | None) -> list[Message]:
        if not self._client.is_reliable:
            return super()._wait_and_take(limit, timeout)
        # One request waits at the queue for all of the time, where a message wakes it.
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._arrived and (left := deadline - time.monotonic()) > 0:
            began = time.monotonic()
            self._fetch(limit, left)
            if not self._arrived and time.monotonic() < began + LONGEST_PAUSE < deadline:
                time.sleep(LONGEST_PAUSE)  # it has too many that wait, or has lent too much
        return self._take(limit) if self._arrived else []

    def _has_news(self) -> bool:
        self._check_open()
        if self._arrived or self._failure is not None:
            return True
        if time.monotonic() < self._ask_again_at:
            return False
        # Asked, not leased: a caller that waits for many queues may read another one first.
        self._is_promised = self._client.size() > 0
        return self._is_promised

    def available(self) -> Iterator[Message]:
        for _ in range(self._client.size() + len(self._arrived)):
            messages = self._take(1)
            if not messages:
                return
            yield messages[0]

    # --- settling -----------------------------------------------------------------------------

    @property
    def redelivers(self) -> bool:
        """Whether the queue has leases; one of the prototype keeps nothing that it gave."""
        return self._client.is_reliable

    def ack(self, messages: Delivered) -> None:
        self._settle(_tags_of(messages), None)

    def nack(self, messages: Delivered, delay: float = 0.0) -> None:
        self._settle(_tags_of(messages), delay)

    def acknowledge(self) -> None:
        """Settle every message that was returned to the caller."""
        waiting = {message.attributes for message in self._arrived}
        handed = {tag: number for tag, (_, number) in self._open.items() if tag not in waiting}
        self._settle(handed, None)

    def _settle(self, tags: Mapping[bytes | None, int], delay: float | None) -> None:
        """Acknowledge, or give back, the messages with these tags and numbers."""
        self._check_open()
        if not self._client.is_reliable:
            if delay is not None:
                raise Unsupported(f"{self.url}: a queue of the prototype takes nothing back")
            return
        lost = [(number, number) for tag, number in tags.items() if tag not in self._open]
        known = sorted([tag for tag in tags if tag in self._open], key=self._open.__getitem__)
        for at in range(0, len(known), _AT_ONCE):
            part = known[at : at + _AT_ONCE]
            runs = _runs(self._open[tag] for tag in part)
            try:
                if delay is None:
                    self._client.ack(runs)
                else:
                    self._client.nack(runs, delay)
            except LeaseLost as error:
                lost += error.ranges
            for tag in part:
                del self._open[tag]
        if lost:
            raise LeaseLost(lost, hint="serve with a longer --lease, or read fewer at once")

    def group(self) -> GroupStatistics:
        raise Unsupported(f"{self.url}: the books of a queue are at its server")

    # --- what every reader has ----------------------------------------------------------------

    def seek(self, position: PositionLike) -> None:
        raise Unsupported(
            f"{self.url}: a queue gives its oldest message next, not {position}", hint=_WHAT_INSTEAD
        )

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._lost,
            filtered=0,
            restarts=0,
            next_seq=self._next_seq,
            backlog=len(self._arrived),
            losses=(),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")

    def close(self) -> None:
        """Return unsettled messages to the queue; one of the prototype takes none. Idempotent."""
        if self._is_closed:
            return
        if self._arrived and not self._client.is_reliable:
            self._lost += len(self._arrived)
            self._arrived.clear()
            log.warning("%s: %s messages were taken away, and not read", self.url, self._lost)
        try:
            if self._open:
                self._settle({tag: number for tag, (_, number) in self._open.items()}, 0.0)
        except PenstockError as error:  # then their leases end by themselves
            log.info("%s: %s", self.url, error)
        finally:
            self._is_closed = True
            self._client.close()


def _tags_of(messages: Delivered) -> dict[bytes | None, int]:
    """Return the numbers of messages that were read, by their tags."""
    if isinstance(messages, Message):
        return {messages.attributes: messages.seq}
    if isinstance(messages, pa.RecordBatch):
        columns = [messages.column(name).to_pylist() for name in ("attributes", "seq")]
        return dict(zip(*columns, strict=True))
    return {message.attributes: message.seq for message in messages}


def _runs(numbers: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the runs of epochs and numbers, in their order."""
    runs: list[tuple[int, int, int]] = []
    for epoch, number in numbers:
        if runs and runs[-1][0] == epoch and runs[-1][2] == number - 1:
            runs[-1] = (epoch, runs[-1][1], number)
        else:
            runs.append((epoch, number, number))
    return runs


class LhhtttWriter(BookedWriter):
    """Appends messages to a queue; each is stored when the call returns."""

    cannot_carry: ClassVar[Mapping[str, str]] = _CANNOT_CARRY

    def __init__(self, url: str, client: QueueClient) -> None:
        super().__init__(url)
        self._client = client

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
        del time_ns, created_ns
        self._headers_dropped += bool(type or subtype or stream or attributes)
        self._send([bytes(payload)])
        return self._messages - 1

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        messages = [bytes(payload) for payload in payloads]
        if type or subtype:
            self._headers_dropped += len(messages)
        self._send(messages)
        return self._messages - 1 if messages else None

    def write_batch(self, batch: Batch) -> int | None:
        check_batch(batch)
        self._headers_dropped += count_headers(batch, "stream", "attributes")
        self._send(batch.column("payload").to_pylist())
        return self._messages - 1 if len(batch) else None

    def _send(self, messages: Sequence[bytes]) -> None:
        """Send in order, up to the first that the queue cannot take; the rest is refused."""
        self._check_open()
        before = self._messages
        try:
            self._send_fitting(messages)
        except BaseException:
            self._refused += len(messages) - (self._messages - before)
            raise

    def _send_fitting(self, messages: Sequence[bytes]) -> None:
        fault: PenstockError | None = None
        for at, message in enumerate(messages):
            try:
                self._check(message)
            except (MessageTooLarge, UnfitPayload) as error:
                fault, messages = error, messages[:at]
                break
        if self._client.is_reliable:
            self._client.put(messages, lambda some: self._count_sent(len(some), _size(some)))
        else:
            for message in messages:
                self._client.put_legacy(message)
                self._count_sent(1, len(message))
        if fault is not None:
            raise fault

    def _check(self, message: bytes) -> None:
        """Check that a message can be sent.

        :raises MessageTooLarge: it does not fit a datagram.
        :raises UnfitPayload: it is not text, and the queue takes texts only.
        """
        largest = self._client.largest
        if len(message) > largest:
            raise MessageTooLarge(len(message), largest, hint="use lhhttt+tcp://host:port")
        if self._client.is_reliable or message.isascii():
            return
        try:
            message.decode()
        except UnicodeDecodeError as error:
            raise UnfitPayload(
                f"message for {self.url}",
                f"byte {error.start}",
                "text in UTF-8",
                f"{message[error.start : error.end]!r}",
                hint="a queue of the prototype takes texts only",
            ) from None

    def close(self) -> None:
        self._is_closed = True
        self._client.close()


def _size(messages: Sequence[bytes]) -> int:
    return sum(map(len, messages))
