"""How does a reader of a group get its share of a stream?"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import pyarrow as pa

from penstock.core.batch import batch_from_messages, bytes_of, numbers_of
from penstock.core.capabilities import Grouped, numbers_of_delivered
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import open_writer
from penstock.core.errors import Closed, NotFound, PenstockError, PositionError, Unsupported
from penstock.core.interfaces import LONGEST_PAUSE, LONGEST_SLEEP, Reader
from penstock.core.overflow import DropReason
from penstock.core.statistics import LoggedLosses, Loss, ReaderStatistics
from penstock.queue.groups.leases import Leases
from penstock.queue.groups.settled import SettledMap, Span, runs_of
from penstock.queue.groups.state import GroupState
from penstock.queue.groups.state_file import Removed, StateFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.core.batch import Batch
    from penstock.core.capabilities import Delivered, GroupStatistics
    from penstock.core.interfaces import Bounds
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.queue.groups.leases import Taken
    from penstock.queue.options import GroupOptions
    from penstock.queue.wide.reader import WideReader

__all__ = ["GroupReader"]

log = logging.getLogger(__name__)

#: Messages of one read: a list of them, or a batch.
_Part: TypeAlias = Any

#: Seconds until dead letters that could not be stored are retried.
_BURIED_AGAIN: Final = 5.0


class OpenStream(Protocol):
    """Opens a plain reader of a stream."""

    def __call__(self, *, may_wait: bool) -> WideReader: ...


class GroupReader(Reader, Grouped):
    """One member of a group: reads the messages of a stream that are leased to it.

    :param open_stream: opens a plain reader of the stream, at the group's start; `may_wait`: it
        may wait for the stream to appear
    :param folder: directory of the state files of the stream's groups
    :param lost: default reason for messages that the stream no longer has
    :param hold: called with epoch and floor: every message below the floor is settled
    """

    _longest_pause = LONGEST_SLEEP

    def __init__(
        self,
        url: str,
        open_stream: OpenStream,
        folder: Path,
        options: GroupOptions,
        *,
        lost: DropReason,
        hold: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(url)
        assert options.group is not None
        self._open_stream = open_stream
        self._folder = folder
        self._options = options
        self._lost = lost
        self._hold = hold
        self._is_closed = False
        self._messages = self._bytes = self._restarts = 0
        self._losses = LoggedLosses(url, log)
        #: Range (first, end) of fresh messages that the stream no longer has.
        self._gap: tuple[int, int] | None = None
        #: Whether this member created the state of the group.
        self._has_begun = False
        self._stream = open_stream(may_wait=True)
        try:
            self._take_up_bounds(self._stream.bounds())
            self._leases = self._join()
        except BaseException:
            self._stream.close()
            raise

    # --- the group, and the stream under it ----------------------------------------------------

    def _join(self) -> Leases:
        """Join the group; the first member creates it.

        :raises InvalidOption: the group has another key.
        """
        options = self._options
        assert options.group is not None
        file = StateFile(self._folder, options.group, self._begin)
        try:
            options.check_key(file.state.key)
            leases = Leases(
                file,
                lease=options.lease,
                deliveries=options.deliveries or 0,
                sync=options.sync,
                hold=self._hold,
            )
        except BaseException:
            file.close()
            raise
        try:
            stream = self._stream
            self._count_restart(leases.renumber(lambda: (stream.bounds(), stream.first_here(), 0)))
        except BaseException:
            leases.close()
            raise
        return leases

    def _begin(self) -> GroupState:
        self._has_begun = True
        first = self._stream.statistics().next_seq or 0
        epoch = self._stream.bounds().epoch
        return GroupState(epoch, SettledMap(first), self._options.key)

    def _take_up_bounds(self, bounds: Bounds) -> None:
        #: The newest epoch, and all epochs of its lineage.
        self._newest = bounds.epoch
        self._epochs = {bounds.epoch, *(ancestor.epoch for ancestor in bounds.lineage)}
        #: Last known end of the stream; 0: unknown.
        self._known_end = 0
        #: The same, even after its reader has switched to a stream that replaced it.
        self._last_end = 0
        #: Position of the stream's reader, if known.
        self._stands_at: int | None = None

    def _take_up_stream(self) -> bool:
        """Reopen the stream and rejoin its group; False: the stream was removed."""
        self._note_end()
        known_end = self._last_end

        def find() -> tuple[Bounds, int, int]:
            # Within this member's turn: no member may apply older bounds after newer ones.
            return self._open_anew(), self._stream.first_here(), known_end

        with suppress(NotFound):  # otherwise it was removed, and is not recreated yet
            try:
                self._count_restart(self._leases.renumber(find))
            except Removed:
                self._join_anew(known_end)
            return True
        return False

    def _join_anew(self, known_end: int) -> None:
        """Join the group that replaces a removed one; its first member counts what was lost.

        :raises NotFound: the stream was removed, too, and is not recreated yet.
        """
        left, newest = self._leases, self._newest
        is_another = self._open_anew().epoch != newest
        if is_another:
            self._stream.seek(self._stream.first_here())
        self._has_begun = False
        self._leases = self._join()
        if self._has_begun and is_another:
            lost = [Loss(left.next, known_end - 1, DropReason.RECREATED)]
            self._count_restart(lost if known_end > left.next else [])
        with suppress(Removed):
            left.close()

    def _open_anew(self) -> Bounds:
        # Without a wait: the other members wait for this one's turn.
        stream = self._open_stream(may_wait=False)
        met, newest = self._stream.epoch, self._newest
        self._stream.close()
        self._stream = stream
        bounds = stream.bounds()
        self._take_up_bounds(bounds)
        if bounds.epoch == newest:
            self._epochs.add(met)  # the same stream, whose lineage is unknown
        return bounds

    def _count_restart(self, lost: list[Loss] | None) -> None:
        """Count a recreation of the stream and its losses; None: it was not recreated."""
        if lost is not None:
            log.warning("%s was created anew", self.url)
            self._restarts += 1
            for loss in lost:
                self._losses.add(loss)

    def _note_end(self) -> None:
        """Remember the end of the stream, before a switch to one that replaces it."""
        if self._stream.epoch in self._epochs:
            self._last_end = self._stream.end_here()

    def _end(self) -> int:
        """Return the number of the stream's next message."""
        newest = self._stream.newest_seq()
        return self._stream.bounds().end if newest is None else newest + 1

    # --- reading -------------------------------------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        found: list[Message] = self._take_joined(limit, _messages, _list_of)
        return found

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        return self._read_columns(n, timeout, origins=False)

    def read_batch_with_origins(self, n: int, timeout: float | None = 0) -> Batch:
        return self._read_columns(n, timeout, origins=True)

    def _read_columns(self, n: int, timeout: float | None, *, origins: bool) -> Batch:
        is_ordered = self._options.key is not None
        read_batch = _batch_with_origins if origins else _batch

        def join(parts: list[_Part]) -> Batch:
            if is_ordered:
                return batch_from_messages(_list_of(parts), origins=origins)
            return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

        def take() -> _Part:
            return self._take_joined(n, _messages if is_ordered else read_batch, join)

        found = (take() or self._wait_for(take, timeout)) if n > 0 else None
        return found or batch_from_messages([], origins=origins)

    def _take_joined(
        self,
        limit: int,
        read: Callable[[WideReader, int], _Part],
        join: Callable[[list[_Part]], _Part],
    ) -> _Part:
        """Lease up to `limit` messages, and return them joined to what the caller gets.

        From `keep_taken` on nothing is called until the caller has them, neither here nor in the
        methods that return them: Python runs signal handlers only at calls and loops.
        """
        self._check_open()
        try:
            parts = self._lease_and_read(limit, read)
            found = join(parts) if parts else []
            count, size = len(found), _bytes_of(found)
            self._leases.keep_taken()
        except BaseException:  # also Ctrl-C: `acknowledge` must not settle what nobody got
            self._leases.give_back_taken()
            raise
        self._messages += count
        self._bytes += size
        return found

    def _lease_and_read(self, limit: int, read: Callable[[WideReader, int], _Part]) -> list[_Part]:
        ahead: dict[int, Message] = {}
        while (taken := self._lease(limit, ahead)) is not None:
            if taken.dying:
                self._bury(taken.dying)
            parts = self._fetch(taken.spans, ahead, read)
            gap, self._gap = self._gap, None
            if gap is not None:
                self._settle_lost([gap])
            if parts:
                return parts
            if not taken.spans and not taken.dying and gap is None:
                break
        return []

    def _lease(self, limit: int, ahead: dict[int, Message]) -> Taken | None:
        """Lease up to `limit` messages of the current stream; None: the stream was removed."""
        keys = None if self._options.key is None else self._keys_into(ahead)
        while True:
            # Read the end only when near it: during catch-up it is far away.
            is_asked = self._known_end < self._leases.next + limit
            if is_asked:
                self._note_end()
                self._known_end = self._last_end
                if not self._stream.is_named():
                    with suppress(NotFound):
                        self._stream.bounds()  # it switches to a stream that has replaced its own
            taken = None
            if self._stream.epoch in self._epochs and self._known_end >= self._leases.next:
                with suppress(Removed):
                    taken = self._leases.take(limit, self._known_end, self._epochs, keys)
            if taken is None:
                if not self._take_up_stream():
                    return None
            elif is_asked or taken.spans or taken.dying:
                return taken
            else:
                self._known_end = 0  # other members took them first

    def _keys_into(self, ahead: dict[int, Message]) -> Callable[[int, int], list[tuple[int, int]]]:
        """Return a function that reads fresh messages into `ahead` and returns numbers and keys."""
        key = self._options.key
        assert key is not None

        def keys(first: int, limit: int) -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = []
            try:
                messages = self._read_at(first, limit, _messages)
            except PositionError:
                return found  # not a number of the current stream
            if self._stream.epoch not in self._epochs:
                return found  # of another epoch: the numbers mean other messages
            stands_at = self._stream.statistics().next_seq if not messages else None
            if stands_at is not None and stands_at > first:
                self._gap = first, stands_at
            for seq, message in enumerate(messages, first):
                if message.seq != seq:  # read the rest after this gap is settled as lost
                    self._gap = seq, message.seq
                    break
                ahead[seq] = message
                found.append((seq, _key_of(getattr(message, key))))
            return found

        return keys

    def _fetch(
        self,
        spans: Sequence[Span],
        ahead: dict[int, Message],
        read: Callable[[WideReader, int], _Part],
    ) -> list[_Part]:
        """Read leased messages; settle as lost those that the stream no longer has."""
        parts: list[_Part] = []
        for number, span in enumerate(spans):
            try:
                if span.size == 1 and span.first in ahead:
                    parts.append([ahead[span.first]])
                else:
                    parts += self._read(span, read)
            except PenstockError:
                self._leases.give_back(spans[number:])
                if not parts:  # otherwise the next call raises it
                    raise
                break
        return parts

    def _read(self, span: Span, read: Callable[[WideReader, int], _Part]) -> list[_Part]:
        parts: list[_Part] = []
        at, count = span.first, 0
        try:
            while at < span.end and len(found := self._read_at(at, span.end - at, read)):
                parts.append(found)
                at = _last(found) + 1
                count += len(found)
        except PositionError:
            pass  # not a number of the current stream
        except PenstockError:
            if not parts:
                raise
            self._leases.give_back([span._replace(first=at)])  # the next call raises it
            return parts
        if self._stream.epoch not in self._epochs:
            # Of another epoch: the numbers mean other messages in this group.
            self._leases.give_back([span])
            return []
        if count == span.size and at == span.end:
            return parts
        if parts:  # the last part may extend past the span
            parts[-1] = parts[-1][: bisect_left(_numbers(parts[-1]), span.end)]
        self._lose(span, [number for part in parts for number in _numbers(part)])
        return [part for part in parts if len(part)]

    def _read_at(self, first: int, limit: int, read: Callable[[WideReader, int], _Part]) -> _Part:
        # Unknown until it has read: a signal may come when the stream's reader has moved.
        stands_at, self._stands_at = self._stands_at, None
        if stands_at != first:
            self._stream.skip_to(first)
        found = read(self._stream, limit)
        self._stands_at = _last(found) + 1 if len(found) else None
        return found

    def _lose(self, span: Span, came: Sequence[int]) -> None:
        """Settle missing messages of a span as lost; return those that may still appear."""
        stands_at = self._stream.statistics().next_seq or 0
        there = runs_of(came)
        missing = []
        at = span.first
        for first, end in (*there, (span.end, span.end)):
            if at < first:
                missing.append((at, first))
            at = end
        if missing and missing[-1][1] > stands_at:
            self._leases.give_back([Span(*missing[-1])], after=LONGEST_PAUSE)
            missing.pop()
        self._settle_lost(missing)

    def _settle_lost(self, missing: Sequence[tuple[int, int]]) -> None:
        oldest = self._stream.bounds().oldest
        for loss in self._leases.lose(missing, oldest, self._reason(missing)):
            self._losses.add(loss)

    def _reason(self, missing: Sequence[tuple[int, int]]) -> DropReason:
        """Return why messages are lost, by the losses of the stream's reader."""
        for loss in reversed(self._stream.statistics().losses):
            if missing and loss.first < missing[-1][1] and loss.last >= missing[0][0]:
                return loss.reason
        return self._lost

    # --- dead letters --------------------------------------------------------------------------

    def _bury(self, spans: Sequence[Span]) -> None:
        """Append messages to the dead-letter stream, and then settle them."""
        try:
            letters = [
                self._letter(message, span.deliveries)
                for span in spans
                for part in self._read(span, _messages)
                for message in part
            ]
            assert self._options.dead is not None
            # Not kept open: a log has one writer at a time, and the group many members.
            with open_writer(self._options.dead) as writer:
                for m in letters:
                    writer.write(
                        m.payload, m.type, m.subtype, m.time_ns, None, m.stream, m.attributes
                    )
                writer.flush()
        except (PenstockError, OSError) as error:
            log.warning("%s: dead letters could not be stored, and wait: %s", self.url, error)
            self._leases.give_back(spans, after=_BURIED_AGAIN, counted=True)
            return
        self._leases.bury(spans)

    def _letter(self, message: Message, deliveries: int) -> Message:
        now = time.time_ns()

        return DeadLetter(
            original=message,
            code=Code.ABORTED,
            reason=f"delivered {deliveries} times, and never acknowledged",
            receiver=f"{self.url.partition('?')[0]}?group={self._options.group}",
            attempts=deliveries,
            first_attempt_ns=now,
            last_attempt_ns=now,
            dead_ns=now,
        ).to_message()

    # --- settling ------------------------------------------------------------------------------

    def ack(self, messages: Delivered) -> None:
        self.ack_ranges(runs_of(numbers_of_delivered(messages)))

    def nack(self, messages: Delivered, delay: float = 0.0) -> None:
        self.nack_ranges(runs_of(numbers_of_delivered(messages)), delay)

    def ack_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Settle messages like `ack`, given as ranges (first, end) of their numbers."""
        self._check_open()
        self._leases.ack(ranges)

    def nack_ranges(self, ranges: Sequence[tuple[int, int]], delay: float = 0.0) -> None:
        """Return messages for redelivery like `nack`, given as for `ack_ranges`."""
        self._check_open()
        self._leases.nack(ranges, delay)

    def give_back_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Return messages that were read ahead and never used; the lease counts as no delivery."""
        self._check_open()
        self._leases.give_back([Span(first, end) for first, end in ranges])

    def unsettled(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges of these delivered messages that are not settled."""
        self._check_open()
        return self._leases.unsettled(ranges)

    def acknowledge(self) -> None:
        """Settle all messages leased to this reader."""
        self._check_open()
        self._leases.ack_all()

    # --- the interface of a reader -------------------------------------------------------------

    def seek(self, position: PositionLike) -> None:
        raise Unsupported(
            f"{self.url}: the readers of a group share one place, and cannot seek to {position}",
            hint="another group=NAME begins where its first reader is opened: start=",
        )

    def newest_seq(self) -> int | None:
        self._check_open()
        return self._stream.newest_seq()

    def group(self) -> GroupStatistics:
        self._check_open()
        return self._leases.statistics(self._end())

    def statistics(self) -> ReaderStatistics:
        backlog = 0
        if not self._is_closed:
            self._next_seq = self._leases.next
            with suppress(Removed):  # the next read joins it anew, when its stream is there
                books = self.group()
                backlog = books.lag - books.leased
                self._next_seq = books.next_seq
        self._losses.tell()
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._losses.total,
            filtered=0,
            restarts=self._restarts,
            next_seq=self._next_seq,
            backlog=backlog,
            losses=self._losses.ranges(),
        )

    def _pause(self, seconds: float) -> None:
        seconds = min(seconds, self._leases.rest())
        following = self._leases.next
        if following != self._end():
            # Messages wait for their key or delay, or the stream was replaced: the next read sees.
            time.sleep(min(seconds, LONGEST_PAUSE))
            return
        if self._stands_at != following:
            self._stream.seek(following)
            self._stands_at = following
        self._stream._wait(seconds)  # noqa: SLF001 - this reader sleeps by its stream's reader

    def _has_news(self) -> bool:
        self._check_open()
        end = self._end()
        if self._stream.epoch not in self._epochs:
            return True  # it was created anew: the next read takes that up
        try:
            return self._leases.has_free(end, self._epochs)
        except Removed:
            pass
        with suppress(NotFound):  # the next read joins it anew, when its stream is there
            self._open_stream(may_wait=False).close()
            return True
        return False

    def _idle(self) -> bool:
        return self._stream._idle()  # noqa: SLF001 - as above

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")

    def close(self) -> None:
        """Return unsettled messages for redelivery, and leave the group."""
        if self._is_closed:
            return
        with suppress(PenstockError):
            self.statistics()
        self._is_closed = True
        self._losses.tell(at_once=True)
        try:
            with suppress(Removed):  # with all that could be returned
                self._leases.close()
        finally:
            self._stream.close()


def _messages(stream: WideReader, limit: int) -> list[Message]:
    return stream.read_many(limit)


def _batch(stream: WideReader, limit: int) -> Batch:
    return stream.read_batch(limit)


def _batch_with_origins(stream: WideReader, limit: int) -> Batch:
    return stream.read_batch_with_origins(limit)


def _list_of(parts: list[_Part]) -> list[Message]:
    return list(itertools.chain.from_iterable(parts))


def _numbers(part: _Part) -> Sequence[int]:
    """Return the sequence numbers of the messages, in order."""
    if isinstance(part, list):
        return [message.seq for message in part]
    numbers: list[int] = part.column("seq").to_pylist()
    return numbers


def _last(part: _Part) -> int:
    """Return the sequence number of the last message."""
    return part[-1].seq if isinstance(part, list) else int(numbers_of(part, "seq")[-1])


def _bytes_of(part: _Part) -> int:
    """Count the bytes of the payloads."""
    if isinstance(part, list):
        return sum([len(message.payload) for message in part])
    return bytes_of(part.column("payload"))


def _key_of(value: object) -> int:
    """Hash the value of a field to 64 bits, equal in all processes."""
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    text = b"" if value is None else bytes(value) if not isinstance(value, str) else value.encode()  # type: ignore[call-overload]
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
