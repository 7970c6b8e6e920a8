"""Serves the streams of a store to psi's importers, and to ours.

`streams` takes a program's values into a store, `server` listens and keeps the sessions, `session`
sends one client its messages, `transports` carries them.
"""

from penstock.protocols.psi.exporter.server import ExporterOptions, RemoteExporter
from penstock.protocols.psi.exporter.session import ExporterStatistics
from penstock.protocols.psi.exporter.streams import ExportedStream, Exporter, Posted

__all__ = [
    "ExportedStream",
    "Exporter",
    "ExporterOptions",
    "ExporterStatistics",
    "Posted",
    "RemoteExporter",
]
