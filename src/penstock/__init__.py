"""Penstock carries message streams under pressure: between processes, machines and Spark.

import penstock

with penstock.open_writer("fmq:/tmp/radar/beams") as writer:
    writer.write(b"a beam", type=1)

with penstock.open_reader("fmq:/tmp/radar/beams") as reader:
    for message in reader.available():
        print(message.seq, message.payload)
"""

from penstock import aio
from penstock.core.batch import BATCH_SCHEMA, Batch, batch_from_messages, messages_from_batch
from penstock.core.capabilities import (
    AppendOnce,
    Commit,
    Held,
    InPlaceReader,
    InPlaceWriter,
    Listable,
    Replayable,
)
from penstock.core.config import ConfigModel, load_config
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import (
    Endpoint,
    Identity,
    create,
    describe,
    endpoint_of,
    find_streams,
    identity,
    open_reader,
    open_writer,
)
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    ConfigError,
    ConnectionLost,
    CursorInUse,
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    InvalidStreamId,
    InvalidURL,
    LockTimeout,
    Malformed,
    MessageTooLarge,
    NotFound,
    Overrun,
    PenstockError,
    PositionError,
    ServerBusy,
    StorageError,
    StreamIdCollision,
    Unacknowledged,
    UnknownScheme,
    Unsupported,
    WriteTimeout,
)
from penstock.core.info import StreamInfo
from penstock.core.interfaces import Reader, Writer
from penstock.core.message import Message
from penstock.core.overflow import (
    BoundedBuffer,
    DropCounts,
    DropReason,
    OverflowPolicy,
    QueueFull,
)
from penstock.core.position import Position
from penstock.core.retry import Backoff, RetryPolicy, retry, retry_async
from penstock.core.statistics import Loss, ReaderStatistics, WriterStatistics
from penstock.core.stream_id import ForwardDestination, StreamId, id_for_app, id_for_codelet
from penstock.core.stream_names import StreamNames

__version__ = "0.2.0"

__all__ = [
    "BATCH_SCHEMA",
    "AlreadyExists",
    "AppendOnce",
    "Backoff",
    "Batch",
    "BoundedBuffer",
    "Closed",
    "Code",
    "Commit",
    "ConfigError",
    "ConfigModel",
    "ConnectionLost",
    "CursorInUse",
    "CursorTableFull",
    "DamagedQueue",
    "DeadLetter",
    "DropCounts",
    "DropReason",
    "Endpoint",
    "ForwardDestination",
    "Held",
    "Identity",
    "InPlaceReader",
    "InPlaceWriter",
    "InvalidOption",
    "InvalidStreamId",
    "InvalidURL",
    "Listable",
    "LockTimeout",
    "Loss",
    "Malformed",
    "Message",
    "MessageTooLarge",
    "NotFound",
    "OverflowPolicy",
    "Overrun",
    "PenstockError",
    "Position",
    "PositionError",
    "QueueFull",
    "Reader",
    "ReaderStatistics",
    "Replayable",
    "RetryPolicy",
    "ServerBusy",
    "StorageError",
    "StreamId",
    "StreamIdCollision",
    "StreamInfo",
    "StreamNames",
    "Unacknowledged",
    "UnknownScheme",
    "Unsupported",
    "WriteTimeout",
    "Writer",
    "WriterStatistics",
    "aio",
    "batch_from_messages",
    "create",
    "describe",
    "endpoint_of",
    "find_streams",
    "id_for_app",
    "id_for_codelet",
    "identity",
    "load_config",
    "messages_from_batch",
    "open_reader",
    "open_writer",
    "retry",
    "retry_async",
]
