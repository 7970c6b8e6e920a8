"""How is a directory's latest_data_info read and written as a stream? `latest:/dir`.

One message for each new file. It reads the queue of latest_data_info, so it can be replayed from
any entry that the queue still has.
"""

from __future__ import annotations

import glob
import json
import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from penstock.core.capabilities import Listable
from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.derived_reader import DerivedReader
from penstock.core.endpoints import Endpoint, Identity
from penstock.core.errors import InvalidURL, Malformed, NotFound
from penstock.core.interfaces import BookedWriter, BytesLike, Reader
from penstock.core.options import Options, Patience, Size, parse_options
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.protocols.lrose.ldata_format import (
    ROOT,
    LatestInfo,
    decode_body,
    decode_xml,
    encode_xml,
    xml_in_body,
)
from penstock.queue.classic.creation import create_queue
from penstock.queue.classic.endpoint import describe_queue
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_files import (
    DEFAULT_NAME,
    InfoFiles,
    LatestSettings,
    data_path,
    expected_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.core.interfaces import StreamInfo, Writer
    from penstock.core.message import Message
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL

__all__ = ["LatestEndpoint", "LatestReader", "LatestWriter", "payload_of"]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000


class LatestReaderOptions(Options):
    """Options of `latest:/dir` for readers."""

    #: Name of the files, after an underscore.
    name: str = DEFAULT_NAME
    #: Form of a payload: LROSE's XML, its fields and the file's path as JSON, or the file itself.
    format: Literal["xml", "json", "file"] = "xml"
    #: Most bytes of a file as a payload.
    max_file: Size = 256 << 20
    #: Wait for the first entry to be written: `true`, or for how long.
    wait: Patience = 0.0


class LatestWriterOptions(Options):
    """Options of `latest:/dir` for writers."""

    name: str = DEFAULT_NAME
    #: Register entries with the DataMapper of this machine.
    datamapper: bool = True


class LatestEndpoint(Listable, Endpoint):
    """`latest:/dir`: the latest_data_info of a directory."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        return LatestReader(
            url.text, _directory(url), start, parse_options(url, LatestReaderOptions)
        )

    def open_writer(self, url: URL) -> Writer:
        return LatestWriter(url.text, _directory(url), parse_options(url, LatestWriterOptions))

    def reread(self, url: URL) -> Reader:
        name = parse_options(url, LatestWriterOptions).name
        return LatestReader(
            url.text, _directory(url), Position.START, LatestReaderOptions(name=name)
        )

    def create(self, url: URL, *, replace: bool = False) -> None:
        """Create an empty queue, for readers that start before the first entry."""
        settings = LatestSettings(name=parse_options(url, LatestReaderOptions).name)
        create_queue(
            InfoFiles(_directory(url), settings.name).queue,
            settings.fmq_slots,
            settings.fmq_size,
            SYSTEM_CLOCK.now_ns() // _SECOND,
            replace=replace,
            lock_timeout=settings.lock_timeout,
        ).close()

    def describe(self, url: URL) -> StreamInfo:
        name = parse_options(url, LatestReaderOptions).name
        with _named(_directory(url)) as directory:
            return describe_queue(url.text, InfoFiles(directory, name).queue)

    def identity(self, url: URL) -> Identity:
        is_other = url.options.get("name", DEFAULT_NAME) != DEFAULT_NAME
        return Identity.of(url, options=("name",) if is_other else ())

    def cannot_carry(self, url: URL) -> Mapping[str, str]:  # noqa: ARG002
        return ClassicReader.cannot_carry

    def find(self, pattern: URL) -> set[str]:
        name = pattern.options.get("name", DEFAULT_NAME)
        found = glob.glob(pattern.path.rstrip("/"))  # noqa: PTH207 - a Path has none from the root
        return {pattern.with_path(path) for path in found if InfoFiles(path, name).has_queue()}


def _directory(url: URL) -> str:
    if url.host is not None:
        raise InvalidURL(
            url.text,
            "latest: is a directory on this machine and has no host",
            hint="write latest:/dir",
        )
    if not url.path:
        raise InvalidURL(url.text, "it names no directory", hint="write latest:/dir")
    if url.path.startswith("ldatap:"):
        raise InvalidURL(
            url.text,
            "latest: is a directory on this machine, and not a server",
            hint=f"penstock latest watch {url.path}",
        )
    return url.path


@contextmanager
def _named(directory: str) -> Iterator[str]:
    """Name the directory, and not the queue in it, when nothing was ever told of a file there."""
    try:
        yield directory
    except NotFound as error:
        raise NotFound(
            f"{directory} has no latest_data_info yet",
            hint=f"penstock latest write {directory} FILE tells of a file; wait=true waits for it",
        ) from error


def payload_of(body: bytes, directory: str, format: str) -> tuple[bytes, LatestInfo]:
    """Return the payload for a message of the queue, and its entry.

    :raises Malformed: the message is not an entry.
    """
    info = decode_body(body)
    if format == "json":
        fields = {**info.to_fields(), "directory": directory, "path": data_path(info, directory)}
        return json.dumps(fields).encode(), info
    return xml_in_body(body) or encode_xml(info, directory), info


def _content(info: LatestInfo, directory: str, most: int) -> bytes:
    """Return the content of an entry's file.

    :raises NotFound: the file does not exist any more.
    :raises Malformed: the file is larger than allowed.
    """
    path = data_path(info, directory)
    if path is None:
        raise NotFound(f"{expected_path(info, directory)} is gone")
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - LROSE's spelling of it
            content = file.read(most + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise Malformed(path, "size", f"at most {most:,} bytes: max_file=", "more")
    return content


class LatestReader(DerivedReader):
    """Reads one message for each new file, in order."""

    cannot_carry = ClassicReader.cannot_carry

    def __init__(
        self, url: str, directory: str, start: Position, options: LatestReaderOptions
    ) -> None:
        self._directory = os.path.abspath(directory)  # noqa: PTH100 - for programs elsewhere
        self._format = options.format
        self._max_file = options.max_file
        queue = InfoFiles(directory, options.name).queue
        wanted = ClassicOptions(damaged="skip", wait=options.wait)
        with _named(directory):
            reader = ClassicReader(url, queue, start, wanted)
        super().__init__(url, reader)

    def _made_of(self, message: Message) -> Message | None:
        lost = DropReason.DAMAGED
        try:
            if self._format == "file":
                info = decode_body(message.payload)
                lost = DropReason.RETENTION
                payload = _content(info, self._directory, self._max_file)
            else:
                payload, info = payload_of(message.payload, self._directory, self._format)
        except (Malformed, NotFound) as error:
            log.warning("%s: entry %d: %s", self.url, message.seq, error)
            self._lose(message, lost)
            return None
        return message._replace(payload=payload, time_ns=info.time_ns)


class LatestWriter(BookedWriter):
    """Writes latest_data_info: a payload is LROSE's XML, or the fields of an entry as JSON."""

    cannot_carry = ClassicReader.cannot_carry

    def __init__(self, url: str, directory: str, options: LatestWriterOptions) -> None:
        super().__init__(url)
        # A writer returns the number of the entry, which only the queue has.
        settings = replace(LatestSettings(name=options.name), use_fmq=True)
        self._latest = LatestDataInfo(
            directory, settings=settings, register="map" if options.datamapper else None
        )

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        """Write an entry; see `Writer.write`.

        For JSON without a `latest_time`, the time is `time_ns`, or now.

        :raises Malformed: the payload is not an entry.
        """
        del type, subtype, created_ns
        self._check_open()
        try:
            data = bytes(payload)
            self._latest.write(info=_entry(data, time_ns))
        except BaseException:
            self._refused += 1
            raise
        self._messages += 1
        self._bytes += len(data)
        self._headers_dropped += (stream is not None) + (attributes is not None)
        self._last_seq = self._latest.last_seq
        return -1 if self._last_seq is None else self._last_seq

    def close(self) -> None:
        self._is_closed = True
        self._latest.close()


def _entry(payload: bytes, time_ns: int | None) -> LatestInfo:
    """Decode a payload of either form."""
    if payload.lstrip().startswith(ROOT):
        return decode_xml(payload)
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Malformed("latest_data_info", "payload", "XML, or an object in JSON", payload[:60])
    # Fields that readers add.
    fields.pop("directory", None)
    fields.pop("path", None)
    moment = SYSTEM_CLOCK.now_ns() if time_ns is None else time_ns
    fields.setdefault("latest_time", moment // _SECOND)
    fields.setdefault("max_time", fields["latest_time"])
    return LatestInfo.from_fields(fields)
