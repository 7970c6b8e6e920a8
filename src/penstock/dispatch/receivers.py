"""Who gets messages from a dispatcher, and under which name are they kept?"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from penstock.protocols.uprotocol import UUri

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.transports import Leg

__all__ = ["Receiver"]

_LONGEST = 80


class Receiver(NamedTuple):
    """An entity, or a whole authority, behind a leg."""

    leg: str
    #: Its resource is 0; of a whole authority all but the name is.
    address: UUri

    @classmethod
    def behind(cls, leg: Leg, address: UUri) -> Receiver:
        """Give the receiver that stands for an address on a leg."""
        if leg.scope == "authority":
            return cls(leg.name, UUri.unchecked(address.authority_name, 0, 0, 0))
        return cls(
            leg.name,
            UUri.unchecked(address.authority_name, address.ue_id, address.ue_version_major, 0),
        )

    @property
    def folder(self) -> str:
        """A name for its folder, readable and its own."""
        text = f"{self.leg}{self.address.without_scheme}"
        digest = blake2b(text.encode(), digest_size=5).hexdigest()
        readable = re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-.")[:_LONGEST]
        return f"{readable}-{digest}"

    def __str__(self) -> str:
        return f"{self.leg} {self.address.without_scheme}"
