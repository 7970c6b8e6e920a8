"""Copying any reader to any writer."""

from penstock.relay.copy import CopyStatistics, check_apart, copy, fields_lost
from penstock.relay.relay import Relay
from penstock.relay.relay_options import RelayFile, RelayOptions, load_relays, relay_options
from penstock.relay.running import Relays, RelayStatus
from penstock.relay.statistics import RelayStatistics

__all__ = [
    "CopyStatistics",
    "Relay",
    "RelayFile",
    "RelayOptions",
    "RelayStatistics",
    "RelayStatus",
    "Relays",
    "check_apart",
    "copy",
    "fields_lost",
    "load_relays",
    "relay_options",
]
