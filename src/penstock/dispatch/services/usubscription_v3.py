"""How does uSubscription answer those who speak its version 3?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.dispatch.services.leg import decoded
from penstock.protocols.uprotocol import (
    InvalidUUri,
    SubscriptionStatus,
    UCode,
    UStatusError,
    UUri,
    proto,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.dispatch.services.leg import Method
    from penstock.dispatch.services.subscriptions import Subscription, SubscriptionTable

__all__ = ["VERSION_3", "Version3", "expiration_ms"]

VERSION_3: Final = 3
_MS: Final = 1000
_NS_PER_MS: Final = 1_000_000
_NS_PER_SECOND: Final = 1_000_000_000


def _message(name: str) -> Any:
    return proto.message_class(f"uprotocol.core.usubscription.v3.{name}")


_Status = _message("SubscriptionStatus")
_Subscription = _message("Subscription")
_Update = _message("Update")


class Keeper(Protocol):
    """The manager of subscriptions, independent of the version."""

    table: SubscriptionTable

    def grant(
        self,
        source: UUri,
        topic: UUri,
        expires_ms: int | None,
        sample_period_ms: int | None,
        version: int,
    ) -> SubscriptionStatus: ...

    def revoke(self, source: UUri, topic: UUri, version: int) -> None: ...

    def reset(self, source: UUri) -> None: ...

    def check_watchers(self) -> None: ...

    def check_size(self, response: Any, count: int) -> bytes: ...


class Version3:
    """The methods and notifications of version 3."""

    def __init__(self, keeper: Keeper, authority: str) -> None:
        self._keeper = keeper
        self._authority = authority
        self.address = UUri(authority, 0, VERSION_3, 0)
        self.methods: Mapping[int, Method] = {
            1: self._subscribe,
            2: self._unsubscribe,
            3: self._fetch,
            6: self._register,
            7: self._unregister,
            8: self._fetch_subscribers,
            9: self._reset,
        }

    def _subscribe(self, source: UUri, payload: bytes) -> bytes:
        asked = decoded(_message("SubscriptionRequest"), payload)
        topic = self._address(asked, "topic")
        wanted = asked.attributes
        expires_ms = expiration_ms(wanted.expire) if wanted.HasField("expire") else None
        status = self._keeper.grant(
            source, topic, expires_ms, wanted.sample_period_ms or None, VERSION_3
        )
        response = _message("SubscriptionResponse")(status=_status(status), topic=asked.topic)
        return _bytes(response)

    def _unsubscribe(self, source: UUri, payload: bytes) -> bytes:
        asked = decoded(_message("UnsubscribeRequest"), payload)
        self._keeper.revoke(source, self._address(asked, "topic"), VERSION_3)
        return _bytes(_message("UnsubscribeResponse")())

    def _fetch(self, source: UUri, payload: bytes) -> bytes:
        del source
        asked = decoded(_message("FetchSubscriptionsRequest"), payload)
        match asked.WhichOneof("request"):
            case "topic":
                topic = self._address(asked, "topic")
                those = [one for one in self._keeper.table if topic.matches(one.topic)]
            case "subscriber":
                who = self._address(asked.subscriber, "uri").with_resource(0)
                those = [one for one in self._keeper.table if who.matches(one.subscriber)]
            case _:  # up-streamer-rust asks so for all
                those = list(self._keeper.table)
        found = [_Subscription(**_fields(one)) for one in those]
        response = _message("FetchSubscriptionsResponse")(subscriptions=found)
        return self._keeper.check_size(response, len(found))

    def _fetch_subscribers(self, source: UUri, payload: bytes) -> bytes:
        del source
        topic = self._address(decoded(_message("FetchSubscribersRequest"), payload), "topic")
        those = [one for one in self._keeper.table if topic.matches(one.topic)]
        found = [_info(one.subscriber) for one in those]
        response = _message("FetchSubscribersResponse")(subscribers=found)
        return self._keeper.check_size(response, len(found))

    def _register(self, source: UUri, payload: bytes) -> bytes:
        topic = self._address(decoded(_message("NotificationsRequest"), payload), "topic")
        if not self._keeper.table.watches(source, topic):
            self._keeper.check_watchers()
            self._keeper.table.watch(source, topic)
        return _bytes(_message("NotificationsResponse")())

    def _unregister(self, source: UUri, payload: bytes) -> bytes:
        topic = self._address(decoded(_message("NotificationsRequest"), payload), "topic")
        self._keeper.table.unwatch(source, topic)
        return _bytes(_message("NotificationsResponse")())

    def _reset(self, source: UUri, payload: bytes) -> bytes:
        decoded(_message("ResetRequest"), payload)
        self._keeper.reset(source)
        return _bytes(_message("ResetResponse")())

    def _address(self, asked: Any, name: str) -> UUri:
        """Return an address of a request, with its authority.

        :raises UStatusError: INVALID_ARGUMENT, it is missing, invalid or a pattern.
        """
        uri = _uri(asked, name)
        is_pattern = (
            uri.has_wildcard_authority
            or uri.has_wildcard_service_id
            or uri.has_wildcard_resource_id
            or (name == "topic" and uri.has_wildcard_version)
        )
        if is_pattern:
            raise UStatusError(UCode.INVALID_ARGUMENT, f"{uri} has a wildcard")
        return uri.resolved(self._authority)

    @staticmethod
    def told(change: Subscription) -> bytes:
        """Encode the notification of a change in this version."""
        return _bytes(_Update(**_fields(change)))


def expiration_ms(stamp: Any) -> int:
    """Convert a timestamp to milliseconds since 1970 UTC.

    :raises UStatusError: INVALID_ARGUMENT, the timestamp is invalid.
    """
    if not 0 <= stamp.nanos < _NS_PER_SECOND:
        raise UStatusError(UCode.INVALID_ARGUMENT, f"the expiration has {stamp.nanos} nanoseconds")
    return int(stamp.seconds) * _MS + int(stamp.nanos) // _NS_PER_MS


def _fields(one: Subscription) -> dict[str, Any]:
    attributes = _message("SubscribeAttributes")()
    if one.expires_ms is not None:
        attributes.expire.seconds = one.expires_ms // _MS
        attributes.expire.nanos = one.expires_ms % _MS * _NS_PER_MS
    if one.sample_period_ms is not None:
        attributes.sample_period_ms = one.sample_period_ms
    return {
        "topic": one.topic.to_proto(),
        "subscriber": _info(one.subscriber),
        "status": _status(one.status),
        "attributes": attributes,
    }


def _info(who: UUri) -> Any:
    return _message("SubscriberInfo")(uri=who.to_proto())


def _status(status: SubscriptionStatus) -> Any:
    # Its numbers are smaller by one: it has no "unspecified" status.
    return _Status(state=max(0, int(status) - 1))


def _uri(asked: Any, name: str) -> UUri:
    if not asked.HasField(name):
        raise UStatusError(UCode.INVALID_ARGUMENT, f"there is no {name}")
    try:
        return UUri.from_proto(getattr(asked, name))
    except InvalidUUri as error:
        raise UStatusError(UCode.INVALID_ARGUMENT, f"{name}: {error}") from error


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data
