"""Which addresses does an entity itself have? (spec uprotocol 1.4)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["LocalUriProvider"]


@dataclass(frozen=True, slots=True)
class LocalUriProvider:
    """An entity's own addresses.

    :raises InvalidUUri: a field is out of its range, or the authority is not a name.
    """

    authority: str
    ue_id: int
    version: int = 1

    def __post_init__(self) -> None:
        self.resource(0)

    @property
    def source(self) -> UUri:
        """The entity itself: where responses and notifications to it go."""
        return self.resource(0)

    def resource(self, resource_id: int) -> UUri:
        """Give the address of one of its methods or topics."""
        return UUri(self.authority, self.ue_id, self.version, resource_id)

    def own(self, resource: int | UUri) -> UUri:
        """Give the address of a resource that is told by its number or in full."""
        if isinstance(resource, UUri):
            return resource.resolved(self.authority)
        return self.resource(resource)
