"""What is done about a message that cannot be delivered?

The order makes each step crash-safe: store the response to a request, publish the dead letter,
write it, settle the message. If the response is refused, its letter is written before that of the
request, which says that the request was answered. After a crash, a message rejected on arrival is
redelivered, and its letter is published again with another id.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from penstock.dispatch.dead_letters import Failure, Letter, letter_id
from penstock.dispatch.intake import DuplicateWindow
from penstock.dispatch.outbox import Entry, Part
from penstock.dispatch.outlets import NoRoom
from penstock.dispatch.plan import Lifetime, class_of, order_of
from penstock.dispatch.routes import Receiver
from penstock.protocols.uprotocol import (
    UUID7,
    DeadLetterReason,
    InvalidMessage,
    UAttributes,
    UCode,
    UMessage,
    UMessageType,
    error_response,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.books import Ledger
    from penstock.dispatch.dead_letters import DeadLetters, Stored
    from penstock.dispatch.delivery import Outlet
    from penstock.dispatch.outbox import Reason
    from penstock.dispatch.outlets import Outlets
    from penstock.dispatch.routes import Routing
    from penstock.dispatch.switches import Switches
    from penstock.protocols.uprotocol import UAttributes, UUri
    from penstock.protocols.uprotocol.transports import Leg

__all__ = ["FailureHandler"]

#: The codes that a dispatcher answers a request with.
COMMSTATUS: Final = frozenset(
    {
        UCode.UNAVAILABLE,
        UCode.DEADLINE_EXCEEDED,
        UCode.PERMISSION_DENIED,
        UCode.UNAUTHENTICATED,
        UCode.RESOURCE_EXHAUSTED,
        UCode.INVALID_ARGUMENT,
        UCode.UNKNOWN,
        UCode.INTERNAL,
    }
)

#: The response code for each other code of a leg.
_MEANS: Final = {
    UCode.NOT_FOUND: UCode.UNAVAILABLE,  # nobody is registered there
    UCode.CANCELLED: UCode.UNAVAILABLE,
    UCode.ABORTED: UCode.UNAVAILABLE,
    UCode.FAILED_PRECONDITION: UCode.UNAVAILABLE,
    UCode.UNIMPLEMENTED: UCode.INVALID_ARGUMENT,  # the leg cannot carry such a message
    UCode.OUT_OF_RANGE: UCode.INVALID_ARGUMENT,
    UCode.DATA_LOSS: UCode.INTERNAL,
}

_REMEMBERED: Final = 10_000
_VERSION: Final = 0x7000
_VARIANT: Final = 0b10 << 62


def commstatus(code: UCode) -> UCode:
    """Return the code of the error response to a request."""
    return code if code in COMMSTATUS else _MEANS.get(code, UCode.UNKNOWN)


class Answers:
    """Creates error responses: at most one per request, and only for requests."""

    def __init__(self) -> None:
        self._answered = DuplicateWindow(_REMEMBERED)

    def to(self, attributes: UAttributes, code: UCode, text: str, now_ms: int) -> UMessage | None:
        """Create the response to a request that was not delivered.

        :returns: None if it is no request, is not answerable, or was answered already.
        """
        if attributes.type != UMessageType.REQUEST or not is_answerable(attributes):
            return None
        key = _key(attributes)
        if not self._answered.is_new(key):
            return None
        request = UMessage(attributes)
        try:
            # After a crash it may be answered twice: the ids show that both are the same response.
            id = _id_of(key, now_ms, b"rpc-error")
            return error_response(request, commstatus(code), text, id=id)
        except InvalidMessage:
            return None

    def forget(self, attributes: UAttributes) -> None:
        """Forget a request whose response could not be stored: it may be answered again."""
        with self._answered.lock:
            self._answered.forget([_key(attributes)])


def is_answerable(attributes: UAttributes) -> bool:
    """Tell whether a request has the id, source and sink that a response needs."""
    id, source, sink = attributes.id, attributes.source, attributes.sink
    return (
        id is not None
        and id.is_valid
        and source is not None
        and source.is_valid
        and source.is_rpc_response
        and not source.has_wildcard
        and sink is not None
        and sink.is_valid
        and sink.is_rpc_method
        and not sink.has_wildcard
    )


def _key(attributes: UAttributes) -> bytes:
    assert attributes.id is not None
    assert attributes.source is not None
    return attributes.id.to_big_endian() + attributes.source.to_bytes()


def _id_of(key: bytes, time_ms: int, person: bytes) -> UUID7:
    """Create an id with this time and random bits derived from a request."""
    chance = int.from_bytes(blake2b(key, digest_size=10, person=person).digest())
    return UUID7.unchecked(
        time_ms << 16 | _VERSION | chance >> 68, _VARIANT | chance & ((1 << 62) - 1)
    )


#: Failures per batch.
_AT_ONCE: Final = 256
#: Bytes of letters waiting for room in one queue, at most.
_MOST_WAITING: Final = 16 << 20


class FailureHandler:
    """Answers failed requests, and writes and publishes dead letters."""

    def __init__(
        self,
        topic: UUri,
        dead_letters: DeadLetters,
        outlets: Outlets,
        routing: Routing,
        switches: Switches,
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self._topic = topic
        self._dead_letters = dead_letters
        self._outlets = outlets
        self._routing = routing
        self._switches = switches
        self._ledger = ledger
        self._clock = clock
        self._answers = Answers()
        self._publishing = threading.RLock()
        #: Letters waiting for room in the queue of a subscriber.
        self.unpublished: dict[Outlet, deque[Entry]] = {}

    def handle(self, failures: Iterable[Failure], done: list[Failure] | None = None) -> None:
        """Handle messages that cannot be delivered.

        :param done: receives the failures that were handled, also when it raises
        :raises StorageError: the disk is full; the stored messages are requeued.
        """
        waiting = list(failures)
        while waiting:
            some, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            caused: list[Failure] = []
            try:
                self._handle(some, caused)
                if done is not None:
                    done += some
                waiting += [failure for failure in caused if failure.stored is not None]
            except BaseException:
                _give_back((*some, *waiting, *caused))
                self._uncount(caused)
                raise

    def _uncount(self, failures: Iterable[Failure]) -> None:
        """Uncount responses that were created here and not stored: they get no dead letter."""
        for failure in failures:
            if failure.stored is not None:
                continue
            self._ledger.add(copies=-1, copies_refused=-1)
            if failure.request is not None:
                self._answers.forget(failure.request)
                self._ledger.add(responses=-1)

    def _handle(self, failures: Sequence[Failure], caused: list[Failure]) -> None:
        """Handle a batch, and the refused responses to its requests.

        :param caused: receives those responses, and the evicted messages, which are left to do
        """
        now_ms = self._clock.now_ns() // 1_000_000
        found = self._letters(failures, now_ms)
        for failure, letter in found:
            if letter.header.type == UMessageType.REQUEST:
                caused += self._answer(failure, letter, now_ms)
        # A request that is settled does not come again: its response is handled with it.
        refused = [failure for failure in caused if failure.stored is None]
        letters = [letter for _, letter in (*self._letters(refused, now_ms), *found)]
        new = self._dead_letters.new(letters)
        # Publish before writing: after a crash in between it is published twice, never lost.
        if new:
            self._publish(new, caused)
        self._dead_letters.write(new)
        _settle(failures)
        self._ledger.add(
            letters=len(new),
            letters_known=len(letters) - len(new),
            letters_withheld=len(failures) + len(refused) - len(letters),
        )

    def _letters(self, failures: Iterable[Failure], now_ms: int) -> list[tuple[Failure, Letter]]:
        """Create the letters about failures, except those withheld."""
        found = []
        for failure in failures:
            try:
                letter = self._letter(failure, now_ms)
            except InvalidMessage:  # it was stored by another version of the rules
                continue
            # A letter about a letter would be one more of them each time.
            if letter.header.source != self._topic:
                found.append((failure, letter))
        return found

    def _letter(self, failure: Failure, now_ms: int) -> Letter:
        if failure.header_only:
            original = None
            header: UAttributes = UMessage.attributes_of(failure.raw)
        else:
            original = UMessage.from_bytes(failure.raw)
            header = original.attributes
        stored, receiver = failure.stored, failure.receiver
        if stored is not None and receiver is not None:
            item = stored.item
            id = letter_id(receiver, item.stored_ms, item.seq)
        elif failure.request is not None and failure.request.id is not None:
            # Its request fails again if its own letter could not be written: this one is the same.
            id = _id_of(_key(failure.request), failure.request.id.time_ms, b"dead-letter")
        else:
            id = UUID7.new(now_ms)
        is_request = header.type == UMessageType.REQUEST
        if is_request and not is_answerable(header):
            original = None  # the request cannot be answered: keep its header only
        return Letter(
            id=id,
            code=commstatus(failure.code) if is_request else failure.code,
            reason=failure.reason,
            message=failure.text,
            receiver=None if receiver is None else receiver.address,
            leg="" if receiver is None else receiver.leg,
            first_failure_ms=failure.first_failure_ms or now_ms,
            dead_ms=now_ms,
            attempts=failure.attempts,
            dispatcher=self._topic.with_resource(0),
            header=header,
            original=original,
        )

    def _answer(self, failure: Failure, letter: Letter, now_ms: int) -> list[Failure]:
        if self._dead_letters.knows(letter.id):
            return []  # it was answered before a crash
        response = self._answers.to(letter.header, letter.code, failure.text, now_ms)
        if response is None:
            self._ledger.add(unanswered=1)
            return []
        try:
            caused = self._respond(response, failure.came_by)
        except BaseException:
            self._answers.forget(letter.header)
            raise
        self._ledger.add(responses=1)
        return [
            each._replace(request=letter.header) if each.stored is None else each for each in caused
        ]

    # --- messages of its own -------------------------------------------------------------------

    def _respond(self, response: UMessage, came_by: str) -> list[Failure]:
        """Store the response to a request; return the resulting failures."""
        own = self._routing.authority
        sink, source = response.attributes.sink, response.attributes.source
        assert sink is not None
        assert source is not None
        sink, source = sink.resolved(own), source.resolved(own)
        response = response.with_attributes(source=source, sink=sink)
        # A spoofed request is answered by the leg it came by.
        is_spoofed = response.attributes.commstatus == UCode.UNAUTHENTICATED
        by = self._routing.legs.get(came_by)
        to = self._routing.leg_to(sink)
        leg = by if is_spoofed and by is not None else to or by
        return self._store(response, leg, came_by)

    def _store(self, message: UMessage, leg: Leg | None, came_by: str) -> list[Failure]:
        sink = message.attributes.sink
        assert sink is not None
        if leg is None:
            return [self._failure(message, None, DeadLetterReason.NO_ROUTE, f"no way to {sink}")]
        return self._store_for(message, Receiver.behind(leg, sink), came_by)

    def _store_for(self, message: UMessage, receiver: Receiver, came_by: str) -> list[Failure]:
        try:
            outlet = self._outlets.outlet(receiver)
        except NoRoom as error:
            return [self._failure(message, receiver, DeadLetterReason.QUEUE_FULL, str(error))]
        return self._outlets.store(outlet, [self._part([message])], came_by)

    def _failure(
        self, message: UMessage, receiver: Receiver | None, reason: DeadLetterReason, text: str
    ) -> Failure:
        self._ledger.add(copies=1, copies_refused=1)
        is_full = reason == DeadLetterReason.QUEUE_FULL
        code = UCode.RESOURCE_EXHAUSTED if is_full else UCode.UNAVAILABLE
        return Failure(message.to_bytes(), code, reason, text, receiver=receiver)

    def _publish(self, letters: Sequence[Letter], caused: list[Failure]) -> None:
        """Store dead letters for their subscribers, as far as there is room.

        :param caused: receives the messages that were evicted, also when it raises
        """
        topic = self._topic
        attributes = letters[0].to_message(topic).attributes
        hops = self._routing.hops(attributes, None)
        if not hops:
            return
        messages = [letter.to_message(topic) for letter in letters]
        for receiver, _ in hops:
            stop = self._switches.find(topic, receiver.address)
            sink = self._routing.sink_to(receiver, attributes)
            entries = self._part(
                [it.with_attributes(sink=sink) for it in messages]
            ).columns.entries()
            try:
                outlet = self._outlets.outlet(receiver)
            except NoRoom:
                self._ledger.add(letters_unpublished=len(letters))
                continue
            if stop is not None and not stop.queue:
                self._ledger.add(letters_unpublished=len(letters))
                continue
            with self._publishing:
                waiting = self.unpublished.setdefault(outlet, deque())
                left = _MOST_WAITING - sum(map(_size, waiting))
                before, unpublished = len(waiting), 0
                for entry in entries:
                    left -= _size(entry)
                    # One that never fits would keep all later ones waiting.
                    if left >= 0 and outlet.holds_ever(_size(entry)):
                        waiting.append(entry)
                    else:
                        unpublished += 1
                try:
                    caused += self._publish_waiting(outlet)
                except BaseException:
                    # The failures come again with their letters; those before them do not.
                    while len(waiting) > before:
                        waiting.pop()
                    raise
            self._ledger.add(letters_unpublished=unpublished)

    def _publish_waiting(self, outlet: Outlet) -> list[Failure]:
        """Store the letters waiting for room in a receiver's queue, in order, as far as they fit.

        A letter evicts no message: that would cause another letter, and so on.

        :returns: messages that were evicted because others took the room meanwhile
        :raises StorageError: the disk is full; all go on waiting, also those that were stored.
        """
        with self._publishing:
            waiting = self.unpublished.get(outlet, deque())
            some: list[Entry] = []
            size = 0
            for entry in waiting:
                size += _size(entry)
                if not outlet.has_room(len(some) + 1, size):
                    break
                some.append(entry)
            failures = self._outlets.store(outlet, [Part.of(some)]) if some else []
            for _ in some:
                waiting.popleft()
            if not waiting:
                self.unpublished.pop(outlet, None)
            if not some:
                return []
        evicted = [failure for failure in failures if failure.stored is not None]
        refused = len(failures) - len(evicted)
        self._ledger.add(
            letters_published=len(some) - refused,
            letters_unpublished=refused,
            letters_withheld=refused,
        )
        return evicted

    def room_came(self, outlet: Outlet) -> None:
        """Store waiting letters after messages of a receiver were delivered."""
        _give_back(self._publish_waiting(outlet))

    def close(self) -> None:
        """Count the letters still waiting as unpublished."""
        with self._publishing:
            left = sum(map(len, self.unpublished.values()))
            self._ledger.add(letters_unpublished=left)
            self.unpublished.clear()

    def retry(self, letter: Letter) -> None:
        """Store the message of a dead letter for the receiver that did not get it."""
        assert letter.original is not None
        assert letter.receiver is not None
        failures = self._store_for(letter.original, Receiver(letter.leg, letter.receiver), "")
        done: list[Failure] = []
        try:
            self.handle(failures, done)
        except BaseException:
            self._uncount(failures[len(done) :])
            raise

    def _part(self, messages: Iterable[UMessage]) -> Part:
        now_ms = self._clock.now_ns() // 1_000_000
        return Part.of([_entry(message, now_ms) for message in messages])


def _settle(failures: Iterable[Failure]) -> None:
    groups: defaultdict[tuple[int, Reason], list[Stored]] = defaultdict(list)
    for failure in failures:
        if failure.stored is not None:
            groups[id(failure.stored.outbox), failure.stored.reason].append(failure.stored)
    for (_, reason), group in groups.items():
        group[0].outbox.settle([stored.item for stored in group], reason)


def _give_back(failures: Iterable[Failure]) -> None:
    """Requeue the stored messages."""
    for failure in failures:
        if failure.stored is not None:
            failure.stored.outbox.give_back([failure.stored.item])


def _size(entry: Entry) -> int:
    return len(entry.raw)


def _entry(message: UMessage, now_ms: int) -> Entry:
    attributes = message.attributes
    made_ms = now_ms if attributes.id is None else attributes.id.time_ms
    return Entry(
        class_of(attributes),
        0,
        Lifetime(attributes.ttl or 0).expires_ms(made_ms, now_ms),
        order_of(attributes),
        int(attributes.type),
        message.to_bytes(),
    )
