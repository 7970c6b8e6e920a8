"""Penstock carries message streams under pressure: between processes, machines and Spark.

import penstock

with penstock.open_writer("fmq:/tmp/radar/beams") as writer:
    writer.write(b"a beam", type=1)

with penstock.open_reader("fmq:/tmp/radar/beams") as reader:
    for message in reader.available():
        print(message.seq, message.payload)
"""

from typing import TYPE_CHECKING

from penstock.core.late_names import late_names

if TYPE_CHECKING:
    from penstock import aio
    from penstock.core.batch import Batch
    from penstock.core.capabilities import Grouped, InPlaceReader, InPlaceWriter, Replayable
    from penstock.core.endpoints import (
        Endpoint,
        create,
        describe,
        find_streams,
        open_reader,
        open_writer,
    )
    from penstock.core.errors import (
        ConnectionLost,
        InvalidOption,
        Malformed,
        NotFound,
        PenstockError,
        Unsupported,
        WriteTimeout,
    )
    from penstock.core.interfaces import Reader, StreamInfo, Writer
    from penstock.core.message import Message
    from penstock.core.overflow import OverflowPolicy
    from penstock.core.position import Position
    from penstock.core.retry import RetryPolicy
    from penstock.core.stream_id import StreamId
    from penstock.queue.streams import InputStream, OutputStream
    from penstock.queue.waiting import wait_any
    from penstock.relay.copy import copy
    from penstock.relay.relay import Relay

#: Names that were here in 0.1, and the modules that have them. They are gone from here in 0.3.
_MOVED = {
    "penstock.core.batch": "BATCH_SCHEMA batch_from_messages messages_from_batch",
    "penstock.core.capabilities": "AppendOnce GroupStatistics Held Listable",
    "penstock.core.provenance": "Commit",
    "penstock.core.config": "ConfigModel load_config",
    "penstock.core.dead_letter": "Code DeadLetter",
    "penstock.core.endpoints": "Identity endpoint_of identity",
    "penstock.core.errors": (
        "AlreadyExists Closed ConfigError ConfigErrors CursorInUse CursorTableFull "
        "DamagedQueue InvalidStreamId InvalidURL LeaseLost LockTimeout MessageTooLarge "
        "Overrun PositionError ServerBusy StorageError StreamIdCollision Unacknowledged "
        "UnknownScheme"
    ),
    "penstock.core.overflow": "BoundedBuffer DropCounts DropReason QueueFull",
    "penstock.core.retry": "Backoff retry retry_async",
    "penstock.core.statistics": "Loss ReaderStatistics WriterStatistics",
    "penstock.core.stream_id": "ForwardDestination id_for_app id_for_codelet",
    "penstock.core.stream_names": "StreamNames",
}

__getattr__ = late_names(__name__, _MOVED)

__version__ = "0.2.0"

__all__ = [
    "Batch",
    "ConnectionLost",
    "Endpoint",
    "Grouped",
    "InPlaceReader",
    "InPlaceWriter",
    "InputStream",
    "InvalidOption",
    "Malformed",
    "Message",
    "NotFound",
    "OutputStream",
    "OverflowPolicy",
    "PenstockError",
    "Position",
    "Reader",
    "Relay",
    "Replayable",
    "RetryPolicy",
    "StreamId",
    "StreamInfo",
    "Unsupported",
    "WriteTimeout",
    "Writer",
    "aio",
    "copy",
    "create",
    "describe",
    "find_streams",
    "open_reader",
    "open_writer",
    "wait_any",
]
