"""How are messages read from a remote queue, in order and without a silent gap?"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Replayable
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    Malformed,
    NotFound,
    PenstockError,
    PositionError,
)
from penstock.core.interfaces import Bounds, Reader
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.statistics import LoggedLosses, Loss, ReaderStatistics
from penstock.protocols.lrose.ds_client import RequestRefused
from penstock.protocols.lrose.fmq_client import (
    CANNOT_CARRY,
    QueueLink,
    ReceivedMessages,
    Target,
    open_to_read,
)
from penstock.protocols.lrose.fmq_search import (
    Delivered,
    Probe,
    Proof,
    find_message,
    find_newest,
    find_oldest,
    stand_behind,
)
from penstock.protocols.lrose.fmq_wire import SeekTo
from penstock.queue.classic.layout import ID_COUNT, id_distance, unwrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.batch import Batch
    from penstock.core.position import PositionLike
    from penstock.protocols.lrose.fmq_messages import Messages

__all__ = ["FmqReader"]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000
_PAYLOAD_OF: Final = itemgetter(Message._fields.index("payload"))
#: First pause (seconds) between two polls of a server that cannot wait; it grows up to `poll`.
_FIRST_PAUSE: Final = 0.001
#: Seconds that a server of ours waits in one request.
_LONGEST_WAIT: Final = 5.0
#: LROSE's server never looks at its path again. While it sends nothing, check this often (seconds)
#: whether the path names another queue; less often if it names none.
_LOOK_AT_PATH: Final = 0.25
_LOOK_FOR_QUEUE: Final = 3.0
#: After this many seconds without a request, the last message is read again with the next ones,
#: to check that it is still the same queue.
_STILL_THE_SAME: Final = 0.05
#: A writer publishes filled slots in the status almost at once. A status that is still behind what
#: was read after this many seconds is that of another queue.
_PATIENCE: Final = 0.3
#: Most consecutive failures of LROSE's server to read beside a busy writer.
_MOST_FAILURES: Final = 200


class FmqReader(Replayable, Reader):
    """Reads a queue behind a DsFmqServer, LROSE's or ours; reconnects, and resumes.

    The protocol has only ids, which wrap: a message's number is its id, unwrapped. Messages missing
    between two ids are counted as lost; but first they are searched from the oldest one on, because
    LROSE's server jumps to the newest when it is overrun (docs/specs/lrose.md 6.1 item 4). That
    server also reads slots before the status publishes them, and then goes back: messages that it
    repeats are skipped.
    """

    cannot_carry = CANNOT_CARRY

    def __init__(self, target: Target, start: Position) -> None:
        super().__init__(target.url)
        self._target = target
        self._options = target.options
        self._wanted = -1
        if target.options.type is not None and target.options.filter == "server":
            self._wanted = target.options.type
        self._closed = False
        self._messages = 0
        self._bytes = 0
        self._restarts = 0
        self._losses = LoggedLosses(target.url, log)
        #: Connections made after one was lost.
        self.reconnects = 0
        self._probe = Probe(target)
        self._received = ReceivedMessages(target.options)
        self._ready = self._received.ready
        #: What `_put_back` returns to: the messages that the present call took, and the counters.
        self._before: tuple[list[Message], int, int] | None = None
        #: The number of the next message; None: any.
        self._next: int | None = None
        #: A number near the next ones, to unwrap ids.
        self._near = 0
        #: The server is before the next message: skip the first messages.
        self._is_skipping = False
        self._skipped_to: int | None = None
        self._proof: Proof | None = None
        self._delivered = Delivered()
        self._looked_at_path = self._asked = time.monotonic()
        self._could_look = True
        self._lost_since: float | None = None
        self._link: QueueLink | None = open_to_read(target, 0.0)
        try:
            self.seek(start)
        except BaseException:
            self.close()
            raise

    # --- the connection ---------------------------------------------------------------------

    def _linked(self, patience: float | None = None) -> QueueLink:
        """Return the connection; if it broke, a new one at the same position."""
        link = self._link
        if link is None:
            began = time.monotonic()
            try:
                link = self._new_link(patience)
            except ConnectionLost:
                if self._lost_since is None:
                    self._lost_since = began
                raise
            self._link = link
            if self._lost_since is not None:
                self._lost_since = None
                self.reconnects += 1
                log.warning("%s: connected again", self.url)
        return link

    def _new_link(self, patience: float | None) -> QueueLink:
        limit = math.inf if patience is None else patience
        try:
            link = open_to_read(self._target, min(self._options.retry, limit), limit)
        except NotFound as error:
            if math.isinf(limit) or not self._options.wait:
                raise
            raise ConnectionLost(self.url, "the queue is not there yet") from error
        try:
            self._stand_again(link)
        except BaseException:
            link.abandon()
            raise
        return link

    def _stand_again(self, link: QueueLink) -> None:
        if self._next is None:
            self._skip_from(link, None)
        elif self._can_step(link):
            self._find_place(link)
        else:
            # One before, if it was read: to check that it is still the same queue.
            self._place(link, self._next if self._proof is None else self._proof.seq)
            self._is_skipping = True

    def _place(self, link: QueueLink, seq: int) -> None:
        """Move the server to a message, or else to the oldest."""
        if seq == 0 or not link.seek_after_id((seq - 1) % ID_COUNT):
            self._skip_from(link, self._next)

    def _skip_from(self, link: QueueLink, next_seq: int | None) -> None:
        """Move the server to the oldest message, and skip all before a number."""
        link.seek(SeekTo.START)
        self._next = next_seq
        self._is_skipping = next_seq is not None
        self._skipped_to = None

    def _can_step(self, link: QueueLink) -> bool:
        """Tell whether to find positions by steps back: LROSE's server, and no type filter."""
        return not link.is_ours and self._wanted < 0

    def _find_place(self, link: QueueLink) -> None:
        """Move LROSE's server to the next message, or to the oldest one left after it.

        The server reopens the queue of its path. If that is another queue, start over.
        """
        assert self._next is not None
        if not self._is_published(link):
            return
        proof = self._proof if self._proof and self._proof.seq == self._next - 1 else None
        wanted = self._next - 1 if proof else self._next
        if link.last_id == (wanted - 1) % ID_COUNT:
            return  # there is nothing behind it
        found = find_message(link, wanted % ID_COUNT)
        if found is None:
            self._place(link, wanted)
            self._is_skipping = True
            return
        first = unwrap(found.ids[0], wanted) if found.ids else None
        if proof is not None and first == wanted:
            if self._delivered.is_same(found, 0, wanted) is False:
                self._restart(link)
                return
            found, first = found.rows(1), wanted + 1
        if first != self._next:
            found = find_oldest(link)
            first = unwrap(found.ids[0], self._next) if found.ids else None
            if first is None or first < self._next:
                return  # it is there, for the next question
            self._miss(first)
        self._keep_run(link, found)

    def _is_published(self, link: QueueLink) -> bool:
        """Reopen the queue, and check that it reaches the current position.

        If not, it is another queue, or the last messages read were never published.
        """
        assert self._next is not None
        deadline = time.monotonic() + _PATIENCE
        while True:
            found = find_newest(link)
            newest = unwrap(found.ids[0], self._next) if found.ids else -1
            if newest >= self._next - 1 and (found.ids or not self._next):
                return bool(found.ids)
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        if found.ids and self._delivered.is_same(found, 0, newest):
            log.warning("%s: its writer took back what is behind message %d", self.url, newest)
            self._next = newest + 1
            stand_behind(link, newest % ID_COUNT)
        else:
            self._restart(link)
        return False

    def _keep_run(self, link: QueueLink, messages: Messages) -> None:
        """Keep the contiguous messages from the next one on; move the server after them."""
        assert self._next is not None
        ids = messages.ids
        count = 0
        while count < len(ids) and ids[count] == (self._next + count) % ID_COUNT:
            count += 1
        self._is_skipping = False
        self._keep(messages.rows(0, count), range(self._next, self._next + count))
        last = (self._next - 1) % ID_COUNT
        if self._next and link.last_id != last and not stand_behind(link, last):
            self._place(link, self._next)
            self._is_skipping = True

    def _give_up_link(self, *, is_lost: bool = True) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
            if is_lost:
                self._lost_since = time.monotonic()

    # --- where it stands --------------------------------------------------------------------

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        place = Position.of(position)
        before = self._next, self._near, self._proof, self._delivered
        received = self._received.contents()
        try:
            self._received.replace()
            self._delivered = Delivered()
            self._seek(place)
        except BaseException as error:
            # It stays where it was: the next read connects again, and resumes there.
            self._give_up_link(is_lost=isinstance(error, ConnectionLost))
            self._received.replace(received)
            self._next, self._near, self._proof, self._delivered = before
            self._is_skipping = False
            raise

    def _seek(self, place: Position) -> None:
        self._proof = self._skipped_to = None
        self._is_skipping = False
        while True:
            if self._link is None:
                self._next = None
            link = self._linked()
            try:
                if self._can_step(link):
                    self._step_to(link, place)
                else:
                    self._go(link, place)
            except ConnectionLost:
                self._give_up_link()
                continue
            return

    def _step_to(self, link: QueueLink, place: Position) -> None:
        """Move LROSE's server to a position."""
        self._next = None
        found = find_newest(link)
        newest = unwrap(found.ids[0], self._near_to(place)) if found.ids else -1
        match place.anchor:
            case "start" | "time":
                if found.ids:
                    found = find_oldest(link)
                    newest = unwrap(found.ids[0], newest)
                if place.anchor == "time" and found.ids:
                    stand_behind(link, found.ids[-1])
                    found = self._skip_before(link, found, place.value // _SECOND)
                    newest = unwrap(found.ids[0], newest) if found.ids else newest
                if self._next is None:
                    self._next = max(newest, 0)
            case "last":
                self._next = max(newest, 0)
            case "end":
                self._next = newest + 1
                found = found.rows(1)
            case _:
                self._check_reached(place.value, newest + 1)
                self._next = place.value
                if place.value <= newest:
                    self._find_place(link)
                    return
                found = found.rows(1)
        self._keep_run(link, found)

    def _near_to(self, place: Position) -> int:
        """Return a number near the newest one, to unwrap ids."""
        return place.value if place.anchor == "seq" else self._near

    def _check_reached(self, seq: int, end: int) -> None:
        if seq > end:
            raise PositionError(
                f"{self.url} has no message {seq} yet: the next one is {end}",
                hint="use end to wait for the next message",
            )

    def _go(self, link: QueueLink, place: Position) -> None:
        if not link.is_ours:
            find_newest(link)  # or it would seek by what it saw long ago
        self._next = None
        match place.anchor:
            case "start" | "time":
                link.seek(SeekTo.START)
                # At once: LROSE's server dies of START if the first message comes before the
                # first read (docs/specs/lrose.md 6.1 item 1).
                messages = link.read(self._wanted)
                if place.anchor == "time":
                    messages = self._skip_before(link, messages, place.value // _SECOND)
            case "last":
                link.seek(SeekTo.LAST)
                messages = link.read(self._wanted)
            case "end":
                messages = self._go_behind_newest(link, self._near)
            case _:
                messages = self._go_behind_newest(link, place.value)
                self._check_reached(place.value, self._next or 0)
                if place.value != self._next:
                    link.is_another = False
                    self._next = place.value
                    self._place(link, place.value)
                    return
        link.is_another = False  # who seeks means the queue that there is
        if messages.ids:
            self._take_in(link, messages)
        elif self._next is None and self._wanted < 0:
            self._next = 0  # an empty queue begins with this one

    def _go_behind_newest(self, link: QueueLink, near: int) -> Messages:
        """Move to the end, and learn its number, so that nothing after it is missed.

        Returns the messages appended after it meanwhile.
        """
        link.seek(SeekTo.LAST)
        messages = link.read(most=1)
        self._next = unwrap(messages.ids[0], near) + 1 if messages.ids else 0
        behind = messages.rows(1)  # of all types
        if self._wanted < 0:
            return behind
        return behind.chosen([row for row, t in enumerate(behind.types) if t == self._wanted])

    def _skip_before(self, link: QueueLink, messages: Messages, second: int) -> Messages:
        """Skip messages that were appended earlier; the protocol cannot seek a time."""
        newest = None
        while messages.ids:
            if newest is not None and self._wanted < 0:
                # The missing messages may include the wanted ones.
                missing = id_distance(messages.ids[0], newest % ID_COUNT) != 1
                if missing:
                    self._next = newest + 1
                    return messages
            for row, moment in enumerate(messages.times):
                if moment >= second:
                    return messages.rows(row)
            newest = self._near = unwrap(messages.ids[-1], self._near)
            messages = link.read(self._wanted)
        self._next = 0 if newest is None else newest + 1
        return messages

    @property
    def server_is_ours(self) -> bool:
        """Whether the server is one of ours, and not LROSE's."""
        return self._link is not None and self._link.is_ours

    def newest_seq(self) -> int | None:
        """Return the newest number, over a second connection that keeps this position."""
        self._check_open()
        ids = self._probe.newest().ids
        return unwrap(ids[0], self._here) if ids else None

    def bounds(self) -> Bounds:
        self._check_open()
        found = self._probe.bounds(self._here)
        if found is None:
            end = self._next or 0
            return Bounds(0, end, end)
        # The protocol has no epoch; a recreated queue is recognised by its numbers.
        oldest, newest = found
        return Bounds(0, oldest, max(newest, oldest) + 1)

    @property
    def _here(self) -> int:
        return self._near if self._next is None else self._next

    # --- taking in what comes ---------------------------------------------------------------

    def _take_in(self, link: QueueLink, messages: Messages) -> bool:
        """Check the ids of received messages, and keep them; False: read from elsewhere."""
        if link.is_another:  # whatever its ids are
            link.is_another = False
            self._restart(link)
            return False
        ids = messages.ids
        if not ids:
            return self._is_right_place(link)
        if self._next is None:
            self._next = unwrap(ids[0], self._near)
        first, count = ids[0], len(ids)
        if (
            not self._is_skipping
            and first == self._next % ID_COUNT
            and (count == 1 or ids == list(range(first, first + count)))
        ):
            self._keep(messages, range(self._next, self._next + count))
            return True
        return self._take_in_slowly(link, messages)

    def _take_in_slowly(self, link: QueueLink, messages: Messages) -> bool:
        assert self._next is not None
        rows: dict[int, int] = {}  # of the messages to keep, by their numbers
        gaps: list[tuple[int, int]] = []
        next_seq = self._next
        for row, id in enumerate(messages.ids):
            distance = id_distance(id, next_seq % ID_COUNT)
            if distance < 0 and self._is_skipping:
                self._skipped_to = next_seq + distance
                if self._is_another(messages, row):
                    self._restart(link)
                    return False
                continue
            seq = next_seq + distance
            if distance < 0 and not link.is_ours and self._is_repeated(messages, row, seq, rows):
                continue
            if distance < 0 or (distance > 0 and self._may_look_back(link)):
                self._keep(messages.chosen(list(rows.values())), list(rows), gaps)
                if self._received.failure is not None:
                    return False  # nothing behind it can be read before a seek
                if self._can_step(link):
                    self._find_place(link)
                elif distance < 0:
                    self._restart(link)
                else:
                    self._skip_from(link, self._next)
                return False
            if distance:
                gaps.append((next_seq, seq - 1))
            rows[seq] = row
            next_seq = seq + 1
            self._is_skipping = False
        self._keep(messages.chosen(list(rows.values())), list(rows), gaps)
        return True

    def _is_repeated(self, messages: Messages, row: int, seq: int, rows: dict[int, int]) -> bool:
        """Tell whether LROSE's server repeats a message, of this reply or of an earlier one."""
        before = rows.get(seq)
        if before is not None:
            return Proof.of(messages, before, seq) == Proof.of(messages, row, seq)
        return bool(self._delivered.is_same(messages, row, seq))

    def _may_look_back(self, link: QueueLink) -> bool:
        """Tell whether missing messages may still exist: LROSE's server jumps too far."""
        return not self._is_skipping and not link.is_ours and self._wanted < 0

    def _is_another(self, messages: Messages, row: int) -> bool:
        """Tell whether the last message read has changed."""
        proof = self._proof
        if proof is None or proof.seq != self._skipped_to:
            return False
        return proof != Proof.of(messages, row, proof.seq)

    def _is_right_place(self, link: QueueLink) -> bool:
        """Check, at the end of the queue, that it is not shorter than before."""
        if not self._is_skipping or not self._next or self._wanted >= 0:
            self._is_skipping = False
            return True
        if self._skipped_to is not None and self._skipped_to + 1 >= self._next:
            self._is_skipping = False
            return True
        self._restart(link)
        return False

    def _restart(self, link: QueueLink) -> None:
        log.warning("%s was created anew; reading it from its start", self.url)
        self._restarts += 1
        self._near = 0
        self._proof = None
        self._delivered.clear()
        if not self._can_step(link):
            self._skip_from(link, 0)
            return
        self._next = 0
        self._is_skipping = False
        if find_newest(link).ids:
            found = find_oldest(link)
            if found.ids and found.ids[0]:
                self._miss(found.ids[0])
            self._keep_run(link, found)

    def _miss(self, next_seq: int) -> None:
        """Continue with a later message, and count those between as lost."""
        assert self._next is not None
        self._lose(self._next, next_seq - 1, DropReason.OVERRUN)

    def _lose(self, first: int, last: int, reason: DropReason) -> None:
        """Count messages as lost, and continue behind them: both, or neither after an interrupt."""
        self._losses, self._next = self._losses.with_losses([Loss(first, last, reason)]), last + 1
        self._losses.tell()

    def _keep(
        self, messages: Messages, seqs: Sequence[int], gaps: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Keep received messages, count those missing between, and remember where they end.

        Nothing is kept or counted behind a failure: a seek has it received again.
        """
        if not seqs or self._received.failure is not None:
            return
        last, proof = seqs[-1], Proof.of(messages, len(seqs) - 1, seqs[-1])
        received, losses = self._received.with_more(messages, seqs)
        missing = [Loss(*gap, DropReason.OVERRUN) for gap in gaps]
        if self._wanted >= 0:  # of other types, or lost: they cannot be told apart
            received.filtered += sum([loss.count for loss in missing])
        else:
            losses += missing
        ledger = self._losses.with_losses(losses) if losses else self._losses
        if not self.server_is_ours:
            self._delivered.add(messages, seqs)
        changed = received, received.ready, ledger, last, last + 1, proof
        # In one statement without a call: an interrupt before it has them received again.
        self._received, self._ready, self._losses, self._near, self._next, self._proof = changed
        self._losses.tell()

    # --- reading ----------------------------------------------------------------------------

    # What a call took is put back if a signal keeps it from its caller.

    def _take(self, limit: int) -> list[Message]:
        self._check_open()
        self._before = None
        try:
            if not self._ready:
                self._fetch(patience=self._options.retry)
            return self._hand_over(limit)
        except BaseException:
            self._put_back()
            raise

    def read(self, timeout: float | None = None) -> Message | None:
        ready = self._ready
        if ready:
            message = ready[0]
            size = len(message.payload)
            self._messages, self._bytes = self._messages + 1, self._bytes + size
            del ready[0]  # not `popleft`: a signal could be raised behind it
            return message
        self._before = None
        try:
            messages = self.read_many(1, timeout)
            return messages[0] if messages else None
        except BaseException:
            self._put_back()
            raise

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        # A reconnect must not exceed the caller's timeout.
        self._before = None
        if n < 1:
            return []
        try:
            if self._ready or (timeout is not None and timeout <= 0):
                return self._take(n)
            self._check_open()
            return self._wait_and_take(n, timeout)
        except BaseException:
            self._put_back()
            raise

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        self._before = None
        try:
            return super().read_batch(n, timeout)
        except BaseException:
            self._put_back()
            raise

    def _hand_over(self, limit: int) -> list[Message]:
        # What takes long comes before the removal: after Ctrl-C, they are still ready.
        ready = self._ready
        messages = list(islice(ready, limit))
        size = sum(map(len, map(_PAYLOAD_OF, messages)))
        if messages:
            self._before = messages, self._messages, self._bytes
        if len(messages) == len(ready):
            ready.clear()
        else:
            # Pops them inside one C call, so that no signal comes between two.
            deque(islice(iter(ready.popleft, None), len(messages)), maxlen=0)
        self._messages += len(messages)
        self._bytes += size
        return messages

    def _put_back(self) -> None:
        """Return to the start of what the present call took, and does not return."""
        before, self._before = self._before, None
        if before is not None:
            taken, self._messages, self._bytes = before
            if not self._ready or self._ready[0] is not taken[0]:
                self._ready.extendleft(reversed(taken))

    def _fetch(self, wait: float = 0.0, patience: float | None = None) -> None:
        """Request messages until some are ready, or there are no more.

        :raises Malformed: the next one is damaged.
        """
        failures = 0
        while not self._ready:
            if self._received.failure is not None:
                raise self._received.failure
            link = self._linked(patience)
            try:
                if not self._fetch_once(link, wait):
                    return
            except (ConnectionLost, Malformed) as error:
                self._give_up_link(is_lost=isinstance(error, ConnectionLost))
                if isinstance(error, Malformed):
                    raise
                continue
            except RequestRefused:
                if self._is_skipped(link):
                    continue
                failures += 1
                if link.is_ours or failures > _MOST_FAILURES:
                    raise
                time.sleep(min(0.0001 * failures, 0.01))
                continue
            failures = 0
            wait = 0.0

    def _fetch_once(self, link: QueueLink, wait: float) -> bool:
        """Request messages, and keep them; False: there are no more."""
        before = self._next, self._restarts
        try:
            is_settled = self._take_in(link, self._ask(link, wait))
            is_idle = is_settled and (self._next, self._restarts) == before
            return not is_idle or self._is_moved(link)
        except PenstockError:
            raise
        except BaseException:
            # After Ctrl-C, a reply may be lost: the next read connects again, at `_next`.
            self._give_up_link(is_lost=False)
            raise

    def _is_skipped(self, link: QueueLink) -> bool:
        """Move behind a message that a server of ours cannot read, if the options allow that."""
        if not link.is_damaged or self._options.damaged == "fail":
            return False
        if self._next is None or self._is_skipping or self._wanted >= 0:
            return False  # which message it is is not known
        if not link.seek_after_id(self._next % ID_COUNT):
            return False
        self._lose(self._next, self._next, DropReason.DAMAGED)
        return True

    def _ask(self, link: QueueLink, wait: float) -> Messages:
        """Request the next messages; after a pause, the last one again, too."""
        now, asked = time.monotonic(), self._asked
        self._asked = now
        if now - asked > _STILL_THE_SAME and self._can_step(link) and not self._is_skipping:
            stands_here = self._next and link.last_id == (self._next - 1) % ID_COUNT
            if stands_here and not link.has_asked:
                messages = link.read_last_and_on()
                if not messages.ids:
                    self._find_place(link)
                return messages
        return link.read(self._wanted, wait, ahead=True)

    def _is_moved(self, link: QueueLink) -> bool:
        """Check now and then whether the path names another queue than LROSE's server has open.

        The rest of the open queue is read first.
        """
        now = time.monotonic()
        if now - self._looked_at_path < _LOOK_AT_PATH or not self._can_step(link):
            return False
        if self._next is None or self._is_skipping:
            return False
        self._looked_at_path = now
        try:
            found = self._probe.newest(patience=0)
        except NotFound:
            self._looked_at_path = time.monotonic() + _LOOK_FOR_QUEUE
            return False
        except (ConnectionLost, RequestRefused) as error:
            # The server may refuse a second connection. Messages of this one are still read.
            if self._could_look:
                log.warning("%s: cannot see whether it is made anew: %s", self.url, error)
            self._could_look = False
            self._looked_at_path = time.monotonic() + _LOOK_FOR_QUEUE
            return False
        self._could_look = True
        newest = unwrap(found.ids[0], self._next) if found.ids else -1
        if newest == self._next - 1 and self._delivered.is_same(found, 0, newest) is not False:
            return False
        before = self._next, self._restarts
        self._take_in(link, link.read())
        if (self._next, self._restarts) == before and not self._ready:
            if newest >= self._next:  # and the server does not see it
                self._restart(link)
            else:
                self._find_place(link)
        return True

    def _wait_and_take(self, limit: int, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.0
        left = timeout
        while left is None or left > 0:
            wait = 0.0
            if self._link is not None and self._link.is_ours:
                wait = _LONGEST_WAIT if left is None else min(left, _LONGEST_WAIT)
            elif self._link is not None and pause:
                self._pause(pause if left is None else min(pause, left))
            try:
                self._fetch(wait, left)
            except ConnectionLost:
                if deadline is None or self._is_given_up():
                    raise
                # Timeout; the next call continues to retry.
                return []
            if self._ready:
                return self._hand_over(limit)
            pause = min(max(pause * 2, _FIRST_PAUSE), self._options.poll)
            left = None if deadline is None else deadline - time.monotonic()
        return []

    def _has_news(self) -> bool:
        self._check_open()
        if not self._ready:
            try:
                self._fetch(patience=0.0)
            except ConnectionLost:
                if self._is_given_up():
                    raise
        return bool(self._ready)

    def _is_given_up(self) -> bool:
        """Tell whether the server, or its queue, was away for longer than the options allow."""
        outage = 0.0 if self._lost_since is None else time.monotonic() - self._lost_since
        return outage >= max(self._options.retry, self._options.wait)

    # --- the rest ---------------------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        """Return the counters. The backlog counts only messages received already."""
        self._losses.tell()
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._losses.total,
            filtered=self._received.filtered,
            restarts=self._restarts,
            next_seq=self._ready[0].seq if self._ready else self._next,
            backlog=len(self._ready),
            losses=self._losses.ranges(),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.url} was closed")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._losses.tell(at_once=True)
            self._ready.clear()
            self._probe.close()
            link, self._link = self._link, None
            if link is not None:
                link.close()
