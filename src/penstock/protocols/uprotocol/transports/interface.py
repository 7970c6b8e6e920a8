"""What can every transport of uProtocol do, for an entity and for a dispatcher? (spec 4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from penstock.core.closing import Closable
from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.message import UMessage

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = [
    "NOT_TRIED",
    "Ingest",
    "Leg",
    "Listener",
    "UListener",
    "UTransport",
    "Unreadable",
    "not_tried_after",
]


class UListener(Protocol):
    """Whoever is told of messages.

    One that also has a method `accepts`, of a message, is told of those only for which that returns
    True; the others wait for another listener.
    """

    def on_receive(self, message: UMessage) -> None: ...


#: A listener may be an object with `on_receive`, or any function of a message.
Listener: TypeAlias = UListener | Callable[[UMessage], None]


class Unreadable(NamedTuple):
    """What came by a transport, and is not a message as it should be."""

    #: All of it, in a form for people.
    raw: bytes
    reason: str
    code: UCode = UCode.INVALID_ARGUMENT
    #: The message as far as it can be read; None: nobody can say what it is.
    message: UMessage | None = None

    @property
    def size(self) -> int:
        return len(self.raw)


#: What a leg hands its messages to. It returns when all of them are stored, and raises when none
#: is: only what it returned for may be acknowledged to the transport.
Ingest: TypeAlias = Callable[[Sequence[bytes | UMessage]], None]

#: Of a message that was not sent because one before it in the same batch failed. It says nothing
#: of the message itself: it is to be delivered after the one that failed, without counting an
#: attempt. Compare by identity.
NOT_TRIED: Final = UStatus(UCode.ABORTED, "not tried: one before it in the batch failed")


def not_tried_after(status: UStatus, rest: int) -> list[UStatus | None]:
    """Give the end of what `Leg.deliver` returns: a failure, and `rest` messages after it."""
    return [status, *[NOT_TRIED] * rest]


class _Counting(Closable):
    @abstractmethod
    def statistics(self) -> Mapping[str, int]:
        """Return what passed so far, each count by its name."""


class UTransport(_Counting):
    """Sends and receives messages for entities: uP-L1. Safe to share between threads."""

    #: The authority that addresses without one belong to.
    authority: str

    @abstractmethod
    def send(self, message: UMessage) -> None:
        """Hand a message to the transport, and return when it has taken it over.

        :raises UStatusError: INVALID_ARGUMENT, the message violates a rule, and is not worth
            sending again; UNAVAILABLE, it may work later; PERMISSION_DENIED,
            UNAUTHENTICATED or RESOURCE_EXHAUSTED, as the transport says; DEADLINE_EXCEEDED, the
            message is expired. After a failure the message may have been sent all the same.
        """

    @abstractmethod
    def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        """Take the oldest message that matches, is not expired and was given to no listener.

        :raises UStatusError: NOT_FOUND, there is none; UNIMPLEMENTED, the transport only calls
            listeners; INVALID_ARGUMENT, no message can match such filters.
        """

    @abstractmethod
    def register_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        """Call the listener for each message that matches; again with the same changes nothing.

        Without a sink filter it gets messages without sink, with one those whose sink matches. What
        came before and waits is for it, too: a transport acknowledges nothing that nobody took.

        :raises UStatusError: INVALID_ARGUMENT, no message can match such filters;
            RESOURCE_EXHAUSTED, there are too many listeners; UNAVAILABLE, the transport cannot
            be reached.
        """

    @abstractmethod
    def unregister_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        """Call the listener no more: after this returns no further call begins.

        What still comes for it then is acknowledged, counted and dropped.

        :raises UStatusError: NOT_FOUND, it is not registered; INVALID_ARGUMENT as above.
        """

    def withdraw_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        """Do the same, but let what comes for it wait for another listener where it can.

        :raises UStatusError: NOT_FOUND, it is not registered; INVALID_ARGUMENT as above.
        """
        self.unregister_listener(source_filter, listener, sink_filter)


class Leg(_Counting):
    """A transport as a dispatcher uses it: whole messages, in batches, acknowledged."""

    #: Whether a message for several entities of one authority is given to each ("entity"), or
    #: once to their authority ("authority").
    scope: ClassVar[Literal["entity", "authority"]]

    #: For how many seconds a message that was taken over may still be lost: with this process, or
    #: with the link that it is on its way by. 0: the transport acknowledges what it takes over.
    settle_after: float = 0.0

    def __init__(self, name: str) -> None:
        #: What the dispatcher's configuration calls it.
        self.name = name
        #: What it hands over what came and is not a message, as to an `Ingest`; None: it is counted
        #: and dropped. To be set before `start`.
        self.on_unreadable: Callable[[Sequence[Unreadable]], None] | None = None

    def hand_over(self, came: Sequence[UMessage | Unreadable], ingest: Ingest) -> None:
        """Hand messages to `ingest`, and the others to who wants them."""
        messages = [it for it in came if isinstance(it, UMessage)]
        if len(messages) < len(came) and self.on_unreadable is not None:
            self.on_unreadable([it for it in came if isinstance(it, Unreadable)])
        if messages:
            ingest(messages)

    @abstractmethod
    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        """Begin to receive point-to-point messages for these authorities; "*" is any.

        `ingest` is called by threads of the leg. When it raises, the messages stay unacknowledged
        and come again.

        :raises PenstockError: what is to be received from does not exist, or is not right. A
            broker that does not answer now is none of these: it is tried again.
        """

    @abstractmethod
    def listen(self, topic: UUri) -> None:
        """Receive publishes of this topic, too; again with the same changes nothing.

        :raises UStatusError: INVALID_ARGUMENT, it is not a topic or a pattern of topics.
        """

    @abstractmethod
    def unlisten(self, topic: UUri) -> None:
        """Receive publishes of this topic no more; of one that is not received, do nothing."""

    @abstractmethod
    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        """Send messages to one receiver, in order, and say of each how that ended.

        Returns within some seconds at most, with UNAVAILABLE if need be. None means that the
        transport has taken the message over; after the first that is not None nothing more is
        sent where that can be helped, and those not sent are `NOT_TRIED`. A transport that sends
        ahead may have sent some of them: such a message is None if it was taken over all
        the same. Several threads may call this, each for an address of its own.
        """

    def await_connection(self, patience: float) -> UStatus | None:  # noqa: ARG002
        """Return None when the transport is connected, or after that time why it is not."""
        return None

    @property
    def links_lost(self) -> int:
        """How many links there were that are no more: what was on its way by them may be lost."""
        return 0

    @property
    def is_up(self) -> bool:
        """Whether the transport can be reached now, as far as is known."""
        return True

    @abstractmethod
    def stop(self) -> None:
        """Receive no more: when this returns, no call of `ingest` is under way or begins."""
