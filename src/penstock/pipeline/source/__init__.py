"""The Spark source `format("penstock")`: its offsets, ranges, losses and payloads."""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock.pipeline.source.decoded_rows import decode, split_failures
    from penstock.pipeline.source.stream import PenstockSource

__all__ = ["PenstockSource", "decode", "split_failures"]

__getattr__ = late_names(__name__)
