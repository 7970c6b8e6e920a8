"""How does uProtocol address a thing, and which addresses match a pattern?

(docs/specs/uprotocol.md 1)
"""

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
    "address_segments",
    "authority_segment",
]

ANY_AUTHORITY: Final = "*"
#: Largest service id and instance id, the halves of an entity id.
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

    :raises InvalidUUri: a field is out of range, or the authority is not a valid name.
    """

    authority_name: str = ""
    ue_id: int = 0
    ue_version_major: int = 0
    resource_id: int = 0
    # Cached: addresses are keys of most tables, and are looked up for every message.
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
        """Create an address without checks, as found in a message from outside."""
        if len(authority) <= _LONGEST_AUTHORITY:
            return _interned(authority, ue_id, version, resource)
        return _made(authority, ue_id, version, resource)

    @classmethod
    def parse(cls, text: str) -> UUri:
        """Parse the text form (docs/specs/uprotocol.md 1.2), with or without the scheme.

        :raises InvalidUUri: the text is not an address.
        """
        return _parse_again(text) if len(text) <= _LONGEST_REMEMBERED else _parse(text)

    @classmethod
    def from_bytes(cls, data: bytes) -> UUri:
        """Decode the protobuf form (docs/specs/uprotocol.md 1.1).

        :raises InvalidUUri: the bytes do not decode, or violate a rule.
        """
        try:
            message = proto.UUri.FromString(data)
        except proto.UNDECODABLE as error:
            raise InvalidUUri(bytes(data), "not the protobuf message uprotocol.v1.UUri") from error
        return cls.from_proto(message)

    @classmethod
    def from_proto(cls, message: Any) -> UUri:
        """Convert a protobuf message.

        :raises InvalidUUri: it violates a rule.
        """
        uri = cls.from_proto_unchecked(message)
        problem = uri.problem
        if problem is not None:
            raise InvalidUUri(str(uri), problem)
        return uri

    @classmethod
    def from_proto_unchecked(cls, message: Any) -> UUri:
        """Convert a protobuf message without checks."""
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
        # String hashes differ between processes, so the cached hash is not pickled.
        return UUri.unchecked, self._key

    @property
    def _key(self) -> tuple[str, int, int, int]:
        return self.authority_name, self.ue_id, self.ue_version_major, self.resource_id

    # --- what it is ---------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """The rule that it violates, or None if it is valid."""
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
        """The instance of this type; 0 is the default instance, not a wildcard."""
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
        """Whether it is an entity itself: the target of responses and notifications."""
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
        """Whether it names no authority, and so means the local one."""
        return not self.authority_name

    # --- others made from it ------------------------------------------------------------------

    def replace(self, **changes: Any) -> UUri:
        """Return a copy with some fields changed.

        :raises InvalidUUri: the copy would violate a rule.
        """
        return replace(self, **changes)

    def with_authority(self, name: str) -> UUri:
        return self if name == self.authority_name else self.replace(authority_name=name)

    def with_resource(self, resource_id: int) -> UUri:
        return self.replace(resource_id=resource_id)

    def resolved(self, local_authority: str) -> UUri:
        """Fill in the authority of a local address (docs/specs/uprotocol.md 1.4)."""
        return self if self.authority_name else self.with_authority(local_authority)

    def matches(self, candidate: UUri) -> bool:
        """Tell whether this pattern covers a candidate, whose wildcards count as plain values."""
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


# Bypass the checks of a frozen class while an object is created.
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


# Cached: MQTT has the same few texts in every message.
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
    """Return why a text is not an address, in words."""
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


def authority_segment(uri: UUri, local_authority: str, wildcard: str) -> str:
    """Return the first segment of a transport's address; an empty authority is the local one."""
    return wildcard if uri.has_wildcard_authority else uri.authority_name or local_authority


@lru_cache(maxsize=4096)
def address_segments(uri: UUri, local_authority: str, wildcard: str) -> str:
    """Return the five segments of zenoh and MQTT (docs/specs/uprotocol.md 8).

    They are authority, type, instance, version and resource.
    """
    type, instance = uri.service_id, uri.instance_id
    version, resource = uri.ue_version_major, uri.resource_id
    return "/".join(
        (
            authority_segment(uri, local_authority, wildcard),
            wildcard if type == ANY_ID else f"{type:X}",
            wildcard if instance == ANY_ID else f"{instance:X}",
            wildcard if version == ANY_VERSION else f"{version:X}",
            wildcard if resource == ANY_RESOURCE else f"{resource:X}",
        )
    )
