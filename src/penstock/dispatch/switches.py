"""Which messages are not delivered now: of topics that are stopped, sampled or left?"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.dispatch.outbox.state import save_notes
from penstock.dispatch.routes import topic_of
from penstock.protocols.uprotocol import InvalidMessage, InvalidUUri, UMessage, UMessageType, UUri
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.dispatch.outbox import Item
    from penstock.dispatch.routes import Receiver, Routing

__all__ = ["Kind", "Stop", "Switches", "Traffic", "topic_of_item"]

_MOST = 10_000


class Stop(NamedTuple):
    """Topics that are not delivered to some receivers.

    It applies to publishes and notifications of a topic, and to requests of a method. Responses
    are delivered: a caller waits for each.
    """

    topic: UUri
    receiver: UUri
    #: Whether their messages are queued; otherwise they become dead letters, UNAVAILABLE.
    queue: bool = True


class Switches:
    """All stops, persisted in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists.

        :raises Malformed: the file is invalid.
        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._lock = threading.Lock()
        self._stops: dict[tuple[UUri, UUri], Stop] = _read(path)
        #: Incremented with every change.
        self.generation = 0

    def __bool__(self) -> bool:
        return bool(self._stops)

    def __iter__(self) -> Iterator[Stop]:
        return iter(list(self._stops.values()))

    def stop(self, stop: Stop) -> None:
        """Add a stop. Idempotent.

        :raises InvalidOption: there are too many stops.
        """
        with self._lock:
            key = (stop.topic, stop.receiver)
            if self._stops.get(key) == stop:
                return
            if len(self._stops) >= _MOST:
                raise InvalidOption("topic", str(stop.topic), f"{_MOST:,} are stopped already")
            self._save({**self._stops, key: stop})

    def start(self, topic: UUri, receiver: UUri) -> bool:
        """Remove a stop with exactly these arguments; tell whether it existed."""
        with self._lock:
            left = dict(self._stops)
            if left.pop((topic, receiver), None) is None:
                return False
            self._save(left)
            return True

    def find(self, topic: UUri, receiver: UUri) -> Stop | None:
        """Return the stop of a topic for a receiver, first one that does not queue, or None."""
        found = None
        for stop in list(self._stops.values()):
            if stop.topic.matches(topic) and stop.receiver.matches(receiver):
                if not stop.queue:
                    return stop
                found = stop
        return found

    def _save(self, stops: dict[tuple[UUri, UUri], Stop]) -> None:
        rows = [
            {"topic": str(stop.topic), "receiver": str(stop.receiver), "queue": stop.queue}
            for stop in stops.values()
        ]
        save_notes(self._path, json.dumps({"stopped": rows}, indent=1).encode(), sync=True)
        self._stops = stops
        self.generation += 1


def _read(path: Path) -> dict[tuple[UUri, UUri], Stop]:
    with storage_errors("reading", str(path)):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return {}
    try:
        stops = [
            Stop(UUri.parse(row["topic"]), UUri.parse(row["receiver"]), bool(row["queue"]))
            for row in json.loads(text)["stopped"][:_MOST]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.rule if isinstance(error, InvalidUUri) else str(error)
        raise Malformed(
            str(path),
            "the list of what is stopped",
            "JSON of this program",
            reason,
            hint="remove the file; then nothing is stopped",
        ) from error
    return {(stop.topic, stop.receiver): stop for stop in stops}


_MOST_KINDS: Final = 65536
_PUBLISH: Final = int(UMessageType.PUBLISH)


class Kind(NamedTuple):
    """How the messages of one source and type are treated."""

    is_gone: bool = False
    is_stopped: bool = False
    #: Sample period (seconds).
    period: float = 0.0


_PLAIN: Final = Kind()


class Traffic:
    """A cache of how the sources of a receiver's messages are treated."""

    def __init__(self, receiver: Receiver, routing: Routing, switches: Switches) -> None:
        self._receiver = receiver
        self._routing = routing
        self._switches = switches
        self._kinds: dict[int, Kind] = {}
        self._generation = -1
        #: Sources whose next message is of a stopped topic.
        self.stopped: set[int] = set()
        #: Whether any source is sampled.
        self.is_sampled = False

    def notice_changes(self) -> None:
        """Clear the cache after a change of subscriptions or stops."""
        generation = self._routing.subscriptions.generation + self._switches.generation
        if generation != self._generation or len(self._kinds) > _MOST_KINDS:
            self._generation = generation
            self._kinds = {}
            self.stopped = set()
            self.is_sampled = False

    def is_plain(self, items: Sequence[Item]) -> bool:
        """Tell whether all of these are known to need no special treatment."""
        kinds = self._kinds
        return not self._switches and all(
            kinds.get(kind) is _PLAIN for kind in {item.source ^ item.type for item in items}
        )

    def period(self, item: Item) -> float:
        """Return the cached sample period of a message's source (seconds)."""
        return self._kinds.get(item.source ^ item.type, _PLAIN).period

    def of(self, item: Item) -> Kind:
        """Return how a message, and others of its source and type, are treated."""
        kind = item.source ^ item.type
        known = self._kinds.get(kind)
        if known is not None:
            return known
        try:
            attributes = UMessage.attributes_of(item.raw)
        except InvalidMessage:
            return _PLAIN  # its delivery will fail
        topic = topic_of(attributes) or UUri()
        known = _PLAIN
        if item.type == _PUBLISH:
            period = self._routing.period_of(self._receiver, topic, attributes.sink)
            known = Kind(is_gone=True) if period is None else Kind(period=period / 1000)
            self.is_sampled = self.is_sampled or known.period > 0
        if item.type != UMessageType.RESPONSE and self._switches.find(
            topic, self._receiver.address
        ):
            known = known._replace(is_stopped=True)
        if known == _PLAIN:
            known = _PLAIN
        if not (self._switches and item.type == UMessageType.REQUEST):
            self._kinds[kind] = known  # requests of one source may be for several methods
        return known


def topic_of_item(item: Item) -> UUri:
    """Return the topic or the method of a stored message."""
    try:
        return topic_of(UMessage.attributes_of(item.raw)) or UUri()
    except InvalidMessage:
        return UUri()
