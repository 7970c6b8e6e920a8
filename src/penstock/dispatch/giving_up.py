"""What is done about a message that cannot be delivered? (spec uprotocol 10.2, 10.3).

In this order, so that a crash between two of them loses nothing: the response to a request is
stored, the dead letter is published, it is written, the message is settled. One that was refused as
it came then comes again, and its letter is published a second time, with another id.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.dispatch.letters import Letter, letter_id
from penstock.dispatch.rpc_errors import Answers, commstatus, is_answerable
from penstock.protocols.uprotocol import (
    UUID7,
    DeadLetterReason,
    InvalidMessage,
    UAttributes,
    UCode,
    UMessage,
    UMessageType,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.books import Ledger
    from penstock.dispatch.dead_letters import DeadLetters
    from penstock.dispatch.outbox import Item, Outbox, Reason
    from penstock.dispatch.receivers import Receiver
    from penstock.protocols.uprotocol import UUri

__all__ = ["Failure", "GivingUp", "Stored"]

_AT_ONCE: Final = 256


class Stored(NamedTuple):
    """A message in an outbox that is to be settled."""

    outbox: Outbox
    item: Item
    reason: Reason


class Failure(NamedTuple):
    """A message that cannot be delivered, and why."""

    raw: bytes
    code: UCode
    reason: DeadLetterReason
    text: str
    #: The leg it came by, where that is known.
    came_by: str = ""
    #: Who should have got it, where that is known.
    receiver: Receiver | None = None
    #: Where it waits to be settled; None for one that was not stored.
    stored: Stored | None = None
    attempts: int = 0
    first_failure_ms: int = 0
    header_only: bool = False


class Post(Protocol):
    """Whoever stores the messages that a dispatcher makes itself."""

    def post_response(self, response: UMessage, came_by: str) -> list[Failure]:
        """Store the response to a request; return what could not be delivered because of it."""

    def post_letters(self, letters: Sequence[Letter], topic: UUri) -> list[Failure]:
        """Store dead letters for those who subscribed to them, as far as there is room."""


class GivingUp:
    """Writes dead letters and answers requests."""

    def __init__(
        self,
        topic: UUri,
        dead: DeadLetters,
        post: Post,
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self.topic = topic
        self._dispatcher = topic.with_resource(0)
        self._dead = dead
        self._post = post
        self._ledger = ledger
        self._clock = clock
        self._answers = Answers()

    def give_up(self, failures: Iterable[Failure], done: list[Failure] | None = None) -> None:
        """Do all that is to be done about messages that cannot be delivered.

        :param done: gets those about which all is done, also when it raises
        :raises StorageError: there is no space; those that were stored then wait again.
        """
        waiting = list(failures)
        while waiting:
            some, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            caused: list[Failure] = []
            try:
                self._give_up(some, caused)
                if done is not None:
                    done += some
                waiting += caused
            except BaseException:
                for failure in (*some, *caused, *waiting):
                    if failure.stored is not None:
                        failure.stored.outbox.give_back([failure.stored.item])
                raise

    def _give_up(self, failures: Sequence[Failure], caused: list[Failure]) -> None:
        """Do it for some; `caused` gets what cannot be delivered because of these."""
        now_ms = self._clock.now_ns() // 1_000_000
        letters: list[Letter] = []
        withheld = 0
        for failure in failures:
            try:
                letter = self._letter(failure, now_ms)
            except InvalidMessage:  # it was stored by another version of the rules
                letter = None
            if letter is None or letter.header.source == self.topic:
                withheld += 1  # a letter about a letter would be one more of them each time
                continue
            if letter.header.type == UMessageType.REQUEST:
                caused += self._answer(failure, letter, now_ms)
            letters.append(letter)
        new = self._dead.new(letters)
        # Told of before it is written down: a crash in between makes that twice, never not at all.
        if new:
            caused += self._post.post_letters(new, self.topic)
        self._dead.write(new)
        _settle(failures)
        self._ledger.add(
            letters=len(new), letters_known=len(letters) - len(new), letters_withheld=withheld
        )

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
            id = letter_id(receiver, item.stored_ms, item.priority, item.seq)
        else:
            id = UUID7.new(now_ms)
        is_request = header.type == UMessageType.REQUEST
        if is_request and not is_answerable(header):
            original = None  # R16: nobody can be told, and nobody can be asked
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
            dispatcher=self._dispatcher,
            header=header,
            original=original,
        )

    def _answer(self, failure: Failure, letter: Letter, now_ms: int) -> list[Failure]:
        if self._dead.knows(letter.id):
            return []  # it was answered before the crash that the letter survived
        response = self._answers.to(letter.header, letter.code, failure.text, now_ms)
        if response is None:
            self._ledger.add(unanswered=1)
            return []
        self._ledger.add(responses=1)
        return self._post.post_response(response, failure.came_by)


def _settle(failures: Iterable[Failure]) -> None:
    groups: defaultdict[tuple[int, Reason], list[Stored]] = defaultdict(list)
    for failure in failures:
        if failure.stored is not None:
            groups[id(failure.stored.outbox), failure.stored.reason].append(failure.stored)
    for (_, reason), group in groups.items():
        group[0].outbox.settle([stored.item for stored in group], reason)
