"""How does a task stage its messages with a server, and how does the driver commit them?

A task sends its messages in one call, once it has them all. The commit is one small request, which
names the attempts that have succeeded. What the server does with both is in `staging`.
"""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import Malformed, PenstockError, Unsupported
from penstock.core.provenance import Commit, Staged, ranges_to_json
from penstock.core.retry import retry
from penstock.protocols.flight.client import Connection
from penstock.protocols.flight.errors import error_from
from penstock.protocols.flight.wire import (
    EMPTY,
    ActionKind,
    CommitStaged,
    Committed,
    Piece,
    Stage,
    StagedFile,
    Unstage,
    pieces_of,
)
from penstock.protocols.flight.writer import BROKEN, PutStream
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.batch import Batch
    from penstock.protocols.flight.client import Target

__all__ = ["TaskPart", "commit_staged", "unstage"]

log = logging.getLogger(__name__)

#: Pieces sent ahead of the server's answers.
_AHEAD: Final = 8
#: Seconds that one request waits for a commit; then the client asks again.
_BETWEEN_QUESTIONS: Final = 5.0


# --- a task ---------------------------------------------------------------------------------------


class TaskPart:
    """The messages of one task attempt for one stream, in a local file until all are staged.

    So a broken connection, or a restart of the server, does not fail the task.
    """

    def __init__(
        self, target: Target, writer: str, suffix: str, batch: int, partition: int
    ) -> None:
        """Check that the server can stage, and create the local file.

        :raises Unsupported: the server is of an older release, which cannot stage.
        :raises ConnectionLost: the server cannot be reached.
        """
        self._target = target
        self._connection = Connection(target)
        self._id = secrets.token_hex(16)
        self._partition = partition
        names = target.names(writer=writer, suffix=suffix, batch=batch)
        self._command = Stage(**names, id=self._id, partition=partition)
        self._messages = 0
        policy = self._connection.retry_policy()
        if not retry(lambda: self._connection.can(ActionKind.COMMIT), policy):
            self._connection.drop()
            raise Unsupported(
                f"the server at {target.server} does not stage messages",
                hint='update Penstock there, or .option("staging", …): a folder that all share',
            )
        # Without a name: it disappears with the process, however that ends.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `discard`
        self._writer = pa.ipc.new_file(self._file, BATCH_SCHEMA)

    def add(self, batch: Batch) -> None:
        with storage_errors("staging in", tempfile.gettempdir()):
            self._writer.write_batch(batch)
        self._messages += batch.num_rows

    def finish(self) -> Staged:
        try:
            with storage_errors("staging in", tempfile.gettempdir()):
                self._writer.close()
                self._file.flush()
            retry(self._send, self._connection.retry_policy(), on_retry=self._note_break)
        finally:
            self.discard()
        return Staged(self._target.url, self._id, self._partition, self._messages, is_there=True)

    def _note_break(self, attempt: int, error: Exception, delay: float) -> None:
        del delay
        if attempt == 1:
            log.warning("%s: %s; staging again", self._target.url, error)

    def _send(self) -> None:
        """Send all messages; when this returns, the server has staged them."""
        try:
            stream = PutStream(self._connection, self._command)
            waiting = number = 0
            for number, (batch, is_last) in enumerate(self._pieces(), start=1):
                stream.send(batch, Piece(number=number, flush=is_last))
                waiting += 1
                if waiting >= _AHEAD:
                    _receive(stream)
                    waiting -= 1
            for _ in range(waiting):
                _receive(stream)
            stream.end()
        except PenstockError:
            self._connection.drop()
            raise
        except BROKEN as error:
            self._connection.drop()
            raise self._connection.understood(error) from None

    def _pieces(self) -> Iterator[tuple[Batch, bool]]:
        with pa.memory_map(f"/proc/self/fd/{self._file.fileno()}") as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                for piece in pieces_of(reader.get_batch(i), self._target.options.chunk):
                    yield piece, False
        yield EMPTY, True

    def discard(self) -> None:
        self._connection.drop()
        self._file.close()


def _receive(stream: PutStream) -> None:
    outcome = stream.receive()
    if outcome.failure is not None:
        stream.end()
        raise error_from(outcome.failure)


# --- the committer --------------------------------------------------------------------------------


def commit_staged(target: Target, commit: Commit, suffix: str) -> Committed:
    """Have a server append a staged batch exactly once.

    :raises Unsupported: the server is of an older release, which cannot stage.
    :raises PenstockError: as `append_noted`.
    """
    options = dict(target.passed_on)
    if target.options.hold is not None:
        options["hold"] = target.options.hold
    ranges = ranges_to_json(commit.origin.ranges)
    question = CommitStaged(
        **target.names(options=options, **_of_batch(commit, suffix)),
        id=secrets.token_hex(16),
        ranges=None if ranges is None else json.dumps(ranges),
        checkpoint=commit.origin.checkpoint,
        run=commit.origin.run,
        is_renamed=commit.origin.is_renamed,
        wait=min(_BETWEEN_QUESTIONS, target.options.call_timeout / 2),
    )
    connection = Connection(target)
    policy = connection.retry_policy()
    try:
        while True:
            # A server that restarted meanwhile starts over, and finds what is appended already.
            answer = retry(lambda: connection.ask(ActionKind.COMMIT, question), policy)
            committed = Committed.from_bytes(answer)
            if committed.is_done:
                return committed
    except Malformed as error:
        if error.what == "flight action":
            raise Unsupported(f"the server at {target.server} does not stage messages") from error
        raise
    finally:
        connection.drop()


def unstage(target: Target, commit: Commit, suffix: str, *, is_done: bool) -> None:
    """Have a server remove staged files; see `Stages.unstage`."""
    question = Unstage(**target.names(**_of_batch(commit, suffix)), is_done=is_done)
    connection = Connection(target)
    try:
        retry(lambda: connection.ask(ActionKind.UNSTAGE, question), connection.retry_policy())
    finally:
        connection.drop()


def _of_batch(commit: Commit, suffix: str) -> dict[str, Any]:
    files = tuple(
        StagedFile(id=file.path, partition=file.partition, messages=file.messages)
        for file in commit.files
    )
    return {"writer": commit.writer, "suffix": suffix, "batch": commit.batch, "files": files}
