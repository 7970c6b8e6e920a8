"""How does a client open a remote queue, and what can it ask of it?

Works with LROSE's unmodified server, and uses what ours can do beyond it (`fmq_wire.OURS`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import ConnectionLost, MessageTooLarge, NotFound, PenstockError
from penstock.core.options import parse_options
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.protocols.lrose.addresses import Address, parse_address
from penstock.protocols.lrose.connection import Connection
from penstock.protocols.lrose.ds_message import Category, CommonPart, DsMessage, ErrorCode
from penstock.protocols.lrose.errors import RequestRefused
from penstock.protocols.lrose.fmq_messages import Messages, decode_messages
from penstock.protocols.lrose.fmq_options import FmqOptions
from penstock.protocols.lrose.fmq_short import encode_write, find_written
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
from penstock.queue.options import Creation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.url import URL

__all__ = ["QueueLink", "Target", "open_link", "open_to_read", "open_to_write"]

#: Messages that a server of ours is asked for at a time, at first and at most; LROSE's has its own
#: limit. A line that breaks soon gets few of them through, and those are not asked for again.
_FIRST: Final = 250
_MOST: Final = 1000
#: After more than so many there are probably more. LROSE's server sends up to 101.
_FEW: Final = 90
#: Attempts to have LROSE's server open a queue beside a busy writer.
_MOST_OPENINGS: Final = 100
#: Requests without parts that are sent at a time.
_AT_ONCE: Final = 256
#: How soon, and how often, a server that cannot be reached is tried again.
_BACKOFF: Final = Backoff(initial=0.02, factor=1.7, maximum=1.0)


class Target(NamedTuple):
    """A remote queue, and how it is used."""

    url: str
    address: Address
    options: FmqOptions

    @classmethod
    def of(cls, url: URL) -> Target:
        """Take a URL apart.

        :raises InvalidURL: it is none of a remote queue.
        :raises InvalidOption: an option is unknown, or its value does not fit.
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
        #: Of a WRITE that was refused: messages that were appended all the same, if that is known.
        self.written: int | None = 0
        #: The type of messages that were asked for already.
        self._ahead: int | None = None
        self._was_ahead = False
        self._most = _FIRST
        #: A server of ours said that the queue was created anew, since it was looked at last.
        self.is_another = False
        self._restarts = 0
        #: The id of the message that the server read last, if that is known.
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
            # LROSE's server has one answer for all. To a reader it means this, mostly.
            return NotFound(f"{self._target.url} cannot be opened: {error}", hint=_CREATE_HINT)
        return error

    # --- requests ---------------------------------------------------------------------------

    def ask(self, op: Op, sub_type: int = -1, mode: int = -1) -> DsMessage:
        """Send a request without parts, and return its reply.

        :raises RequestRefused: the server says that it failed.
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
        """Go behind a message; False: it is not there, or the server cannot do that."""
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
        """Return messages from here on; a server of ours waits some seconds for the first.

        With `ahead`, the next ones are asked for as soon as there seem to be more, so that the
        server gets them ready while these are taken apart.
        """
        messages = self._read(wanted, wait, most, ahead=ahead)
        if not messages.ids and wait > 0 and self._was_ahead:
            # That question was asked before, and was not to wait.
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
        except BaseException:
            self._connection.close()  # also after Ctrl-C: replies would go to other questions
            raise
        head, messages = decode_messages(payload)
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
        """Return the request that has the server open the queue of its path anew, at its end."""
        return encode_init(self._init)

    @property
    def has_asked(self) -> bool:
        """Whether the next messages were asked for already."""
        return self._ahead is not None

    def read_last_and_on(self) -> Messages:
        """Read the last message once more, and what is behind it."""
        return self.read_after([DsMessage(Op.SEEK, SeekTo.BACK)])

    @staticmethod
    def reading() -> DsMessage:
        """Return the request to read what is next."""
        return DsMessage(Op.READ)

    def ask_all(self, requests: Sequence[DsMessage]) -> list[bytes]:
        """Send requests one behind the other, and return the replies to them.

        They are so few at a time that neither side waits for the other to take something.

        :raises RequestRefused: one of them failed; the last one that did is told.
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
        """Send requests, and return what is there to read after them."""
        _, messages = decode_messages(self.ask_all([*requests, self.reading()])[-1])
        if messages.ids:
            self.last_id = messages.ids[-1]
        return messages

    def _settle(self) -> None:
        """Take the reply to a question that was asked ahead: nobody wants it any more."""
        if self._ahead is not None:
            self._ahead = None
            self._connection.receive()

    def write(self, payload: bytes) -> int | None:
        """Send a WRITE; return the id of its last message if the server says so.

        :raises RequestRefused: it was refused; see `written`.
        :raises MessageTooLarge: a message of it can never fit; see `written`.
        """
        return self._written_id(self._connection.exchange(SOCKET_ID, payload).payload)

    def _written_id(self, reply: bytes) -> int | None:
        head = DsMessage.head_of(reply)
        if head.error:
            raise self._error(DsMessage.from_bytes(reply))
        return head.mode if self.is_ours else None

    def write_one(self, payload: bytes, type: int, subtype: int) -> int | None:
        """Append one plain message; otherwise as `write`."""
        connection = self._connection
        frame = encode_write(connection.seq + 1, payload, type, subtype)
        reply = connection.exchange_frame(frame, find_written)
        if isinstance(reply, Frame):
            return self._written_id(reply.payload)
        return reply if self.is_ours else None

    @property
    def is_sent(self) -> bool:
        """Whether the last request went out whole: it may have been carried out."""
        return self._connection.is_sent

    @property
    def is_alive(self) -> bool:
        """Whether the server has not hung up meanwhile."""
        return self._connection.is_alive

    def _error(self, reply: DsMessage) -> PenstockError:
        """Return the error that a reply means: the server's own one where ours says so."""
        self.written = max(reply.serial_num, 0) if self.is_ours else None
        if self.is_ours and reply.mode == Failure.NOT_FOUND:
            return NotFound(f"{self._target.url}: {reply.error_text}", hint=_CREATE_HINT)
        if self.is_ours and reply.mode == Failure.TOO_LARGE:
            numbers = [part.number for part in reply.parts_of(CommonPart.INT)]
            if len(numbers) == _SIZE_AND_LIMIT:
                return MessageTooLarge(*numbers, hint="create the queue with a larger size=")
        return self._connection.refusal(reply)

    def close(self) -> None:
        """Say good-bye, and hang up."""
        with contextlib.suppress(PenstockError, OSError):
            message = DsMessage(Op.CLOSE, category=Category.END_SERIES)
            self._connection.send(SOCKET_ID, message.to_bytes())
        self._connection.close()

    def abandon(self) -> None:
        """Hang up."""
        self._connection.close()


def _is_overtaken(reply: DsMessage) -> bool:
    """Tell whether LROSE's server lost the end of a queue, to a writer, while it opened it."""
    return bool(reply.error) and "Cannot find slot for id" in (reply.error_text or "")


_CREATE_HINT: Final = "write to it first, or wait for it with wait=true"
_SIZE_AND_LIMIT: Final = 2


def open_link(
    target: Target, mode: OpenMode, patience: float, *, compress: bool = False
) -> QueueLink:
    """Open a queue, trying for some seconds to reach its server.

    :raises ConnectionLost: it cannot be reached.
    :raises NotFound: there is no such queue.
    """
    policy = RetryPolicy(
        retry_on=_may_pass, backoff=_BACKOFF, max_attempts=None, max_elapsed=patience
    )
    return retry(lambda: QueueLink(target, mode, compress=compress), policy)


def _may_pass(error: Exception) -> bool:
    """Tell whether a connection that failed may work a little later."""
    if isinstance(error, RequestRefused):
        return error.code == ErrorCode.SERVICE_DENIED
    return isinstance(error, ConnectionLost)


def open_to_read(target: Target, patience: float) -> QueueLink:
    """Open a queue for reading; with `wait`, once it is there."""
    wait = target.options.wait
    if not wait:
        return open_link(target, OpenMode.READ_ONLY, patience)
    policy = RetryPolicy(
        retry_on=lambda error: isinstance(error, NotFound) or _may_pass(error),
        backoff=_BACKOFF,
        max_attempts=None,
        max_elapsed=None if math.isinf(wait) else wait,
    )
    return retry(lambda: QueueLink(target, OpenMode.READ_ONLY), policy)


def open_to_write(target: Target, creation: Creation, patience: float) -> QueueLink:
    """Open a queue for writing, and make it where that is asked for.

    :raises NotFound: there is none, and none is to be made.
    """
    compress = target.options.compress.method is not None
    if creation is Creation.ALWAYS:
        return open_link(target, OpenMode.CREATE, patience, compress=compress)
    # LROSE's READ_WRITE looks at the whole queue without a lock, and empties it if a writer is at
    # work just then (spec lrose 6.1, 6). So it only serves to make one that is not there.
    try:
        open_to_read(target, patience).close()
    except NotFound:
        if creation is Creation.NEVER:
            raise
        return open_link(target, OpenMode.READ_WRITE, patience, compress=compress)
    return open_link(target, OpenMode.BLOCKING_READ_WRITE, patience, compress=compress)
