"""Copying any reader to any writer."""

from penstock.relay.copy import CopyStatistics, copy, fields_lost

__all__ = ["CopyStatistics", "copy", "fields_lost"]
