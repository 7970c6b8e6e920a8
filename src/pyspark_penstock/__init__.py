"""Lets Spark find `format("penstock")`: it looks for a `DefaultSource` in modules named so."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.pipeline.source.stream import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: `daemon`, which is beside this, must not start any threads.
    if name != "DefaultSource":
        raise AttributeError(name)
    from penstock.pipeline.source.stream import PenstockSource  # noqa: PLC0415

    return PenstockSource
