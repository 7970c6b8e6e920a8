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
from penstock.core.config import ConfigModel, load_config
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import create, describe, open_reader, open_writer
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
    LeaseLost,
    LockTimeout,
    Malformed,
    MessageTooLarge,
    NotFound,
    Overrun,
    PenstockError,
    PositionError,
    StorageError,
    StreamIdCollision,
    Unacknowledged,
    UnknownScheme,
    Unsupported,
    WriteTimeout,
)
from penstock.core.grouped import Grouped, GroupStatistics
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
    "Backoff",
    "Batch",
    "BoundedBuffer",
    "Closed",
    "Code",
    "ConfigError",
    "ConfigModel",
    "ConnectionLost",
    "CursorInUse",
    "CursorTableFull",
    "DamagedQueue",
    "DeadLetter",
    "DropCounts",
    "DropReason",
    "ForwardDestination",
    "GroupStatistics",
    "Grouped",
    "InvalidOption",
    "InvalidStreamId",
    "InvalidURL",
    "LeaseLost",
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
    "RetryPolicy",
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
    "id_for_app",
    "id_for_codelet",
    "load_config",
    "messages_from_batch",
    "open_reader",
    "open_writer",
    "retry",
    "retry_async",
]
