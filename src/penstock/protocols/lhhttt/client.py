"""How does a program ask a queue, and never take one answer for another?

In the reliable mode, if the queue has it, every request carries a number, or the tag of a message,
that its reply repeats, and is sent again until a reply arrives. The prototype's replies carry no
number: so only one request is in flight at a time, and each comes from a port of its own, where no
reply to another arrives, late or doubled. So does a request about a message after an earlier one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import secrets
import select
import socket
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Final, NoReturn

from penstock.core.errors import (
    ConnectionLost,
    LeaseLost,
    Malformed,
    MessageTooLarge,
    PenstockError,
    Unacknowledged,
    WriteTimeout,
)
from penstock.core.interfaces import Closable
from penstock.core.retry import Backoff
from penstock.protocols.connection import tune
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.host_port import why_unreachable
from penstock.protocols.lhhttt._frames import fitting
from penstock.protocols.lhhttt.commands import (
    LONGEST_WAIT_MS,
    MOST_MESSAGES,
    Code,
    Reply,
    Tags,
    ack_request,
    format_tags,
    lease_request,
    nack_request,
    parse_limits,
    parse_reply,
    parse_tags,
    store_request,
)
from penstock.protocols.lhhttt.frames import FrameDecoder, decode_bytes, encode_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["DatagramLink", "Link", "QueueClient", "QueueRefused", "StreamLink"]

log = logging.getLogger(__name__)

#: Seconds to wait for a reply, for the first and each further attempt.
_WAITS: Final = Backoff(initial=0.1, maximum=1.0, jitter=0.25)
#: How often `CAPS` is asked before a queue is taken for one that does not know it.
_CAPS_ASKED: Final = 5
#: Bytes of a message, with its number and its sender, that fit a datagram; and of a batch of them.
_LARGEST_DATAGRAM: Final = 65_507
_HEADERS: Final = 100
_BATCH: Final = 60_000
_STREAM_BATCH: Final = 1 << 20
_FRAME: Final = 9
_HOW_LARGE: Final = (
    "the server's --max-message, --capacity-bytes and the segment= of its journal set the limit"
)
#: What a stream's answer may have.
_LARGEST_ANSWER: Final = 1 << 30


class QueueRefused(PenstockError):
    """The queue refused a request; the error says why."""

    def __init__(self, server: str, code: str, text: str) -> None:
        super().__init__(f"{server} refuses: {text or code}")
        self.code = code
        self.text = text


# --- ways to a queue ----------------------------------------------------------------------------


class Link(Closable):
    """A connection to a queue that carries frames."""

    #: Whether frames can get lost on this link, so that requests are sent again.
    is_lossy: bool
    #: Bytes of a batch of messages that it takes well, and of a message that it takes at all.
    batch: int
    largest: int

    def __init__(self, server: str) -> None:
        self.server = server

    @abstractmethod
    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames.

        :raises OSError: the queue cannot be reached.
        """

    @abstractmethod
    def receive(self, timeout: float) -> list[bytes]:
        """Return the bodies of received frames; wait up to `timeout` seconds for the first.

        :raises OSError: the queue cannot be reached.
        """

    @abstractmethod
    def renew(self) -> None:
        """Reconnect, so that no reply to an earlier request can arrive any more.

        :raises OSError: the queue cannot be reached.
        """


class DatagramLink(Link):
    """UDP to one queue. The socket is connected: datagrams of other senders are dropped."""

    is_lossy = True
    batch = _BATCH
    largest = _LARGEST_DATAGRAM - _HEADERS

    def __init__(self, server: str, host: str, port: int) -> None:
        """Resolve the address and connect the socket; nothing is sent.

        :raises ConnectionLost: the host name does not resolve.
        """
        super().__init__(server)
        self._to = (host, port)
        try:
            self._socket = DatagramSocket.connect(host, port)
        except OSError as error:
            raise ConnectionLost(server, why_unreachable(error, host, port)) from error

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send([(frame, None) for frame in frames], 1.0)

    def receive(self, timeout: float) -> list[bytes]:
        answers = []
        for datagram, _ in self._socket.receive(timeout=timeout).whole:
            with contextlib.suppress(Malformed):  # it was changed on its way
                answers.append(decode_bytes(datagram))
        return answers

    def renew(self) -> None:
        self._socket.close()
        self._socket = DatagramSocket.connect(*self._to)

    def close(self) -> None:
        self._socket.close()


class StreamLink(Link):
    """A connection to a queue, by TCP or a Unix socket."""

    is_lossy = False
    batch = _STREAM_BATCH
    largest = _LARGEST_ANSWER

    def __init__(self, server: str, to: tuple[str, int] | str, timeout: float) -> None:
        """Connect.

        :raises ConnectionLost: nothing listens there.
        """
        super().__init__(server)
        self._to = to
        self._timeout = timeout
        try:
            self._connect()
        except OSError as error:
            host, port = to if isinstance(to, tuple) else (to, 0)
            raise ConnectionLost(server, why_unreachable(error, host, port)) from error

    def _connect(self) -> None:
        self._decoder = FrameDecoder(_LARGEST_ANSWER)
        if isinstance(self._to, tuple):
            self._socket = socket.create_connection(self._to, self._timeout)
            tune(self._socket)
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._timeout)
        self._socket.connect(self._to)

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.sendall(b"".join(frames))

    def receive(self, timeout: float) -> list[bytes]:
        poll = select.poll()  # `select.select` refuses descriptors above 1,023
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(math.ceil(timeout * 1000)):
            return []
        piece = self._socket.recv(1 << 18)
        if not piece:
            raise ConnectionResetError("the queue has ended the connection")
        try:
            return list(self._decoder.feed(piece))
        except Malformed as error:
            raise ConnectionResetError(str(error)) from error

    def renew(self) -> None:
        self._socket.close()
        self._connect()

    def close(self) -> None:
        self._socket.close()


# --- the client ---------------------------------------------------------------------------------


class QueueClient(Closable):
    """Asks one queue. Not safe to share between threads."""

    def __init__(
        self,
        link: Link,
        *,
        timeout: float = 10.0,
        is_reliable: bool | None = None,
        name: str = "",
    ) -> None:
        """Take over a link to a queue, and ask for the queue's capabilities.

        :param timeout: seconds after which an unanswered request fails
        :param is_reliable: whether the queue has the reliable mode; None asks it
        :param name: prefix of this client's name at the queue; a random suffix makes it unique

        :raises ConnectionLost: the queue does not answer.
        """
        self._link = link
        self._timeout = timeout
        self._name = f"{name}.{secrets.token_hex(8)}".lstrip(".").encode()
        # Nobody who cannot see a request knows the number that an answer has to name.
        self._seqs = itertools.count(secrets.randbits(40))
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        #: Requests that were sent again, and answers that were to none under way.
        self.repeated = self.strays = 0
        #: Messages, and about how many bytes of them, that one request has.
        self._most, self._most_bytes = MOST_MESSAGES, link.batch
        #: Whether the next request needs a new connection: half a request may be on this one, or an
        #: answer may still arrive that would be taken for its own, as it has no number, or names a
        #: message that may be asked about again.
        self._is_used = False
        self.is_reliable = self._ask_caps() if is_reliable is None else is_reliable

    @property
    def server(self) -> str:
        return self._link.server

    @property
    def largest(self) -> int:
        """The largest message that fits, in bytes."""
        return self._link.largest

    # --- legacy -------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of queued messages.

        :raises ConnectionLost: the queue does not answer.
        """
        answer = self._ask(b"SIZE", self._some_waits())
        if answer is None or not answer.isdigit():
            raise self._lost("it does not answer, or not as a queue does")
        return int(answer)

    def put_legacy(self, message: bytes) -> None:
        """Append a message with the legacy verb. If only the reply is lost, it is stored twice.

        :raises ConnectionLost: the queue does not answer.
        """
        answer = self._ask(b"PUT:" + message, self._some_waits())
        if answer is None or not answer.startswith(b"PUT "):
            raise self._lost("nobody knows whether it has the message")

    def get_legacy(self) -> bytes:
        """Take a message with the legacy verb; empty if the queue is empty or the message is.

        :raises ConnectionLost: no reply arrived; a message may have been lost with it.
        """
        # Asked once: the queue forgets a message before it answers.
        answer = self._ask(b"GET", [self._timeout])
        if answer is None:
            raise self._lost("no answer came to GET, and a message may be lost with it")
        return answer

    def _ask_caps(self) -> bool:
        answer = self._ask(b"CAPS", self._some_waits())
        if answer is not None and answer.startswith(b"CAPS:1:"):
            return True
        self.size()  # which raises if nobody is there
        log.warning(
            "%s has no reliable mode: a lost datagram loses a message, or stores it twice",
            self.server,
        )
        return False

    def _some_waits(self) -> Iterable[float]:
        return itertools.islice(_WAITS.delays(self._rng), _CAPS_ASKED)

    def _ask(self, command: bytes, waits: Iterable[float]) -> bytes | None:
        """Send a legacy request once per wait until a reply arrives; None if none does."""
        frame = encode_bytes(command)
        for wait in waits:
            deadline = time.monotonic() + wait
            try:
                if self._is_used:
                    self._link.renew()  # where no answer to an earlier one is heard
                self._is_used = True
                self._link.send([frame])
                while (left := deadline - time.monotonic()) > 0:
                    for answer in self._link.receive(left):
                        self._is_used = self._link.is_lossy  # which may deliver it once more
                        return answer
            except OSError as error:
                log.debug("%s: %s", self.server, error)
                time.sleep(max(0.0, deadline - time.monotonic()))
        return None

    # --- reliable -----------------------------------------------------------------------------

    def put(
        self,
        messages: Sequence[bytes],
        on_stored: Callable[[Sequence[bytes]], None] = lambda _: None,
    ) -> None:
        """Append messages, each exactly once.

        :param on_stored: called with the messages of each request that is done, in their order
        :raises Unacknowledged: no reply arrives, or the queue stored a part of a request; its
            fields say what is stored.
        :raises WriteTimeout: the queue stayed full for the time allowed.
        :raises MessageTooLarge: the queue never takes one of them; all before it are stored.
        :raises QueueRefused: the queue refuses them for another reason.
        """
        done = 0
        while done < len(messages):
            batch = messages[done : self._end_of_batch(messages, done)]
            try:
                self._store(batch)
            except ConnectionLost as error:
                raise Unacknowledged(
                    self.server, error.reason, acknowledged=done, in_doubt=len(batch)
                ) from error
            except PenstockError as error:
                if isinstance(error, QueueRefused) and error.code == Code.TOO_LARGE:
                    if self._learn_limits(error, batch):
                        continue
                    self._raise_too_large(error, done, batch)
                error.add_note(f"{done:,} messages of this call are stored")
                raise
            done += len(batch)
            on_stored(batch)

    def _end_of_batch(self, messages: Sequence[bytes], start: int) -> int:
        """Return the end of the messages from `start` on that one request takes well."""
        count = fitting(messages, start, self._most, self._most_bytes, _FRAME)
        if not count and len(messages[start]) > self._link.largest:
            raise MessageTooLarge(len(messages[start]), self._link.largest)
        return start + max(1, count)

    def _learn_limits(self, error: QueueRefused, batch: Sequence[bytes]) -> bool:
        """Take smaller batches where the queue holds no more; False if that is not the matter."""
        limits = parse_limits(error.text)
        if limits is None or len(batch) == 1:
            return False
        self._most = max(1, min(limits[0], self._most))
        self._most_bytes = min(limits[1], self._most_bytes)
        if fitting(batch, 0, self._most, self._most_bytes, _FRAME) == len(batch):
            self._most = len(batch) - 1  # it refuses what it says that it takes
        return True

    def _raise_too_large(self, error: QueueRefused, done: int, batch: Sequence[bytes]) -> NoReturn:
        """Raise the error for a request with a message that the queue never takes."""
        if len(batch) > 1:  # a queue that names no limits may have stored those before it
            raise Unacknowledged(
                self.server,
                f"it answers, and refuses one: {error.text}",
                acknowledged=done,
                in_doubt=len(batch),
            ) from error
        size, limits = len(batch[0]), parse_limits(error.text)
        limit = size - 1 if limits is None else min(limits[1], size - 1)
        raise MessageTooLarge(size, limit, hint=_HOW_LARGE) from error

    def _store(self, messages: Sequence[bytes]) -> None:
        seq = next(self._seqs)
        frame = store_request(self._name, seq, messages)
        deadline = time.monotonic() + self._timeout
        has_failed = False
        for wait in _WAITS.delays(self._rng):
            reply = self._exchange(b"%d" % seq, frame)
            if reply.code is None:
                return
            has_failed |= reply.code == Code.FAILED
            if reply.code in {Code.FULL, Code.FAILED} and time.monotonic() + wait <= deadline:
                time.sleep(wait)
                continue
            if has_failed:  # at one of them: those before it are stored, whatever it says now
                raise ConnectionLost(self.server, f"it answers, and fails: {reply.text}")
            if reply.code != Code.FULL:
                raise QueueRefused(self.server, reply.code, reply.text)
            raise WriteTimeout(
                f"{self.server} takes no message: {reply.text}",
                hint="its readers are slower than its writers, or have stopped",
            )

    def get(self, most: int, wait: float = 0.0) -> tuple[Tags, Sequence[bytes]]:
        """Lease up to `most` messages; wait up to `wait` seconds for the first.

        :returns: the runs of their numbers, and the messages
        :raises ConnectionLost: the queue does not answer.
        :raises QueueRefused: the queue refuses.
        """
        wait = min(wait, LONGEST_WAIT_MS / 1000)
        seq = next(self._seqs)
        frame = lease_request(self._name, seq, min(most, MOST_MESSAGES), wait)
        reply = self._exchange(b"%d" % seq, frame, wait)
        if reply.code == Code.BUSY:
            return (), ()
        if reply.code is not None:
            raise QueueRefused(self.server, reply.code, reply.text)
        return reply.tags, reply.messages

    def ack(self, tags: Tags) -> None:
        """Acknowledge messages.

        :raises LeaseLost: some leases had ended; the other messages are settled.
        :raises ConnectionLost: the queue does not answer.
        """
        self._give_back(tags, lambda part: ack_request(self._name, part), is_last=True)

    def nack(self, tags: Tags, delay: float = 0.0) -> None:
        """Return messages to the queue; they are redelivered after `delay` seconds.

        :raises LeaseLost: as for `ack`.
        :raises ConnectionLost: the queue does not answer.
        """
        self._give_back(tags, lambda part: nack_request(self._name, part, delay), is_last=False)

    def _give_back(self, tags: Tags, request: Callable[[bytes], bytes], *, is_last: bool) -> None:
        lost: list[tuple[int, int]] = []
        for part in _parts(tags, self._link.batch):
            epoch, first, _ = part[0]
            about = format_tags([(epoch, first, first)])
            reply = self._exchange(about, request(format_tags(part)))
            # A message that is done is not asked about again; any other may come again.
            self._is_used = self._link.is_lossy and not (is_last and reply.code is None)
            if reply.code == Code.NO_LEASE:
                lost += [(first, last) for _, first, last in parse_tags(reply.text.encode())]
            elif reply.code is not None:
                raise QueueRefused(self.server, reply.code, reply.text)
        if lost:
            raise LeaseLost(lost)

    def _exchange(self, about: bytes, frame: bytes, wait: float = 0.0) -> Reply:
        """Send a request until the reply arrives that names `about`.

        :param wait: seconds that the queue may hold the request
        :raises ConnectionLost: no reply arrived in time.
        """
        deadline = time.monotonic() + self._timeout + wait
        # A call that is interrupted leaves half a frame, or an answer that nobody waits for.
        is_used, self._is_used = self._is_used, True
        for pause in _WAITS.delays(self._rng):
            again = min(deadline, time.monotonic() + pause) if self._link.is_lossy else deadline
            try:
                if is_used:
                    self._link.renew()
                    is_used = False
                self._link.send([frame])
                while (left := again - time.monotonic()) > 0:
                    for answer in self._link.receive(left):
                        reply = self._reply(answer)
                        if reply is not None and reply.about == about:
                            self._is_used = False
                            return reply
                        self.strays += 1  # late, or of somebody who guesses
            except OSError as error:
                log.debug("%s: %s", self.server, error)
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                if not self._link.is_lossy:
                    with contextlib.suppress(OSError):
                        self._link.renew()
            if time.monotonic() >= deadline:
                break
            self.repeated += 1
        raise self._lost(f"no answer came within {self._timeout:g} s")

    def _reply(self, answer: bytes) -> Reply | None:
        try:
            return parse_reply(answer)
        except Malformed:
            return None

    def _lost(self, reason: str) -> ConnectionLost:
        return ConnectionLost(self.server, reason, hint="is a queue served there?")

    def close(self) -> None:
        self._link.close()


def _parts(tags: Tags, room: int) -> Iterator[Tags]:
    """Yield tags in parts that fit one request: by their bytes, and by their messages."""
    part: list[tuple[int, int, int]] = []
    size = count = 0
    for run in tags:
        _, first, last = run
        more = len(format_tags([run])) + 1
        if part and (size + more > room or count + last - first >= MOST_MESSAGES):
            yield part
            part, size, count = [], 0, 0
        part.append(run)
        size += more
        count += last - first + 1
    if part:
        yield part
