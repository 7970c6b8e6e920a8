"""psi's remoting: what travels between exporters and importers, and what is in stores."""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock.protocols.psi.chunks import Chunker, Unchunker, UnchunkerStatistics
    from penstock.protocols.psi.clock import ClockSample, RemoteClock, RemoteClockServer, ask_clock
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
    from penstock.protocols.psi.errors import (
        DamagedStore,
        Truncated,
        UnknownStream,
        UnknownType,
        WrongVersion,
    )
    from penstock.protocols.psi.exporter import (
        ExportedStream,
        Exporter,
        ExporterStatistics,
        Posted,
        RemoteExporter,
    )
    from penstock.protocols.psi.handshake import (
        ClientHello,
        ClientHelloDecoder,
        Intermission,
        MetaDecoder,
        ServerHello,
        SessionIdDecoder,
        Transport,
        encode_burst,
    )
    from penstock.protocols.psi.importer import (
        REPLAY_ALL,
        Gap,
        ImportedStream,
        ImporterStatistics,
        Received,
        RemoteImporter,
    )
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
    from penstock.protocols.psi.rendezvous import RendezvousClient, RendezvousServer
    from penstock.protocols.psi.store import (
        Catalog,
        Place,
        PsiFiles,
        PsiStoreReader,
        Store,
        StoredMessage,
        StreamInStore,
        find_store,
        find_stores,
        list_places,
        open_store,
    )
    from penstock.protocols.psi.ticks import DateTime, DateTimeKind, TimeSpan

__getattr__ = late_names(__name__)

__all__ = [
    "REPLAY_ALL",
    "Catalog",
    "Chunker",
    "ClientHello",
    "ClientHelloDecoder",
    "ClockSample",
    "Codec",
    "CodecLibrary",
    "DamagedStore",
    "DateTime",
    "DateTimeKind",
    "Decoded",
    "Envelope",
    "ExportedStream",
    "Exporter",
    "ExporterStatistics",
    "Gap",
    "ImportedStream",
    "ImporterStatistics",
    "Intermission",
    "MessageDecoder",
    "MetaDecoder",
    "Place",
    "Posted",
    "PsiFiles",
    "PsiMessage",
    "PsiStoreReader",
    "Received",
    "RemoteClock",
    "RemoteClockServer",
    "RemoteExporter",
    "RemoteImporter",
    "RendezvousClient",
    "RendezvousServer",
    "RuntimeInfo",
    "SchemaFlags",
    "SchemaMember",
    "ServerHello",
    "SessionIdDecoder",
    "Store",
    "StoredMessage",
    "StreamFlags",
    "StreamInStore",
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
    "ask_clock",
    "decode_message",
    "decode_record",
    "encode_burst",
    "encode_message",
    "encode_messages",
    "encode_record",
    "find_store",
    "find_stores",
    "frame_record",
    "known_schemas",
    "list_places",
    "make_schema",
    "open_store",
    "qualify",
]
