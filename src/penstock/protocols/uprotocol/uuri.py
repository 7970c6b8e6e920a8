"""How does uProtocol address a thing, and which addresses match a pattern? (spec uprotocol 1)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Final

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.errors import InvalidUUri

__all__ = [
    "ANY_AUTHORITY",
    "ANY_ENTITY",
    "ANY_ID",
    "ANY_RESOURCE",
    "ANY_VERSION",
    "InvalidUUri",
    "UUri",
]

ANY_AUTHORITY: Final = "*"
#: Of a service id and of an instance id, which are the halves of an entity's.
ANY_ID: Final = 0xFFFF
ANY_ENTITY: Final = 0xFFFFFFFF
ANY_VERSION: Final = 0xFF
ANY_RESOURCE: Final = 0xFFFF

_FIRST_TOPIC = 0x8000
_LONGEST_AUTHORITY = 128
_LONGEST_REMEMBERED = 160
_TEXT = re.compile(
    r"(?:up:)?(?://(?P<authority>[^/?#]*))?"
    r"/(?P<ue_id>[0-9A-Fa-f]+)/(?P<version>[0-9A-Fa-f]+)/(?P<resource>[0-9A-Fa-f]+)"
)
_NAME = re.compile(r"\*|[a-z0-9\-._~]{1,128}")


@dataclass(frozen=True, slots=True)
class UUri:
    """An address of uProtocol, or a pattern of addresses.

    :raises InvalidUUri: a field is out of its range, or the authority is not a name.
    """

    authority_name: str = ""
    ue_id: int = 0
    ue_version_major: int = 0
    resource_id: int = 0
    # An address is the key of most tables, and is looked up for every message.
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    #: The pattern that matches every address.
    ANY: ClassVar[UUri]

    def __post_init__(self) -> None:
        if self.authority_name.startswith("["):
            _set_authority(self, self.authority_name.lower())
        problem = self.problem
        if problem is not None:
            raise InvalidUUri(str(self), problem)
        _set_hash(self, hash(self._key))

    @classmethod
    def unchecked(cls, authority: str, ue_id: int, version: int, resource: int) -> UUri:
        """Make one that may break the rules, as a message from outside may hold."""
        if len(authority) <= _LONGEST_AUTHORITY:
            return _interned(authority, ue_id, version, resource)
        return _made(authority, ue_id, version, resource)

    @classmethod
    def parse(cls, text: str) -> UUri:
        """Read the text form (1.2), with or without the scheme.

        :raises InvalidUUri: it is not one.
        """
        return _parse_again(text) if len(text) <= _LONGEST_REMEMBERED else _parse(text)

    @classmethod
    def from_bytes(cls, data: bytes) -> UUri:
        """Read the protobuf form (1.1).

        :raises InvalidUUri: it does not decode, or breaks a rule.
        """
        try:
            message = proto.UUri.FromString(data)
        except proto.UNDECODABLE as error:
            raise InvalidUUri(bytes(data), "not the protobuf message uprotocol.v1.UUri") from error
        return cls.from_proto(message)

    @classmethod
    def from_proto(cls, message: Any) -> UUri:
        """Take over a protobuf message.

        :raises InvalidUUri: it breaks a rule.
        """
        uri = cls.from_proto_unchecked(message)
        problem = uri.problem
        if problem is not None:
            raise InvalidUUri(str(uri), problem)
        return uri

    @classmethod
    def from_proto_unchecked(cls, message: Any) -> UUri:
        """Take over a protobuf message that may break the rules."""
        return cls.unchecked(
            message.authority_name, message.ue_id, message.ue_version_major, message.resource_id
        )

    def to_bytes(self) -> bytes:
        data: bytes = self.to_proto().SerializeToString(deterministic=True)
        return data

    def to_proto(self) -> Any:
        return proto.UUri(
            authority_name=self.authority_name,
            ue_id=self.ue_id,
            ue_version_major=self.ue_version_major,
            resource_id=self.resource_id,
        )

    def __str__(self) -> str:
        return f"up:{self.without_scheme}"

    @property
    def without_scheme(self) -> str:
        authority = f"//{self.authority_name}" if self.authority_name else ""
        return f"{authority}/{self.ue_id:X}/{self.ue_version_major:X}/{self.resource_id:X}"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The hash of a text differs between processes, so it does not travel.
        return UUri.unchecked, self._key

    @property
    def _key(self) -> tuple[str, int, int, int]:
        return self.authority_name, self.ue_id, self.ue_version_major, self.resource_id

    # --- what it is ---------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """The rule that it breaks, or None for a good one."""
        if not 0 <= self.ue_id <= ANY_ENTITY:
            return "the ue_id does not fit 32 bits"
        if not 0 <= self.ue_version_major <= ANY_VERSION:
            return "the version does not fit 8 bits"
        if not 0 <= self.resource_id <= ANY_RESOURCE:
            return "the resource id does not fit 16 bits"
        if not self.authority_name:
            return None
        if len(self.authority_name) > _LONGEST_AUTHORITY:
            return "the authority is longer than 128 characters"
        return _authority_problem(self.authority_name)

    @property
    def is_valid(self) -> bool:
        return self.problem is None

    @property
    def service_id(self) -> int:
        """The type of the entity: the low half of its id."""
        return self.ue_id & 0xFFFF

    @property
    def instance_id(self) -> int:
        """Which of the entities of this type; 0 is the ordinary one, not a wildcard."""
        return self.ue_id >> 16

    @property
    def is_rpc_method(self) -> bool:
        return 0 < self.resource_id < _FIRST_TOPIC

    @property
    def is_topic(self) -> bool:
        return _FIRST_TOPIC <= self.resource_id < ANY_RESOURCE

    @property
    def is_event(self) -> bool:
        """Another name of `is_topic`."""
        return self.is_topic

    @property
    def is_rpc_response(self) -> bool:
        """Whether it is an entity itself: where responses and notifications go."""
        return self.resource_id == 0

    @property
    def is_notification_destination(self) -> bool:
        """Another name of `is_rpc_response`."""
        return self.resource_id == 0

    @property
    def has_wildcard_authority(self) -> bool:
        return self.authority_name == ANY_AUTHORITY

    @property
    def has_wildcard_service_id(self) -> bool:
        return self.service_id == ANY_ID

    @property
    def has_wildcard_instance_id(self) -> bool:
        return self.instance_id == ANY_ID

    @property
    def has_wildcard_version(self) -> bool:
        return self.ue_version_major == ANY_VERSION

    @property
    def has_wildcard_resource_id(self) -> bool:
        return self.resource_id == ANY_RESOURCE

    @property
    def has_wildcard(self) -> bool:
        return (
            self.resource_id == ANY_RESOURCE
            or self.ue_version_major == ANY_VERSION
            or self.ue_id & 0xFFFF == ANY_ID
            or self.ue_id >> 16 == ANY_ID
            or self.authority_name == ANY_AUTHORITY
        )

    @property
    def is_empty(self) -> bool:
        """Whether all fields have their defaults, which is zero bytes on the wire."""
        return not (self.authority_name or self.ue_id or self.ue_version_major or self.resource_id)

    @property
    def is_local(self) -> bool:
        """Whether it names no authority: the one whose reads it."""
        return not self.authority_name

    # --- others made from it ------------------------------------------------------------------

    def replace(self, **changes: Any) -> UUri:
        """Make another one with some fields changed.

        :raises InvalidUUri: that would break a rule.
        """
        return replace(self, **changes)

    def with_authority(self, name: str) -> UUri:
        return self if name == self.authority_name else self.replace(authority_name=name)

    def with_resource(self, resource_id: int) -> UUri:
        return self.replace(resource_id=resource_id)

    def resolved(self, local_authority: str) -> UUri:
        """Name the authority if it is local (1.4), so that it means the same on the next hop."""
        return self if self.authority_name else self.with_authority(local_authority)

    def matches(self, candidate: UUri) -> bool:
        """Tell whether this pattern covers the candidate, whose wildcards are plain values."""
        resource = self.resource_id
        if resource not in (ANY_RESOURCE, candidate.resource_id):
            return False
        if self.ue_version_major not in (ANY_VERSION, candidate.ue_version_major):
            return False
        mine, its = self.ue_id, candidate.ue_id
        if mine not in (ANY_ENTITY, its) and not (
            (mine & 0xFFFF) in (ANY_ID, its & 0xFFFF) and (mine >> 16) in (ANY_ID, its >> 16)
        ):
            return False
        return self.authority_name in (ANY_AUTHORITY, candidate.authority_name)


# Past the guard of a frozen class: these set the fields of those that are being made.
_set_authority = UUri.__dict__["authority_name"].__set__
_set_ue_id = UUri.__dict__["ue_id"].__set__
_set_version = UUri.__dict__["ue_version_major"].__set__
_set_resource = UUri.__dict__["resource_id"].__set__
_set_hash = UUri.__dict__["_hash"].__set__


def _made(authority: str, ue_id: int, version: int, resource: int) -> UUri:
    if authority.startswith("["):  # the digits of an address may be of either case (RFC 3986)
        authority = authority.lower()
    uri: UUri = object.__new__(UUri)
    _set_authority(uri, authority)
    _set_ue_id(uri, ue_id)
    _set_version(uri, version)
    _set_resource(uri, resource)
    _set_hash(uri, hash((authority, ue_id, version, resource)))
    return uri


_interned = lru_cache(maxsize=16384)(_made)


def _parse(text: str) -> UUri:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise InvalidUUri(text, _fault(text), hint="write up://authority/ue_id/version/resource")
    uri = UUri.unchecked(
        found["authority"] or "",
        int(found["ue_id"], 16),
        int(found["version"], 16),
        int(found["resource"], 16),
    )
    problem = uri.problem
    if problem is not None:
        raise InvalidUUri(text, problem)
    return uri


# MQTT has the same few texts in every message.
_parse_again = lru_cache(maxsize=4096)(_parse)


@lru_cache(maxsize=4096)
def _authority_problem(authority: str) -> str | None:
    if _NAME.fullmatch(authority):
        return None
    if authority.startswith("[") and authority.endswith("]"):
        literal = authority[1:-1]
        try:
            ipaddress.IPv6Address(literal)
        except ValueError:
            return "the authority is not an IPv6 address in brackets"
        return "the authority has a zone" if "%" in literal else None
    if authority != authority.lower():
        return "the authority has upper-case letters"
    if ANY_AUTHORITY in authority:
        return "a wildcard stands for the whole authority"
    return "the authority has a character that is not of a-z 0-9 - . _ ~"


def _fault(text: str) -> str:
    """Say what keeps a text from being an address, for the person who wrote it."""
    if "?" in text or "#" in text:
        return "it has a query or a fragment"
    scheme, colon, rest = text.partition(":")
    if colon and "/" not in scheme:
        if scheme != "up":
            return "the scheme is not up"
        text = rest
    if not text.startswith("/"):
        return "there is no / before the ue_id"
    path = text[2:].partition("/")[2] if text.startswith("//") else text[1:]
    segments = path.split("/")
    if len(segments) != 3:  # noqa: PLR2004 - the entity, its version, its resource
        return f"it has {len(segments) if path else 0} path segments, not 3"
    if "" in segments:
        return "a path segment is empty"
    return "a path segment is not a hexadecimal number"


UUri.ANY = UUri(ANY_AUTHORITY, ANY_ENTITY, ANY_VERSION, ANY_RESOURCE)
