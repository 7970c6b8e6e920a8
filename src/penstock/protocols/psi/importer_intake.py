"""How does what an exporter sends get into the importer's own store?"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, Malformed, MessageTooLarge
from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.envelope import CLOSING_SEQUENCE_ID, PsiMessage
from penstock.protocols.psi.errors import UnknownType
from penstock.protocols.psi.metadata import StreamMetadata, TypeSchema
from penstock.protocols.psi.ticks import MAX_NS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.handshake import ClientHello
    from penstock.protocols.psi.importer_arrivals import Arrivals
    from penstock.protocols.psi.metadata import Record
    from penstock.protocols.psi.store_set import Store

__all__ = ["Intake"]

log = logging.getLogger(__name__)

#: A message may overtake the announcement of its stream, which comes by another connection.
_ANNOUNCEMENT: Final = 5.0
#: A stream of which only a part was asked for is at its end when it was closed, and then silent.
_QUIET: Final = 1.0


class Intake:
    """Takes the records and messages of one connection after the other."""

    def __init__(
        self,
        store: Store,
        arrivals: Arrivals,
        only: Container[str] | None = None,
        patience: float = _ANNOUNCEMENT,
    ) -> None:
        """`only`: the names of the streams that are wanted; psi sends all of them.

        `patience`: how long a message waits for the announcement of its stream or its type.
        """
        self.store = store
        self.arrivals = arrivals
        self.only = only
        self._patience = patience
        #: Messages of streams that are not wanted.
        self.unwanted = 0
        #: Messages of streams that were never announced, or that the store cannot take.
        self.refused = 0
        #: Payloads that are not of their stream's type, and were kept with what is behind them.
        self.untrimmed = 0
        self._has_news = threading.Condition()
        self._came_at = time.monotonic()
        #: Some came, wanted or not.
        self.has_received = False
        #: Messages are counted by `arrivals`, and not yet in the store.
        self._is_taking = False
        self.begin()

    def begin(self) -> None:
        """Forget what the last connection told: ids are of an exporter's run."""
        with self._has_news:
            self.remote = Catalog()
            self._ids: dict[int, tuple[int, str]] = {}
            self._refused_ids: set[int] = set()
            self._unwanted_ids: set[int] = set()
            self._codecs: dict[int, Codec] = {}
            #: How often news came, and the types that were waited for in vain.
            self._bursts = 0
            self._unknown_types: set[str] = set()

    # --- what is told of streams --------------------------------------------------------------

    def take_records(self, records: Iterable[Record]) -> None:
        """Take in a burst of records: of each stream its last word.

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
            local = self.store.add_stream(stream.name, stream.type_name, id=id, schemas=())
        except (InvalidOption, Malformed) as error:
            self._refused_ids.add(stream.id)
            log.warning("the stream %s is left out: %s", stream.name, error)
            return
        self._ids[stream.id] = (local.id, stream.name)

    def _is_known_and_ended(self, stream: StreamMetadata) -> bool:
        """Tell whether a closed stream is all here, so that it need not be opened again."""
        return (
            any(
                own.name == stream.name and own.is_closed
                for own in self.store.catalog.streams.values()
            )
            and self.arrivals.last_sequence(stream.name) >= stream.message_count
        )

    # --- messages -----------------------------------------------------------------------------

    def take_messages(self, messages: list[PsiMessage]) -> None:
        """Append those that are new to the store."""
        self._came_at = time.monotonic()
        self.has_received = True
        self._is_taking = True
        try:
            self._take_messages(messages)
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
            # What is not in the store has not come: it is asked for with the next connection.
            self.arrivals.undo()
            for name, message in came[: len(done)]:
                self.arrivals.take(name, message)
            log.warning("%s messages are not stored yet: %s", f"{len(kept) - len(done):,}", error)
            raise
        finally:
            self.arrivals.taken -= self.refused - refused

    def _append(self, messages: list[PsiMessage], done: list[PsiMessage]) -> None:
        """Append all but those that do not fit, and refuse these; `done` gets both."""
        while len(done) < len(messages):
            try:
                self.store.append_messages(messages[len(done) :], done)
            except MessageTooLarge as error:
                message = messages[len(done)]
                self.refused += 1
                done.append(message)
                log.warning("a message of source %s is refused: %s", message.source_id, error)

    def _trimmed(self, message: PsiMessage) -> bytes:
        """Return the payload without the stale bytes that psi sends behind it.

        A message may overtake the schema of a type that it is the first to hold.
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
        """Wait until more is told than `bursts`; False: it was in vain, now or before."""
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
        """End the streams of the store that are closed at the exporter and all here."""
        quiet = time.monotonic() - self._came_at >= _QUIET
        for stream in list(self.remote.streams.values()):
            place = self._ids.get(stream.id)
            if place is None or not stream.is_closed:
                continue
            id, name = place
            if self.store.metadata(id).is_closed:
                continue
            reached = self.arrivals.last_sequence(name)
            # A count is less than the last number where psi dropped messages before it stored them.
            reached_ns = self.arrivals.last_originating_ns(name)
            if self._is_taking:  # asked for behind these: what is up to them may be on its way
                return
            if reached < stream.message_count or reached_ns < stream.last_originating_ns:
                is_due = asked.end_ns == MAX_NS and (
                    reached > 0 or stream.last_creation_ns >= (asked.start_ns or MAX_NS)
                )
                if not quiet or (is_due and not may_lose):
                    continue
                if is_due:
                    self.arrivals.miss_until(name, stream.message_count)
            self.store.end_stream(id, closed_ns=stream.closed_ns)

    def is_behind(self) -> bool:
        """Tell whether the exporter told of messages that have not come."""
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
        """Begin to wait for messages now."""
        self._came_at = time.monotonic()
