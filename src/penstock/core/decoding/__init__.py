"""Payloads become columns: C structs, JSON, CSV, Arrow streams and protobuf messages.

    decoder = decoder_for(format="struct", layout="float azimuth; uint16_t gates; float dbz[64];")
    decoded = decoder.decode(batch)

`batch` has a column `payload`, as that of messages has. `decoded.rows` are the new columns, and
`decoded.failures` says of each payload that does not decode what was expected and what was found:
it fails alone, and is never left out silently.

`Rows` puts the columns of the message beside the new ones, and does about failures what `on_error`
says: `fail` raises, `skip` and `dead_letter` keep a row with the reason or with a dead letter.

Spark is not needed; `penstock.pipeline.decoding` is the same on data frames.
"""

from penstock.core.decoding.decoder import Decoded, DecodeError, Decoder, Failure
from penstock.core.decoding.options import (
    AnyDecodeOptions,
    DecodeOptions,
    InvalidDecoding,
    decoder_for,
    parse_decoding,
)
from penstock.core.decoding.rows import Rows

__all__ = [
    "AnyDecodeOptions",
    "DecodeError",
    "DecodeOptions",
    "Decoded",
    "Decoder",
    "Failure",
    "InvalidDecoding",
    "Rows",
    "decoder_for",
    "parse_decoding",
]
