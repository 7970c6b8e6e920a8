"""How do the messages that a dispatcher makes itself get into the outboxes?"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.dispatch.giving_up import Failure
from penstock.dispatch.outbox import Entry
from penstock.dispatch.outbox.records import key_of
from penstock.dispatch.plans import NoRoom
from penstock.dispatch.receivers import Receiver
from penstock.protocols.uprotocol import (
    DeadLetterReason,
    UCode,
    UMessage,
    UMessageType,
    expires_at_ms,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.dispatch.books import Ledger
    from penstock.dispatch.delivering import Outlet
    from penstock.dispatch.letters import Letter
    from penstock.dispatch.outlets import Outlets
    from penstock.dispatch.routing import Routing
    from penstock.dispatch.switches import Switches
    from penstock.protocols.uprotocol import UUri
    from penstock.protocols.uprotocol.transports import Leg

__all__ = ["Posting"]

#: Bytes of letters that wait for room in one queue, at most.
_MOST_WAITING: Final = 16 << 20


class Posting:
    """Stores error responses, dead letters, and messages that are tried again."""

    #: Set when they are there: they need this one first.
    outlets: Outlets

    def __init__(self, routing: Routing, switches: Switches, ledger: Ledger) -> None:
        self._routing = routing
        self._switches = switches
        self._ledger = ledger
        self._lock = threading.RLock()
        #: Letters that wait for room in the queue of one who subscribed to them.
        self._waiting: dict[Outlet, deque[Entry]] = {}

    def post_response(self, response: UMessage, came_by: str) -> list[Failure]:
        """Store the response to a request; return what could not be delivered because of it."""
        own = self._routing.authority
        sink, source = response.attributes.sink, response.attributes.source
        assert sink is not None
        assert source is not None
        sink, source = sink.resolved(own), source.resolved(own)
        response = response.with_attributes(source=source, sink=sink)
        # Who asked under a name that is not his is answered where he is.
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
            outlet = self.outlets.outlet(receiver)
        except NoRoom as error:
            return [self._failure(message, receiver, DeadLetterReason.QUEUE_FULL, str(error))]
        return self.outlets.store(outlet, [_entry(message)], None, came_by)

    def _failure(
        self, message: UMessage, receiver: Receiver | None, reason: DeadLetterReason, text: str
    ) -> Failure:
        self._ledger.add(copies=1, copies_refused=1)
        is_full = reason == DeadLetterReason.QUEUE_FULL
        code = UCode.RESOURCE_EXHAUSTED if is_full else UCode.UNAVAILABLE
        return Failure(message.to_bytes(), code, reason, text, receiver=receiver)

    def post_letters(self, letters: Sequence[Letter], topic: UUri) -> list[Failure]:
        """Store dead letters for those who subscribed to them, as far as there is room."""
        attributes = letters[0].to_message(topic).attributes
        hops = self._routing.hops(attributes, None)
        if not hops:
            return []
        messages = [letter.to_message(topic) for letter in letters]
        failures: list[Failure] = []
        for receiver, _ in hops:
            stop = self._switches.find(topic, receiver.address)
            sink = self._routing.sink_to(receiver, attributes)
            entries = [_entry(each.with_attributes(sink=sink)) for each in messages]
            try:
                outlet = self.outlets.outlet(receiver)
            except NoRoom:
                self._ledger.add(letters_unpublished=len(letters))
                continue
            if stop is not None and not stop.queue:
                self._ledger.add(letters_unpublished=len(letters))
                continue
            with self._lock:
                waiting = self._waiting.setdefault(outlet, deque())
                left = _MOST_WAITING - sum(map(_size, waiting))
                for entry in entries:
                    left -= _size(entry)
                    if left >= 0:
                        waiting.append(entry)
                    else:
                        self._ledger.add(letters_unpublished=1)
            failures += self._post_waiting(outlet)
        return failures

    def _post_waiting(self, outlet: Outlet) -> list[Failure]:
        """Store letters that wait for room in a receiver's queue, in order, as far as there is.

        A letter takes no other message's place: that one would be a letter, too, and so on.
        """
        with self._lock:
            waiting = self._waiting.get(outlet, deque())
            some: list[Entry] = []
            size = 0
            while waiting and outlet.has_room(len(some) + 1, size + len(waiting[0].raw)):
                some.append(waiting.popleft())
                size += len(some[-1].raw)
            if waiting:
                outlet.on_room = self._room_came
            else:
                self._waiting.pop(outlet, None)
                outlet.on_room = None
            if not some:
                return []
            failures = self.outlets.store(outlet, some)
        self._ledger.add(letters_published=len(some))
        return failures

    def _room_came(self, outlet: Outlet) -> None:
        for failure in self._post_waiting(outlet):
            if failure.stored is not None:  # somebody was quicker with the room
                failure.stored.outbox.give_back([failure.stored.item])
            else:
                self._ledger.add(letters_published=-1, letters_unpublished=1)

    def close(self) -> None:
        """Count the letters that nobody was told of."""
        with self._lock:
            left = sum(map(len, self._waiting.values()))
            self._ledger.add(letters_unpublished=left)
            self._waiting.clear()

    def post_again(self, letter: Letter) -> list[Failure]:
        """Store the message of a dead letter for the receiver that did not get it."""
        assert letter.original is not None
        assert letter.receiver is not None
        return self._store_for(letter.original, Receiver(letter.leg, letter.receiver), "")


def _size(entry: Entry) -> int:
    return len(entry.raw)


def _entry(message: UMessage) -> Entry:
    attributes = message.attributes
    end = expires_at_ms(attributes)
    source = b"" if attributes.source is None else attributes.source.to_bytes()
    if attributes.sink is not None and attributes.type != UMessageType.PUBLISH:
        source += attributes.sink.with_resource(0).to_bytes()
    return Entry(
        min(max(attributes.effective_priority - 1, 0), 6),
        0,
        0 if end is None else end + 1,
        key_of(source),
        int(attributes.type),
        message.to_bytes(),
    )
