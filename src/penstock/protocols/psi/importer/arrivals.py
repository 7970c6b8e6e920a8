"""Which messages of an exporter are new, which are missing, and how are they stored?

After a reconnection an exporter sends messages again. A message is identified by its source, its
sequence number and its originating time; missing numbers are a gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed, MessageTooLarge
from penstock.protocols.psi.envelope import CLOSING_SEQUENCE_ID, PsiMessage
from penstock.protocols.psi.errors import UnknownType
from penstock.protocols.psi.metadata import StreamMetadata, TypeSchema
from penstock.protocols.psi.store.catalog import Catalog
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS, NS_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.handshake import ClientHello
    from penstock.protocols.psi.metadata import Record
    from penstock.protocols.psi.store.streams import Store

__all__ = ["Arrivals", "Gap", "Intake"]

log = logging.getLogger(__name__)

#: Gaps that are kept for display; the counts stay exact beyond it.
_GAPS_KEPT: Final = 1000
#: Seconds that a message waits for the announcement of its stream, which comes by the meta
#: connection and may be later.
_ANNOUNCEMENT: Final = 5.0
#: Seconds of silence after which a closed stream ends, if only a part of it was asked for.
_QUIET: Final = 1.0
_NS_PER_SECOND: Final = 1_000_000_000


class Gap(NamedTuple):
    """Missing messages of a stream: sequence numbers `first` to `last`."""

    stream: str
    first: int
    last: int

    @property
    def messages(self) -> int:
        """How many that is."""
        return self.last - self.first + 1


@dataclass(slots=True)
class _Last:
    """The newest message of a stream."""

    sequence: int
    originating_ns: int


class Arrivals:
    """The counters of received messages, over all connections."""

    def __init__(self, *, from_first: bool) -> None:
        """`from_first`: all was asked for, so that each stream begins with number 1."""
        self.from_first = from_first
        #: New messages; messages that were redelivered or out of order.
        self.taken = self.repeated = 0
        #: Missing messages, by their sequence numbers.
        self.lost = 0
        #: How often a stream was recreated, and counted from 1 again.
        self.restarts = 0
        self._last: dict[str, _Last] = {}
        self._gaps: deque[Gap] = deque(maxlen=_GAPS_KEPT)
        self._newest_creation_ns = MIN_NS
        #: The largest step back of creation times: psi merges its streams.
        self._disorder_ns = 0
        self.begin()

    def begin(self) -> None:
        """Save the state for `undo`."""
        self._before: dict[str, _Last | None] = {}
        self._gaps_since = 0
        self._counts_before = self._counts()

    def undo(self) -> None:
        """Restore the state of `begin`: the messages since then were not stored."""
        for stream, last in self._before.items():
            if last is None:
                self._last.pop(stream, None)
            else:
                self._last[stream] = last
        for _ in range(min(self._gaps_since, len(self._gaps))):
            self._gaps.pop()
        (
            self.taken,
            self.repeated,
            self.lost,
            self.restarts,
            self._newest_creation_ns,
            self._disorder_ns,
        ) = self._counts_before
        self.begin()

    def _counts(self) -> tuple[int, ...]:
        return (
            self.taken,
            self.repeated,
            self.lost,
            self.restarts,
            self._newest_creation_ns,
            self._disorder_ns,
        )

    def resume(self, stream: str, sequence: int, originating_ns: int, creation_ns: int) -> None:
        """Note the newest message that an earlier process stored."""
        self._last[stream] = _Last(sequence, originating_ns)
        self._newest_creation_ns = max(self._newest_creation_ns, creation_ns)

    def take(self, stream: str, message: PsiMessage) -> bool:
        """Tell whether a message is new, and count it."""
        sequence, originating_ns, creation_ns = message[1:4]
        last = self._last.get(stream)
        if stream not in self._before:
            self._before[stream] = None if last is None else replace(last)
        if last is None:
            if self.from_first and sequence > 1:
                self._miss(stream, 1, sequence - 1)
            self._last[stream] = _Last(sequence, originating_ns)
        elif sequence > last.sequence:
            if sequence > last.sequence + 1:
                self._miss(stream, last.sequence + 1, sequence - 1)
            last.sequence, last.originating_ns = sequence, originating_ns
        elif originating_ns <= last.originating_ns:
            self.repeated += 1
            return False
        else:
            # The stream was recreated, and counts from 1.
            self.restarts += 1
            if sequence > 1:
                self._miss(stream, 1, sequence - 1)
            last.sequence, last.originating_ns = sequence, originating_ns
        self.taken += 1
        if creation_ns >= self._newest_creation_ns:
            self._newest_creation_ns = creation_ns
        else:
            self._disorder_ns = max(self._disorder_ns, self._newest_creation_ns - creation_ns)
        return True

    def miss_until(self, stream: str, sequence: int) -> None:
        """Note that the stream ended with this number: what is not here is missing."""
        last = self._last.get(stream)
        reached = 0 if last is None else last.sequence
        if sequence > reached and (last is not None or self.from_first):
            self._miss(stream, reached + 1, sequence)
            self._last[stream] = _Last(sequence, MIN_NS if last is None else last.originating_ns)

    def last_sequence(self, stream: str) -> int:
        """Return the number of a stream's newest message; 0 if none came."""
        last = self._last.get(stream)
        return 0 if last is None else last.sequence

    def last_originating_ns(self, stream: str) -> int:
        """Return the originating time of a stream's newest message; `MIN_NS` if none came."""
        last = self._last.get(stream)
        return MIN_NS if last is None else last.originating_ns

    def gaps(self) -> tuple[Gap, ...]:
        """Return the latest gaps, oldest first."""
        return tuple(self._gaps)

    @property
    def resume_ns(self) -> int | None:
        """The creation time from which messages may be missing; None if none came.

        It is that of the newest message, because others may have the same tick, minus twice the
        largest step back that was seen.
        """
        if self._newest_creation_ns == MIN_NS:
            return None
        return max(MIN_NS + NS_PER_TICK, self._newest_creation_ns - 2 * self._disorder_ns)

    def _miss(self, stream: str, first: int, last: int) -> None:
        gap = Gap(stream, first, last)
        self.lost += gap.messages
        self._gaps.append(gap)
        self._gaps_since += 1


class Intake:
    """Takes the records and messages of each connection into the store."""

    def __init__(
        self,
        store: Store,
        arrivals: Arrivals,
        only: Container[str] | None = None,
        patience: float = _ANNOUNCEMENT,
    ) -> None:
        """`only`: the names of the wanted streams; psi sends all of them.

        `patience`: seconds that a message waits for the announcement of its stream or its type.
        """
        self.store = store
        self.arrivals = arrivals
        self.only = only
        self._patience = patience
        #: Messages of streams that are not wanted.
        self.unwanted = 0
        #: Messages of streams that were never announced, or too large for the store.
        self.refused = 0
        #: Payloads that are not of their stream's type, and were stored untrimmed.
        self.untrimmed = 0
        self._has_news = threading.Condition()
        self._came_at = time.monotonic()
        #: Any message came, wanted or not.
        self.has_received = False
        #: Messages are counted in `arrivals`, and not stored yet.
        self._is_taking = False
        self.begin()

    def begin(self) -> None:
        """Forget the metadata of the last connection: ids belong to one run of an exporter."""
        with self._has_news:
            self.remote = Catalog()
            self._ids: dict[int, tuple[int, str]] = {}
            self._refused_ids: set[int] = set()
            self._unwanted_ids: set[int] = set()
            self._codecs: dict[int, Codec] = {}
            #: Bursts of metadata, and the types that were waited for in vain.
            self._bursts = 0
            self._unknown_types: set[str] = set()
            #: The latest creation time of the messages that came, of any stream.
            self._newest_ns = MIN_NS

    # --- metadata -----------------------------------------------------------------------------

    def take_records(self, records: Iterable[Record]) -> None:
        """Take a burst of records; the last record of a stream holds.

        :raises Malformed: there are too many.
        """
        changed: dict[int, StreamMetadata] = {}
        with self._has_news:
            for record in records:
                self.remote.add(record)
                self._codecs.clear()  # a schema may have come
                if isinstance(record, StreamMetadata):
                    changed[record.id] = record
                elif (
                    isinstance(record, TypeSchema)
                    and self.store.catalog.schemas.get(record.id) != record
                ):
                    self.store.tell(record)
            for stream in changed.values():
                self._take_stream(stream)
            self._bursts += 1
            self._has_news.notify_all()

    def _take_stream(self, stream: StreamMetadata) -> None:
        if self.only is not None and stream.name not in self.only:
            self._unwanted_ids.add(stream.id)
            return
        id = None if stream.id in self.store.catalog.streams else stream.id
        known = self._ids.get(stream.id)
        if (
            known is not None
            and known[1] == stream.name
            and (stream.is_closed or not self.store.metadata(known[0]).is_closed)
        ):
            return
        if stream.is_closed and self._is_known_and_ended(stream):
            self._ids[stream.id] = (self.store.catalog.stream(stream.name).id, stream.name)
            return
        try:
            local = self.store.add_copy(stream, id=id)
        except (InvalidOption, Malformed) as error:
            self._refused_ids.add(stream.id)
            log.warning("the stream %s is left out: %s", stream.name, error)
            return
        self._ids[stream.id] = (local.id, stream.name)

    def _is_known_and_ended(self, stream: StreamMetadata) -> bool:
        """Tell whether a closed stream is stored completely, so that it stays closed here."""
        return (
            any(
                own.name == stream.name and own.is_closed
                for own in self.store.catalog.streams.values()
            )
            and self.arrivals.last_sequence(stream.name) >= stream.message_count
        )

    # --- messages -----------------------------------------------------------------------------

    def take_messages(self, messages: list[PsiMessage]) -> None:
        """Append the new ones to the store."""
        self._came_at = time.monotonic()
        self.has_received = True
        self._is_taking = True
        try:
            self._take_messages(messages)
            self._newest_ns = max([self._newest_ns, *(each.creation_ns for each in messages)])
        finally:
            self._is_taking = False

    def _take_messages(self, messages: list[PsiMessage]) -> None:
        self.arrivals.begin()
        kept: list[PsiMessage] = []
        came: list[tuple[str, PsiMessage]] = []
        for message in messages:
            if message.sequence_id == CLOSING_SEQUENCE_ID:
                continue
            if message.source_id in self._unwanted_ids:
                self.unwanted += 1
                continue
            place = self._ids.get(message.source_id) or self._wait_for(message.source_id)
            if place is None:
                if message.source_id in self._unwanted_ids:
                    self.unwanted += 1
                else:
                    self.refused += 1
                continue
            id, name = place
            if self.arrivals.take(name, message):
                kept.append(PsiMessage(id, *message[1:4], self._trimmed(message)))
                came.append((name, message))
        done: list[PsiMessage] = []
        refused = self.refused
        try:
            self._append(kept, done)
        except BaseException as error:
            # What is not stored counts as not received: the next connection asks for it.
            self.arrivals.undo()
            for name, message in came[: len(done)]:
                self.arrivals.take(name, message)
            log.warning("%s messages are not stored yet: %s", f"{len(kept) - len(done):,}", error)
            raise
        finally:
            self.arrivals.taken -= self.refused - refused

    def _append(self, messages: list[PsiMessage], done: list[PsiMessage]) -> None:
        """Append the messages, and refuse those that are too large; `done` gets both."""
        while len(done) < len(messages):
            try:
                self.store.append_messages(messages[len(done) :], done)
            except MessageTooLarge as error:
                message = messages[len(done)]
                self.refused += 1
                done.append(message)
                log.warning("a message of source %s is refused: %s", message.source_id, error)

    def _trimmed(self, message: PsiMessage) -> bytes:
        """Return the payload without the stale bytes that psi sends after the value.

        A message may come before the schema of a type that it is the first to use.
        """
        while True:
            bursts = self._bursts
            try:
                codec = self._codecs.get(message.source_id)
                if codec is None:
                    codec = self._codecs[message.source_id] = self.remote.codec(message.source_id)
                missing = codec.missing_type(message.payload)
                if missing is None or not self._wait_for_type(missing, bursts):
                    return codec.trim(message.payload)
            except UnknownType as error:
                if not self._wait_for_type(error.type_name, bursts):
                    break
            except Malformed:
                break
        self.untrimmed += 1
        return message.payload

    def _wait_for_type(self, name: str, bursts: int) -> bool:
        """Wait for another burst of metadata; False: none came, now or at an earlier wait."""
        if name in self._unknown_types:
            return False
        with self._has_news:
            came = self._has_news.wait_for(lambda: self._bursts != bursts, self._patience)
            if not came:
                self._unknown_types.add(name)
        return came

    def _wait_for(self, id: int) -> tuple[int, str] | None:
        if id in self._refused_ids:
            return None
        deadline = time.monotonic() + self._patience
        with self._has_news:
            while not (id in self._ids or id in self._refused_ids or id in self._unwanted_ids):
                left = deadline - time.monotonic()
                if left <= 0:
                    log.warning("messages of source %s, which nobody announced, are refused", id)
                    self._refused_ids.add(id)
                    break
                self._has_news.wait(left)
            return self._ids.get(id)

    # --- ends ---------------------------------------------------------------------------------

    def end_streams(self, asked: ClientHello, *, may_lose: bool) -> None:
        """End the streams that are closed at the exporter and stored completely."""
        quiet = time.monotonic() - self._came_at >= _QUIET
        for stream in list(self.remote.streams.values()):
            place = self._ids.get(stream.id)
            if place is None or not stream.is_closed:
                continue
            id, name = place
            if self.store.metadata(id).is_closed:
                continue
            reached = self.arrivals.last_sequence(name)
            # The count is below the last number where psi dropped messages before storing them.
            reached_ns = self.arrivals.last_originating_ns(name)
            if self._is_taking:  # messages up to these numbers are not stored yet
                return
            if reached < stream.message_count or reached_ns < stream.last_originating_ns:
                is_due = asked.end_ns == MAX_NS and (
                    reached > 0 or stream.last_creation_ns >= (asked.start_ns or MAX_NS)
                )
                # Messages come in the order of the exporter's store: later ones of other streams
                # tell that those of this one were overwritten or removed there.
                behind_ns = self._newest_ns - max(stream.closed_ns, stream.last_creation_ns)
                is_gone = may_lose or behind_ns > 0
                is_settled = quiet or behind_ns > _QUIET * _NS_PER_SECOND
                if not is_settled or (is_due and not is_gone):
                    continue
                if is_due:
                    self.arrivals.miss_until(name, stream.message_count)
            self.store.end_stream(id, closed_ns=stream.closed_ns)

    def is_behind(self) -> bool:
        """Tell whether the exporter announced messages that have not come."""
        least = 0 if self.arrivals.from_first else 1
        return any(
            stream.id in self._ids
            and least <= self.arrivals.last_sequence(stream.name) < stream.message_count
            for stream in list(self.remote.streams.values())
        )

    @property
    def silent_for(self) -> float:
        """Seconds since messages came."""
        return time.monotonic() - self._came_at

    def wake(self) -> None:
        """Restart the clock of `silent_for`."""
        self._came_at = time.monotonic()
