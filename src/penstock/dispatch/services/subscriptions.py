"""Who is subscribed to what, also after a crash? (spec uprotocol 6.1)."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock.dispatch.routing import Subscriber
from penstock.dispatch.services.journal import Journal
from penstock.protocols.uprotocol import InvalidUUri, SubscriptionStatus, UUri, proto

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.dispatch.services.journal import Record

__all__ = ["Subscription", "SubscriptionTable", "Watcher"]

log = logging.getLogger(__name__)

#: Who is told of changes, and of those of which topic; None: of all.
Watcher: TypeAlias = "tuple[UUri, UUri | None]"

_MS: Final = 1000
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Subscription:
    """That somebody gets the publishes of a topic."""

    topic: UUri
    #: The entity, with resource 0.
    subscriber: UUri
    status: SubscriptionStatus = SubscriptionStatus.SUBSCRIBED
    #: Milliseconds since 1970 UTC; None: until it is unsubscribed.
    expires_ms: int | None = None
    #: Milliseconds between two publishes, at least.
    sample_period_ms: int | None = None
    #: Of uSubscription, in which the subscriber is told of changes.
    version: int = 4

    def to_proto(self) -> Any:
        """Return the protobuf message, which is also what others are told of a change."""
        made = proto.Subscription(
            topic=self.topic.to_proto(),
            subscriber=self.subscriber.to_proto(),
            status=int(self.status),
        )
        if self.expires_ms is not None:
            made.expiration.seconds = self.expires_ms // _MS
            made.expiration.nanos = self.expires_ms % _MS * _NS_PER_MS
        if self.sample_period_ms is not None:
            made.sample_period = self.sample_period_ms
        return made

    def to_record(self) -> Record:
        return {
            "topic": str(self.topic),
            "subscriber": str(self.subscriber),
            "status": int(self.status),
            "expires_ms": self.expires_ms,
            "sample_period_ms": self.sample_period_ms,
            "version": self.version,
        }

    @classmethod
    def from_record(cls, record: Record) -> Subscription:
        return cls(
            UUri.parse(record["topic"]),
            UUri.parse(record["subscriber"]),
            SubscriptionStatus(record["status"]),
            record["expires_ms"],
            record["sample_period_ms"],
            record.get("version", 4),
        )


def _watcher(record: Record) -> Watcher:
    topic = record.get("topic")
    return UUri.parse(record["who"]), None if topic is None else UUri.parse(topic)


def _watcher_record(watcher: Watcher) -> Record:
    who, topic = watcher
    return {"who": str(who), **({} if topic is None else {"topic": str(topic)})}


class SubscriptionTable:
    """All subscriptions, and who is told of changes, kept in a file.

    Changes are made under `lock`, by one at a time; reading needs none.
    """

    def __init__(self, path: Path, static: Iterable[Subscription] = ()) -> None:
        """Read the file, or make it.

        :param static: those that are always there and never in the file
        :raises StorageError: the operating system refuses.
        """
        self.lock = threading.RLock()
        self._static = tuple(static)
        self._by_topic: dict[UUri, dict[UUri, Subscription]] = {}
        self._watchers: dict[Watcher, None] = {}
        self._notes: dict[UUri, Record] = {}
        self._count = 0
        self._generation = 0
        self._expiring: dict[tuple[UUri, UUri], int] = {}
        self._expiry_generation = -1
        self._next_expiry_ms: int | None = None
        self._exact: dict[UUri, tuple[Subscriber, ...]] = {}
        self._patterns: dict[UUri, tuple[Subscriber, ...]] = {}
        self._journal = Journal(path)
        for record in self._journal.replay():
            try:
                self._apply(record)
            except (KeyError, TypeError, ValueError, InvalidUUri) as error:
                log.warning("%s: a line makes no sense (%s), and is left out", path, error)
        for topic in {*self._by_topic, *(one.topic for one in self._static)}:
            self._refresh(topic)

    # --- what a dispatcher asks -------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._generation

    def receivers_of(self, topic: UUri) -> Sequence[Subscriber]:
        """Return who gets the publishes of a topic now; also those whose answer is pending."""
        found = self._exact.get(topic, ())
        for pattern, subscribers in list(self._patterns.items()):
            if pattern.matches(topic):
                found += subscribers
        return found

    def topics(self) -> Collection[UUri]:
        return [*self._exact, *self._patterns]

    # --- looking ----------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many there are, apart from those that are always there."""
        return self._count

    def __iter__(self) -> Iterator[Subscription]:
        for subscriptions in list(self._by_topic.values()):
            yield from list(subscriptions.values())
        yield from self._static

    def get(self, topic: UUri, subscriber: UUri) -> Subscription | None:
        return self._by_topic.get(topic, {}).get(subscriber)

    def of_topic(self, topic: UUri) -> list[Subscription]:
        return list(self._by_topic.get(topic, {}).values())

    @property
    def watchers(self) -> list[Watcher]:
        """Who is told of changes, and of which topic; None: of all of them."""
        return list(self._watchers)

    def watches(self, who: UUri, topic: UUri | None = None) -> bool:
        """Tell whether somebody is told of all changes, or of those of a topic."""
        return (who, topic) in self._watchers

    @property
    def notes(self) -> dict[UUri, Record]:
        """What is to be remembered of topics elsewhere."""
        return dict(self._notes)

    def expired(self, now_ms: int) -> list[Subscription]:
        """Return those whose time is over."""
        keys = [key for key, ms in self._expiring.items() if ms <= now_ms]
        return [self._by_topic[topic][subscriber] for topic, subscriber in keys]

    def next_expiry_ms(self) -> int | None:
        """Return when the next one ends, milliseconds since 1970 UTC; None: none does."""
        if self._expiry_generation != self._generation:
            self._expiry_generation = self._generation
            self._next_expiry_ms = min(self._expiring.values(), default=None)
        return self._next_expiry_ms

    # --- changing ---------------------------------------------------------------------------------

    def put(self, *subscriptions: Subscription) -> None:
        """Add subscriptions, or change them.

        :raises StorageError: the operating system refuses; then nothing is changed.
        """
        self._change([{"op": "put", **one.to_record()} for one in subscriptions])

    def remove(self, *subscriptions: Subscription) -> None:
        """Remove subscriptions.

        :raises StorageError: the operating system refuses; then nothing is changed.
        """
        self._change(
            [
                {"op": "remove", "topic": str(one.topic), "subscriber": str(one.subscriber)}
                for one in subscriptions
            ]
        )

    def watch(self, who: UUri, topic: UUri | None = None) -> None:
        """Let somebody be told of all changes, or of those of a topic."""
        if not self.watches(who, topic):
            self._change([{"op": "watch", **_watcher_record((who, topic))}])

    def unwatch(self, who: UUri, topic: UUri | None = None) -> None:
        """Let somebody be told no more."""
        if self.watches(who, topic):
            self._change([{"op": "unwatch", **_watcher_record((who, topic))}])

    def note(self, topic: UUri, what: Record | None) -> None:
        """Remember something of a topic elsewhere; None: forget it."""
        if self._notes.get(topic) != what:
            self._change([{"op": "note", "topic": str(topic), "what": what}])

    def clear(self) -> list[Subscription]:
        """Remove all subscriptions and all who are told; return what was subscribed to."""
        gone = [one for one in self if one not in self._static]
        self._change([{"op": "clear"}])
        return gone

    def close(self) -> None:
        self._journal.close()

    def _change(self, records: list[Record]) -> None:
        with self.lock:
            self._journal.append(records)
            for record in records:
                topic = self._apply(record)
                if topic is not None:
                    self._refresh(topic)
            self._generation += 1
            in_use = self._count + len(self._watchers) + len(self._notes)
            if self._journal.is_long(in_use):
                self._journal.rewrite(self._records())

    def _apply(self, record: Record) -> UUri | None:
        """Make a change; return the topic whose receivers are others now."""
        match record["op"]:
            case "put":
                one = Subscription.from_record(record)
                those = self._by_topic.setdefault(one.topic, {})
                self._count += one.subscriber not in those
                those[one.subscriber] = one
                self._expiring.pop((one.topic, one.subscriber), None)
                if one.expires_ms is not None:
                    self._expiring[one.topic, one.subscriber] = one.expires_ms
                return one.topic
            case "remove":
                topic, who = UUri.parse(record["topic"]), UUri.parse(record["subscriber"])
                those = self._by_topic.get(topic, {})
                self._count -= those.pop(who, None) is not None
                self._expiring.pop((topic, who), None)
                if not those:
                    self._by_topic.pop(topic, None)
                return topic
            case "clear":
                self._forget_all()
            case _:
                self._apply_other(record)
        return None

    def _apply_other(self, record: Record) -> None:
        match record["op"]:
            case "watch":
                self._watchers[_watcher(record)] = None
            case "unwatch":
                self._watchers.pop(_watcher(record), None)
            case "note":
                topic, what = UUri.parse(record["topic"]), record["what"]
                if what is None:
                    self._notes.pop(topic, None)
                else:
                    self._notes[topic] = what

    def _forget_all(self) -> None:
        topics = list(self._by_topic)
        self._by_topic.clear()
        self._watchers.clear()
        self._expiring.clear()
        self._count = 0
        for topic in topics:
            self._refresh(topic)

    def _refresh(self, topic: UUri) -> None:
        """Make what `receivers_of` reads; it reads meanwhile, so that comes into place whole."""
        subscribers = tuple(
            Subscriber(one.subscriber, one.sample_period_ms or 0)
            for one in (
                *self._by_topic.get(topic, {}).values(),
                *(one for one in self._static if one.topic == topic),
            )
        )
        table = self._patterns if topic.has_wildcard else self._exact
        if subscribers:
            table[topic] = subscribers
        else:
            table.pop(topic, None)

    def _records(self) -> Iterator[Record]:
        for those in self._by_topic.values():
            yield from ({"op": "put", **one.to_record()} for one in those.values())
        yield from ({"op": "watch", **_watcher_record(it)} for it in self._watchers)
        for topic, what in self._notes.items():
            yield {"op": "note", "topic": str(topic), "what": what}
