"""How does Spark write to streams? `writeStream.format("penstock")` and `df.write`."""

from __future__ import annotations

import tempfile
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.core.endpoints import open_writer
from penstock.core.url import URL
from penstock.pipeline.commits import append_once
from penstock.pipeline.outgoing import Targets
from penstock.pipeline.staging import Staged, Staging, remove_staged, staged_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.pipeline.options import SinkOptions

__all__ = ["BatchSink", "StreamSink"]


@dataclass
class _Message(WriterCommitMessage):
    """What a task tells the driver."""

    query: str
    folder: str
    staged: list[Staged]


class _Sink:
    """What the batch and the stream sink share: tasks stage, the driver appends."""

    def __init__(self, options: SinkOptions, names: list[str]) -> None:
        self._options = options
        self._targets = Targets(options.url, options.outputs, names)
        #: Names a batch write, which has no query.
        self._run = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") or self._run
        batch = context.getLocalProperty("streaming.sql.batchId") or "0"
        folder = self._folder() / query / batch
        staging = Staging(folder, context.partitionId())
        for rows in iterator:
            if rows.num_rows:
                for url, messages in self._targets.messages(rows):
                    staging.add(url, messages)
        return _Message(query, str(folder), staging.finish())

    def _folder(self) -> Path:
        """Return a place that the driver and the tasks have in common."""
        if self._options.staging is not None:
            return Path(self._options.staging)
        for url in (self._options.url, *self._options.outputs.values()):
            parsed = None if url is None else URL.parse(url)
            if parsed is not None and parsed.scheme in {"fmq", "log"} and parsed.host is None:
                return Path(parsed.path).parent / ".penstock-staging"
        return Path(tempfile.gettempdir()) / "penstock-staging"

    def _by_url(self, messages: Sequence[WriterCommitMessage | None]) -> dict[str, list[Staged]]:
        found: dict[str, list[Staged]] = defaultdict(list)
        for message in messages:
            if isinstance(message, _Message):
                for part in message.staged:
                    found[part.url].append(part)
        return dict(sorted(found.items()))

    def _clean(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        for folder in {m.folder for m in messages if isinstance(m, _Message)}:
            remove_staged(Path(folder))


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """Appends every batch of a query exactly once to streams of ours."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        query = next((m.query for m in messages if isinstance(m, _Message)), "")
        for url, parts in self._by_url(messages).items():
            append_once(url, staged_batches(parts), query, batchId, self._folder())
        self._clean(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        self._clean(messages)


class BatchSink(_Sink, DataSourceArrowWriter):
    """`df.write.format("penstock")`: appends all of it, or nothing."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        for url, parts in self._by_url(messages).items():
            with open_writer(url) as writer:
                for batch in staged_batches(parts):
                    writer.write_batch(batch)
                writer.flush()
        self._clean(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._clean(messages)
