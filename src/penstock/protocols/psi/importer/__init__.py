"""Brings the streams of an exporter, psi's or ours, into a local store.

`client` keeps the connection, `connection` receives, `intake` stores what is new, `streams` reads.
"""

from penstock.protocols.psi.importer.arrivals import Gap
from penstock.protocols.psi.importer.client import REPLAY_ALL, ImporterStatistics, RemoteImporter
from penstock.protocols.psi.importer.streams import ImportedStream, Received

__all__ = [
    "REPLAY_ALL",
    "Gap",
    "ImportedStream",
    "ImporterStatistics",
    "Received",
    "RemoteImporter",
]
