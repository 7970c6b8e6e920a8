"""A router between clients and a target that injects loss, delay, corruption and cuts."""

from penstock.relay.faults.counters import ClientCounters, Counters, DirectionCounters
from penstock.relay.faults.fault_router import FaultRouter
from penstock.relay.faults.model import Cut, Direction, Faults, parse_delay, parse_share
from penstock.relay.faults.sockets import parse_address

__all__ = [
    "ClientCounters",
    "Counters",
    "Cut",
    "Direction",
    "DirectionCounters",
    "FaultRouter",
    "Faults",
    "parse_address",
    "parse_delay",
    "parse_share",
]
