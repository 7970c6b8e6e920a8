"""How does a program in any language work as a vertex, through stdin and stdout?

It reads one LHHTTT frame for each message. For each it writes any number of results, and then an
empty line: the message is done. Results are frames, too. A line between them, which begins with
none of the digits that a frame begins with, says more:

| line | meaning |
|---|---|
| (empty) | the oldest unanswered message is done |
| `>EDGE` | the next result goes to this output |
| `#KEY` | the next result goes to the output that the key chooses |
| `!REASON` | the message failed and is redelivered; its results are dropped |

Results are passed on when their message is done. A message that a program did not finish before it
ended is redelivered. The end of its input tells a program to end.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import Malformed, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.supervision import Process, describe_status
from penstock.core.worker_function import BadResult, Output, place_of
from penstock.protocols.lhhttt.frames import encode_bytes, frame_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.message import Message

__all__ = ["Answer", "FrameProgram", "ProgramEnded", "ResultDecoder"]

log = logging.getLogger(__name__)

_PIECE: Final = 1 << 16
#: Bytes of messages that wait in the pipe and the program at once, and how many messages.
_AHEAD: Final = 1 << 16
_MOST_AHEAD: Final = 64
#: The longest line between frames, and the largest result.
_LONGEST_LINE: Final = 4096
_LARGEST: Final = 64 << 20
_DIGITS: Final = b"0123456789abcdefABCDEF"
#: Seconds between two looks whether to stop.
_LOOK: Final = 0.2
_WHAT: Final = "a program's output"


class ProgramEnded(PenstockError):
    """A program ended, or wrote an invalid result, while it held messages."""


class Answer(NamedTuple):
    """The outcome of a message: its results, or why it failed."""

    message: Message
    outputs: list[Output]
    error: Exception | None = None


class ResultDecoder:
    """An incremental decoder of a program's output: results per message."""

    def __init__(self, edges: Sequence[str]) -> None:
        self._edges = edges
        self._rest = bytearray()
        self._results: list[Output] = []
        #: The outputs of the next result: all of them, unless a line says otherwise.
        self._to: tuple[str, ...] = tuple(edges)

    def feed(self, data: bytes) -> Iterator[list[Output] | BadResult]:
        """Add output, and yield the outcome of each message that it completes.

        :raises Malformed: the output is neither a frame nor a line.
        """
        rest = self._rest
        rest += data
        at = 0
        try:
            while at < len(rest):
                if rest[at] in _DIGITS:
                    end = self._frame(rest, at)
                    if end is None:
                        break
                else:
                    end = rest.find(b"\n", at, at + _LONGEST_LINE) + 1
                    if not end:
                        if len(rest) - at >= _LONGEST_LINE:
                            raise Malformed(_WHAT, "line", "a newline", "none")
                        break
                    line = bytes(rest[at : end - 1])
                    if line[:1] in {b"", b"!", b"\r"}:
                        yield self._end(line.rstrip(b"\r"))
                    else:
                        self._direct(line.rstrip(b"\r"))
                at = end
        finally:
            del rest[:at]

    def _frame(self, rest: bytearray, at: int) -> int | None:
        """Parse a result; return where it ends, or None if it is incomplete."""
        body = frame_body(rest, at)
        if body is None:
            return None
        start, size = body
        if size > _LARGEST:
            raise Malformed(_WHAT, "frame", f"at most {_LARGEST:,} bytes", f"{size:,}")
        if len(rest) < start + size:
            return None
        payload = bytes(rest[start : start + size])
        if not self._edges:
            raise Malformed(_WHAT, "frame", "no result: the vertex has no output", f"{size} bytes")
        self._results += [Output(edge, payload) for edge in self._to]
        self._to = tuple(self._edges)
        return start + size

    def _direct(self, line: bytes) -> None:
        kind, said = line[:1], line[1:]
        if kind == b">" and said.decode(errors="replace") in self._edges:
            self._to = (said.decode(),)
        elif kind == b"#" and self._edges:
            self._to = (self._edges[place_of(said, len(self._edges))],)
        else:
            raise Malformed(
                _WHAT, "line", f"one of >EDGE, #KEY, !REASON or empty; {', '.join(self._edges)}",
                repr(line[:80])[1:],
            )  # fmt: skip

    def _end(self, line: bytes) -> list[Output] | BadResult:
        results, self._results = self._results, []
        self._to = tuple(self._edges)
        return BadResult(line[1:].decode(errors="replace") or "it said !") if line else results


class FrameProgram(Closable):
    """A running program that works on messages."""

    def __init__(
        self,
        command: Sequence[str],
        edges: Sequence[str],
        environment: Mapping[str, str],
        *,
        grace: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Start it.

        :raises NotStarted: the program does not exist or cannot be run.
        """
        self._process = Process(
            command,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            dies_with_us=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin.fileno()
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._decoder = ResultDecoder(edges)
        self._grace = grace
        self._is_stopping = is_stopping

    def __call__(self, messages: Sequence[Message]) -> Iterator[Answer]:
        """Yield the outcome of messages in order; when stopping, of those already sent.

        :raises ProgramEnded: the program has ended.
        """
        waiting = deque(messages)
        given: deque[Message] = deque()
        ahead = memoryview(b"")
        while given or ahead or (waiting and not self._is_stopping()):
            if not ahead and waiting and not self._is_stopping() and len(given) < _MOST_AHEAD:
                ahead = self._fill(waiting, given)
            poll = select.poll()
            poll.register(self._output, select.POLLIN)
            if ahead:
                poll.register(self._input, select.POLLOUT)
            ready = dict(poll.poll(_LOOK * 1000))
            if self._input in ready and ahead:
                ahead = self._write(ahead)
            if self._output in ready:
                for results in self._read():
                    if not given:
                        raise ProgramEnded(f"{self._name} answers more than it was asked")
                    message = given.popleft()
                    if isinstance(results, BadResult):
                        yield Answer(message, [], results)
                    else:
                        yield Answer(message, results)

    @property
    def _name(self) -> str:
        return self._process.command[0]

    @staticmethod
    def _fill(waiting: deque[Message], given: deque[Message]) -> memoryview:
        frames: list[bytes] = []
        size = 0
        while waiting and size < _AHEAD and len(given) < _MOST_AHEAD:
            message = waiting.popleft()
            given.append(message)
            frames.append(encode_bytes(message.payload))
            size += len(frames[-1])
        return memoryview(b"".join(frames))

    def _write(self, ahead: memoryview) -> memoryview:
        try:
            return ahead[os.write(self._input, ahead) :]
        except BlockingIOError:
            return ahead
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self) -> Iterator[list[Output] | BadResult]:
        try:
            data = os.read(self._output, _PIECE)
        except BlockingIOError:
            return
        if not data:
            raise self._ended()
        try:
            yield from self._decoder.feed(data)
        except Malformed as error:
            raise ProgramEnded(f"{self._name}: {error}") from None

    def _ended(self) -> ProgramEnded:
        status = self._process.wait(self._grace)
        how = "closed its output" if status is None else describe_status(status)
        return ProgramEnded(f"{self._name} {how}, and had messages that are not done")

    def close(self) -> None:
        """Close the program's input, and kill it if it does not end. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(self._grace / 2)
        self._process.end(self._grace / 2)
        self._process.close()
