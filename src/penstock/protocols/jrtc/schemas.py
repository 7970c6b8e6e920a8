"""Which protobuf message does a stream carry, and what is in it?

Descriptor sets describe messages, and streams are associated with them: no code of a peer ever
runs. The forwarder serialises with a schema, the collector decodes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.decoding.protobuf import ProtobufDecoder, find_message, message_names
from penstock.core.errors import (
    AlreadyExists,
    InvalidOption,
    InvalidStreamId,
    Malformed,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.core.options import nearest
from penstock.core.stream_id import ANY_FILTER, StreamId
from penstock.protocols.jrtc.struct_codec import StructCodec, StructLike
from penstock.protocols.jrtc.wire import LARGEST_FRAME, schema_key
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["Association", "Schema", "SchemaLimits", "Schemas", "TooManySchemas"]

log = logging.getLogger(__name__)

#: A message of the wire is never larger.
_LARGEST_MESSAGE: Final = LARGEST_FRAME
#: What makes a file that can be loaded.
_HOW: Final = "make it with protoc --include_imports --descriptor_set_out=FILE …"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaLimits:
    """Limits on loaded schemas."""

    #: Bytes of one descriptor set.
    descriptor_bytes: int = 1 << 20
    #: Files of one descriptor set.
    files: int = 256
    #: Packages, and the bytes of all their descriptor sets.
    packages: int = 1000
    total_bytes: int = 64 << 20
    #: Streams that have a schema.
    streams: int = 100_000


class TooManySchemas(PenstockError):
    """The limit on schemas is reached."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"there are {limit:,} {what}, and no more are taken")
        self.what = what
        self.limit = limit


class Association(NamedTuple):
    """The message type of a stream."""

    package: str
    message: str
    #: The C struct that its payloads are in the queue; None: they are protobuf there, too.
    struct: StructLike | None = None


class _Package(NamedTuple):
    """A descriptor set."""

    descriptors: bytes
    digest: bytes


class Schema:
    """The schema of one stream, built from the current package."""

    def __init__(self, descriptors: bytes, association: Association) -> None:
        """Look up the message.

        :raises InvalidOption: the message does not exist, or the struct does not match it.
        """
        self.package = association.package
        self.message = association.message
        self.descriptors = descriptors
        self.descriptor = find_message(descriptors, association.message)
        #: Translates the structs of the stream; None: its payloads are protobuf.
        self.codec: StructCodec | None = None
        if association.struct is not None:
            self.codec = StructCodec(self.descriptor, association.struct)

    @cached_property
    def decoder(self) -> ProtobufDecoder:
        """The decoder of payloads into Arrow columns.

        :raises InvalidOption: the message is recursive, so it cannot become columns.
        """
        return ProtobufDecoder(self.descriptors, self.message, None, "", max_size=_LARGEST_MESSAGE)

    @cached_property
    def message_class(self) -> Any:
        """The protobuf library's class of the message."""
        from google.protobuf import message_factory  # noqa: PLC0415 - an extra

        return message_factory.GetMessageClass(self.descriptor)

    def parse(self, payload: bytes) -> Any:
        """Parse a payload with the protobuf library.

        :raises Malformed: the payload does not parse.
        """
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - an extra

        try:
            return self.message_class.FromString(payload)
        except DecodeError as error:
            raise Malformed("payload", self.message, "such a message", error) from None

    def json_object(self, stream: StreamId, payload: bytes) -> dict[str, Any]:
        """Return a payload in protobuf's JSON form, with stream and schema.

        :raises Malformed: the payload does not parse.
        """
        from google.protobuf import json_format  # noqa: PLC0415 - an extra
        from google.protobuf.message import DecodeError  # noqa: PLC0415

        message = self.parse(payload)
        pool = self.descriptor.file.pool  # has what an Any may hold; TypeError: it has not
        try:
            values: dict[str, Any] = json_format.MessageToDict(message, descriptor_pool=pool)
        except (json_format.Error, DecodeError, RecursionError, TypeError, ValueError) as error:
            raise Malformed("payload", self.message, "what JSON has", error) from None
        values["_schema_proto_msg"] = self.message
        values["_schema_proto_package"] = self.package
        values["_stream_id"] = stream.dashed()
        return values

    def json_line(self, stream: StreamId, payload: bytes) -> bytes:
        """Return one line of JSON, as the original's collector writes it.

        :raises Malformed: the payload does not parse.
        """
        values = self.json_object(stream, payload)
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode(errors="replace") + b"\n"


class Schemas:
    """The loaded packages, and the streams associated with their messages.

        schemas = Schemas()
        schemas.load("example.pb", {stream: "status"})
        schemas.find(stream).json_object(stream, payload)

    Thread-safe.
    """

    def __init__(self, limits: SchemaLimits | None = None) -> None:
        self.limits = limits or SchemaLimits()
        self._lock = Lock()
        self._packages: dict[str, _Package] = {}
        self._streams: dict[StreamId, Association] = {}
        #: Schemas that were looked up, by whole ids; streams of several devices share one.
        self._found: dict[StreamId, Schema | None] = {}
        self._made: dict[Association, Schema | None] = {}

    # --- packages -----------------------------------------------------------------------------

    def upsert(self, descriptors: bytes, *, replace: bool = True) -> tuple[str, bool]:
        """Load a descriptor set; return the package's name, and whether anything changed.

        The name is the file's without its extension; of several files, that of the one
        which no other imports. A package of this name is replaced.

        :param replace: False: another descriptor set of the same name is refused
        :raises InvalidOption: it is no descriptor set, an inconsistent one, or refused.
        :raises TooManySchemas: the limit is reached.
        """
        limits = self.limits
        if len(descriptors) > limits.descriptor_bytes:
            reason = f"has {len(descriptors):,} bytes; the limit is {limits.descriptor_bytes:,}"
            raise InvalidOption("descriptor_set", "…", reason)
        name = _package_name(descriptors, limits.files)
        message_names(descriptors)  # so that one that does not fit together is refused here
        package = _Package(descriptors, hashlib.sha256(descriptors).digest())
        with self._lock:
            known = self._packages.get(name)
            if known is not None and known.digest == package.digest:
                return name, False
            if known is not None and not replace:
                reason = f"its package {name} is loaded already, with other contents"
                hint = "a package has the name of its .proto file: rename one of them"
                raise InvalidOption("descriptor_set", "…", reason, hint=hint)
            if known is None and len(self._packages) >= limits.packages:
                raise TooManySchemas("packages", limits.packages)
            others = (each for key, each in self._packages.items() if key != name)
            if sum(len(each.descriptors) for each in others) + len(descriptors) > (
                limits.total_bytes
            ):
                raise TooManySchemas("bytes of descriptor sets", limits.total_bytes)
            self._packages[name] = package
            self._forget()
        return name, True

    def load(
        self,
        file: str | os.PathLike[str],
        streams: Mapping[StreamId, str],
        struct: StructLike | None = None,
        *,
        replace: bool = True,
    ) -> str:
        """Load a descriptor set from a file, and associate streams with its messages.

        :param replace: as for `upsert`
        :raises StorageError: the file cannot be read.
        :raises PenstockError: as `upsert` and `associate`.
        """
        path = Path(file)
        with storage_errors("reading", str(path)), path.open("rb") as source:
            descriptors = source.read(self.limits.descriptor_bytes + 1)
        try:
            package, _ = self.upsert(descriptors, replace=replace)
        except InvalidOption as error:
            hint = error.hint or _HOW
            raise InvalidOption(error.option, str(path), error.reason, hint=hint) from None
        for stream, message in streams.items():
            self.associate(stream, package, message, struct)
        return package

    def packages(self) -> list[str]:
        """Return the names of all packages."""
        with self._lock:
            return sorted(self._packages)

    # --- streams ------------------------------------------------------------------------------

    def associate(
        self, stream: StreamId, package: str, message: str, struct: StructLike | None = None
    ) -> bool:
        """Associate a stream with a message, on all devices; False if it was already.

        :param message: its full name
        :param struct: what the payloads are in the queue: a ctypes structure, a numpy dtype, or
            nanopb's layout (`Nanopb`); None: protobuf
        :raises NotFound: the package or the message does not exist.
        :raises AlreadyExists: the stream is associated with another message.
        :raises InvalidStreamId: the path or the name is ANY.
        :raises InvalidOption: the struct does not match the message.
        """
        if ANY_FILTER in (stream.path, stream.name):
            raise InvalidStreamId("text", str(stream), "leaves its path or its name open")
        key, wanted = schema_key(stream), Association(package, message, struct)
        with self._lock:
            known = self._streams.get(key)
            if known == wanted:
                return False
            if known is not None:
                raise AlreadyExists(
                    f"stream {stream} carries {known.message} of {known.package} already",
                    hint="dissociate it first",
                )
            found = self._packages.get(package)
            if found is None:
                hint = nearest(package, self._packages, "packages")
                raise NotFound(f"proto package {package} not found", hint=hint)
            if len(self._streams) >= self.limits.streams:
                raise TooManySchemas("streams with a schema", self.limits.streams)
        try:
            Schema(found.descriptors, wanted)
        except InvalidOption as error:
            if error.option != "message":
                raise
            text = f"proto package {package} has no message {message}"
            raise NotFound(text, hint=error.hint) from None
        with self._lock:
            self._streams[key] = wanted
            self._forget()
        return True

    def dissociate(self, stream: StreamId) -> bool:
        """Remove the association of a stream; False if it had none."""
        with self._lock:
            known = self._streams.pop(schema_key(stream), None)
            self._forget()
        return known is not None

    def associations(self) -> dict[StreamId, Association]:
        """Return all associations, by ids without version, destination and device."""
        with self._lock:
            return dict(self._streams)

    def find(self, stream: StreamId) -> Schema | None:
        """Return the schema of a stream, or None if it has none or its package lost the message."""
        try:
            return self._found[stream]
        except KeyError:
            pass
        with self._lock:
            association = self._streams.get(schema_key(stream))
            schema = None if association is None else self._schema_of(association)
            # Ids come from outside: what is remembered of those without a schema is bounded.
            if len(self._found) < self.limits.streams:
                self._found[stream] = schema
        return schema

    def is_broken(self, stream: StreamId) -> bool:
        """Tell whether a stream is associated with a message that its package does not have now."""
        with self._lock:
            association = self._streams.get(schema_key(stream))
            return association is not None and self._schema_of(association) is None

    def has_structs(self, stream: StreamId) -> bool:
        """Tell whether a stream's payloads are C structs in its queue."""
        with self._lock:
            association = self._streams.get(schema_key(stream))
            return association is not None and association.struct is not None

    def _schema_of(self, association: Association) -> Schema | None:
        if association not in self._made:
            self._made[association] = self._make(association)
        return self._made[association]

    def _make(self, association: Association) -> Schema | None:
        package = self._packages.get(association.package)
        if package is None:
            return None
        try:
            return Schema(package.descriptors, association)
        except InvalidOption as error:  # another package came by that name
            log.warning("%s of %s: %s", association.message, association.package, error)
            return None

    def _forget(self) -> None:
        self._found.clear()
        self._made.clear()


def _package_name(descriptors: bytes, most_files: int) -> str:
    try:
        from google.protobuf import descriptor_pb2, message  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Unsupported(
            "schemas need the protobuf library", hint="pip install 'penstock[jrtc]'"
        ) from error
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
    except message.DecodeError:
        raise InvalidOption("descriptor_set", "…", "is not a descriptor set") from None
    if not files:
        raise InvalidOption("descriptor_set", "…", "has no files")
    if len(files) > most_files:
        reason = f"has {len(files):,} files; the limit is {most_files:,}"
        raise InvalidOption("descriptor_set", "…", reason)
    imported = {each for file in files for each in file.dependency}
    roots = [file.name for file in files if file.name not in imported]
    if not roots:
        raise InvalidOption("descriptor_set", "…", "has only files that import each other")
    # As protoc writes them, what is imported comes first.
    name = str(roots[-1])
    package, _ = posixpath.splitext(name)
    if not package:
        raise InvalidOption("descriptor_set", name, "has a file without a name")
    return package
