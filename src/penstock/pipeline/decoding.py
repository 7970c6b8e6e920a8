"""The former place of `decode`, which is in `penstock.pipeline.source` now."""

import warnings

from penstock.pipeline.source.decoded_rows import (
    AnyDecodeOptions,
    Decoded,
    DecodeError,
    DecodeOptions,
    Decoder,
    Failure,
    InvalidDecoding,
    Rows,
    decode,
    decoder_for,
    parse_decoding,
    split_failures,
)

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

warnings.warn(
    "penstock.pipeline.decoding goes with the next release: import from penstock.pipeline.source",
    DeprecationWarning,
    stacklevel=2,
)
