"""Copy any reader to any writer."""

from penstock.relay.config import RelayFile, RelayOptions, load_relays, relay_options
from penstock.relay.copy import CopyStatistics, check_apart, copy, fields_lost
from penstock.relay.relay import Relay, RelayStatistics
from penstock.relay.relays import Relays, RelayStatus

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
