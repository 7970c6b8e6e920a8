"""Payloads of psi's messages as values of Python and numpy, and back."""

from penstock.protocols.psi.codecs.base import Codec, Decoded, RawCodec
from penstock.protocols.psi.codecs.fixed import FixedCodec
from penstock.protocols.psi.codecs.library import CodecLibrary
from penstock.protocols.psi.codecs.references import TYPE_KEY
from penstock.protocols.psi.codecs.schemas import known_schemas, make_schema
from penstock.protocols.psi.codecs.type_names import (
    TypeName,
    parse_type_name,
    qualify,
    schema_id,
)

__all__ = [
    "TYPE_KEY",
    "Codec",
    "CodecLibrary",
    "Decoded",
    "FixedCodec",
    "RawCodec",
    "TypeName",
    "known_schemas",
    "make_schema",
    "parse_type_name",
    "qualify",
    "schema_id",
]
