"""What streams exist on a site, who writes them, and how fresh are they?"""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock.registry.data_map import DataMap, MapFull
    from penstock.registry.data_map_server import DataMapServer, MapServerOptions
    from penstock.registry.latest import LatestDataInfo
    from penstock.registry.latest_files import LatestSettings
    from penstock.registry.latest_reader import LatestStatistics
    from penstock.registry.latest_server import LdataServer, LdataServerOptions
    from penstock.registry.registration import RegisteredWriter, registered
    from penstock.registry.trigger_commands import Command, CommandFailed, CommandTimeout
    from penstock.registry.triggers import (
        DeadLetters,
        Happening,
        NewData,
        Trigger,
        TriggerStatistics,
        on_new_data,
    )

__getattr__ = late_names(__name__)

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
