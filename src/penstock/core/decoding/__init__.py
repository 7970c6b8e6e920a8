"""Decode payloads to columns: C structs, JSON, CSV, XML, Arrow streams and protobuf messages.

    decoder = decoder_for(format="struct", layout="float azimuth; uint16_t gates; float dbz[64];")
    decoded = decoder.decode(batch)

`batch` has a column `payload`, like a batch of messages. `decoded.rows` are the new columns.
`decoded.failures` has each payload that does not decode, with what was expected and found: it fails
alone, and is never dropped silently.

`Rows` adds the columns of the message to the new ones, and handles failures according to
`on_error`: `fail` raises, `skip` and `dead_letter` keep a row with the reason or a dead letter.

Spark is not needed; `penstock.pipeline.source.decode` is the same on data frames.
"""

from penstock.core.decoding.decoder import Decoded, DecodeError, Decoder, Failure
from penstock.core.decoding.options import (
    AnyDecodeOptions,
    DecodeOptions,
    InvalidDecoding,
    decoder_for,
    decoding_from_text,
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
    "decoding_from_text",
    "parse_decoding",
]
