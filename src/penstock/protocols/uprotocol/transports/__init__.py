"""The transports of uProtocol between entities and dispatchers.

Those over zenoh and MQTT are in the modules `zenoh` and `mqtt`, which need their libraries.
"""

from penstock.protocols.uprotocol.transports.in_process import (
    InProcessBus,
    InProcessLeg,
    InProcessTransport,
)
from penstock.protocols.uprotocol.transports.interface import (
    NOT_TRIED,
    Ingest,
    Leg,
    Listener,
    UListener,
    Unreadable,
    UTransport,
    not_tried_after,
)
from penstock.protocols.uprotocol.transports.listeners import ListenerLimits
from penstock.protocols.uprotocol.transports.ring import RingLeg, RingTransport

__all__ = [
    "NOT_TRIED",
    "InProcessBus",
    "InProcessLeg",
    "InProcessTransport",
    "Ingest",
    "Leg",
    "Listener",
    "ListenerLimits",
    "RingLeg",
    "RingTransport",
    "UListener",
    "UTransport",
    "Unreadable",
    "not_tried_after",
]
