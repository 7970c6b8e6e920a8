"""How does a client open a remote queue, and which requests can it send?

Works with LROSE's unmodified server, and uses what ours can do beyond it (`fmq_wire.OURS`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from penstock.core.errors import ConnectionLost, Malformed, MessageTooLarge, NotFound, PenstockError
from penstock.core.message import Message
from penstock.core.options import Duration, Options, Patience, Size, parse_options
from penstock.core.overflow import DropReason
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.core.statistics import Loss
from penstock.protocols.lrose.addresses import Address, parse_address
from penstock.protocols.lrose.ds_client import Connection, RequestRefused
from penstock.protocols.lrose.ds_message import Category, CommonPart, DsMessage, ErrorCode
from penstock.protocols.lrose.fmq_messages import (
    Messages,
    decode_messages,
    encode_write,
    find_written,
)
from penstock.protocols.lrose.fmq_wire import (
    OURS,
    SOCKET_ID,
    Failure,
    Init,
    Op,
    OpenMode,
    SeekTo,
    encode_init,
)
from penstock.protocols.lrose.sku import Frame
from penstock.queue.classic._rows import make_messages
from penstock.queue.classic.compression import decompress
from penstock.queue.classic.options import Compression
from penstock.queue.options import Creation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.url import URL

__all__ = [
    "CANNOT_CARRY",
    "READER_OPTIONS",
    "WRITER_OPTIONS",
    "FmqOptions",
    "QueueLink",
    "ReceivedMessages",
    "Target",
    "open_link",
    "open_to_read",
    "open_to_write",
]

# --- options ------------------------------------------------------------------------------------

#: Fields that the protocol cannot carry.
CANNOT_CARRY: Final[Mapping[str, str]] = {
    "time_ns": "kept to the second by a server of ours, else the server's own",
    "stream": "dropped",
    "attributes": "dropped",
}

#: Options that writers ignore, and those that readers ignore.
READER_OPTIONS: Final = frozenset({"type", "filter", "damaged", "poll"})
WRITER_OPTIONS: Final = frozenset(
    {"slots", "size", "compress", "create", "blocking", "doubt", "batch"}
)


def _compression(value: object) -> object:
    """Accept LROSE's on and off, too; on means gzip (docs/specs/lrose.md 1.13)."""
    return {"true": "gzip", "on": "gzip", "false": "off"}.get(str(value), value)


class FmqOptions(Options):
    """Options of `fmqp://host:port/path`."""

    #: How long to retry a broken connection before it is an error.
    retry: Duration = 30.0
    #: Timeout of a connection, and of a reply.
    timeout: Annotated[Duration, Field(gt=0)] = 30.0
    #: Most bytes of a reply, and of a message.
    max_message: Annotated[Size, Field(ge=1024, le=(1 << 31) - 1)] = 64 << 20
    #: Wait for the server and the queue to appear: `true`, or for how long.
    wait: Patience = 0.0

    #: Reader: deliver only messages of this type.
    type: int | None = None
    #: Reader: which side skips the others. Only the client can tell them from lost ones.
    filter: Literal["here", "server"] = "here"
    #: Reader: raise an error at a damaged message, or count it as lost and go on.
    damaged: Literal["fail", "skip"] = "fail"
    #: Reader: the longest pause between two polls of a server that cannot wait.
    poll: Annotated[Duration, Field(ge=0.001, le=60)] = 0.5

    #: Writer: slots and bytes of a queue that is created.
    slots: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    size: Annotated[Size, Field(ge=12, le=(1 << 31) - 1)] = 10 << 20
    #: Writer: compress before sending.
    compress: Annotated[Compression, BeforeValidator(_compression)] = Compression.OFF
    create: Creation = Creation.MISSING
    #: Writer: let the server wait for its reader instead of overwriting.
    blocking: bool = False
    #: Writer: when the answer to a write is lost, raise an error, or write again (maybe twice).
    doubt: Literal["raise", "again"] = "raise"
    #: Writer: most messages of `write_many` and `write_batch` in one request.
    batch: Annotated[int, Field(ge=1, le=100_000)] = 500


# --- the connection -----------------------------------------------------------------------------

#: Messages requested at a time from a server of ours, at first and at most; LROSE's has its own
#: limit. The start is small so that an unstable line makes progress.
_FIRST: Final = 250
_MOST: Final = 1000
#: A reply with more messages than this is probably not the last. LROSE's server sends up to 101.
_FEW: Final = 90
#: Attempts to open a queue with a busy writer at LROSE's server.
_MOST_OPENINGS: Final = 100
#: Requests without parts that are sent at a time.
_AT_ONCE: Final = 256
#: Backoff of the retries to reach a server.
_BACKOFF: Final = Backoff(initial=0.02, factor=1.7, maximum=1.0)


class Target(NamedTuple):
    """A remote queue, and its options."""

    url: str
    address: Address
    options: FmqOptions

    @classmethod
    def of(cls, url: URL) -> Target:
        """Parse a URL.

        :raises InvalidURL: it is not the URL of a remote queue.
        :raises InvalidOption: an option is unknown, or its value is not valid.
        """
        return cls(url.text, parse_address(url), parse_options(url, FmqOptions))


class QueueLink:
    """One connection to a server, with one queue open on it."""

    def __init__(self, target: Target, mode: OpenMode, *, compress: bool = False) -> None:
        options = target.options
        self._target = target
        self._connection = Connection(
            target.address.host,
            target.address.port,
            connect_timeout=options.timeout,
            timeout=options.timeout,
            max_bytes=options.max_message,
        )
        #: Whether the server is one of ours.
        self.is_ours = False
        #: Messages of a refused WRITE that were appended nevertheless, if known.
        self.written: int | None = 0
        #: The last request was refused because the next message is damaged.
        self.is_damaged = False
        #: The type of the messages requested ahead.
        self._ahead: int | None = None
        self._was_ahead = False
        self._most = _FIRST
        #: A server of ours reported that the queue was recreated, since this was last checked.
        self.is_another = False
        self._restarts = 0
        #: The id of the last message that the server has read, if known.
        self.last_id: int | None = None
        self._init = Init(
            str(target.address),
            mode,
            mode,  # as LROSE's clients do: where to start is said by SEEK
            compress=compress,
            num_slots=options.slots,
            buf_size=options.size,
            proc_name=f"penstock {os.getpid()}",
            is_ours=True,
        )
        try:
            reply = self._connection.call(SOCKET_ID, encode_init(self._init))
            for attempt in range(_MOST_OPENINGS):
                if not _is_overtaken(reply):
                    break
                time.sleep(0.0001 * attempt)
                reply = self._connection.call(SOCKET_ID, encode_init(self._init))
        except BaseException:
            self._connection.close()
            raise
        self.is_ours = reply.flags == OURS
        self._connection.quick_ack = not self.is_ours
        if reply.error:
            self._connection.close()
            raise self._opening_failed(reply, mode)

    def _opening_failed(self, reply: DsMessage, mode: OpenMode) -> PenstockError:
        error = self._error(reply)
        is_failure = reply.error == ErrorCode.FAILED and not _is_overtaken(reply)
        if mode is OpenMode.READ_ONLY and is_failure and not self.is_ours:
            # LROSE's server has one error for all cases. For a reader it mostly means this.
            return NotFound(f"{self._target.url} cannot be opened: {error}", hint=_CREATE_HINT)
        return error

    # --- requests ---------------------------------------------------------------------------

    def ask(self, op: Op, sub_type: int = -1, mode: int = -1) -> DsMessage:
        """Send a request without parts, and return its reply.

        :raises RequestRefused: the server reports an error.
        """
        self._settle()
        self.last_id = None
        reply = self._connection.call(SOCKET_ID, DsMessage(op, sub_type, mode))
        if reply.error:
            raise self._error(reply)
        return reply

    def seek(self, place: SeekTo) -> None:
        self.ask(Op.SEEK, place)

    def seek_after_id(self, id: int) -> bool:
        """Move after a message; False: it does not exist, or the server cannot do that."""
        if not self.is_ours:
            return False  # LROSE's server answers with an error, always
        try:
            self.ask(Op.SEEK_TO_ID, id)
        except RequestRefused:
            return False
        return True

    def read(
        self, wanted: int = -1, wait: float = 0.0, most: int | None = None, *, ahead: bool = False
    ) -> Messages:
        """Return the next messages; a server of ours waits up to `wait` seconds for the first.

        With `ahead`, the following ones are requested at once if there seem to be more, so that the
        server prepares them while these are decoded.
        """
        messages = self._read(wanted, wait, most, ahead=ahead)
        if not messages.ids and wait > 0 and self._was_ahead:
            # That request was sent ahead, without a wait.
            messages = self._read(wanted, wait, most, ahead=ahead)
        return messages

    def _read(self, wanted: int, wait: float, most: int | None, *, ahead: bool) -> Messages:
        if self._ahead is not None and self._ahead != wanted:
            self._settle()
        self._was_ahead = self._ahead is not None
        timeout = self._target.options.timeout + max(wait, 0.0)
        try:
            if not self._was_ahead:
                self._ask_for_messages(wanted, wait, most)
            self._ahead = None
            payload = self._connection.receive(timeout).payload
            if ahead and int.from_bytes(payload[36:40]) > 2 * _FEW:  # nParts: two a message
                self._most = min(2 * self._most, _MOST)
                self._ask_for_messages(wanted, 0.0, most)
                self._ahead = wanted
            head, messages = decode_messages(payload)
        except BaseException:
            self._connection.close()  # also after Ctrl-C: replies would go to other questions
            raise
        if head.error:
            self.last_id = None
            raise self._error(DsMessage.from_bytes(payload))
        if messages.ids:
            self.last_id = messages.ids[-1]
        if self.is_ours and head.serial_num > self._restarts:
            self._restarts = head.serial_num
            self.is_another = True
        return messages

    def _ask_for_messages(self, wanted: int, wait: float, most: int | None) -> None:
        milliseconds = int(wait * 1000) if self.is_ours else -1
        number = (most or self._most) if self.is_ours else 0
        request = DsMessage(Op.READ, wanted, milliseconds, number)
        self._connection.send(SOCKET_ID, request.to_bytes())

    # --- what LROSE's server needs ----------------------------------------------------------

    def reopening(self) -> DsMessage:
        """Return the request that makes the server reopen the queue of its path, at its end."""
        return encode_init(self._init)

    @property
    def has_asked(self) -> bool:
        """Whether the next messages were requested already."""
        return self._ahead is not None

    def read_last_and_on(self) -> Messages:
        """Read the last message again, and those after it."""
        return self.read_after([DsMessage(Op.SEEK, SeekTo.BACK)])

    @staticmethod
    def reading() -> DsMessage:
        """Return the request to read the next messages."""
        return DsMessage(Op.READ)

    def ask_all(self, requests: Sequence[DsMessage]) -> list[bytes]:
        """Pipeline requests, and return their replies.

        Only few are sent at a time, so that full socket buffers cannot block both sides.

        :raises RequestRefused: one of them failed; all were sent.
        """
        self._settle()
        self.last_id = None
        replies: list[bytes] = []
        failure: PenstockError | None = None
        try:
            for first in range(0, len(requests), _AT_ONCE):
                some = requests[first : first + _AT_ONCE]
                self._connection.send_all(SOCKET_ID, [request.to_bytes() for request in some])
                for request in some:
                    reply = self._connection.receive().payload
                    if DsMessage.head_of(reply).error:
                        message = DsMessage.from_bytes(reply)
                        is_init = request.type == Op.INIT
                        mode = OpenMode(self._init.open_mode)
                        failed = self._opening_failed(message, mode) if is_init else None
                        failure = failed or failure or self._error(message)
                    replies.append(reply)
        except BaseException:
            self._connection.close()  # as in `_read`
            raise
        if failure is not None:
            raise failure
        return replies

    def read_after(self, requests: Sequence[DsMessage]) -> Messages:
        """Send requests and a read, and return the messages read."""
        _, messages = decode_messages(self.ask_all([*requests, self.reading()])[-1])
        if messages.ids:
            self.last_id = messages.ids[-1]
        return messages

    def _settle(self) -> None:
        """Receive and drop the reply to a read that was sent ahead."""
        if self._ahead is not None:
            self._ahead = None
            self._connection.receive()

    def write(self, payload: bytes) -> int | None:
        """Send a WRITE; return the id of its last message if the reply has it.

        :raises RequestRefused: it was refused; see `written`.
        :raises MessageTooLarge: a message can never fit; see `written`.
        """
        return self._written_id(self._connection.exchange(SOCKET_ID, payload).payload)

    def _written_id(self, reply: bytes) -> int | None:
        head = DsMessage.head_of(reply)
        if head.error:
            raise self._error(DsMessage.from_bytes(reply))
        return head.mode if self.is_ours else None

    def write_one(self, payload: bytes, type: int, subtype: int) -> int | None:
        """Append one plain message; errors as for `write`."""
        connection = self._connection
        frame = encode_write(connection.seq + 1, payload, type, subtype)
        reply = connection.exchange_frame(frame, find_written)
        if isinstance(reply, Frame):
            return self._written_id(reply.payload)
        return reply if self.is_ours else None

    @property
    def is_sent(self) -> bool:
        """Whether the last request was sent completely: it may have been executed."""
        return self._connection.is_sent

    @property
    def is_alive(self) -> bool:
        """Whether the server has not closed the connection."""
        return self._connection.is_alive

    def _error(self, reply: DsMessage) -> PenstockError:
        """Return the error that a reply reports; a server of ours sends its own kind."""
        self.written = max(reply.serial_num, 0) if self.is_ours else None
        self.is_damaged = self.is_ours and reply.mode == Failure.DAMAGED
        if self.is_ours and reply.mode == Failure.NOT_FOUND:
            return NotFound(f"{self._target.url}: {reply.error_text}", hint=_CREATE_HINT)
        if self.is_ours and reply.mode == Failure.TOO_LARGE:
            numbers = [part.number for part in reply.parts_of(CommonPart.INT)]
            if len(numbers) == _SIZE_AND_LIMIT:
                return MessageTooLarge(*numbers, hint="create the queue with a larger size=")
        return self._connection.refusal(reply)

    def close(self) -> None:
        """Close the queue at the server, and disconnect."""
        with contextlib.suppress(PenstockError, OSError):
            message = DsMessage(Op.CLOSE, category=Category.END_SERIES)
            self._connection.send(SOCKET_ID, message.to_bytes())
        self._connection.close()

    def abandon(self) -> None:
        """Disconnect."""
        self._connection.close()


def _is_overtaken(reply: DsMessage) -> bool:
    """Tell whether an open by LROSE's server failed because a writer moved the end."""
    return bool(reply.error) and "Cannot find slot for id" in (reply.error_text or "")


_CREATE_HINT: Final = "write to it first, or wait for it with wait=true"
_SIZE_AND_LIMIT: Final = 2


def open_link(
    target: Target, mode: OpenMode, patience: float, *, compress: bool = False
) -> QueueLink:
    """Open a queue; retry for a while to reach its server.

    :raises ConnectionLost: the server cannot be reached.
    :raises NotFound: no queue has this name.
    """
    policy = RetryPolicy(
        retry_on=_may_pass, backoff=_BACKOFF, max_attempts=None, max_elapsed=patience
    )
    return retry(lambda: QueueLink(target, mode, compress=compress), policy)


def _may_pass(error: Exception) -> bool:
    """Tell whether an error of a connection is transient."""
    if isinstance(error, RequestRefused):
        return error.code == ErrorCode.SERVICE_DENIED
    return isinstance(error, ConnectionLost)


def open_to_read(target: Target, patience: float, limit: float = math.inf) -> QueueLink:
    """Open a queue for reading; with `wait`, once it exists.

    :param limit: seconds after which it is given up, also with a longer `wait`
    """
    wait = min(target.options.wait, limit)
    if not target.options.wait:
        return open_link(target, OpenMode.READ_ONLY, patience)
    policy = RetryPolicy(
        retry_on=lambda error: isinstance(error, NotFound) or _may_pass(error),
        backoff=_BACKOFF,
        max_attempts=None,
        max_elapsed=None if math.isinf(wait) else wait,
    )
    return retry(lambda: QueueLink(target, OpenMode.READ_ONLY), policy)


def open_to_write(target: Target, creation: Creation, patience: float) -> QueueLink:
    """Open a queue for writing; create it if the options say so.

    :raises NotFound: it does not exist, and must not be created.
    """
    compress = target.options.compress.method is not None
    if creation is Creation.ALWAYS:
        return open_link(target, OpenMode.CREATE, patience, compress=compress)
    # LROSE's READ_WRITE looks at the whole queue without a lock, and empties it if a writer is at
    # work just then (docs/specs/lrose.md 6.1 item 6). So it only serves to make one that is not
    # there.
    try:
        open_to_read(target, patience).close()
    except NotFound:
        if creation is Creation.NEVER:
            raise
        return open_link(target, OpenMode.READ_WRITE, patience, compress=compress)
    return open_link(target, OpenMode.BLOCKING_READ_WRITE, patience, compress=compress)


# --- received messages ---------------------------------------------------------------------------

_SECOND: Final = 1_000_000_000


class ReceivedMessages:
    """Received messages that are not read yet: decompressed, of the wanted type only."""

    def __init__(self, options: FmqOptions) -> None:
        self._options = options
        self.ready: deque[Message] = deque()
        #: A damaged message behind those that are ready; nothing after it can be read.
        self.failure: Malformed | None = None
        #: Messages of other types that were left out.
        self.filtered = 0

    def contents(self) -> tuple[list[Message], Malformed | None]:
        """Return all messages, for `replace`."""
        return list(self.ready), self.failure

    def replace(self, contents: tuple[list[Message], Malformed | None] = ([], None)) -> None:
        """Replace all messages by earlier contents, or by none."""
        self.ready.clear()
        self.ready.extend(contents[0])
        self.failure = contents[1]

    def with_more(
        self, messages: Messages, seqs: Sequence[int]
    ) -> tuple[ReceivedMessages, list[Loss]]:
        """Return a copy with more messages, and the damaged ones, which are left out.

        Nothing is added behind a failure.
        """
        if self.failure is not None:
            return self, []
        payloads = messages.payloads
        damaged: list[Loss] = []
        failure: Malformed | None = None
        if any(messages.pre_compressed):
            payloads, good, damaged, failure = self._unpacked(messages, seqs)
            if len(good) < len(payloads):
                payloads, seqs = [payloads[row] for row in good], [seqs[row] for row in good]
                messages = messages.chosen(good)
        moments, count = messages.times, len(payloads)
        if moments and moments.count(moments[0]) == count:
            times = [moments[0] * _SECOND] * count  # one number for all of them
        else:
            times = [moment * _SECOND for moment in moments]
        made = make_messages(
            Message, list(seqs), times, messages.types, messages.subtypes, payloads
        )
        wanted = self._options.type
        if wanted is not None and self._options.filter != "server":
            made = [message for message in made if message.type == wanted]
        more = ReceivedMessages(self._options)
        more.ready.extend([*self.ready, *made])
        more.failure = failure
        more.filtered = self.filtered + count - len(made)
        return more, damaged

    def _unpacked(
        self, messages: Messages, seqs: Sequence[int]
    ) -> tuple[list[bytes], list[int], list[Loss], Malformed | None]:
        """Decompress payloads; stop before a damaged one, or skip it.

        Returns the payloads, the rows that are readable, those that are not, and why it stopped.
        """
        payloads = list(messages.payloads)
        good: list[int] = []
        damaged: list[Loss] = []
        for row, is_compressed in enumerate(messages.pre_compressed):
            if is_compressed and payloads[row]:
                try:
                    payloads[row] = self._decompressed(messages, row)
                except Malformed as fault:
                    if self._options.damaged == "fail":
                        fault.hint = "damaged=skip counts it as lost and goes on"
                        return payloads, good, damaged, fault
                    damaged.append(Loss(seqs[row], seqs[row], DropReason.DAMAGED))
                    continue
            good.append(row)
        return payloads, good, damaged, None

    def _decompressed(self, messages: Messages, row: int) -> bytes:
        said = messages.uncompressed_lens[row]
        payload = decompress(messages.payloads[row], self._options.max_message)
        if len(payload) != said:
            raise Malformed("DsFmq message", "uncompressedLen", len(payload), said)
        return payload
