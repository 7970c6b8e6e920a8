"""How does a queue answer what clients ask, and tell what became of each message?"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import MessageTooLarge, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.overflow import DropReason, OverflowPolicy
from penstock.core.worker import Worker
from penstock.protocols.lhhttt.clients import WINDOW, Clients, Loan, Loans, chosen_by
from penstock.protocols.lhhttt.commands import (
    CAPS,
    RELIABLE,
    STORING,
    Ack,
    BadRequest,
    Code,
    Lease,
    Nack,
    Store,
    error_reply,
    format_limits,
    format_tags,
    is_text,
    message_reply,
    messages_head,
    none_reply,
    ok_reply,
)
from penstock.protocols.lhhttt.frames import encode_bytes
from penstock.protocols.lhhttt.interface import CommandQueue, QueueSettings, QueueStatistics, Send
from penstock.protocols.lhhttt.journal import Journal
from penstock.protocols.lhhttt.runs import framed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.protocols.datagrams import Address
    from penstock.protocols.lhhttt.commands import Tags
    from penstock.protocols.lhhttt.interface import Commands
    from penstock.protocols.lhhttt.runs import Range, Run

__all__ = ["CommandQueue", "MessageQueue", "QueueSettings", "QueueStatistics", "Send"]

log = logging.getLogger(__name__)

#: Requests that wait for a message.
_MOST_PARKED: Final = 10_000
#: Room that an answer needs beside its messages, and for each tag in it.
_ANSWER: Final = 100
_TAG: Final = 60
#: Of a frame's header, over which a message grows in a batch.
_FRAME: Final = 9
_EMPTY: Final = encode_bytes(b"")
#: Stands for an answer that comes later.
_WAITS: Final = b""


class _Parked(NamedTuple):
    """A request that waits for a message."""

    request: Lease
    until: float
    send: Send
    peer: Address
    largest: int


class MessageQueue(Closable):
    """One queue. Thread-safe."""

    def __init__(self, settings: QueueSettings) -> None:
        """Open the journal, or make a log in memory.

        :raises PenstockError: the journal cannot be opened, or another process has it.
        """
        self._settings = settings
        self._lock = Lock()
        self._is_closed = False
        self._parked: OrderedDict[bytes, _Parked] = OrderedDict()
        #: Replies to those, not sent yet.
        self._late: list[tuple[Send, bytes, Address]] = []
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._dropped: Counter[DropReason] = Counter()
        #: The latest message that was too large for a reply.
        self._stuck = -1
        #: When timed work is due next.
        self._comes_at = 0.0
        self._loans = Loans(settings.lease)
        self._clients = Clients(time.monotonic)
        self._clock = Worker("lhhttt-queue", self._run, log=log, restart=True)
        self._journal = Journal(settings, self._remember, self._come_by)
        self._clock.start()

    def _remember(self, client: bytes, seq: int, left: int) -> None:
        self._clients.hear(client).note_stored(seq, left)

    # --- commands -----------------------------------------------------------------------------

    def handle(
        self, commands: Sequence[Commands], send: Send, largest: int
    ) -> tuple[list[tuple[bytes, Address]], int]:
        replies: list[tuple[bytes, Address]] = []
        #: Places of replies that say that something is stored, and what was asked.
        stored: dict[int, bytes | None] = {}
        parked = 0
        with self._lock:
            now = time.monotonic()
            for verb, rests, peers in commands:
                self._counts["commands"] += len(rests)
                if verb == b"PUT":
                    first = len(replies)
                    self._put(rests, peers, replies)
                    stored |= dict.fromkeys(range(first, len(replies)))
                elif verb == b"GET":
                    self._get(rests, peers, largest, replies)
                else:
                    for rest, peer in zip(rests, peers, strict=True):
                        asker = _Parked(_NOTHING, now, send, peer, largest)
                        reply = self._answer(verb, rest, asker)
                        parked += reply == _WAITS
                        if reply:
                            if verb in STORING:
                                stored[len(replies)] = rest
                            replies.append((reply, peer))
            self._serve_parked(now)
            self._journal.settle(now)
            try:
                self._journal.sync()
            except PenstockError as error:
                replies = _without_promises(replies, stored, error)
            late, self._late = self._late, []
        _send_late(late)
        return replies, parked

    @property
    def epochs(self) -> frozenset[int]:
        """The epochs in the tags of its messages."""
        return self._journal.epochs

    def forget(self, send: Send) -> None:
        with self._lock:
            for name in [name for name, parked in self._parked.items() if parked.send == send]:
                del self._parked[name]

    def release(self, name: bytes) -> None:
        """End all leases of a client that has left; `name` is the prefix that it chose.

        Requests of it that arrive later get no messages.
        """
        with self._lock:
            self._clients.leave(name)
            for client in [client for client in self._parked if chosen_by(client) == name]:
                del self._parked[client]
            self._journal.give_again(self._loans.release(lambda each: chosen_by(each) == name))
            self._serve_parked(time.monotonic())
            late, self._late = self._late, []
        _send_late(late)

    def _put(
        self,
        messages: Sequence[bytes],
        peers: Sequence[Address],
        replies: list[tuple[bytes, Address]],
    ) -> None:
        """Store the messages of legacy PUTs; a refused one gets no reply."""
        self._counts["puts"] += len(messages)
        self._counts["offered"] += len(messages)
        fresh: list[bytes] = []
        answers: list[tuple[bytes, Address]] = []
        size = 0
        is_room = self._has_room(len(messages), sum(map(len, messages)))
        for message, peer in zip(messages, peers, strict=True):
            try:
                # The prototype counts characters.
                characters = len(message) if message.isascii() else len(str(message, "utf-8"))
            except UnicodeDecodeError:
                self._refused["not text"] += 1
                continue
            if not is_room and not self._has_room(len(fresh) + 1, size + len(message)):
                self._write(fresh, answers, replies)
                fresh, answers, size = [], [], 0
                if (code := self._refusal(1, len(message), len(message))) is not None:
                    self._refused[code] += 1
                    continue
                if self._is_dropped(1, len(message)):
                    replies.append((_put_reply(characters), peer))
                    continue
            fresh.append(message)
            answers.append((_put_reply(characters), peer))
            size += len(message)
        self._write(fresh, answers, replies)

    def _write(
        self,
        messages: list[bytes],
        answers: list[tuple[bytes, Address]],
        replies: list[tuple[bytes, Address]],
    ) -> None:
        """Store messages that fit, and add the replies for those that are stored."""
        at = 0
        while at < len(messages):
            before = self._journal.queued
            try:
                rest = messages[at:]
                self._journal.append(rest, sum(map(len, rest)))
            except PenstockError as error:
                stored = at + self._journal.queued - before
                replies += answers[at:stored]
                # A message that is too large does not stop the others.
                at = stored + 1 if isinstance(error, MessageTooLarge) else len(messages)
                self._refused[self._failure(error)] += at - stored
            else:
                replies += answers[at:]
                return

    def _get(
        self,
        rests: Sequence[bytes],
        peers: Sequence[Address],
        largest: int,
        replies: list[tuple[bytes, Address]],
    ) -> None:
        """Answer legacy GETs: each takes a message away. One too large for a reply stays."""
        if any(rests):  # it is left unanswered where it is no text
            peers = [peer for rest, peer in zip(rests, peers, strict=True) if is_text(rest)]
            self._counts["unknown"] += len(rests) - len(peers)
        self._counts["gets"] += len(peers)
        taken: list[Run] = []
        at = 0
        while at < len(peers):
            run = self._journal.next()
            if run is None:
                replies += [(_EMPTY, peer) for peer in peers[at:]]
                break
            if not (count := run.count_below(largest - _FRAME, len(peers) - at)):
                self._leave_unanswered(run, len(peers) - at, largest)
                break
            taken.append(self._journal.take(run, count))
            replies += zip(taken[-1].frames(), peers[at:], strict=False)
            at += count
        self._counts["taken"] += sum([run.count for run in taken])
        self._journal.finish(taken)

    def _leave_unanswered(self, run: Run, count: int, largest: int) -> None:
        self._counts["unanswered"] += count
        if run.first != self._stuck:  # told of once, however often it is asked for
            self._stuck = run.first
            log.warning(
                "GETs are not answered: the next message has %s bytes, and an answer at most %s; "
                "take it by TCP or a Unix socket",
                f"{run.part(run.first, run.first + 1).size:,}",
                f"{largest:,}",
            )

    def _answer(self, verb: bytes, rest: bytes, asker: _Parked) -> bytes | None:
        """Answer any other command; None: no reply; `_WAITS`: the reply follows with a message."""
        if verb == b"SIZE" and is_text(rest):
            self._counts["sizes"] += 1
            return encode_bytes(b"%d" % (self._journal.held - self._loans.count))
        if verb != b"CAPS" and verb not in RELIABLE:
            self._counts["unknown"] += 1
            return None
        self._counts["reliable"] += 1
        if verb == b"CAPS":
            return CAPS
        try:
            request = RELIABLE[verb](rest)
        except BadRequest as error:
            self._counts["bad_requests"] += 1
            return error_reply(error.about, Code.MALFORMED, str(error))
        match request:
            case Store():
                return self._store(request)
            case Lease():
                return self._lease(request, asker)
            case Ack():
                return self._ack(request, asker.largest)
            case Nack():
                return self._nack(request, asker.largest)

    # --- storing ------------------------------------------------------------------------------

    def _store(self, request: Store) -> bytes:
        self._counts["offered"] += len(request.messages)
        client = self._clients.hear(request.client)
        about = b"%d" % request.seq
        if request.seq in client.stored:
            self._counts["repeated"] += len(request.messages)
            return ok_reply(about)
        if client.stored.is_past(request.seq):
            self._refused[Code.STALE] += len(request.messages)
            return error_reply(about, Code.STALE, f"the last {WINDOW} numbers are remembered")
        # Where the first messages are stored, those that are left are its last ones.
        left = client.begun.get(request.seq, len(request.messages))
        is_whole = left == len(request.messages)
        messages = request.messages if is_whole else request.messages[-left:]
        self._counts["repeated"] += len(request.messages) - len(messages)
        size = messages.size
        # Each is looked at only if all together are more than one may be.
        largest = messages.largest if size > self._journal.largest else size
        if (code := self._refusal(len(messages), size, largest)) is not None:
            why = self._why(code)
            if not is_whole:  # any other answer would say that nothing is stored
                code = Code.FAILED
            self._refused[code] += len(messages)
            return error_reply(about, code, why)
        if not self._is_dropped(len(messages), size):
            before = self._journal.queued
            try:
                self._journal.append(messages, size, (request.client, request.seq))
            except PenstockError as error:
                left -= self._journal.queued - before
                client.note_stored(request.seq, left)
                code = self._failure(error)
                self._refused[code] += left
                return error_reply(about, code, str(error))
        client.note_stored(request.seq, 0)
        return ok_reply(about)

    def _failure(self, error: PenstockError) -> Code:
        if isinstance(error, MessageTooLarge):
            return Code.TOO_LARGE
        log.warning("a message is not stored: %s", error)
        return Code.FAILED

    def _has_room(self, count: int, size: int) -> bool:
        return (
            self._journal.held + count <= self._settings.capacity
            and self._journal.held_bytes + size <= self._settings.capacity_bytes
            and not self._journal.is_pinned
        )

    @property
    def limits(self) -> tuple[int, int]:
        """Messages and bytes of a request that the empty queue takes, whatever their sizes."""
        settings = self._settings
        return settings.capacity, min(settings.capacity_bytes, self._journal.largest)

    def exceeds(self, count: int, size: int, largest: int) -> bool:
        """Tell whether even the empty queue cannot take a request.

        :param size: bytes of its messages
        :param largest: bytes of its largest message
        """
        return (
            count > self._settings.capacity
            or size > self._settings.capacity_bytes
            or largest > self._journal.largest
        )

    def _why(self, code: Code) -> str:
        if code is Code.FULL:
            return f"the queue holds {self._journal.held:,} messages"
        return format_limits(*self.limits)

    def _refusal(self, count: int, size: int, largest: int) -> Code | None:
        """Return why messages are refused, by size or policy; None if they are taken."""
        settings = self._settings
        if self.exceeds(count, size, largest):
            return Code.TOO_LARGE
        is_refused = settings.policy is OverflowPolicy.FAIL and not self._has_room(count, size)
        if is_refused or self._journal.is_pinned:
            return Code.FULL
        if settings.policy is OverflowPolicy.DROP_OLDEST:
            if not self._could_make_room(count, size):
                return Code.FULL
            while not self._has_room(count, size):
                if (run := self._journal.next()) is None:
                    return Code.FULL  # clients have all the rest
                self._dropped[DropReason.OVERFLOW_OLDEST] += 1
                self._journal.finish([self._journal.take(run, 1)])
        return None

    def _could_make_room(self, count: int, size: int) -> bool:
        """Tell whether new messages had room if every waiting one was dropped."""
        journal, settings = self._journal, self._settings
        staying, bytes_staying = journal.held - journal.waiting, self._loans.size
        return (
            staying + count <= settings.capacity
            and bytes_staying + journal.delayed_bytes + size <= settings.capacity_bytes
        )

    def _is_dropped(self, count: int, size: int) -> bool:
        """Tell whether the queue's policy drops these new messages, and count them if so."""
        if self._settings.policy is not OverflowPolicy.DROP_NEWEST or self._has_room(count, size):
            return False
        self._dropped[DropReason.OVERFLOW_NEWEST] += count
        return True

    # --- giving -------------------------------------------------------------------------------

    def _lease(self, request: Lease, asker: _Parked) -> bytes | None:
        if self._clients.is_gone(request.client):
            return none_reply(request.seq)
        client = self._clients.hear(request.client)
        loan = self._loans.find(request.client, request.seq)
        if loan is not None:
            return self._lent_reply(loan, self._loans.of(loan))
        if request.seq <= client.latest - WINDOW:
            about = b"%d" % request.seq
            return error_reply(about, Code.STALE, f"the last {WINDOW} numbers are remembered")
        waiting = self._parked.get(request.client)
        if waiting is not None and waiting.request.seq == request.seq:  # it is answered once
            self._parked[request.client] = waiting._replace(send=asker.send, peer=asker.peer)
            if waiting.send == asker.send:
                return None
            # Its client has another connection now, and each of them counts what it waits for.
            self._answer_late(waiting, none_reply(request.seq))
            return _WAITS
        if request.seq <= client.latest:
            # It was answered, or its client has given it up: messages would reach nobody.
            return none_reply(request.seq)
        client.latest = request.seq
        if waiting is not None:
            del self._parked[request.client]
            self._answer_late(waiting, none_reply(waiting.request.seq))
        reply = self._lend(request, asker.largest)
        if reply is not None:
            return reply
        if request.wait and len(self._parked) < _MOST_PARKED:
            until = asker.until + request.wait
            self._parked[request.client] = asker._replace(request=request, until=until)
            self._come_by(until)
            return _WAITS
        return none_reply(request.seq)

    def _lend(self, request: Lease, largest: int) -> bytes | None:
        """Lease messages to a client, and return the reply; None if the queue is empty."""
        about = b"%d" % request.seq
        if self._loans.is_full:
            return error_reply(about, Code.BUSY, f"{self._loans.count:,} messages are leased")
        runs: list[Run] = []
        left = request.most
        room = largest - _ANSWER + _FRAME  # which has room for the first, and its tag
        while left and (run := self._journal.next()) is not None:
            if runs and run.first != runs[-1].end:
                room -= _TAG
            count = min(left, run.count_within(room, _FRAME))
            if not count:
                break
            runs.append(self._journal.take(run, count))
            room -= runs[-1].size + count * _FRAME
            left -= count
        if not runs and left and self._journal.next() is not None:
            text = "the next message does not fit an answer"
            return error_reply(about, Code.TOO_LARGE, text)
        if not runs:
            return None
        # In their order, as their tags say it, also if some of them come again.
        runs.sort(key=_FIRST)
        loan = self._loans.lend(request, runs, time.monotonic())
        self._come_by(loan.until)
        return self._lent_reply(loan, runs)

    def _lent_reply(self, loan: Loan, runs: Sequence[Run]) -> bytes:
        tags = self._journal.tags_of([run.range for run in runs])
        if loan.request.is_single:
            return message_reply(loan.request.seq, tags, runs[0].payload())
        return framed(messages_head(loan.request.seq, tags), runs)

    def _serve_parked(self, now: float) -> None:
        """Answer waiting requests that can get a message or have timed out."""
        while self._parked and self._journal.waiting > 0:
            name = next(iter(self._parked))
            reply = self._lend(self._parked[name].request, self._parked[name].largest)
            if reply is None:
                break
            self._answer_late(self._parked.pop(name), reply)
        for name in [name for name, parked in self._parked.items() if now >= parked.until]:
            parked = self._parked.pop(name)
            self._answer_late(parked, none_reply(parked.request.seq))

    def _answer_late(self, parked: _Parked, reply: bytes) -> None:
        self._late.append((parked.send, reply, parked.peer))

    # --- what clients give back ---------------------------------------------------------------

    def _ack(self, request: Ack, largest: int) -> bytes:
        ranges, unknown = self._journal.ranges_of(request.tags)
        lost: list[Range] = []
        done: list[Run] = []
        for first, end in ranges:
            done += self._loans.give_back(request.client, first, end)
            # Whose lease ran out, and whom nobody was given since.
            done += self._journal.take_again(first, end)
            lost += self._journal.delayed(first, end)
            lost += self._others(first, end)
        self._counts["acked"] += sum([run.count for run in done])
        self._journal.finish(done)
        return self._settled_reply(request, lost, unknown, largest)

    def _nack(self, request: Nack, largest: int) -> bytes:
        ranges, unknown = self._journal.ranges_of(request.tags)
        lost: list[Range] = []
        back: list[Run] = []
        for first, end in ranges:
            back += self._loans.give_back(request.client, first, end)
            lost += self._others(first, end)
        self._journal.give_again(back, request.delay)
        return self._settled_reply(request, lost, unknown, largest)

    def _others(self, first: int, end: int) -> list[Range]:
        """Return which of these messages another client holds, or no client held here."""
        return self._loans.lent(first, end) + self._journal.not_given(first, end)

    def _settled_reply(
        self, request: Ack | Nack, lost: Sequence[Range], unknown: Tags, largest: int
    ) -> bytes:
        if not lost and not unknown:
            return ok_reply(request.first)
        tags = b",".join(filter(None, (self._journal.tags_of(lost), format_tags(unknown))))
        if len(tags) > largest - _ANSWER:
            # Named by the runs that were asked about, which fitted a request.
            tags = format_tags([*dict.fromkeys((*_named(request.tags, lost), *unknown))])
        return error_reply(request.first, Code.NO_LEASE, tags.decode())

    # --- time ---------------------------------------------------------------------------------

    def _run(self, worker: Worker) -> None:
        """Run timed work (expired leases, redelivery, settling) until the queue closes."""
        while not worker.is_stopping:
            with self._lock:
                now = time.monotonic()
                self._journal.give_again(self._loans.expire(now))
                self._journal.redeliver(now)
                self._serve_parked(now)
                self._journal.settle(now)
                self._clients.forget(now)
                self._journal.look_at_memory(now)
                self._comes_at = self._next_moment(now)
                late, self._late = self._late, []
            _send_late(late)
            worker.wait(max(0.0, self._comes_at - time.monotonic()))

    def _come_by(self, moment: float) -> None:
        """Wake the timer at this time at the latest."""
        if moment < self._comes_at:
            self._comes_at = moment
            self._clock.wake()

    def _next_moment(self, now: float) -> float:
        moments = [parked.until for parked in self._parked.values()]
        known = (self._loans.ends_at, self._journal.comes_at)
        return min([now + 1.0, *moments, *[each for each in known if each is not None]])

    # --- books, and the end -------------------------------------------------------------------

    def statistics(self) -> QueueStatistics:
        with self._lock:
            if not self._is_closed:
                self._dead, self._lost = self._journal.count_dead()
            counts, journal = self._counts, self._journal
            return QueueStatistics(
                commands=counts["commands"],
                puts=counts["puts"],
                gets=counts["gets"],
                sizes=counts["sizes"],
                reliable=counts["reliable"],
                bad_requests=counts["bad_requests"],
                unknown=counts["unknown"],
                recovered=journal.recovered,
                offered=counts["offered"],
                queued=journal.queued,
                refused=dict(self._refused),
                dropped=dict(self._dropped),
                repeated=counts["repeated"],
                taken=counts["taken"],
                unanswered=counts["unanswered"],
                acked=counts["acked"],
                redelivered=journal.redelivered,
                dead=self._dead,
                lost=self._lost,
                held=journal.held,
                leased=self._loans.count,
                held_bytes=journal.held_bytes,
                waiting=len(self._parked),
                forgotten=self._clients.forgotten,
            )

    def close(self) -> None:
        """Settle finished messages; leased ones are redelivered later. Idempotent."""
        if self._is_closed:
            return
        self._clock.stop()
        self.statistics()
        with self._lock:
            self._is_closed = True
            self._journal.close()


_FIRST: Final = operator.attrgetter("first")
#: Stands for the request of who asks, until that is known.
_NOTHING: Final = Lease(b"", 0, 0, 0.0, is_single=True)


def _named(tags: Tags, lost: Sequence[Range]) -> Tags:
    """Return the tags that name any of these messages."""
    ranges = sorted(lost)
    firsts = [first for first, _ in ranges]
    ends = [0, *itertools.accumulate((end for _, end in ranges), max)]
    return [tag for tag in tags if ends[bisect_right(firsts, tag[2])] > tag[1]]


def _without_promises(
    replies: Sequence[tuple[bytes, Address]], stored: Mapping[int, bytes | None], error: Exception
) -> list[tuple[bytes, Address]]:
    """Return replies without those that say that messages are stored, which may not be on the disk.

    All others stay: a message that a GET took is nowhere else.
    """
    log.warning("messages are stored, and may not be on the disk: %s", error)
    found: list[tuple[bytes, Address]] = []
    for at, (reply, peer) in enumerate(replies):
        rest = stored.get(at, b"")
        if rest is None:
            continue  # who asked the prototype's way hears nothing
        about = rest.partition(b":")[2].partition(b":")[0]  # behind the client
        is_promise = at in stored and reply == ok_reply(about)
        found.append((error_reply(about, Code.FAILED, str(error)) if is_promise else reply, peer))
    return found


def _send_late(late: Sequence[tuple[Send, bytes, Address]]) -> None:
    """Send the replies to requests that had waited."""
    for send, reply, peer in late:
        send([(reply, peer)])


@lru_cache(maxsize=4096)
def _put_reply(characters: int) -> bytes:
    return encode_bytes(b"PUT %d bytes" % characters)
