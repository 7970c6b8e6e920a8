"""How does a reader of a group get its share of a stream?"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import open_writer
from penstock.core.errors import Closed, NotFound, PenstockError, PositionError, Unsupported
from penstock.core.grouped import Grouped, numbers_of_delivered
from penstock.core.interfaces import LONGEST_PAUSE, LONGEST_SLEEP, Reader
from penstock.core.statistics import ReaderStatistics
from penstock.queue.groups.leases import Leases
from penstock.queue.groups.settled import SettledMap, Span, runs_of
from penstock.queue.groups.state import GroupState
from penstock.queue.groups.state_file import Removed, StateFile
from penstock.queue.losses import LoggedLosses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.core.grouped import Delivered, GroupStatistics
    from penstock.core.interfaces import Bounds
    from penstock.core.message import Message
    from penstock.core.overflow import DropReason
    from penstock.core.position import PositionLike
    from penstock.core.statistics import Loss
    from penstock.queue.groups.leases import Taken
    from penstock.queue.groups.options import GroupOptions
    from penstock.queue.wide.reader import WideReader

__all__ = ["GroupReader"]

log = logging.getLogger(__name__)

#: Dead letters that could not be stored are tried again after so long (seconds).
_BURIED_AGAIN: Final = 5.0


class GroupReader(Reader, Grouped):
    """One member of a group: reads the messages of a stream that are leased to it.

    :param open_stream: opens a reader of the stream alone; the first stands where a group begins
    :param folder: where the states of the stream's groups are
    :param lost: why messages are gone that the stream had once
    :param hold: is told up to where all is settled
    """

    _longest_pause = LONGEST_SLEEP

    def __init__(
        self,
        url: str,
        open_stream: Callable[[], WideReader],
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
        #: Fresh messages that were not there, from and up to these numbers.
        self._gap: tuple[int, int] | None = None
        self._stream = open_stream()
        try:
            self._take_up_bounds(self._stream.bounds())
            self._leases = self._join()
        except BaseException:
            self._stream.close()
            raise

    # --- the group, and the stream under it ----------------------------------------------------

    def _join(self) -> Leases:
        """Become a member; the first one makes the group.

        :raises InvalidOption: its messages are ordered by another key.
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
            self._count_restart(leases.renumber(lambda: (self._stream.bounds(), 0)))
        except BaseException:
            leases.close()
            raise
        return leases

    def _begin(self) -> GroupState:
        first = self._stream.statistics().next_seq or 0
        epoch = self._stream.bounds().epoch
        return GroupState(epoch, SettledMap(first), self._options.key)

    def _take_up_bounds(self, bounds: Bounds) -> None:
        #: The newest epoch, and all whose numbers are those of the group.
        self._newest = bounds.epoch
        self._epochs = {bounds.epoch, *(ancestor.epoch for ancestor in bounds.lineage)}
        #: Where the stream's reader stands, if that is known.
        self._stands_at: int | None = None

    def _take_up_stream(self) -> bool:
        """Go on with the stream and the group that are there now; False: there is no stream."""
        known_end = self._end()

        def find() -> tuple[Bounds, int]:
            # In the turn of this member, so that no other knows less and goes back.
            return self._open_anew(), known_end

        try:
            self._count_restart(self._leases.renumber(find))
        except Removed:
            with suppress(Removed):
                self._leases.close()
            self._open_anew()
            self._leases = self._join()
        except NotFound:
            return False  # removed, and not made anew yet
        return True

    def _open_anew(self) -> Bounds:
        stream = self._open_stream()
        met, newest = self._stream.epoch, self._newest
        self._stream.close()
        self._stream = stream
        bounds = stream.bounds()
        self._take_up_bounds(bounds)
        if bounds.epoch == newest:
            self._epochs.add(met)  # it is the same stream, though nobody knows its lineage
        return bounds

    def _count_restart(self, lost: list[Loss] | None) -> None:
        """Count that the stream was created anew, with what was lost by that; None: it was not."""
        if lost is not None:
            log.warning("%s was created anew", self.url)
            self._restarts += 1
            for loss in lost:
                self._losses.add(loss)

    def _end(self) -> int:
        """Return the number of the stream's next message."""
        newest = self._stream.newest_seq()
        return self._stream.bounds().end if newest is None else newest + 1

    # --- reading -------------------------------------------------------------------------------

    def _take(self, limit: int) -> list[Message]:
        self._check_open()
        ahead: dict[int, Message] = {}
        while (taken := self._lease(limit, ahead)) is not None:
            if taken.dying:
                self._bury(taken.dying)
            messages = self._fetch(taken.spans, ahead)
            gap, self._gap = self._gap, None
            if gap is not None:
                self._settle_lost([gap])
            if messages:
                self._messages += len(messages)
                self._bytes += sum([len(message.payload) for message in messages])
                return messages
            if not taken.spans and not taken.dying and gap is None:
                break
        return []

    def _lease(self, limit: int, ahead: dict[int, Message]) -> Taken | None:
        """Lease messages, in the numbers of the stream that is there now; None: there is none."""
        keys = None if self._options.key is None else self._keys_into(ahead)
        while True:
            end = self._end()
            taken = None
            if self._stream.epoch in self._epochs and end >= self._leases.next:
                with suppress(Removed):
                    taken = self._leases.take(limit, end, self._epochs, keys)
            if taken is not None:
                return taken
            if not self._take_up_stream():
                return None

    def _keys_into(self, ahead: dict[int, Message]) -> Callable[[int, int], list[tuple[int, int]]]:
        """Return what reads fresh messages ahead, keeps them, and tells their numbers and keys."""
        key = self._options.key
        assert key is not None

        def keys(first: int, limit: int) -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = []
            try:
                messages = self._read_at(first, limit)
            except PositionError:
                return found  # it is no number of the stream that is there now
            if self._stream.epoch not in self._epochs:
                return found  # these are of another epoch, and their numbers mean others here
            stands_at = self._stream.statistics().next_seq if not messages else None
            if stands_at is not None and stands_at > first:
                self._gap = first, stands_at
            for seq, message in enumerate(messages, first):
                if message.seq != seq:  # the rest comes when this gap is settled as a loss
                    self._gap = seq, message.seq
                    break
                ahead[seq] = message
                found.append((seq, _key_of(getattr(message, key))))
            return found

        return keys

    def _fetch(self, spans: Sequence[Span], ahead: dict[int, Message]) -> list[Message]:
        """Read leased messages. What is not there any more is settled as lost."""
        messages: list[Message] = []
        for number, span in enumerate(spans):
            try:
                if span.size == 1 and span.first in ahead:
                    messages.append(ahead[span.first])
                else:
                    messages += self._read(span)
            except PenstockError:
                self._leases.give_back(spans[number:])
                if not messages:  # otherwise the next call comes to it
                    raise
                break
            except BaseException:
                self._leases.give_back(spans)
                raise
        return messages

    def _read(self, span: Span) -> list[Message]:
        messages: list[Message] = []
        at = span.first
        try:
            while at < span.end and (found := self._read_at(at, span.end - at)):
                messages += found
                at = found[-1].seq + 1
        except PositionError:
            pass  # it is no number of the stream that is there now
        except PenstockError:
            if not messages:
                raise
            self._leases.give_back([span._replace(first=at)])  # the next call comes to it
            return messages
        if self._stream.epoch not in self._epochs:
            # These are of another epoch, and their numbers mean others in this group.
            self._leases.give_back([span])
            return []
        if len(messages) == span.size and messages[-1].seq == span.end - 1:
            return messages
        messages = [message for message in messages if message.seq < span.end]
        self._lose(span, messages)
        return messages

    def _read_at(self, first: int, limit: int) -> list[Message]:
        if self._stands_at != first:
            self._stands_at = None
            self._stream.seek(first)
        messages = self._stream.read_many(limit)
        self._stands_at = messages[-1].seq + 1 if messages else None
        return messages

    def _lose(self, span: Span, messages: Sequence[Message]) -> None:
        """Settle as lost what of a span did not come; give back what may come yet."""
        stands_at = self._stream.statistics().next_seq or 0
        there = runs_of([message.seq for message in messages])
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
        """Return why messages are gone, as the stream's reader found it."""
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
                for message in self._read(span)
            ]
            assert self._options.dead is not None
            # Not kept open: a log has one writer at a time, and this group many members.
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
        self._check_open()
        self._leases.ack(numbers_of_delivered(messages))

    def nack(self, messages: Delivered, delay: float = 0.0) -> None:
        self._check_open()
        self._leases.nack(numbers_of_delivered(messages), delay)

    def acknowledge(self) -> None:
        """Settle everything that this reader has."""
        self._check_open()
        self._leases.ack_all()

    # --- what every reader has -----------------------------------------------------------------

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
            books = self.group()
            backlog = books.lag - books.leased
            self._next_seq = books.next_seq
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
            # There are some, which have to wait; or it is another stream, as the next read finds.
            time.sleep(min(seconds, LONGEST_PAUSE))
            return
        if self._stands_at != following:
            self._stream.seek(following)
            self._stands_at = following
        self._stream._wait(seconds)  # noqa: SLF001 - the sleep of this reader, too

    def _idle(self) -> bool:
        return self._stream._idle()  # noqa: SLF001 - as above

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")

    def close(self) -> None:
        """Give back what was not acknowledged, and leave the group."""
        if self._is_closed:
            return
        with suppress(PenstockError):
            self.statistics()
        self._is_closed = True
        try:
            self._leases.close()
        finally:
            self._stream.close()


def _key_of(value: object) -> int:
    """Return a number for the value of a field, the same in all processes."""
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    text = b"" if value is None else bytes(value) if not isinstance(value, str) else value.encode()  # type: ignore[call-overload]
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
