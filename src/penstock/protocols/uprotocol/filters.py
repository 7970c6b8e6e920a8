"""Which filters may a listener have, and which messages match them? (spec uprotocol 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocols.uprotocol.codes import UCode, UStatusError
from penstock.protocols.uprotocol.uuri import ANY_RESOURCE, UUri

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.attributes import UAttributes

__all__ = ["check_filter", "is_filter", "matches"]

_FIRST_TOPIC = 0x8000


def is_filter(source_resource: int, sink_resource: int | None, *, loose: bool = False) -> bool:
    """Tell whether the resource ids of a source filter and a sink filter go together.

    :param loose: take what up-rust takes as well, such as any source with one method's sink.
    """
    any_source = source_resource == ANY_RESOURCE
    topic = _FIRST_TOPIC <= source_resource < ANY_RESOURCE
    if sink_resource is None:
        return topic or any_source
    to_method = 0 < sink_resource < _FIRST_TOPIC
    if loose:
        if source_resource == 0 and sink_resource == 0:
            return False
        return not to_method or any_source or source_resource == 0
    if sink_resource == 0:
        return source_resource != 0
    return (source_resource == 0 and to_method) or (any_source and sink_resource == ANY_RESOURCE)


def check_filter(source: UUri, sink: UUri | None, *, loose: bool = False) -> None:
    """See that a listener may have this pair of filters.

    :raises UStatusError: INVALID_ARGUMENT, it may not.
    """
    for filter in (source, sink):
        if filter is not None and not filter.is_valid:
            raise UStatusError(UCode.INVALID_ARGUMENT, f"{filter} is not a pattern of addresses")
    resource = None if sink is None else sink.resource_id
    if not is_filter(source.resource_id, resource, loose=loose):
        raise UStatusError(
            UCode.INVALID_ARGUMENT,
            f"no message has a source like {source} and "
            + ("no sink" if sink is None else f"a sink like {sink}"),
            hint="topics have resources 8000 to FFFE and no sink; methods 1 to 7FFF; entities 0",
        )


def matches(source_filter: UUri, sink_filter: UUri | None, attributes: UAttributes) -> bool:
    """Tell whether a listener gets the message.

    Without a sink filter it gets those without sink, with one those whose sink matches.
    """
    sink, source = attributes.sink, attributes.source
    if sink_filter is None:
        if sink is not None:
            return False
    elif sink is None or not sink_filter.matches(sink):
        return False
    return source is not None and source_filter.matches(source)
