"""psi's remoting: what travels between exporters and importers, and what is in stores."""

from penstock.protocols.psi.catalog import Catalog
from penstock.protocols.psi.chunks import Chunker, Unchunker, UnchunkerStatistics
from penstock.protocols.psi.codecs import (
    Codec,
    CodecLibrary,
    Decoded,
    known_schemas,
    make_schema,
    qualify,
)
from penstock.protocols.psi.envelope import (
    Envelope,
    MessageDecoder,
    PsiMessage,
    decode_message,
    encode_message,
    encode_messages,
)
from penstock.protocols.psi.errors import Truncated, UnknownStream, UnknownType, WrongVersion
from penstock.protocols.psi.handshake import (
    ClientHello,
    ClientHelloDecoder,
    ServerHello,
    SessionIdDecoder,
    Transport,
)
from penstock.protocols.psi.meta_channel import Intermission, MetaDecoder, encode_burst
from penstock.protocols.psi.metadata import (
    RuntimeInfo,
    SchemaFlags,
    SchemaMember,
    StreamFlags,
    StreamMetadata,
    TypeSchema,
    decode_record,
    encode_record,
    frame_record,
)
from penstock.protocols.psi.store import PsiStoreReader, StoredMessage, find_stores
from penstock.protocols.psi.ticks import DateTime, DateTimeKind, TimeSpan

__all__ = [
    "Catalog",
    "Chunker",
    "ClientHello",
    "ClientHelloDecoder",
    "Codec",
    "CodecLibrary",
    "DateTime",
    "DateTimeKind",
    "Decoded",
    "Envelope",
    "Intermission",
    "MessageDecoder",
    "MetaDecoder",
    "PsiMessage",
    "PsiStoreReader",
    "RuntimeInfo",
    "SchemaFlags",
    "SchemaMember",
    "ServerHello",
    "SessionIdDecoder",
    "StoredMessage",
    "StreamFlags",
    "StreamMetadata",
    "TimeSpan",
    "Transport",
    "Truncated",
    "TypeSchema",
    "Unchunker",
    "UnchunkerStatistics",
    "UnknownStream",
    "UnknownType",
    "WrongVersion",
    "decode_message",
    "decode_record",
    "encode_burst",
    "encode_message",
    "encode_messages",
    "encode_record",
    "find_stores",
    "frame_record",
    "known_schemas",
    "make_schema",
    "qualify",
]
