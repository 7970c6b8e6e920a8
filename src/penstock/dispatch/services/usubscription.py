"""Who gets which topics, and who says so? The service uSubscription.

It implements version 4, and version 3 for clients that use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.dispatch.access import Access
from penstock.dispatch.services.leg import Service, decoded
from penstock.dispatch.services.remote import RemoteTopics
from penstock.dispatch.services.subscriptions import Subscription, SubscriptionTable
from penstock.dispatch.services.usubscription_v3 import VERSION_3, Version3, expiration_ms
from penstock.protocols.uprotocol import (
    InvalidUUri,
    SubscriptionStatus,
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatusError,
    UUri,
    notification,
    proto,
    publish,
)
from penstock.protocols.uprotocol.uuri import ANY_AUTHORITY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from penstock.core.clock import Clock
    from penstock.dispatch.services.leg import Method
    from penstock.dispatch.services.remote import Wish, Wishes
    from penstock.dispatch.services.subscriptions import Record, Watcher

__all__ = ["CHANGES", "SubscriptionLimits", "USubscription"]

#: The topic on which changes are published.
CHANGES: Final = 0x8000
_NS_PER_MS: Final = 1_000_000

_UNSUBSCRIBED: Final = SubscriptionStatus.UNSUBSCRIBED
_PENDING: Final = SubscriptionStatus.SUBSCRIBE_PENDING
_SUBSCRIBED: Final = SubscriptionStatus.SUBSCRIBED


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionLimits:
    """Limits of the saved state."""

    subscriptions: int = 10_000
    watchers: int = 1_000
    #: Bytes of a response.
    response: int = 1 << 20


class USubscription(Service):
    """Manages subscriptions, and notifies of changes.

    The subscriber is the source of a request. For a topic of another authority it subscribes at the
    uSubscription there, and retries until that answers; meanwhile the pending subscriber is already
    a receiver.
    """

    service_id = 0
    version = 4
    name = "uSubscription"

    def __init__(
        self,
        authority: str,
        table: SubscriptionTable,
        clock: Clock,
        *,
        access: Access | None = None,
        serves: Collection[str] = (),
        limits: SubscriptionLimits | None = None,
    ) -> None:
        """Resume with the table.

        :param serves: authorities without a uSubscription, whose topics are managed here; "*": all
        """
        super().__init__(authority, clock)
        self.table = table
        self._access = access or Access()
        self._limits = limits or SubscriptionLimits()
        self._own = {authority, *serves}
        self._remote = RemoteTopics(self.address, table.notes, clock)
        self._is_reconciled = False
        self._news: list[UMessage] = []
        self._version_3 = Version3(self, authority)
        self.methods = {
            1: self._subscribe,
            2: self._unsubscribe,
            3: self._fetch,
            4: self._register,
            5: self._unregister,
            6: self._reset,
        }

    def method(self, address: UUri) -> Method | None:
        if address.ue_version_major == VERSION_3:
            return self._version_3.methods.get(address.resource_id)
        return super().method(address)

    def receive(self, message: UMessage) -> list[UMessage]:
        with self.table.lock:
            kind = message.attributes.type
            if kind == UMessageType.RESPONSE:
                self._answered(message)
            elif kind == UMessageType.NOTIFICATION:
                self._told(message)
            answers = super().receive(message)
            return [*answers, *self._take_news(), *self._remote.work()]

    def work(self) -> list[UMessage]:
        with self.table.lock:
            self._reconcile()
            self._expire()
            return [*self._take_news(), *self._remote.work()]

    def next_due(self) -> float | None:
        with self.table.lock:
            now = self.clock.monotonic()
            expiry_ms = self.table.next_expiry_ms()
            due = self._remote.next_due()
            if expiry_ms is None:
                return due
            expiry = now + max(expiry_ms - self.clock.now_ns() / _NS_PER_MS, 0) / 1000
            return expiry if due is None else min(due, expiry)

    def close(self) -> None:
        self.table.close()

    # --- methods ----------------------------------------------------------------------------------

    def _subscribe(self, source: UUri, payload: bytes) -> bytes:
        asked = decoded(proto.SubscribeRequest, payload)
        topic = _topic(asked)
        expires_ms = expiration_ms(asked.expiration) if asked.HasField("expiration") else None
        status = self.grant(source, topic, expires_ms, asked.sample_period or None, self.version)
        return _bytes(proto.SubscribeResponse(topic=topic.to_proto(), status=int(status)))

    def grant(
        self,
        source: UUri,
        topic: UUri,
        expires_ms: int | None,
        sample_period_ms: int | None,
        version: int,
    ) -> SubscriptionStatus:
        """Add or change the subscription of an entity to a topic.

        :param version: the version in which the entity is notified.
        :raises UStatusError: it is forbidden, a limit is reached, or the topic is invalid.
        """
        _check_topic(topic)
        if not self._access.may("subscribe", source, topic):
            raise UStatusError(
                UCode.PERMISSION_DENIED, f"no rule allows {source} to subscribe to {topic}"
            )
        known = self.table.get(topic, source)
        if expires_ms is not None and expires_ms <= self.now_ms:
            if known is not None:
                self._end([known])
            return _UNSUBSCRIBED
        if known is None and self.table.count >= self._limits.subscriptions:
            raise UStatusError(
                UCode.RESOURCE_EXHAUSTED, f"there are {self.table.count:,} subscriptions already"
            )
        wanted = Subscription(
            topic,
            source,
            self._status_of(topic) if known is None else known.status,
            expires_ms,
            sample_period_ms,
            version,
        )
        others = [one for one in self.table.of_topic(topic) if one.subscriber != source]
        changed = [wanted] if wanted != known else []
        self._save(put=changed, wishes=self._following(topic, [*others, wanted]))
        self._tell(changed)
        return wanted.status

    def _unsubscribe(self, source: UUri, payload: bytes) -> bytes:
        self.revoke(source, _topic(decoded(proto.UnsubscribeRequest, payload)), self.version)
        return _bytes(proto.UnsubscribeResponse())

    def revoke(self, source: UUri, topic: UUri, version: int) -> None:
        """Unsubscribe an entity. Idempotent.

        :param version: of the request; in version 4 the entity is told no more from now on.
        :raises UStatusError: the topic is invalid.
        """
        _check_topic(topic)
        known = self.table.get(topic, source)
        if known is not None:
            self._end([known], tell_subscriber=version == VERSION_3)

    def _fetch(self, source: UUri, payload: bytes) -> bytes:
        del source
        asked = decoded(proto.FetchSubscriptionsRequest, payload)
        topics = self._filter(asked, "topic_filter")
        subscribers = self._filter(asked, "subscriber_filter")
        found = proto.FetchSubscriptionsResponse(
            subscriptions=[
                one.to_proto()
                for one in self.table
                if (topics is None or topics.matches(one.topic))
                and (subscribers is None or subscribers.matches(one.subscriber))
            ]
        )
        return self.check_size(found, len(found.subscriptions))

    def _filter(self, asked: Any, name: str) -> UUri | None:
        """Return a filter of a request, with its authority, or None if it has none.

        :raises UStatusError: INVALID_ARGUMENT, it is not a pattern of addresses.
        """
        if not asked.HasField(name):
            return None
        try:
            return UUri.from_proto(getattr(asked, name)).resolved(self.address.authority_name)
        except InvalidUUri as error:
            raise UStatusError(UCode.INVALID_ARGUMENT, f"{name}: {error}") from error

    def check_size(self, response: Any, count: int) -> bytes:
        """Encode a response.

        :raises UStatusError: RESOURCE_EXHAUSTED, the response is too large.
        """
        if response.ByteSize() > self._limits.response:
            raise UStatusError(
                UCode.RESOURCE_EXHAUSTED,
                f"{count:,} subscriptions do not fit into a response: ask for fewer by a filter",
            )
        return _bytes(response)

    def _register(self, source: UUri, payload: bytes) -> bytes:
        decoded(proto.NotificationsRequest, payload)
        if not self.table.watches(source):
            self.check_watchers()
            self.table.watch(source)
        return _bytes(proto.NotificationsResponse())

    def check_watchers(self) -> None:
        """Check that one more watcher is allowed.

        :raises UStatusError: RESOURCE_EXHAUSTED, there are too many watchers.
        """
        count = len(self.table.watchers)
        if count >= self._limits.watchers:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{count:,} are told of changes already")

    def _unregister(self, source: UUri, payload: bytes) -> bytes:
        decoded(proto.NotificationsRequest, payload)
        self.table.unwatch(source)
        return _bytes(proto.NotificationsResponse())

    def _reset(self, source: UUri, payload: bytes) -> bytes:
        decoded(proto.ResetRequest, payload)
        self.reset(source)
        return _bytes(proto.ResetResponse())

    def reset(self, source: UUri) -> None:
        """Remove all subscriptions.

        :raises UStatusError: PERMISSION_DENIED, the caller is not another uSubscription.
        """
        if source.service_id != self.service_id or source == self.address:
            raise UStatusError(
                UCode.PERMISSION_DENIED, "only another uSubscription may reset this one"
            )
        watchers = self.table.watchers
        wishes: dict[UUri, Wish | None] = {}
        for topic in {one.topic for one in self.table}:
            wishes.update(self._following(topic, []))
        gone = self.table.clear(_notes(wishes))
        self._remote.adopt(wishes)
        self._tell([replace(one, status=_UNSUBSCRIBED) for one in gone], watchers)

    # --- changes ----------------------------------------------------------------------------------

    def _is_own(self, topic: UUri) -> bool:
        return topic.authority_name in self._own or ANY_AUTHORITY in self._own

    def _status_of(self, topic: UUri) -> SubscriptionStatus:
        if self._is_own(topic) or self._remote.is_granted(topic):
            return _SUBSCRIBED
        return _PENDING

    def _save(
        self,
        *,
        put: Sequence[Subscription] = (),
        remove: Sequence[Subscription] = (),
        wishes: Wishes,
    ) -> None:
        """Save subscriptions and the wishes that follow from them, all or nothing.

        :raises StorageError: they cannot be saved.
        """
        self.table.change(put=put, remove=remove, notes=_notes(wishes))
        self._remote.adopt(wishes)

    def _end(self, subscriptions: Sequence[Subscription], *, tell_subscriber: bool = True) -> None:
        ended = set(subscriptions)
        wishes: dict[UUri, Wish | None] = {}
        for topic in {one.topic for one in ended}:
            left = [one for one in self.table.of_topic(topic) if one not in ended]
            wishes.update(self._following(topic, left))
        self._save(remove=subscriptions, wishes=wishes)
        self._tell(
            [replace(one, status=_UNSUBSCRIBED) for one in subscriptions],
            tell_subscriber=tell_subscriber,
        )

    def _expire(self) -> None:
        expiry_ms, now_ms = self.table.next_expiry_ms(), self.now_ms
        if expiry_ms is not None and expiry_ms <= now_ms:
            self._end(self.table.expired(now_ms))

    def _following(self, topic: UUri, those: Iterable[Subscription]) -> Wishes:
        """Return the change of our own subscription at the topic's authority.

        :param those: the only subscribers of the topic here
        """
        if self._is_own(topic):
            return {}
        return self._remote.following(topic, [one.sample_period_ms for one in those])

    def _reconcile(self) -> None:
        """Complete changes of which a power failure left some lines only. Once, at the start."""
        if self._is_reconciled:
            return
        for topic in {*self.table.notes, *(one.topic for one in self.table)}:
            those = self.table.of_topic(topic)
            self._save(wishes=self._following(topic, those))
            if self._remote.is_granted(topic):
                self._restate(those, _SUBSCRIBED)
        self._is_reconciled = True

    def _answered(self, message: UMessage) -> None:
        outcome = self._remote.answered(message)
        if outcome is None:
            return
        those = self.table.of_topic(outcome.topic)
        if outcome.status == _UNSUBSCRIBED:
            self._save(remove=those, wishes=outcome.wishes)
            self._tell([replace(one, status=_UNSUBSCRIBED) for one in those])
        else:
            self._restate(those, outcome.status, outcome.wishes)

    def _told(self, message: UMessage) -> None:
        """Process a change notified by the uSubscription of another authority."""
        source = message.attributes.source
        if source is None or (source.service_id, source.resource_id) != (self.service_id, CHANGES):
            return
        try:
            payload = message.payload or b""
            if message.attributes.payload_format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY:
                payload = decoded(proto.Any_, payload).value
            change = decoded(proto.Subscription, payload)
            topic = UUri.from_proto(change.topic)
        except (UStatusError, InvalidUUri):
            return
        if topic.authority_name != source.authority_name or self._is_own(topic):
            return  # it speaks for its own topics only
        status = SubscriptionStatus(change.status)
        self._remote.note_notified(topic, status)
        if status == _SUBSCRIBED and self._remote.is_answered(topic):
            self._restate(self.table.of_topic(topic), status, self._remote.granted(topic))
        elif status == _UNSUBSCRIBED and self.table.of_topic(topic):
            # It lost the subscription, for example by a reset, but the topic is still wanted here.
            self._restate(self.table.of_topic(topic), _PENDING, self._remote.again(topic))

    def _restate(
        self,
        those: Iterable[Subscription],
        status: SubscriptionStatus,
        wishes: Wishes = MappingProxyType({}),
    ) -> None:
        changed = [replace(one, status=status) for one in those if one.status != status]
        self._save(put=changed, wishes=wishes)
        self._tell(changed)

    def _tell(
        self,
        changes: Iterable[Subscription],
        also: Sequence[Watcher] | None = None,
        *,
        tell_subscriber: bool = True,
    ) -> None:
        """Notify the subscriber and the watchers of changes, and publish them.

        Each is notified in the version of its request.
        """
        watchers = self.table.watchers if also is None else also
        topics = {
            it.ue_version_major: it.with_resource(CHANGES)
            for it in (self.address, self._version_3.address)
        }
        form: dict[str, Any] = {
            "payload_format": UPayloadFormat.PROTOBUF,
            "priority": UPriority.CS2,
        }
        for change in changes:
            payloads = {
                self.version: _bytes(change.to_proto()),
                VERSION_3: self._version_3.told(change),
            }
            told = [(change.subscriber, change.version)] if tell_subscriber else []
            told += [
                (who, self.version if topic is None else VERSION_3)
                for who, topic in watchers
                if topic is None or topic.matches(change.topic)
            ]
            for who, version in dict.fromkeys(told):
                message = notification(
                    topics[version], who, payloads[version], id=self.new_id(), **form
                )
                self._news.append(message)
            for version, topic in topics.items():
                if version == self.version or self.table.receivers_of(topic):
                    payload = payloads[version]
                    self._news.append(publish(topic, payload, id=self.new_id(), **form))

    def _take_news(self) -> list[UMessage]:
        news, self._news = self._news, []
        return news


def _notes(wishes: Wishes) -> dict[UUri, Record | None]:
    """Return wishes as they are saved."""
    return {topic: None if wish is None else wish.to_record() for topic, wish in wishes.items()}


def _topic(asked: Any) -> UUri:
    """Return the topic of a request.

    :raises UStatusError: INVALID_ARGUMENT, the topic is not an address.
    """
    try:
        return UUri.from_proto(asked.topic)
    except InvalidUUri as error:
        raise UStatusError(UCode.INVALID_ARGUMENT, str(error)) from error


def _check_topic(topic: UUri) -> None:
    """Check that a topic can be subscribed to.

    :raises UStatusError: INVALID_ARGUMENT, it cannot be.
    """
    problem = ""
    if not topic.is_topic:
        problem = "its resource is not one of 8000 to FFFE"
    elif topic.is_local or topic.has_wildcard_authority:
        problem = "its authority is empty or a wildcard"
    elif topic.has_wildcard_service_id:
        problem = "its service is a wildcard"
    if problem:
        raise UStatusError(UCode.INVALID_ARGUMENT, f"{topic} cannot be subscribed to: {problem}")


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data
