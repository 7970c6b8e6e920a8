"""The command `penstock`: parses arguments, calls the library."""

from penstock.cli.main import main

__all__ = ["main"]
