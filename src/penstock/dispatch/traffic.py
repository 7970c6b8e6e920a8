"""Which messages for a receiver are not to be delivered now, or not at all? (R11, E8, E19)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.dispatch.plans import topic_of
from penstock.protocols.uprotocol import InvalidMessage, UMessage, UMessageType, UUri

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.dispatch.outbox import Item
    from penstock.dispatch.receivers import Receiver
    from penstock.dispatch.surroundings import Surroundings

__all__ = ["Kind", "Traffic", "topic_of_item"]

_MOST: Final = 65536
_PUBLISH: Final = int(UMessageType.PUBLISH)


class Kind(NamedTuple):
    """What holds for the messages of one source and type."""

    is_gone: bool = False
    is_stopped: bool = False
    #: Seconds between two of them.
    period: float = 0.0


_PLAIN: Final = Kind()


class Traffic:
    """What is known of the sources of a receiver's messages, until something changes."""

    def __init__(self, receiver: Receiver, around: Surroundings) -> None:
        self._receiver = receiver
        self._around = around
        self._kinds: dict[int, Kind] = {}
        self._generation = -1
        #: Sources whose next message is of a topic that is stopped.
        self.stopped: set[int] = set()
        #: Whether there is a source that is sampled.
        self.is_sampled = False

    def notice_changes(self) -> None:
        """Forget what may be another thing now."""
        around = self._around
        generation = around.routing.subscriptions.generation + around.switches.generation
        if generation != self._generation or len(self._kinds) > _MOST:
            self._generation = generation
            self._kinds = {}
            self.stopped = set()
            self.is_sampled = False

    def is_plain(self, items: Sequence[Item]) -> bool:
        """Tell whether all of these are known to be delivered as they come."""
        kinds = self._kinds
        return not self._around.switches and all(
            kinds.get(kind) is _PLAIN for kind in {item[5] ^ item[6] for item in items}
        )

    def period(self, item: Item) -> float:
        """Return the seconds between two messages like this one, as far as that is known."""
        return self._kinds.get(item.source ^ item.type, _PLAIN).period

    def of(self, item: Item) -> Kind:
        """Find out what holds for a message and others like it."""
        kind = item.source ^ item.type
        known = self._kinds.get(kind)
        if known is not None:
            return known
        around = self._around
        try:
            attributes = UMessage.attributes_of(item.raw)
        except InvalidMessage:
            return _PLAIN  # its delivery fails, and says so
        topic = topic_of(attributes) or UUri()
        known = _PLAIN
        if item.type == _PUBLISH:
            period = around.routing.period_of(self._receiver, topic, attributes.sink)
            known = Kind(is_gone=True) if period is None else Kind(period=period / 1000)
            self.is_sampled = self.is_sampled or known.period > 0
        if item.type != UMessageType.RESPONSE and around.switches.find(
            topic, self._receiver.address
        ):
            known = known._replace(is_stopped=True)
        if known == _PLAIN:
            known = _PLAIN
        if not (around.switches and item.type == UMessageType.REQUEST):
            self._kinds[kind] = known  # of requests each may be for another method
        return known


def topic_of_item(item: Item) -> UUri:
    """Return the topic or the method of a stored message."""
    try:
        return topic_of(UMessage.attributes_of(item.raw)) or UUri()
    except InvalidMessage:
        return UUri()
