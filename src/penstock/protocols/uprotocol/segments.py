"""How do zenoh and MQTT write an address into their own? (spec uprotocol 8)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.protocols.uprotocol.codes import UMessageType
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.uuri import ANY_ID, ANY_RESOURCE, ANY_VERSION, UUri

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.attributes import UAttributes

__all__ = ["addresses", "authority", "segments"]


def authority(uri: UUri, local_authority: str, wildcard: str) -> str:
    """Write the first segment; an address without authority is of the local one."""
    return wildcard if uri.has_wildcard_authority else uri.authority_name or local_authority


@lru_cache(maxsize=4096)
def segments(uri: UUri, local_authority: str, wildcard: str) -> str:
    """Write the five segments: authority, type, instance, version and resource."""
    type, instance = uri.service_id, uri.instance_id
    version, resource = uri.ue_version_major, uri.resource_id
    return "/".join(
        (
            authority(uri, local_authority, wildcard),
            wildcard if type == ANY_ID else f"{type:X}",
            wildcard if instance == ANY_ID else f"{instance:X}",
            wildcard if version == ANY_VERSION else f"{version:X}",
            wildcard if resource == ANY_RESOURCE else f"{resource:X}",
        )
    )


def addresses(attributes: UAttributes) -> tuple[UUri, UUri | None]:
    """Give the source and the sink that a transport addresses a message by.

    A publish is addressed by its topic alone, even if a streamer put a sink on it.

    :raises InvalidMessage: there is no source, or what must not be a pattern is one.
    """
    source, sink = attributes.source, attributes.sink
    if attributes.type == UMessageType.PUBLISH:
        sink = None
    elif sink is None:
        raise InvalidMessage("there is no sink to send it to", field="sink")
    if source is None:
        raise InvalidMessage("there is no source", field="source")
    for uri, name in ((source, "source"), (sink, "sink")):
        if uri is not None and (uri.has_wildcard or not uri.is_valid):
            raise InvalidMessage(
                f"the {name} {str(uri)[:200]} is not the address of one thing",
                rules=[f"{name}-wildcard" if uri.is_valid else f"{name}-uuri"],
                field=name,
            )
    return source, sink
