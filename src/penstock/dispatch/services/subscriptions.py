"""Who is subscribed to what, also after a crash?"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock.core.errors import StorageError
from penstock.core.whole_files import make_folder, sync_names
from penstock.dispatch.outbox.state import save_notes
from penstock.dispatch.routes import Subscriber
from penstock.protocols.uprotocol import InvalidUUri, SubscriptionStatus, UUri, proto
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Journal", "Subscription", "SubscriptionTable", "Watcher"]

log = logging.getLogger(__name__)

#: Number of obsolete lines from which the file is rewritten.
_SPARE: Final = 1024

Record = dict[str, Any]


class Journal:
    """The file of a table. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._lines = 0
        #: Whether the last line may be incomplete; the next append then starts with a newline.
        self._is_torn = False
        with storage_errors("opening", str(path)):
            make_folder(path.parent)
            self._file = path.open("a+b", buffering=0)
            sync_names(path.parent)  # else all is lost with the name of a new file

    def replay(self) -> list[Record]:
        """Return all changes, the oldest first; truncate an incomplete last line.

        :raises StorageError: the operating system refuses.
        """
        with storage_errors("reading", str(self._path)):
            data = self._path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                self._file.truncate(whole)
        found = []
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            if not line:
                continue
            record = _read(line)
            if record is None:
                log.warning("%s: line %d is damaged, and left out", self._path, number)
            else:
                found.append(record)
        self._lines = len(found)
        return found

    def append(self, records: Iterable[Record]) -> None:
        """Append changes and sync them.

        :raises StorageError: the operating system refuses; none is written.
        """
        lines = [_line(record) for record in records]
        if not lines:
            return
        with storage_errors("writing", str(self._path)):
            if self._file.closed:
                self._open_again()
            end = os.fstat(self._file.fileno()).st_size
            data = (b"\n" if self._is_torn else b"") + b"".join(lines)
            self._is_torn = True
            try:
                written = self._file.write(data)
                if written < len(data):
                    raise OSError(28, "there is no space left")  # noqa: TRY301 - as a write would
                os.fdatasync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                self._is_torn = False
                raise
        self._is_torn = False
        self._lines += len(lines)

    def is_long(self, in_use: int) -> bool:
        """Tell whether most lines are obsolete."""
        return self._lines > 2 * in_use + _SPARE

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the file by one with these records only.

        :raises StorageError: the operating system refuses; no record is lost.
        """
        lines = [_line(record) for record in records]
        save_notes(self._path, b"".join(lines), sync=True)
        self._lines = len(lines)
        self._file.close()  # it has no name any more: nothing may be appended to it
        with storage_errors("opening", str(self._path)):
            self._open_again()

    def _open_again(self) -> None:
        sync_names(self._path.parent)  # else later appends may be lost with the new name
        self._file = self._path.open("a+b", buffering=0)

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(line: bytes) -> Record | None:
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


#: An entity notified of changes, and the topic; None: all topics.
Watcher: TypeAlias = "tuple[UUri, UUri | None]"

_MS: Final = 1000
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription of an entity to a topic."""

    topic: UUri
    #: The entity, with resource 0.
    subscriber: UUri
    status: SubscriptionStatus = SubscriptionStatus.SUBSCRIBED
    #: Milliseconds since 1970 UTC; None: until unsubscribed.
    expires_ms: int | None = None
    #: Minimal time between two publishes (milliseconds).
    sample_period_ms: int | None = None
    #: The version of uSubscription in which the subscriber is notified.
    version: int = 4

    def to_proto(self) -> Any:
        """Return the protobuf message, which is also the notification of a change."""
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
    """All subscriptions and watchers, persisted in a file.

    Changes need `lock`; reading needs none.
    """

    def __init__(self, path: Path, static: Iterable[Subscription] = ()) -> None:
        """Read the file, or create it.

        :param static: permanent subscriptions, which are not in the file
        :raises StorageError: the operating system refuses.
        """
        self.lock = threading.RLock()
        self._static = tuple(static)
        self._by_topic: dict[UUri, dict[UUri, Subscription]] = {}
        self._watchers: dict[Watcher, None] = {}
        self._notes: dict[UUri, Record] = {}
        self._count = 0
        #: A number that increases with every change, including expiries.
        self.generation = 0
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

    def receivers_of(self, topic: UUri) -> Sequence[Subscriber]:
        """Return the subscribers of a topic, including pending ones."""
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
        """Number of subscriptions, without permanent ones."""
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
        """The entities notified of changes, each with a topic; None: all topics."""
        return list(self._watchers)

    def watches(self, who: UUri, topic: UUri | None = None) -> bool:
        """Tell whether an entity is notified of all changes, or of those of a topic."""
        return (who, topic) in self._watchers

    @property
    def notes(self) -> dict[UUri, Record]:
        """The saved state of topics of other authorities."""
        return dict(self._notes)

    def expired(self, now_ms: int) -> list[Subscription]:
        """Return the expired subscriptions."""
        keys = [key for key, ms in self._expiring.items() if ms <= now_ms]
        return [self._by_topic[topic][subscriber] for topic, subscriber in keys]

    def next_expiry_ms(self) -> int | None:
        """Return when the next one expires (milliseconds since 1970 UTC), or None."""
        if self._expiry_generation != self.generation:
            self._expiry_generation = self.generation
            self._next_expiry_ms = min(self._expiring.values(), default=None)
        return self._next_expiry_ms

    # --- changing ---------------------------------------------------------------------------------

    def put(self, *subscriptions: Subscription) -> None:
        """Add or replace subscriptions.

        :raises StorageError: the operating system refuses; nothing is changed.
        """
        self.change(put=subscriptions)

    def remove(self, *subscriptions: Subscription) -> None:
        """Remove subscriptions.

        :raises StorageError: the operating system refuses; nothing is changed.
        """
        self.change(remove=subscriptions)

    def change(
        self,
        *,
        remove: Sequence[Subscription] = (),
        put: Sequence[Subscription] = (),
        notes: Mapping[UUri, Record | None] | None = None,
    ) -> None:
        """Remove and put subscriptions, and save notes, all by one append.

        :raises StorageError: the operating system refuses; nothing is changed.
        """
        removed = [
            {"op": "remove", "topic": str(one.topic), "subscriber": str(one.subscriber)}
            for one in remove
        ]
        added = [{"op": "put", **one.to_record()} for one in put]
        self._change([*removed, *added, *self._note_records(notes or {})])

    def watch(self, who: UUri, topic: UUri | None = None) -> None:
        """Notify an entity of all changes, or of those of a topic."""
        if not self.watches(who, topic):
            self._change([{"op": "watch", **_watcher_record((who, topic))}])

    def unwatch(self, who: UUri, topic: UUri | None = None) -> None:
        """Stop notifying an entity."""
        if self.watches(who, topic):
            self._change([{"op": "unwatch", **_watcher_record((who, topic))}])

    def note(self, topic: UUri, what: Record | None) -> None:
        """Save the state of a topic of another authority; None deletes it."""
        self.change(notes={topic: what})

    def clear(self, notes: Mapping[UUri, Record | None] | None = None) -> list[Subscription]:
        """Remove all subscriptions and watchers, and save notes; return the subscriptions."""
        gone = [one for one in self if one not in self._static]
        self._change([{"op": "clear"}, *self._note_records(notes or {})])
        return gone

    def close(self) -> None:
        self._journal.close()

    def _note_records(self, notes: Mapping[UUri, Record | None]) -> list[Record]:
        return [
            {"op": "note", "topic": str(topic), "what": what}
            for topic, what in notes.items()
            if self._notes.get(topic) != what
        ]

    def _change(self, records: list[Record]) -> None:
        if not records:
            return
        with self.lock:
            self._journal.append(records)
            for record in records:
                topic = self._apply(record)
                if topic is not None:
                    self._refresh(topic)
            self.generation += 1
            in_use = self._count + len(self._watchers) + len(self._notes)
            if self._journal.is_long(in_use):
                self._shorten()

    def _shorten(self) -> None:
        try:
            self._journal.rewrite(self._records())
        except StorageError as error:  # the change itself is stored
            log.warning("the subscriptions could not be rewritten: %s", error)

    def _apply(self, record: Record) -> UUri | None:
        """Apply a change; return the topic whose receivers changed."""
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
        """Update the index of `receivers_of` atomically: it is read without the lock."""
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
