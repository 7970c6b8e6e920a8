"""What becomes of datagrams that forwarders send?

The collector looks up the schema of each, and passes the decoded messages to its outputs. The rest
is counted, and kept as dead letters if a stream for them is configured.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.core.dead_letter import Code
from penstock.core.errors import InvalidOption, Malformed, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.options import Options
from penstock.core.stream_id import StreamId
from penstock.core.url import is_loopback
from penstock.protocols.datagrams import DatagramServer, DatagramSocket
from penstock.protocols.jrtc.collector_outputs import Collected, Output
from penstock.protocols.jrtc.dead_letters import DeadLetters
from penstock.protocols.jrtc.decoder import DecoderServer
from penstock.protocols.jrtc.decoder_http import decoder_app
from penstock.protocols.jrtc.destinations import Rejected
from penstock.protocols.jrtc.schemas import Schema, Schemas
from penstock.protocols.jrtc.wire import (
    DATA_PORT,
    DECODER_PORT,
    ID_SIZE,
    batch_of_datagrams,
    payload_bytes,
)
from penstock.protocols.web import WebServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.protocols.datagrams import Datagrams, DatagramStatistics

__all__ = ["Collector", "CollectorOptions", "CollectorStatistics", "Refusal"]

log = logging.getLogger(__name__)

#: Seconds that what has come has to be given on when it is closed.
_GRACE: Final = 10.0


class CollectorOptions(Options):
    """Options of `penstock serve collector`."""

    host: str = "127.0.0.1"
    #: Where datagrams come.
    port: int = DATA_PORT
    #: Where schemas come by gRPC; None: nowhere.
    grpc_port: int | None = DECODER_PORT
    #: Where schemas come by HTTP; None: nowhere.
    http_port: int | None = None


class Refusal(StrEnum):
    """Why a datagram was refused."""

    #: It is shorter than an id, or was truncated by the system.
    MALFORMED = "malformed"
    #: Its stream has no schema.
    UNKNOWN = "unknown stream"
    #: It does not match the schema of its stream.
    UNDECODABLE = "undecodable"


class CollectorStatistics(NamedTuple):
    """Counters: every received datagram is collected, refused, unhandled or waiting."""

    #: What came, and what the kernel dropped because it came too fast.
    datagrams: DatagramStatistics
    #: Messages that have a schema and fit it, and bytes of their payloads.
    collected: int
    bytes: int
    #: Datagrams that are not collected.
    refused: dict[Refusal, int]
    #: Datagrams that had come at the end, and were not looked at in time.
    unhandled: int
    #: Messages that an output did not take, by its name.
    undelivered: dict[str, int]
    #: Dead letters that were written, and that could not be.
    dead: int
    unwritten: int

    @property
    def lost(self) -> int:
        """Lost messages: dropped, unhandled, or refused without a dead letter."""
        return self.datagrams.dropped + self.unhandled + self.unwritten


class Collector(Closable):
    """Collects datagrams, from construction until `close`.

    schemas = Schemas()
    schemas.load("example.pb", {stream: "status"})
    with Collector(CollectorOptions(), schemas, [JsonOutput("-")]):
        ...
    """

    def __init__(
        self,
        options: CollectorOptions,
        schemas: Schemas | None = None,
        outputs: Sequence[Output] = (),
        dead: Writer | None = None,
    ) -> None:
        """Listen and start. The outputs and `dead` are closed with the collector.

        :raises StorageError: an address is in use.
        :raises Unsupported: a library is missing.
        """
        self.options = options
        #: What streams carry.
        self.schemas = Schemas() if schemas is None else schemas
        self._outputs = list(outputs)
        self._letters = DeadLetters(dead)
        self._seq = self._collected = self._bytes = 0
        self._refused: Counter[Refusal] = Counter()
        self._undelivered: Counter[str] = Counter()
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._letters.close)
            for output in self._outputs:
                undo.callback(output.close)
            sock = DatagramSocket.bind(options.host, options.port)
            undo.callback(sock.close)
            #: Where datagrams and schemas come.
            self.port = sock.port
            self.grpc_port: int | None = None
            self.http_port: int | None = None
            if options.grpc_port is not None:
                decoder = DecoderServer(self.schemas, options.host, options.grpc_port)
                undo.callback(decoder.close)
                self.grpc_port = decoder.port
            if options.http_port is not None:
                app = decoder_app(self.schemas)
                web = WebServer(
                    app, options.host, options.http_port, name="jrtc-http", log=log, extra="jrtc"
                )
                undo.callback(web.close)
                self.http_port = web.port
            self._server = DatagramServer("jrtc-collector", sock, self._handle, log=log)
            undo.callback(self._server.close, _GRACE)
            self._undo = undo.pop_all()
        if not is_loopback(options.host):
            log.warning(
                "port %d is open to other machines: anybody who can reach it can send messages, "
                "because the protocol has no passwords",
                self.port,
            )
        self._server.start()

    # --- datagrams ----------------------------------------------------------------------------

    def _handle(self, datagrams: Datagrams) -> None:
        whole = [data for data, _ in datagrams.whole if len(data) >= ID_SIZE]
        short = len(datagrams.whole) - len(whole) + len(datagrams.cut)
        if short:
            self._refused[Refusal.MALFORMED] += short
            self._letters.note(short, "datagrams are shorter than an id, or were cut")
        if not whole:
            return
        batch = batch_of_datagrams(whole, self._seq, time.time_ns())
        self._seq += len(whole)
        groups: dict[Schema | None, list[int]] = {}
        found: dict[bytes, Schema | None] = {}
        for row, data in enumerate(whole):
            stream = data[:ID_SIZE]
            if stream not in found:
                found[stream] = self.schemas.find(StreamId(stream))
            groups.setdefault(found[stream], []).append(row)
        for schema, rows in groups.items():
            part = batch if len(groups) == 1 else batch.take(pa.array(rows, pa.int64()))
            if schema is None:
                reason = "nobody said what the stream carries"
                every = range(len(part))
                self._refuse(
                    Refusal.UNKNOWN,
                    part,
                    [Rejected(row, Code.FAILED_PRECONDITION, reason) for row in every],
                )
            else:
                self._collect(schema, part)

    def _collect(self, schema: Schema, batch: Batch) -> None:
        rows, rejected = _decoded(schema, batch)
        if rejected:
            self._refuse(Refusal.UNDECODABLE, batch, rejected)
            batch = _without(batch, rejected)
        if not len(batch):
            return
        self._collected += len(batch)
        self._bytes += payload_bytes(batch)
        for output in self._outputs:
            try:
                refused = output.give(Collected(schema, batch, rows))
            except (OSError, PenstockError) as error:
                log.warning("%s takes nothing: %s", output.name, error)
                reason = str(error)
                refused = [Rejected(row, Code.UNAVAILABLE, reason) for row in range(len(batch))]
            except Exception as error:
                log.exception("%s fails", output.name)
                reason = f"{type(error).__name__}: {error}"
                refused = [Rejected(row, Code.INTERNAL, reason) for row in range(len(batch))]
            if refused:
                self._undelivered[output.name] += len(refused)
                self._letters.write(batch, refused, output.name)

    def _refuse(self, why: Refusal, batch: Batch, rejected: Sequence[Rejected]) -> None:
        self._refused[why] += len(rejected)
        self._letters.write(batch, rejected, "the collector")

    # --- books, and the end -------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        return CollectorStatistics(
            self._server.statistics(),
            self._collected,
            self._bytes,
            {why: self._refused[why] for why in Refusal},
            self._server.unhandled,
            dict(self._undelivered),
            self._letters.written,
            self._letters.unwritten,
        )

    def close(self) -> None:
        """Stop after handling what has arrived. Idempotent."""
        self._undo.close()


def _decoded(schema: Schema, batch: Batch) -> tuple[pa.RecordBatch | None, Sequence[Rejected]]:
    """Return a row for each message that fits its schema, and the messages that do not."""
    try:
        decoder = schema.decoder
    except InvalidOption:  # no column can have it: the library tells what fits
        rejected = []
        for row, payload in enumerate(batch.column("payload").to_pylist()):
            try:
                schema.parse(payload)
            except Malformed as error:
                rejected.append(Rejected(row, Code.INVALID_ARGUMENT, str(error)))
        return None, rejected
    decoded = decoder.decode(batch)
    return decoded.rows, [
        Rejected(each.row, Code.INVALID_ARGUMENT, each.reason) for each in decoded.failures
    ]


def _without(batch: Batch, rejected: Sequence[Rejected]) -> Batch:
    is_good = np.ones(len(batch), np.bool_)
    is_good[[each.row for each in rejected]] = False
    return batch.take(pa.array(np.flatnonzero(is_good)))
