"""How does a queue keep messages, lend them, and tell what became of each?

It is one writer and one group on a log: the journal, or a log in memory that ends with it. What
clients have leased is known here; what the journal's group knows is that this queue has it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import operator
import shutil
import tempfile
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.closing import Closable
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import InvalidOption, MessageTooLarge, PenstockError
from penstock.core.overflow import DropReason, OverflowPolicy
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.protocols.lhhttt.commands import (
    CAPS,
    RELIABLE,
    Ack,
    BadRequest,
    Code,
    Lease,
    Nack,
    Store,
    Tags,
    error_reply,
    format_tags,
    messages_reply,
    none_reply,
    ok_reply,
)
from penstock.protocols.lhhttt.frames import encode_bytes, join_frames
from penstock.queue.groups.reader import GroupReader
from penstock.queue.groups.settled import runs_of
from penstock.queue.log.endpoint import names_log
from penstock.queue.log.writer import LogWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.interfaces import Ancestor
    from penstock.core.message import Message
    from penstock.protocols.datagrams import Address

__all__ = ["MessageQueue", "QueueSettings", "QueueStatistics", "Send"]

log = logging.getLogger(__name__)

#: Takes answers to where they were asked.
Send: TypeAlias = "Callable[[Sequence[tuple[bytes, Address]]], None]"

#: The group in the log.
_GROUP: Final = "lhhttt"
#: Messages that are read ahead of those who ask.
_AHEAD: Final = 512
#: What is done is settled when there is so much of it, or after so many seconds.
_SETTLED_AT_ONCE: Final = 512
_SETTLED_AFTER: Final = 0.02
#: A message whose delay is over, and which does not come, is looked for again after so long.
_LOOKED_FOR_AGAIN: Final = 1.0
#: Seconds between two looks at how much memory a log takes.
_LOOKED_AT_MEMORY: Final = 0.5
#: Clients that are remembered, and for how long (seconds) after their last word.
_MOST_CLIENTS: Final = 10_000
_REMEMBERED: Final = 600.0
#: Numbers that are remembered of each, below its latest.
_WINDOW: Final = 1024
#: Requests that wait for a message.
_MOST_PARKED: Final = 10_000
#: What may be leased at once: it is kept in memory, to be given again.
_MOST_LEASED: Final = 100_000
_MOST_LEASED_BYTES: Final = 256 << 20
#: Messages at the end of a journal in which repeated requests of before a restart are looked for.
_REMEMBERED_MESSAGES: Final = 100_000
#: Bytes in a segment of a log in memory, and so of a message, at least and at most.
_SEGMENT: Final = 1 << 20
_LARGEST_SEGMENT: Final = 64 << 20
#: Room that an answer needs beside its messages, and for each tag in it.
_ANSWER: Final = 100
_TAG: Final = 60
#: Of a frame's header, over which a message grows in a batch.
_FRAME: Final = 9
_EMPTY: Final = encode_bytes(b"")
#: Stands for an answer that comes later.
_WAITS: Final = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What a queue holds, and for how long it lends."""

    #: Messages and bytes that are not done.
    capacity: int = 1_000_000
    capacity_bytes: int = 128 << 20
    policy: OverflowPolicy = OverflowPolicy.FAIL
    #: The URL of a log that outlives the queue.
    journal: str | None = None
    #: Seconds that a client has a message before it comes again.
    lease: float = 30.0
    #: After so many deliveries a message goes to this stream.
    deliveries: int | None = None
    dead: str | None = None

    def __post_init__(self) -> None:
        if self.policy is OverflowPolicy.BLOCK:
            raise InvalidOption("policy", self.policy, "a queue of datagrams cannot make them wait")
        if self.journal is not None and not names_log(self.journal):
            raise InvalidOption("journal", self.journal, "must be a log: log:/path/name")
        if self.capacity < 1 or self.capacity_bytes < 1:
            raise InvalidOption("capacity", self.capacity, "must be at least 1")
        if not self.lease > 0:
            raise InvalidOption("lease", self.lease, "must be above 0 seconds")


class QueueStatistics(NamedTuple):
    """Books of a queue.

    commands = puts + gets + sizes + reliable + unknown; and of messages
    recovered + offered = refused + dropped + repeated + taken + acked + dead + lost + held.
    """

    #: Commands that were whole frames.
    commands: int
    puts: int
    gets: int
    sizes: int
    #: Requests of the reliable mode, and those of them that are not as they should be.
    reliable: int
    bad_requests: int
    #: Commands that are not answered: no verb of the protocol.
    unknown: int
    #: Messages in the journal from before.
    recovered: int
    #: Messages in commands to store them.
    offered: int
    #: Messages that were stored.
    queued: int
    #: Messages that were not, and whose sender hears that, or hears nothing: by the reason.
    refused: dict[str, int]
    #: Messages that made room, or found none, by the queue's policy.
    dropped: dict[DropReason, int]
    #: Messages that were stored before, and are not again.
    repeated: int
    #: Messages that a legacy GET took.
    taken: int
    #: Messages that clients acknowledged.
    acked: int
    #: Messages that came again.
    redelivered: int
    #: Messages that went to the dead letters.
    dead: int
    #: Messages that the journal lost.
    lost: int
    #: Messages that are not done; those of them that a client has, and the bytes of all.
    held: int
    leased: int
    held_bytes: int
    #: Requests that wait for a message now.
    waiting: int
    #: Clients that were forgotten before their time, to make room for others.
    forgotten: int


class _Window:
    """The numbers that a client has used, of which the latest are remembered."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        #: A bit for each number, the highest first.
        self._seen = 0

    def __contains__(self, seq: int) -> bool:
        below = self._highest - seq
        return below >= 0 and bool(self._seen >> below & 1)

    def is_past(self, seq: int) -> bool:
        """Tell whether nobody knows any more if a number was used."""
        return seq <= self._highest - _WINDOW

    def add(self, seq: int) -> None:
        if seq > self._highest:
            more = seq - self._highest
            self._seen = 1 if more >= _WINDOW else (self._seen << more | 1) & ((1 << _WINDOW) - 1)
            self._highest = seq
        else:
            self._seen |= 1 << self._highest - seq


@dataclass(slots=True)
class _Client:
    """What is remembered of a client, so that what it repeats is done once."""

    heard: float = 0.0
    stored: _Window = field(default_factory=_Window)
    answered: _Window = field(default_factory=_Window)
    #: Messages of a request that are stored, where the rest is not: the server failed, or died.
    begun: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Loan:
    """Messages that a client has, and how it asked for them."""

    request: Lease
    messages: dict[int, Message]
    until: float


class _Parked(NamedTuple):
    """A request that waits for a message."""

    request: Lease
    until: float
    send: Send
    peer: Address
    largest: int


class MessageQueue(Closable):
    """One queue, which any number of threads may ask."""

    def __init__(self, settings: QueueSettings) -> None:
        """Open the journal, or make a log in memory.

        :raises PenstockError: the journal cannot be opened, or another has it.
        """
        self._settings = settings
        self._lock = Lock()
        self._is_closed = False
        #: Messages at hand, in the order in which they are given.
        self._ready: deque[Message] = deque()
        #: Numbers of those among them that a client has had before.
        self._again: set[int] = set()
        #: Messages that clients have; the requests they were leased by, the earliest to end first.
        self._leased: dict[int, _Loan] = {}
        self._leased_bytes = 0
        self._loans: OrderedDict[tuple[bytes, int], _Loan] = OrderedDict()
        #: Sizes of messages that the group gives again after a while; and when how many of them.
        self._delayed: dict[int, int] = {}
        self._due: list[tuple[float, int]] = []
        #: Messages to be settled, and by when.
        self._done: list[Message] = []
        self._settle_at: float | None = None
        self._parked: OrderedDict[bytes, _Parked] = OrderedDict()
        #: Answers to those, on their way.
        self._late: list[tuple[Send, bytes, Address]] = []
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._dropped: Counter[DropReason] = Counter()
        self._held = self._held_bytes = self._dead = self._given = 0
        self._is_unsynced = False
        #: Whether the log is as large in memory as it may be; and when to look next.
        self._is_pinned = False
        self._looks_at = 0.0
        #: What all was settled below, when it was looked at last.
        self._floor = -1
        #: When time brings something next.
        self._comes_at = 0.0
        self._folder: str | None = None
        try:
            self._open()
        except BaseException:
            self._remove_folder()
            raise
        self._clock = Worker("lhhttt-queue", self._run, log=log, restart=True).start()

    # --- the log ------------------------------------------------------------------------------

    def _open(self) -> None:
        settings = self._settings
        if settings.journal is None:
            self._folder = tempfile.mkdtemp(prefix="penstock-lhhttt-", dir="/dev/shm")
            segment = min(max(_SEGMENT, settings.capacity_bytes), _LARGEST_SEGMENT)
            kept = settings.capacity_bytes + segment
            url = f"log:{self._folder}/queue?segment={segment}&retain={kept}&crc=false"
            self._syncs = False
        else:
            url = settings.journal
            # By batches of requests, and not by messages.
            self._syncs = URL.parse(url).options.get("sync") == "batch"
        path = url.partition("?")[0]
        sync = {"sync": "none"} if self._syncs or self._folder else {}
        writer = open_writer(url, hold=f"group:{_GROUP}", **sync)
        assert isinstance(writer, LogWriter)
        self._writer = writer
        letters = {"deliveries": settings.deliveries, "dead": settings.dead}
        given = {name: value for name, value in letters.items() if value is not None}
        try:
            # Nobody else is in the group: what this queue has stays its own, however long it takes.
            reader = open_reader(path, group=_GROUP, lease="365d", **sync, **given)
            assert isinstance(reader, GroupReader)
            self._reader = reader
            try:
                self._recover(path)
            except BaseException:
                reader.close()
                raise
        except BaseException:
            writer.close()
            raise

    def _recover(self, path: str) -> None:
        """Count what is there, and remember who stored it."""
        books = self._reader.group()
        self._held = self._counts["recovered"] = books.lag
        self._dead = self._dead_before = books.dead
        self._given = books.floor
        with open_reader(path) as reader:
            bounds = reader.bounds()
            self._epoch: int = bounds.epoch
            self._lineage: tuple[Ancestor, ...] = bounds.lineage
            first = min(books.floor, bounds.end - _REMEMBERED_MESSAGES)
            reader.seek(max(bounds.oldest, first))
            # A message above the floor may be settled, too: then this counts too many bytes until
            # the floor has passed it.
            while messages := reader.read_many(1000):
                for message in messages:
                    if message.seq >= books.floor:
                        self._held_bytes += len(message.payload)
                    if message.attributes is not None:
                        self._remember(message.attributes)

    def _remember(self, attributes: bytes) -> None:
        """Note who stored a message: its client, the number of its request, and what followed."""
        name, _, rest = attributes.rpartition(b":")
        name, _, seq = name.rpartition(b":")
        if not (name and seq.isdigit() and rest.isdigit()):
            return  # the journal was another's before
        client = self._client(name)
        if int(rest):
            client.begun[int(seq)] = int(rest)
        else:
            client.begun.pop(int(seq), None)
            client.stored.add(int(seq))

    def _epochs(self) -> Iterator[tuple[int, int, int]]:
        """Yield each epoch of the log, its first number, and the first of the next."""
        first = 0
        for ancestor in self._lineage:
            yield ancestor.epoch, first, ancestor.end
            first = ancestor.end
        yield self._epoch, first, 1 << 63

    def _tags_of(self, numbers: Sequence[int]) -> bytes:
        """Return the tags of messages, in the order of their numbers."""
        runs = [
            (epoch, max(first, low), min(end, high) - 1)
            for first, end in runs_of(numbers)
            for epoch, low, high in self._epochs()
            if first < high and low < end
        ]
        return format_tags(runs)

    def _numbers_of(self, tags: Tags) -> tuple[list[int], list[int]]:
        """Return the numbers of messages in tags, and those that were never tagged so."""
        known: list[int] = []
        strange: list[int] = []
        spans = {epoch: range(low, high) for epoch, low, high in self._epochs()}
        for epoch, first, last in tags:
            span = spans.get(epoch, range(0))
            is_known = first in span and last in span
            (known if is_known else strange).extend(range(first, last + 1))
        return known, strange

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- commands -----------------------------------------------------------------------------

    def handle(
        self, commands: Sequence[tuple[bytes, Address]], send: Send, largest: int
    ) -> tuple[list[tuple[bytes, Address]], int]:
        """Do what commands ask for; return the answers, and how many more will come.

        :param send: gets the answers to requests that wait for a message, now or later
        :param largest: the most bytes that an answer may have
        :raises StorageError: the journal fails; nobody is to be answered.
        """
        replies: list[tuple[bytes, Address]] = []
        parked = 0
        # Most requests are of one verb, and many of that are cheap at once.
        parts = [(*command.partition(b":"), peer) for command, peer in commands]
        with self._lock:
            now = time.monotonic()
            self._counts["commands"] += len(parts)
            for verb, run in itertools.groupby(parts, _VERB):
                if verb == b"PUT":
                    self._put([(message, peer) for _, _, message, peer in run], replies)
                elif verb == b"GET":
                    self._get([peer for _, _, _, peer in run], largest, replies)
                else:
                    for _, _, rest, peer in run:
                        asker = _Parked(_NOTHING, now, send, peer, largest)
                        reply = self._answer(verb, rest, asker)
                        parked += reply == _WAITS
                        if reply:
                            replies.append((reply, peer))
            self._serve_parked(now)
            self._settle(now)
            if self._syncs and self._is_unsynced:
                self._writer.sync()
                self._is_unsynced = False
            late, self._late = self._late, []
        _send_late(late)
        return replies, parked

    def forget(self, send: Send) -> None:
        """Let no request wait any more whose answers go by this."""
        with self._lock:
            for name in [name for name, parked in self._parked.items() if parked.send == send]:
                del self._parked[name]

    def _put(
        self,
        puts: Sequence[tuple[bytes, Address]],
        replies: list[tuple[bytes, Address]],
    ) -> None:
        """Store messages; of one that is refused, nobody hears."""
        self._counts["puts"] += len(puts)
        self._counts["offered"] += len(puts)
        fresh: list[bytes] = []
        answers: list[tuple[bytes, Address]] = []
        size = 0
        for message, peer in puts:
            try:
                # The prototype counts characters.
                characters = len(message) if message.isascii() else len(str(message, "utf-8"))
            except UnicodeDecodeError:
                self._refused["not text"] += 1
                continue
            if not self._has_room(len(fresh) + 1, size + len(message)):
                self._write(fresh, answers, replies)
                fresh, answers, size = [], [], 0
                if (code := self._refusal(1, len(message))) is not None:
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
        """Store messages for which there is room, and answer for those that are stored."""
        at = 0
        while at < len(messages):
            before = self._counts["queued"]
            try:
                self._append(messages[at:])
            except PenstockError as error:
                stored = at + self._counts["queued"] - before
                replies += answers[at:stored]
                # One that is too large is no reason to refuse the others.
                at = stored + 1 if isinstance(error, MessageTooLarge) else len(messages)
                self._refused[self._failure(error)] += at - stored
            else:
                replies += answers[at:]
                return

    def _get(
        self, peers: Sequence[Address], largest: int, replies: list[tuple[bytes, Address]]
    ) -> None:
        """Give each a message, which then is done; what is too large for an answer stays."""
        self._counts["gets"] += len(peers)
        taken: list[Message] = []
        size = 0
        for peer in peers:
            if not self._ready and not self._read_ahead(taken):
                replies.append((_EMPTY, peer))
                continue
            message = self._ready[0]
            length = len(message.payload)
            if length > largest - _FRAME:
                continue
            taken.append(self._ready.popleft())
            size += length
            replies.append((join_frames((message.payload,)), peer))
        self._give(taken)
        self._counts["taken"] += len(taken)
        self._finish(taken, size)

    def _answer(self, verb: bytes, rest: bytes, asker: _Parked) -> bytes | None:
        """Answer any other command. None: nobody does; `_WAITS`: a message has to come first."""
        if verb == b"SIZE":
            self._counts["sizes"] += 1
            return encode_bytes(b"%d" % (self._held - len(self._leased)))
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
                return self._ack(request)
            case Nack():
                return self._nack(request)

    def _client(self, name: bytes) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
            if len(self._clients) > _MOST_CLIENTS:
                self._clients.popitem(last=False)
                self._counts["forgotten"] += 1
        else:
            self._clients.move_to_end(name)
        client.heard = time.monotonic()
        return client

    # --- storing ------------------------------------------------------------------------------

    def _store(self, request: Store) -> bytes:
        self._counts["offered"] += len(request.messages)
        client = self._client(request.client)
        about = b"%d" % request.seq
        if request.seq in client.stored:
            self._counts["repeated"] += len(request.messages)
            return ok_reply(about)
        if client.stored.is_past(request.seq):
            self._refused[Code.STALE] += len(request.messages)
            return error_reply(about, Code.STALE, f"the last {_WINDOW} numbers are remembered")
        # Where the first messages are stored, those that are left are its last ones.
        left = client.begun.get(request.seq, len(request.messages))
        messages = request.messages[-left:]
        self._counts["repeated"] += len(request.messages) - len(messages)
        size = sum(map(len, messages))
        if (code := self._refusal(len(messages), size)) is not None:
            self._refused[code] += len(messages)
            return error_reply(about, code, f"the queue holds {self._held:,} messages")
        if not self._is_dropped(len(messages), size):
            before = self._counts["queued"]
            try:
                self._append(messages, (request.client, request.seq))
            except PenstockError as error:
                left -= self._counts["queued"] - before
                client.begun[request.seq] = left
                code = self._failure(error)
                self._refused[code] += left
                return error_reply(about, code, str(error))
        client.begun.pop(request.seq, None)
        client.stored.add(request.seq)
        return ok_reply(about)

    def _append(self, messages: Sequence[bytes], request: tuple[bytes, int] | None = None) -> None:
        """Store messages, of a client's request or of nobody's.

        :raises PenstockError: some could not be stored; those before them are counted.
        """
        stored = len(messages)
        try:
            if request is None or self._folder is not None:
                self._writer.write_many(messages)
            else:  # see `_remember`
                for left, message in zip(range(len(messages) - 1, -1, -1), messages, strict=True):
                    self._writer.write(message, attributes=b"%b:%d:%d" % (*request, left))
        except PenstockError:
            stored = self._writer.statistics().messages - self._counts["queued"]
            raise
        finally:
            self._is_unsynced = True
            self._counts["queued"] += stored
            self._held += stored
            self._held_bytes += sum(map(len, messages[:stored]))

    def _failure(self, error: PenstockError) -> Code:
        if isinstance(error, MessageTooLarge):
            return Code.TOO_LARGE
        log.warning("a message is not stored: %s", error)
        return Code.FAILED

    def _has_room(self, count: int, size: int) -> bool:
        return (
            self._held + count <= self._settings.capacity
            and self._held_bytes + size <= self._settings.capacity_bytes
            and not self._is_pinned
        )

    def _refusal(self, count: int, size: int) -> Code | None:
        """Return why messages cannot be taken, by their size or the queue's policy."""
        settings = self._settings
        if count > settings.capacity or size > settings.capacity_bytes:
            return Code.TOO_LARGE
        is_refused = settings.policy is OverflowPolicy.FAIL and not self._has_room(count, size)
        if is_refused or self._is_pinned:
            return Code.FULL
        if settings.policy is OverflowPolicy.DROP_OLDEST:
            while not self._has_room(count, size):
                if not self._ready and not self._read_ahead():
                    return Code.FULL  # clients have all the rest
                oldest = self._ready.popleft()
                self._give((oldest,))
                self._dropped[DropReason.OVERFLOW_OLDEST] += 1
                self._finish((oldest,), len(oldest.payload))
        return None

    def _is_dropped(self, count: int, size: int) -> bool:
        """Tell whether the queue's policy drops new messages, and count them."""
        if self._settings.policy is not OverflowPolicy.DROP_NEWEST or self._has_room(count, size):
            return False
        self._dropped[DropReason.OVERFLOW_NEWEST] += count
        return True

    # --- giving -------------------------------------------------------------------------------

    @property
    def _unread(self) -> int:
        """Messages in the log that nobody has read."""
        return self._held - len(self._ready) - len(self._leased) - len(self._delayed)

    def _give(self, messages: Sequence[Message]) -> None:
        """Note that messages leave those at hand."""
        if messages:
            numbers = [message.seq for message in messages]
            self._given = max(self._given, max(numbers) + 1)
            if self._again:
                self._again.difference_update(numbers)

    def _read_ahead(self, taken: Sequence[Message] = ()) -> bool:
        """Have messages at hand; False: there are none. Those just taken are held as yet."""
        if self._unread <= len(taken):
            return False
        messages = self._reader.read_many(_AHEAD)
        self._make_ready(messages)
        if not messages:
            self._recount()
        return bool(messages)

    def _make_ready(self, messages: Sequence[Message]) -> None:
        """Have messages at hand; those that come again are the first."""
        if not self._delayed:
            self._ready.extend(messages)
            return
        again = [message for message in messages if message.seq in self._delayed]
        self._ready.extend([message for message in messages if message.seq not in self._delayed])
        self._ready.extendleft(reversed(again))
        for message in again:
            del self._delayed[message.seq]
            self._again.add(message.seq)
        self._counts["redelivered"] += len(again)

    def _recount(self) -> None:
        """Find out what the group settled by itself: dead letters, and losses."""
        books = self._reader.group()
        for number in list(itertools.islice(self._delayed, books.dead - self._dead)):
            self._held_bytes -= self._delayed.pop(number)
        self._dead = books.dead
        self._held = books.lag - len(self._done)
        if not self._held:
            self._held_bytes = 0

    def _finish(self, messages: Sequence[Message], size: int) -> None:
        """Note that messages, of so many bytes, are done."""
        self._held -= len(messages)
        self._held_bytes -= size
        self._done += messages
        if self._settle_at is None:
            self._settle_at = time.monotonic() + _SETTLED_AFTER
            self._come_by(self._settle_at)

    def _settle(self, now: float, *, everything: bool = False) -> None:
        """Tell the group what is done."""
        if self._settle_at is None:
            return
        if everything or now >= self._settle_at or len(self._done) >= _SETTLED_AT_ONCE:
            self._reader.ack(self._done)
            self._done = []
            self._settle_at = None

    def _lease(self, request: Lease, asker: _Parked) -> bytes | None:
        client = self._client(request.client)
        loan = self._loans.get((request.client, request.seq))
        if loan is not None:
            return self._lent_reply(loan)
        if request.seq in client.answered:
            return none_reply(request.seq)
        if client.answered.is_past(request.seq):
            about = b"%d" % request.seq
            return error_reply(about, Code.STALE, f"the last {_WINDOW} numbers are remembered")
        reply = self._lend(request, asker.largest)
        if reply is not None:
            return reply
        if request.wait and (len(self._parked) < _MOST_PARKED or request.client in self._parked):
            before = self._parked.get(request.client)
            if before is not None and before.request.seq == request.seq:
                self._parked[request.client] = before._replace(send=asker.send, peer=asker.peer)
                return None
            if before is not None:  # of which it does not wait for an answer any more
                del self._parked[request.client]
                client.answered.add(before.request.seq)
                self._answer_late(before, none_reply(before.request.seq))
            until = asker.until + request.wait
            self._parked[request.client] = asker._replace(request=request, until=until)
            self._come_by(until)
            return _WAITS
        client.answered.add(request.seq)
        return none_reply(request.seq)

    def _lend(self, request: Lease, largest: int) -> bytes | None:
        """Lease what there is to a client, and return the answer; None: there is nothing."""
        about = b"%d" % request.seq
        if len(self._leased) >= _MOST_LEASED or self._leased_bytes >= _MOST_LEASED_BYTES:
            return error_reply(about, Code.BUSY, f"{len(self._leased):,} messages are leased")
        found: dict[int, Message] = {}
        room = largest - _ANSWER
        previous = 0
        while len(found) < request.most and (self._ready or self._read_ahead()):
            message = self._ready[0]
            size = len(message.payload)
            if size > room:
                break
            found[message.seq] = self._ready.popleft()
            room -= size + _FRAME
            if message.seq != previous + 1:
                room -= _TAG
            previous = message.seq
        if not found and self._ready:
            text = "the next message does not fit an answer"
            return error_reply(about, Code.TOO_LARGE, text)
        if not found:
            return None
        self._give(list(found.values()))
        # In their order, as their tags say it, also if some of them come again.
        messages = {number: found[number] for number in sorted(found)}
        loan = _Loan(request, messages, time.monotonic() + self._settings.lease)
        self._loans[request.client, request.seq] = loan
        self._come_by(loan.until)
        self._leased.update(dict.fromkeys(messages, loan))
        self._leased_bytes += sum([len(message.payload) for message in messages.values()])
        self._clients[request.client].answered.add(request.seq)
        return self._lent_reply(loan)

    def _lent_reply(self, loan: _Loan) -> bytes:
        messages = [message.payload for message in loan.messages.values()]
        return messages_reply(loan.request, self._tags_of(list(loan.messages)), messages)

    def _serve_parked(self, now: float) -> None:
        """Answer requests for which there is a message, or whose time is over."""
        while self._parked and (self._ready or self._unread > 0):
            name = next(iter(self._parked))
            self._client(name)
            reply = self._lend(self._parked[name].request, self._parked[name].largest)
            if reply is None:
                break
            self._answer_late(self._parked.pop(name), reply)
        for name in [name for name, parked in self._parked.items() if now >= parked.until]:
            parked = self._parked.pop(name)
            self._client(name).answered.add(parked.request.seq)
            self._answer_late(parked, none_reply(parked.request.seq))

    def _answer_late(self, parked: _Parked, reply: bytes) -> None:
        self._late.append((parked.send, reply, parked.peer))

    # --- what clients give back ---------------------------------------------------------------

    def _ack(self, request: Ack) -> bytes:
        numbers, lost = self._numbers_of(request.tags)
        messages, others = self._return(numbers, request.client)
        for number in others:
            if number in self._again:
                # Its lease ran out, and nobody was given it since.
                message = next(each for each in self._ready if each.seq == number)
                self._ready.remove(message)
                self._again.discard(number)
                messages.append(message)
            elif number in self._leased or number in self._delayed or number >= self._given:
                lost.append(number)
        self._counts["acked"] += len(messages)
        self._finish(messages, sum([len(message.payload) for message in messages]))
        return self._settled_reply(request.first, lost)

    def _nack(self, request: Nack) -> bytes:
        numbers, lost = self._numbers_of(request.tags)
        messages, others = self._return(numbers, request.client)
        lost += [n for n in others if n in self._leased or n >= self._given]
        self._give_again(messages, request.delay)
        return self._settled_reply(request.first, lost)

    def _settled_reply(self, first: bytes, lost: list[int]) -> bytes:
        if not lost:
            return ok_reply(first)
        return error_reply(first, Code.NO_LEASE, self._tags_of(lost).decode())

    def _return(self, numbers: Iterable[int], client: bytes) -> tuple[list[Message], list[int]]:
        """End the leases of messages; return these, and the numbers that the client has not."""
        messages: list[Message] = []
        others: list[int] = []
        for number in numbers:
            loan = self._leased.get(number)
            if loan is None or loan.request.client != client:
                others.append(number)
                continue
            del self._leased[number]
            message = loan.messages.pop(number)
            messages.append(message)
            self._leased_bytes -= len(message.payload)
            if not loan.messages:
                del self._loans[client, loan.request.seq]
        return messages, others

    def _give_again(self, messages: Sequence[Message], delay: float) -> None:
        if messages:
            self._reader.nack(messages, delay)
            self._delayed |= {message.seq: len(message.payload) for message in messages}
            due = time.monotonic() + delay
            heapq.heappush(self._due, (due, len(messages)))
            self._come_by(due)
            self._redeliver(time.monotonic())

    def _redeliver(self, now: float) -> None:
        """Read what is due to be given again."""
        count = 0
        while self._due and self._due[0][0] <= now:
            count += heapq.heappop(self._due)[1]
        if not count:
            return
        expected = len(self._delayed)
        self._make_ready(self._reader.read_many(count))
        self._recount()
        missing = count - (expected - len(self._delayed))
        if missing > 0 and self._delayed:
            heapq.heappush(self._due, (now + _LOOKED_FOR_AGAIN, min(missing, len(self._delayed))))

    # --- time ---------------------------------------------------------------------------------

    def _run(self, worker: Worker) -> None:
        """Do what time brings, until the end."""
        while not worker.is_stopping:
            with self._lock:
                now = time.monotonic()
                self._end_leases(now)
                self._redeliver(now)
                self._serve_parked(now)
                self._settle(now)
                self._forget_clients(now)
                self._look_at_memory(now)
                self._comes_at = self._next_moment(now)
                late, self._late = self._late, []
            _send_late(late)
            worker.wait(max(0.0, self._comes_at - time.monotonic()))

    def _come_by(self, moment: float) -> None:
        """Have the clock come at this moment at the latest."""
        if moment < self._comes_at:
            self._comes_at = moment
            self._clock.wake()

    def _next_moment(self, now: float) -> float:
        moments = [now + 1.0, *(parked.until for parked in self._parked.values())]
        if self._loans:
            moments.append(next(iter(self._loans.values())).until)
        if self._due:
            moments.append(self._due[0][0])
        if self._settle_at is not None:
            moments.append(self._settle_at)
        return min(moments)

    def _end_leases(self, now: float) -> None:
        over: list[Message] = []
        while self._loans and (loan := next(iter(self._loans.values()))).until <= now:
            messages, _ = self._return(list(loan.messages), loan.request.client)
            over += messages
        self._give_again(over, 0.0)

    def _forget_clients(self, now: float) -> None:
        while self._clients:
            name, client = next(iter(self._clients.items()))
            if client.heard + _REMEMBERED > now:
                return
            del self._clients[name]

    def _look_at_memory(self, now: float) -> None:
        """Find out whether one old message keeps too much of a log in memory from going."""
        if self._folder is None or now < self._looks_at:
            return
        self._looks_at = now + _LOOKED_AT_MEMORY
        files = Path(self._folder).rglob("*")
        used = sum(each.stat().st_blocks * 512 for each in files if each.is_file())
        books = self._reader.group()
        # The log gives memory back as it is written to: so it has to go on when the oldest is done.
        is_stuck = books.lag > 0 and books.floor == self._floor
        self._floor = books.floor
        is_pinned = is_stuck and used > 2 * (self._settings.capacity_bytes + _LARGEST_SEGMENT)
        if is_pinned and not self._is_pinned:
            log.warning("the queue takes no more until its oldest message is done: it fills memory")
        self._is_pinned = is_pinned

    # --- books, and the end -------------------------------------------------------------------

    def statistics(self) -> QueueStatistics:
        with self._lock:
            if not self._is_closed:
                self._recount()
            counts = self._counts
            dead = self._dead - self._dead_before
            return QueueStatistics(
                commands=counts["commands"],
                puts=counts["puts"],
                gets=counts["gets"],
                sizes=counts["sizes"],
                reliable=counts["reliable"],
                bad_requests=counts["bad_requests"],
                unknown=counts["unknown"],
                recovered=counts["recovered"],
                offered=counts["offered"],
                queued=counts["queued"],
                refused=dict(self._refused),
                dropped=dict(self._dropped),
                repeated=counts["repeated"],
                taken=counts["taken"],
                acked=counts["acked"],
                redelivered=counts["redelivered"],
                dead=dead,
                lost=self._reader.statistics().lost,
                held=self._held,
                leased=len(self._leased),
                held_bytes=self._held_bytes,
                waiting=len(self._parked),
                forgotten=counts["forgotten"],
            )

    def close(self) -> None:
        """Settle what is done; what clients have comes again. Closing twice is fine."""
        if self._is_closed:
            return
        self._clock.stop()
        self.statistics()
        with self._lock:
            self._is_closed = True
            try:
                self._settle(time.monotonic(), everything=True)
            finally:
                self._reader.close()
                self._writer.close()
                self._remove_folder()


_VERB: Final = operator.itemgetter(0)
#: Stands for the request of who asks, until that is known.
_NOTHING: Final = Lease(b"", 0, 0, 0.0, is_single=True)


def _send_late(late: Sequence[tuple[Send, bytes, Address]]) -> None:
    """Send answers to where they were asked for."""
    for send, reply, peer in late:
        send([(reply, peer)])


@lru_cache(maxsize=4096)
def _put_reply(characters: int) -> bytes:
    return encode_bytes(b"PUT %d bytes" % characters)
