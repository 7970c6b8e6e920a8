"""Payloads become columns: C structs, JSON, CSV, Arrow streams and protobuf messages.

decode(df, format="struct", layout="float azimuth; uint16_t gates; float dbz[64];")

A payload that does not decode is never left out silently. `on_error` says what happens:

- `fail`, the default: the query fails, and names the message, what was expected and found.
- `skip`: the row is left out and counted, in the query's observed metrics and in the log of the
  task.
- `dead_letter`: the row stays, without values, and its column `decode_error` has the message as a
  dead letter; `split_failures` parts these from the others.

`decoder_for` is the same without Spark: it takes and gives Arrow batches.
"""

from penstock.pipeline.decoding.frames import decode, split_failures
from penstock.pipeline.decoding.options import (
    AnyDecodeOptions,
    DecodeOptions,
    InvalidDecoding,
    decoder_for,
    parse_decoding,
)
from penstock.pipeline.decoding.policy import Rows
from penstock.pipeline.decoding.result import Decoded, DecodeError, Decoder, Failure

__all__ = [
    "AnyDecodeOptions",
    "DecodeError",
    "DecodeOptions",
    "Decoded",
    "Decoder",
    "Failure",
    "InvalidDecoding",
    "Rows",
    "decode",
    "decoder_for",
    "parse_decoding",
    "split_failures",
]
