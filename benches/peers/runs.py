"""What happens in one run of one way: who starts when, and what counts?"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeAlias

from peers.tally import Delivery, Stopwatch, Tally, end_marker, payloads_of, stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from peers.contract import Case, Scratch, Way
    from peers.tally import Taker

__all__ = ["Failed", "Outcome", "Pace", "in_own_process", "latency_run", "throughput_run"]

#: A run that takes so much longer (seconds) than it should has failed.
_GRACE = 25.0

#: New processes come from one that has the slow imports behind it. None inherits what another
#: one left in its heap.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["penstock", "numpy"])


@dataclass(frozen=True, slots=True)
class Pace:
    """How long one run takes."""

    warm_up: float
    seconds: float
    #: For latency: messages, and the pause (seconds) before each, so that nothing queues up.
    messages: int
    pause: float = 0.001


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run found."""

    #: Messages a second for each reader, from the first send to the last receipt; the slowest
    #: reader counts.
    rate: float | None = None
    #: One-way delays in nanoseconds.
    delays: tuple[int, ...] = field(default=(), repr=False)
    #: Why it does not count, if it does not.
    problem: str | None = None


#: When a reader had its last message, and what it got.
_Found: TypeAlias = "tuple[float, Delivery]"


class Failed(Exception):
    """A process could not do its part."""


def throughput_run(way: Way, case: Case, pace: Pace, scratch: Scratch) -> Outcome:
    """Let one process send as fast as it can and the others take everything."""

    def judge(began: float, found: Sequence[_Found]) -> Outcome:
        ended, delivery = max(found, key=lambda each: each[0])
        return Outcome(rate=delivery.received / (ended - began))

    return _run(way, case, pace, scratch, (_full_writer, _full_reader), judge)


def latency_run(way: Way, case: Case, pace: Pace, scratch: Scratch) -> Outcome:
    """Let one process send now and then, and the others note how old each message is."""

    def judge(began: float, found: Sequence[_Found]) -> Outcome:
        del began
        return Outcome(delays=tuple(delay for _, each in found for delay in each.delays))

    return _run(way, case, pace, scratch, (_paced_writer, _paced_reader), judge)


def in_own_process(work: Callable[..., Any], *arguments: object) -> Any:
    """Return what a function returns in a new process.

    :raises Failed: it raised something, or took too long.
    """
    workers = [_Worker(_do, work, arguments)]
    try:
        return _answers(workers, _GRACE * 2)[0]
    finally:
        _end(workers)


def _do(pipe: Connection, work: Callable[..., Any], arguments: Sequence[object]) -> None:
    pipe.send(work(*arguments))


def _run(
    way: Way,
    case: Case,
    pace: Pace,
    scratch: Scratch,
    ends: tuple[Callable[..., None], Callable[..., None]],
    judge: Callable[[float, Sequence[_Found]], Outcome],
) -> Outcome:
    address = way.address(scratch)
    write, read = ends
    workers: list[_Worker] = []
    try:
        workers = [_Worker(write, way, address, case, pace)]
        workers += [_Worker(read, way, address, case, number) for number in range(case.readers)]
        return _conduct(workers, judge)
    except Failed as error:
        return Outcome(problem=str(error))
    finally:
        _end(workers)
        way.clean_up(address)


def _conduct(
    workers: Sequence[_Worker], judge: Callable[[float, Sequence[_Found]], Outcome]
) -> Outcome:
    writer, *readers = workers
    _answers([writer])  # it is open
    for reader in readers:
        reader.tell()
    _answers(readers)  # they are open, too
    outcome = Outcome()
    for _ in ("warm-up", "measurement"):
        writer.tell()
        began, *found = _answers(workers)
        for _, delivery in found:
            if delivery.problem is not None:
                return Outcome(problem=delivery.problem)
        outcome = judge(began, found)
    return outcome


# --- the processes ------------------------------------------------------------------------------


class _Worker:
    """A process, and a pipe to it."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = _PROCESSES.Pipe()
        self._process: BaseProcess = _PROCESSES.Process(
            target=_guarded, args=(theirs, work, arguments), daemon=True
        )
        self._process.start()
        theirs.close()  # only its own copy is left: should it die, recv ends

    def tell(self) -> None:
        try:
            self.pipe.send(None)
        except OSError:
            raise Failed("a process ended before its time") from None

    def answer(self) -> Any:
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise Failed("a process ended before its time") from None
        if isinstance(answer, Failed):
            raise answer
        return answer

    def end(self) -> None:
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()

    def stop(self) -> None:
        """Let it close what it opened and end by itself."""
        self.pipe.close()


def _answers(workers: Sequence[_Worker], patience: float = _GRACE) -> list[Any]:
    """Wait for one answer of each; the first one that failed ends it for all."""
    answers: dict[Any, Any] = {}
    waiting: dict[Any, _Worker] = {worker.pipe: worker for worker in workers}
    deadline = time.monotonic() + patience
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Failed(f"no answer for {patience:.0f} s")
        for pipe in ready:
            answers[pipe] = waiting.pop(pipe).answer()
    return [answers[worker.pipe] for worker in workers]


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.end()


def _guarded(pipe: Connection, work: Callable[..., None], arguments: Sequence[object]) -> None:
    try:
        work(pipe, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over
    except BaseException as error:  # noqa: BLE001 - whatever it is, the table must say so
        with suppress(OSError):
            pipe.send(Failed(f"{type(error).__name__}: {error}"))


def _full_writer(pipe: Connection, way: Way, address: str, case: Case, pace: Pace) -> None:
    payloads = payloads_of(case.size)
    with closing(way.open_writer(address, case)) as sender:
        pipe.send(None)
        pipe.recv()
        sender.wait_for_readers(case.readers)
        for seconds in (pace.warm_up, pace.seconds):
            began = time.perf_counter()
            count = sender.send_for(seconds, payloads)
            sender.send(end_marker(case.size, count))
            pipe.send(began)
            pipe.recv()


def _paced_writer(pipe: Connection, way: Way, address: str, case: Case, pace: Pace) -> None:
    template = bytearray(case.size)
    with closing(way.open_writer(address, case)) as sender:
        pipe.send(None)
        pipe.recv()
        sender.wait_for_readers(case.readers)
        for count in (pace.messages // 5, pace.messages):
            for _ in range(count):
                time.sleep(pace.pause)
                sender.send(stamped(template))
            sender.send(end_marker(case.size, count))
            pipe.send(0.0)
            pipe.recv()


def _full_reader(pipe: Connection, way: Way, address: str, case: Case, number: int) -> None:
    # Every byte is compared while it warms up, and the first byte of each while it counts.
    takers = (Tally(case.size, thorough=True), Tally(case.size))
    _reader(pipe, way, address, case, number, takers)


def _paced_reader(pipe: Connection, way: Way, address: str, case: Case, number: int) -> None:
    _reader(pipe, way, address, case, number, (Stopwatch(), Stopwatch()))


def _reader(
    pipe: Connection, way: Way, address: str, case: Case, number: int, takers: Sequence[Taker]
) -> None:
    pipe.recv()
    with closing(way.open_reader(address, case, number)) as receiver:
        pipe.send(None)
        for taker in takers:
            receiver.take_all(taker)
            ended = time.perf_counter()
            pipe.send((ended, taker.delivery()))
        pipe.recv()
