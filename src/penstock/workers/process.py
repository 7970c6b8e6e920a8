"""What does a worker's process do: lease messages, work, store the results, acknowledge?

`penstock graph run` runs it, with its job in the environment.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.core.batch import batch_from_messages
from penstock.core.capabilities import Grouped
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import LeaseLost, PenstockError
from penstock.core.functions import FunctionNotFound
from penstock.core.interfaces import Closable
from penstock.core.message import Message
from penstock.core.redaction import Redacted
from penstock.core.supervision import NotStarted
from penstock.core.worker_function import (
    BadResult,
    load_worker_function,
    outputs_of,
)
from penstock.workers.job import JOB, UNFIT, Job
from penstock.workers.programs import Answer, FrameProgram
from penstock.workers.worker_counters import WorkerCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.worker_function import Output
    from penstock.workers.job import Source, Target

__all__ = ["main"]

log = logging.getLogger(__name__)

#: Seconds to wait for a message before it is looked whether to stop.
_WAIT: Final = 0.5
#: With several queues to read, seconds to wait at one of them; more, while nothing comes.
_LOOK: Final = 0.02
_LONGEST_LOOK: Final = 0.1
#: Results are stored, and messages acknowledged, after so many seconds of work at the latest.
_SETTLED_AFTER: Final = 0.1
#: A message that could not be done comes again after so many seconds.
_AGAIN: Final = 1.0


class Work(Protocol):
    """Makes results of messages."""

    def __call__(self, messages: Sequence[Message]) -> Iterator[Answer]:
        """Yield the outcome of each message, in order."""


class FunctionWork:
    """A function, called in this process."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        edges: Sequence[str],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Load it.

        :raises FunctionNotFound: there is no such function.
        :raises BadResult: the function does not take the options.
        """
        self._call = load_worker_function(name).bound(options)
        self._edges = edges
        self._is_stopping = is_stopping

    def __call__(self, messages: Sequence[Message]) -> Iterator[Answer]:
        for message in messages:
            if self._is_stopping():
                return
            try:
                outputs = list(outputs_of(self._call(message), self._edges))
            except Exception as error:  # noqa: BLE001 - a function may raise anything
                yield Answer(message, [], error)
            else:
                yield Answer(message, outputs)


class _Inputs(Closable):
    """The edges that a worker reads, in turn."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._stack = ExitStack()
        self._readers: list[Reader] = []
        self._look = _LOOK
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            for source in sources:
                options = dict(source.options)
                if "client" in options:  # another in each life, so that a queue knows who is gone
                    options["client"] = f"{options['client']}-{os.getpid()}"
                reader = self._stack.enter_context(open_reader(source.url, **options))
                self._readers.append(reader)
            undo.pop_all()

    def take(self, limit: int) -> tuple[Grouped, list[Message]]:
        """Lease messages of one edge; none if none arrive within a moment."""
        reader = self._readers[0]
        if len(self._readers) == 1:
            messages = reader.read_many(limit, _WAIT)
        else:
            reader, messages = self._take_of_many(limit)
        assert isinstance(reader, Grouped)
        return reader, messages

    def _take_of_many(self, limit: int) -> tuple[Reader, list[Message]]:
        """Poll all edges, then wait at one for a moment."""
        for reader in self._readers:
            if messages := reader.read_many(limit):
                break
        else:
            reader = self._readers[0]
            messages = reader.read_many(limit, self._look)
        self._look = _LOOK if messages else min(2 * self._look, _LONGEST_LOOK)
        self._readers.remove(reader)
        self._readers.append(reader)
        return reader, messages

    def close(self) -> None:
        """Return unsettled messages. Idempotent."""
        self._stack.close()


class _Outputs(Closable):
    """The edges that results go to."""

    def __init__(self, targets: Sequence[Target], counters: WorkerCounters) -> None:
        self._targets = {target.edge: target for target in targets}
        self._counters = counters
        self._writers: dict[str, Writer] = {}

    def store(self, answers: Sequence[Answer]) -> None:
        """Append results; they are stored when this returns.

        :raises PenstockError: some results are not stored; others may be.
        """
        parts: dict[str, list[Message]] = {}
        for answer in answers:
            for output in answer.outputs:
                parts.setdefault(output.edge, []).append(_message(output, answer.message))
        for edge, messages in parts.items():
            self._append(self._targets[edge], messages)
            self._counters.give(edge, len(messages))

    def _append(self, target: Target, messages: Sequence[Message]) -> None:
        writer = self._writers.get(target.edge)
        if writer is None:
            writer = self._writers[target.edge] = open_writer(target.url)
        try:
            writer.write_batch(batch_from_messages(messages))
            writer.flush()
        except BaseException:
            self._let_go(target.edge)
            raise
        if target.is_shared:
            self._let_go(target.edge)

    def _let_go(self, edge: str) -> None:
        self._writers.pop(edge).close()

    def close(self) -> None:
        """Close all targets. Idempotent."""
        for edge in list(self._writers):
            self._let_go(edge)


def _message(output: Output, cause: Message) -> Message:
    """Return a result as a message with the source time of its input."""
    return Message(0, cause.time_ns, 0, 0, 0, None, None, output.payload)


class _Loop:
    """Leases, works, stores and acknowledges until it is stopped."""

    def __init__(
        self, inputs: _Inputs, work: Work, outputs: _Outputs, counters: WorkerCounters, most: int
    ) -> None:
        self._inputs = inputs
        self._work = work
        self._outputs = outputs
        self._counters = counters
        self._most = most
        #: Messages to take at once: what is done in the time of a settlement.
        self._limit = 1

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            reader, messages = self._inputs.take(self._limit)
            if not messages:
                continue
            self._counters.add("taken", len(messages))
            began = time.monotonic()
            self._do(reader, messages)
            spent = (time.monotonic() - began) / len(messages)
            wanted = int(_SETTLED_AFTER / max(spent, 1e-6))
            self._limit = max(1, min(self._most, 2 * self._limit, wanted))

    def _do(self, reader: Grouped, messages: Sequence[Message]) -> None:
        done: list[Answer] = []
        settled_at = time.monotonic()
        try:
            for answer in self._work(messages):
                if answer.error is not None:
                    self._fail(reader, [answer], answer.error)
                    continue
                done.append(answer)
                if time.monotonic() - settled_at > _SETTLED_AFTER:
                    done, answers = [], done
                    self._settle(reader, answers)
                    settled_at = time.monotonic()
        finally:  # also of a program that ended at a later message
            self._settle(reader, done)

    def _settle(self, reader: Grouped, answers: Sequence[Answer]) -> None:
        """Store the results of messages, then acknowledge the messages."""
        if not answers:
            return
        try:
            self._outputs.store(answers)
        except PenstockError as error:
            if isinstance(error, ValueError) and len(answers) > 1:
                for answer in answers:  # one of them has a result that does not fit
                    self._settle(reader, [answer])
            else:
                self._fail(reader, answers, error)
            return
        lost = 0
        try:
            reader.ack([answer.message for answer in answers])
        except LeaseLost as error:
            lost = error.count
            log.warning("%s: others do them again; give the edge a longer lease", error)
        self._counters.add("done", len(answers) - lost)
        self._counters.add("lost_leases", lost)

    def _fail(self, reader: Grouped, answers: Sequence[Answer], error: Exception) -> None:
        """Return failed messages for redelivery after a delay."""
        is_told = isinstance(error, PenstockError)  # of others the place matters
        count = f"{len(answers)} messages come" if len(answers) > 1 else "a message comes"
        log.error("%s again: %s", count, error, exc_info=None if is_told else error)
        self._counters.add("failed", len(answers))
        try:
            reader.nack([answer.message for answer in answers], _AGAIN)
        except LeaseLost as lost:
            log.warning("%s", lost)


def main() -> int:
    """Run the job from the environment until SIGTERM; return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(Redacted())
    job = Job.model_validate_json(os.environ.pop(JOB))
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us tells us when to end
    sys.path[:0] = job.path
    edges = [target.edge for target in job.targets]
    with ExitStack() as stack:
        counters = stack.enter_context(WorkerCounters(job.counters, edges))
        try:
            work: Work
            if job.use is not None:
                work = FunctionWork(job.use, job.options, edges, lambda: is_stopping)
            else:
                assert job.command is not None
                work = stack.enter_context(
                    FrameProgram(
                        job.command,
                        edges,
                        job.environment,
                        grace=job.grace,
                        is_stopping=lambda: is_stopping,
                    )
                )
        except (FunctionNotFound, BadResult, NotStarted) as error:
            log.error("%s", error)  # noqa: TRY400 - it says all
            return UNFIT
        outputs = stack.enter_context(_Outputs(job.targets, counters))
        inputs = stack.enter_context(_Inputs(job.sources))
        try:
            _Loop(inputs, work, outputs, counters, job.batch).run(lambda: is_stopping)
        except PenstockError as error:
            log.error("%s", error)  # noqa: TRY400 - as above; whoever started us does so again
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
