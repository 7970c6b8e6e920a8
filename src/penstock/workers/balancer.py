"""How do several queues stand behind one address?

A message goes to one queue: round robin, or by a stable hash of its key. A consumer at the address
gets messages of whichever queue has some. The protocol's promises hold as for one queue: a repeated
request goes to the queue that took it first.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections import Counter, OrderedDict, defaultdict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.interfaces import Closable
from penstock.core.worker import Worker
from penstock.core.worker_function import place_of, stable_hash
from penstock.protocols.lhhttt.commands import (
    RELIABLE,
    Ack,
    BadRequest,
    Code,
    Lease,
    Nack,
    Reply,
    Store,
    ack_request,
    error_reply,
    format_limits,
    format_tags,
    is_text,
    lease_request,
    message_reply,
    messages_head,
    nack_request,
    none_reply,
    ok_reply,
    parse_reply,
    store_request,
)
from penstock.protocols.lhhttt.frames import decode, decode_bytes, encode, join_frames
from penstock.protocols.lhhttt.interface import QueueStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.protocols.datagrams import Address
    from penstock.protocols.lhhttt.commands import Tags
    from penstock.protocols.lhhttt.interface import Commands, Send
    from penstock.protocols.lhhttt.queue import MessageQueue

__all__ = ["Balancer", "sum_of_books"]

log = logging.getLogger(__name__)

#: Seconds between two checks for redelivered messages while a request waits.
_LOOK: Final = 0.02
#: Clients whose last request is remembered, and requests that wait.
_MOST_CLIENTS: Final = 10_000
_MOST_PARKED: Final = 10_000


class _Given(NamedTuple):
    """A client's last lease request, which queue answered it (None: all were empty), and as what.

    A repeated request gets the same answer, not more messages.
    """

    seq: int
    place: int | None
    inner: int


class _Parked(NamedTuple):
    """A request that waits for a message."""

    request: Lease
    until: float
    send: Send
    peer: Address
    largest: int


class Balancer(Closable):
    """Several queues of this process behind one address. It does not close them."""

    def __init__(self, queues: Sequence[MessageQueue], key: str | None = None) -> None:
        """Take the queues.

        :param key: a regular expression that finds the key of a message: its first group, or the
            whole match; without a match the message is the key. None means round robin.
        """
        self._queues = queues
        self._key = None if key is None else re.compile(key.encode())
        self._places = {
            epoch: place for place, queue in enumerate(queues) for epoch in queue.epochs
        }
        self._lock = Lock()
        self._turns = itertools.count()
        #: Numbers of our own requests for messages: each is asked once at each queue.
        self._inner = itertools.count()
        self._given: OrderedDict[bytes, _Given] = OrderedDict()
        self._parked: OrderedDict[bytes, _Parked] = OrderedDict()
        self._clock = Worker("lhhttt-balancer", self._run, log=log, restart=True).start()

    # --- commands -----------------------------------------------------------------------------

    def handle(
        self, commands: Sequence[Commands], send: Send, largest: int
    ) -> tuple[list[tuple[bytes, Address]], int]:
        replies: list[tuple[bytes, Address]] = []
        waiting = 0
        with self._lock:
            for verb, rests, peers in commands:
                if verb == b"PUT":
                    replies += self._put(rests, peers, send, largest)
                    continue
                for rest, peer in zip(rests, peers, strict=True):
                    parked = _Parked(_NOTHING, time.monotonic(), send, peer, largest)
                    answers = self._answer(verb, rest, parked)
                    if answers is None:
                        waiting += 1
                    else:
                        replies += [(answer, peer) for answer in answers]
            late = self._serve_parked()
        _send_late(late)
        return replies, waiting

    def forget(self, send: Send) -> None:
        with self._lock:
            for name in [name for name, parked in self._parked.items() if parked.send == send]:
                del self._parked[name]

    def _ask(self, place: int, verb: bytes, rest: bytes, asker: _Parked) -> list[bytes]:
        """Return a queue's immediate reply, or an empty one."""
        asked = [(verb, [rest], [asker.peer])]
        replies, _ = self._queues[place].handle(asked, asker.send, asker.largest)
        return [reply for reply, _ in replies]

    def _ask_reliably(self, place: int, frame: bytes, asker: _Parked) -> Reply:
        verb, _, rest = decode_bytes(frame).partition(b":")
        (answer,) = self._ask(place, verb, rest, asker)
        return parse_reply(decode_bytes(answer))

    def _put(
        self, messages: Sequence[bytes], peers: Sequence[Address], send: Send, largest: int
    ) -> list[tuple[bytes, Address]]:
        parts: defaultdict[int, Commands] = defaultdict(lambda: (b"PUT", [], []))
        for message, peer in zip(messages, peers, strict=True):
            _, some, askers = parts[self._place(message, next(self._turns))]
            some.append(message)
            askers.append(peer)
        return [
            reply
            for place, part in parts.items()
            for reply in self._queues[place].handle([part], send, largest)[0]
        ]

    def _place(self, message: bytes, turn: int) -> int:
        """Return the queue of a message, by its key or round robin."""
        if self._key is None:
            return turn % len(self._queues)
        found = self._key.search(message)
        key = message if found is None else found[found.re.groups and 1] or b""
        return place_of(key, len(self._queues))

    def _answer(self, verb: bytes, rest: bytes, asker: _Parked) -> list[bytes] | None:
        """Return the reply to a command (may be empty), or None if it waits for a message."""
        if verb == b"GET":
            return self._get(rest, asker)
        if verb == b"SIZE" and is_text(rest):
            return [encode(str(sum(self._size(i, asker) for i in range(len(self._queues)))))]
        if verb not in RELIABLE:
            return self._ask(0, verb, rest, asker)
        try:
            request = RELIABLE[verb](rest)
        except BadRequest:
            return self._ask(0, verb, rest, asker)  # which says what is wrong
        match request:
            case Store():
                return self._store(request, asker)
            case Lease():
                return self._lease(request, asker)
            case Ack() | Nack():
                return self._settle(request, asker)

    def _size(self, place: int, asker: _Parked) -> int:
        return int(decode(self._ask(place, b"SIZE", b"", asker)[0]))

    def _get(self, rest: bytes, asker: _Parked) -> list[bytes]:
        """GET from the first queue that has a message: an empty reply does not tell."""
        places = self._in_turn()
        place = next((place for place in places if self._size(place, asker)), 0)
        return self._ask(place, b"GET", rest, asker)

    def _in_turn(self) -> list[int]:
        first = next(self._turns)
        return [(first + step) % len(self._queues) for step in range(len(self._queues))]

    # --- reliable requests --------------------------------------------------------------------

    def _store(self, request: Store, asker: _Parked) -> list[bytes]:
        """Store each message in its queue, and reply when all are stored."""
        parts: defaultdict[int, list[bytes]] = defaultdict(list)
        # A repeated request goes to the queue that took it first.
        first = stable_hash(request.client) + request.seq
        for turn, message in enumerate(request.messages, first):
            parts[self._place(message, turn)].append(message)
        for place, part in parts.items():  # before any is stored
            sizes = [len(message) for message in part]
            if self._queues[place].exceeds(len(sizes), sum(sizes), max(sizes)):
                text = format_limits(*self._queues[place].limits)
                return [error_reply(b"%d" % request.seq, Code.TOO_LARGE, text)]
        is_begun = False
        for place, messages in parts.items():
            frame = store_request(request.client, request.seq, messages)
            reply = self._ask_reliably(place, frame, asker)
            if reply.code is not None:  # asked again, those that are stored are not again
                # Any other code would say that nothing is stored.
                code = Code.FAILED if is_begun else Code(reply.code)
                return [error_reply(reply.about, code, reply.text)]
            is_begun = True
        return [ok_reply(b"%d" % request.seq)]

    def _lease(self, request: Lease, asker: _Parked) -> list[bytes] | None:
        before = self._given.get(request.client)
        if before is not None and request.seq <= before.seq:
            if request.seq < before.seq or before.place is None:
                return [none_reply(request.seq)]
            return [self._lend_at(before.place, before.inner, request, asker)[1]]
        waiting = self._parked.get(request.client)
        if waiting is not None and waiting.request.seq == request.seq:
            self._parked[request.client] = waiting._replace(send=asker.send, peer=asker.peer)
            if waiting.send == asker.send:
                return []
            # Its client has another connection now, and each of them counts what it waits for.
            waiting.send([(none_reply(request.seq), waiting.peer)])
            return None
        if waiting is not None and request.seq < waiting.request.seq:
            return [none_reply(request.seq)]
        if waiting is not None:  # of which it does not wait for an answer any more
            del self._parked[request.client]
            waiting.send([(self._none(waiting.request), waiting.peer)])
        answer = self._lend(request, asker)
        if answer is not None:
            return [answer]
        if not request.wait or len(self._parked) >= _MOST_PARKED:
            return [self._none(request)]
        until = asker.until + request.wait
        self._parked[request.client] = asker._replace(request=request, until=until)
        self._clock.wake()
        return None

    def _lend(self, request: Lease, asker: _Parked) -> bytes | None:
        """Lease messages of any queue that has some; None if all are empty."""
        for place in self._in_turn():
            inner = next(self._inner)
            is_some, answer = self._lend_at(place, inner, request, asker)
            if is_some:
                self._remember(request.client, _Given(request.seq, place, inner))
                return answer
        return None

    def _none(self, request: Lease) -> bytes:
        self._remember(request.client, _Given(request.seq, None, 0))
        return none_reply(request.seq)

    def _remember(self, client: bytes, given: _Given) -> None:
        self._given[client] = given
        self._given.move_to_end(client)
        if len(self._given) > _MOST_CLIENTS:
            self._given.popitem(last=False)

    def _lend_at(
        self, place: int, inner: int, request: Lease, asker: _Parked
    ) -> tuple[bool, bytes]:
        """Lease from one queue; return whether it had messages, and the client's reply."""
        frame = lease_request(request.client, inner, request.most, 0.0)
        reply = self._ask_reliably(place, frame, asker)
        if reply.code is not None:
            return True, error_reply(b"%d" % request.seq, Code(reply.code), reply.text)
        if not reply.messages:
            return False, none_reply(request.seq)
        seq, tags = request.seq, format_tags(reply.tags)
        if request.is_single:
            return True, message_reply(seq, tags, reply.messages[0])
        return True, join_frames(reply.messages, messages_head(seq, tags))

    def _settle(self, request: Ack | Nack, asker: _Parked) -> list[bytes]:
        parts: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for tag in request.tags:
            parts[self._places.get(tag[0], 0)].append(tag)
        lost: list[str] = []
        asker = asker._replace(largest=asker.largest // max(1, len(parts)))  # all go by one answer
        for place, tags in parts.items():
            reply = self._ask_reliably(place, _settling(request, tags), asker)
            if reply.code == Code.NO_LEASE:
                lost.append(reply.text)
            elif reply.code is not None:
                return [error_reply(request.first, Code(reply.code), reply.text)]
        if lost:
            return [error_reply(request.first, Code.NO_LEASE, ",".join(lost))]
        return [ok_reply(request.first)]

    # --- requests that wait -------------------------------------------------------------------

    def _serve_parked(self) -> list[tuple[Send, bytes, Address]]:
        """Return the replies to waiting requests that can get a message or have timed out."""
        late: list[tuple[Send, bytes, Address]] = []
        now = time.monotonic()
        has_any = True
        for name, parked in list(self._parked.items()):
            answer = self._lend(parked.request, parked) if has_any else None
            has_any = answer is not None
            if answer is None and now >= parked.until:
                answer = self._none(parked.request)
            if answer is not None:
                del self._parked[name]
                late.append((parked.send, answer, parked.peer))
        return late

    def _run(self, worker: Worker) -> None:
        while not worker.is_stopping:
            with self._lock:
                late = self._serve_parked()
                is_asked = bool(self._parked)
            _send_late(late)
            worker.wait(_LOOK if is_asked else None)

    # --- books, and the end -------------------------------------------------------------------

    def statistics(self) -> QueueStatistics:
        return sum_of_books([queue.statistics() for queue in self._queues])

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._clock.stop()


#: Stands for the request of who asks, until that is known.
_NOTHING: Final = Lease(b"", 0, 0, 0.0, is_single=True)


def _settling(request: Ack | Nack, tags: Tags) -> bytes:
    if isinstance(request, Nack):
        return nack_request(request.client, format_tags(tags), request.delay)
    return ack_request(request.client, format_tags(tags))


def _send_late(late: Sequence[tuple[Send, bytes, Address]]) -> None:
    for send, reply, peer in late:
        send([(reply, peer)])


def sum_of_books(books: Sequence[QueueStatistics]) -> QueueStatistics:
    """Return the summed counters of several queues."""
    whole: dict[str, Any] = {}
    for name in QueueStatistics._fields:
        values = [getattr(each, name) for each in books]
        if isinstance(values[0], dict):
            total: Counter[Any] = Counter()
            for value in values:
                total.update(value)
            whole[name] = dict(total)
        else:
            whole[name] = sum(values)
    return QueueStatistics(**whole)
