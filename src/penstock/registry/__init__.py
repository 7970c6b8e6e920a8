"""What streams exist on a site, who writes them, and how fresh are they?"""

from penstock.registry.data_map import DataMap, MapFull
from penstock.registry.data_map_options import MapServerOptions
from penstock.registry.data_map_server import DataMapServer
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_reading import LatestStatistics
from penstock.registry.latest_server import LdataServer, LdataServerOptions
from penstock.registry.latest_settings import LatestSettings
from penstock.registry.registered import RegisteredWriter, registered
from penstock.registry.trigger_commands import Command, CommandFailed, CommandTimeout
from penstock.registry.trigger_letters import DeadLetters
from penstock.registry.triggers import (
    Happening,
    NewData,
    Trigger,
    TriggerStatistics,
    on_new_data,
)

__all__ = [
    "Command",
    "CommandFailed",
    "CommandTimeout",
    "DataMap",
    "DataMapServer",
    "DeadLetters",
    "Happening",
    "LatestDataInfo",
    "LatestSettings",
    "LatestStatistics",
    "LdataServer",
    "LdataServerOptions",
    "MapFull",
    "MapServerOptions",
    "NewData",
    "RegisteredWriter",
    "Trigger",
    "TriggerStatistics",
    "on_new_data",
    "registered",
]
