"""Lets Spark find `format("penstock")`: it looks for a `DefaultSource` in modules named so."""

from penstock.pipeline.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
