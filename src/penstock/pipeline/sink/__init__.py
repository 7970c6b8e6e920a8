"""Sinks: rows become messages of a stream, or files, each batch exactly once."""
