"""How are other programs run beside this one: started, watched, restarted and ended in time?"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import random
import select
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import AlreadyExists, InvalidOption, NotFound, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.retry import Backoff
from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "Health",
    "NotStarted",
    "Process",
    "Program",
    "ProgramState",
    "ProgramStatistics",
    "Restart",
    "Supervisor",
    "describe_status",
]

log = logging.getLogger(__name__)

#: A longer line of output is passed on in pieces.
_LONGEST_LINE: Final = 65_536
#: The reason for ending a program with a failed health check.
_UNWELL: Final = "it was not well"


#: Errors of a start that says the same at every try; others, such as too many files, may pass.
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC})


class NotStarted(PenstockError):
    """A program could not be started."""

    def __init__(self, command: str, error: OSError) -> None:
        self.command = command
        #: Whether it is not there, or may not be run: a later try fails as well.
        self.is_missing = error.errno in _MISSING
        self.reason = f"cannot be started: {error.strerror or error}"
        super().__init__(
            f"{command} {self.reason}",
            hint="give its whole path, or see whether it is installed and may be run",
        )


def describe_status(status: int) -> str:
    """Describe how a program ended, from its `subprocess` status."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


class Process:
    """A running program with all its children: one process group.

    Ctrl-C in a terminal does not reach it: its owner ends it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        dies_with_us: bool = False,
    ) -> None:
        """Start it. `environment` is added to that of this process.

        `dies_with_us`: it also ends when this process is killed; more exactly, when the thread
        that started it ends.

        :raises NotStarted: the program does not exist, or cannot be run.
        """
        self.command = tuple(command)
        try:
            # Otherwise the wrapper would start, and fail to find the program.
            found = shutil.which(command[0], path=(environment or os.environ).get("PATH"))
            wrapper = _wrapper() if dies_with_us and found else ()
            self._process = subprocess.Popen(  # noqa: S603 - it is what the caller asked for
                [*wrapper, *command],
                cwd=directory,
                env=None if environment is None else {**os.environ, **environment},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise NotStarted(command[0], error) from error
        except ValueError as error:  # no program, folder or variable can have this name
            raise NotStarted(command[0], OSError(errno.EINVAL, str(error))) from error
        self.pid = self._process.pid
        #: It runs as another user, and cannot be ended from here: sudo, a setuid program.
        self.is_foreign = False
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout
        try:
            #: Readable when it has ended.
            self.descriptor = os.pidfd_open(self.pid)
        except OSError as error:  # no descriptor left
            self.descriptor = -1
            self.signal(signal.SIGKILL)
            if not self.is_foreign:
                self._process.wait()
            self.close()
            raise NotStarted(command[0], error) from error

    @property
    def status(self) -> int | None:
        """Its `subprocess` status, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for its end; return its status. (`Popen.wait` would poll.)"""
        if self.status is None:
            waiting = select.poll()
            waiting.register(self.descriptor, select.POLLIN)
            waiting.poll(seconds * 1000)
        return self.status

    def signal(self, number: int) -> bool:
        """Send a signal to the process group; False: the group has ended, or is foreign."""
        # The group exists while any process in it does, also when its first process has ended.
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            self.is_foreign = True
            return False
        return True

    def end(self, grace: float) -> int | None:
        """End its process group, after `grace` seconds by force; return its status.

        None: it is foreign, and still runs.
        """
        self.signal(signal.SIGTERM)
        self.wait(grace)
        self.signal(signal.SIGKILL)
        return self.status if self.is_foreign else self._process.wait()

    def close(self) -> None:
        """Close its descriptors, after its end. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()


@cache
def _wrapper() -> tuple[str, ...]:
    """Return a command prefix that makes a program die with its parent."""
    # `preexec_fn` would run Python in the fork of a threaded process.
    found = shutil.which("setpriv")
    return () if found is None else (found, "--pdeathsig", "KILL", "--")


class Restart(enum.Enum):
    """When a program is restarted after its end."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A command that checks a program's health; status 0: healthy."""

    command: tuple[str, ...]
    #: Seconds between two checks, and before the first.
    every: float = 10.0
    #: A check that takes longer (seconds) has failed.
    timeout: float = 5.0
    #: Consecutive failed checks before a restart.
    failures: int = 3

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidOption("health", "", "is empty")
        if not (self.every > 0 and self.timeout > 0):
            raise InvalidOption("health", self.every, "its times must be above 0 seconds")
        if self.failures < 1:
            raise InvalidOption("failures", self.failures, "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to run, and its restart policy.

    :raises InvalidOption: it has no command.
    """

    name: str
    command: tuple[str, ...]
    directory: str | None = None
    #: Added to the environment of this process.
    environment: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = Restart.ON_FAILURE
    backoff: Backoff = field(default_factory=partial(Backoff, initial=0.5, maximum=30.0))
    #: After this many seconds without a failure, the next one counts as the first.
    calm: float = 10.0
    #: Seconds from SIGTERM to SIGKILL.
    grace: float = 5.0
    health: Health | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidOption("command", "", f"{self.name} has no command")


class ProgramState(enum.Enum):
    """State of a program."""

    RUNNING = "running"
    #: It failed, and will be restarted.
    WAITING = "waiting"
    #: It was told to end.
    STOPPING = "stopping"
    #: It has ended, and is not restarted.
    ENDED = "ended"


class ProgramStatistics(NamedTuple):
    """Counters and state of a program."""

    state: ProgramState
    #: Of the process that runs now.
    pid: int | None
    starts: int
    #: Ends with a status other than 0, failed starts, and ends after failed health checks.
    failures: int
    #: How the last run ended, in words, and its process; None: the first still runs.
    last_end: str | None
    last_pid: int | None = None
    #: Whether the last start failed because the program is not there, or may not be run.
    is_missing: bool = False


class Supervisor(Closable):
    """Keeps programs running, in a thread of its own, until it is stopped.

    They also die when this process is killed, where the system has `setpriv`.
    """

    def __init__(
        self,
        programs: Iterable[Program] = (),
        *,
        on_output: Callable[[str, str], None] | None = None,
        on_end: Callable[[str, ProgramStatistics], None] | None = None,
    ) -> None:
        """Start the programs.

        `on_output` gets a program's name and each line of its output, which is logged by default.
        `on_end` gets each end. Both are called in the supervisor's thread.

        :raises AlreadyExists: two programs have the same name.
        """
        self._on_output = on_output or (lambda name, line: log.info("%s: %s", name, line))
        self._on_end = on_end
        self._children: dict[str, _Child] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._waker, selectors.EVENT_READ, self._drain_waker)
        self._is_closed = False
        self._worker = Worker("supervisor", self._supervise, log=log, rouse=self._rouse)
        try:
            for program in programs:
                self.add(program)
            self._worker.start()
        except BaseException:
            self.close()
            raise

    # --- for its owner ------------------------------------------------------------------------

    def add(self, program: Program) -> None:
        """Start another program.

        :raises AlreadyExists: a program has this name.
        """
        with self._changed:
            known = self._children.get(program.name)
            if known is not None and known.state is not ProgramState.ENDED:
                raise AlreadyExists(
                    f"a program {program.name!r} runs already",
                    hint="end it first, or give this one another name",
                )
            child = _Child(program, self)
            self._children[program.name] = child
        self._ask(child.start)

    def restart(self, name: str) -> None:
        """Restart a program, also one that has ended.

        :raises NotFound: no program has this name.
        """
        with self._changed:
            child = self._child(name)
            if child.state is ProgramState.ENDED:  # not any more: `wait` waits for its next end
                child.state = ProgramState.WAITING
        self._ask(child.restart)

    def end(self, name: str) -> None:
        """Tell a program to end for good; `wait` waits for that.

        :raises NotFound: no program has this name.
        """
        self._ask(self._child(name).end)

    def wait(self, names: Iterable[str] | None = None, timeout: float | None = None) -> bool:
        """Wait until programs (default: all) have ended for good; False: not within `timeout`.

        :raises NotFound: no program has this name.
        """
        with self._changed:
            children = [self._child(name) for name in names or self._children]
            return self._changed.wait_for(
                lambda: all(child.state is ProgramState.ENDED for child in children), timeout
            )

    def statistics(self) -> dict[str, ProgramStatistics]:
        """Return the statistics of each program, by name."""
        with self._changed:
            return {name: child.statistics() for name, child in self._children.items()}

    def close(self) -> None:
        """End all programs, each within its grace period. Idempotent."""
        self._worker.stop()
        if not self._is_closed:
            self._is_closed = True
            self._selector.close()
            os.close(self._waker)

    def _child(self, name: str) -> _Child:
        try:
            return self._children[name]
        except KeyError:
            known = ", ".join(self._children) or "none"
            raise NotFound(f"no program is called {name!r}", hint=f"there are: {known}") from None

    def _ask(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._waker, 1)

    # --- its thread ---------------------------------------------------------------------------

    def _supervise(self, worker: Worker) -> None:
        while True:
            while self._requests:
                self._requests.popleft()()
            children = list(self._children.values())
            if worker.is_stopping:
                for child in children:
                    child.end()
                if all(child.state is ProgramState.ENDED for child in children):
                    return
            now = time.monotonic()
            for child in children:
                child.look(now)
            due = min((child.due for child in children), default=float("inf"))
            timeout = None if due == float("inf") else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(timeout):
                # The end of a program, handled just before, may have unwatched its output.
                if key.fd in self._selector.get_map():
                    key.data()

    def _drain_waker(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)

    def watch(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Call a function when a descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def tell_output(self, name: str, line: str) -> None:
        """Pass a line to `on_output`; log its errors, which must not end the supervision."""
        try:
            self._on_output(name, line)
        except Exception:
            log.exception("a line of %s was not taken", name)

    def tell_change(self, child: _Child, *, has_ended: bool = False) -> None:
        """Call `on_end` after an end, and wake waiting threads."""
        if has_ended and self._on_end is not None:
            try:
                self._on_end(child.program.name, child.statistics())
            except Exception:
                log.exception("the end of %s was not taken", child.program.name)
        with self._changed:
            self._changed.notify_all()


class _Child:
    """One supervised program. All methods but `statistics` run in the supervisor's thread."""

    def __init__(self, program: Program, supervisor: Supervisor) -> None:
        self.program = program
        self.state = ProgramState.WAITING
        #: Time of the next `look`, by the monotonic clock.
        self.due = float("inf")
        self._supervisor = supervisor
        self._process: Process | None = None
        self._starts = self._failures = 0
        self._last_end: str | None = None
        self._last_pid: int | None = None
        self._is_missing = False
        self._failures_in_a_row = 0
        self._started_at = 0.0
        self._is_wanted = True
        #: Restart it, whatever its policy.
        self._is_asked_for = False
        self._why_ended: str | None = None
        self._output = _Lines(partial(supervisor.tell_output, program.name))
        self._check: Process | None = None
        self._bad_checks = 0
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret

    def statistics(self) -> ProgramStatistics:
        pid = None if self._process is None else self._process.pid
        return ProgramStatistics(
            self.state,
            pid,
            self._starts,
            self._failures,
            self._last_end,
            self._last_pid,
            self._is_missing,
        )

    def start(self) -> None:
        if self._process is not None or not self._is_wanted:
            return
        program = self.program
        self._starts += 1
        self._started_at = time.monotonic()
        try:
            self._process = Process(
                program.command,
                directory=program.directory,
                environment=program.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                dies_with_us=True,
            )
        except NotStarted as error:
            self._is_missing = error.is_missing
            self._end_run(str(error), has_failed=True)
            return
        self._is_missing = False
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._supervisor.watch(self._process.stdout.fileno(), self._read_output)
        self._supervisor.watch(self._process.descriptor, self._note_end)
        self._bad_checks = 0
        self.due = (
            float("inf") if program.health is None else self._started_at + program.health.every
        )
        self._change(ProgramState.RUNNING)

    def restart(self) -> None:
        self._is_wanted = True
        self._failures_in_a_row = 0
        if self._process is None:
            self.start()
        else:
            self._is_asked_for = True
            self._ask_to_end("it is restarted")

    def end(self) -> None:
        self._is_wanted = False
        if self._process is None:
            if self.state is not ProgramState.ENDED:
                self._change(ProgramState.ENDED)
            self.due = float("inf")
        elif self.state is not ProgramState.STOPPING:
            self._ask_to_end("it was told to end")

    def look(self, now: float) -> None:
        """Do what is due at `now`."""
        if now < self.due:
            return
        self.due = float("inf")
        if self._process is None:
            self.start()
        elif self.state is ProgramState.STOPPING:
            self._process.signal(signal.SIGKILL)
            if self._process.is_foreign and self._process.status is None:
                self._give_up(self._process)
        elif self._check is None:
            self._begin_check()
        else:
            self._end_check(is_well=False)

    def _ask_to_end(self, why: str) -> None:
        assert self._process is not None
        if self._check is not None:
            self._drop_check()
        self._why_ended = why
        self._change(ProgramState.STOPPING)
        self._process.signal(signal.SIGTERM)
        self.due = time.monotonic() + self.program.grace

    def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        try:
            data = os.read(descriptor, _LONGEST_LINE)
        except BlockingIOError:
            return
        self._output.feed(data)
        if not data:
            self._supervisor.unwatch(descriptor)
            self._process.stdout.close()

    def _note_end(self) -> None:
        process = self._process
        assert process is not None
        status = process.status
        if status is None:
            return
        process.signal(signal.SIGKILL)  # its remaining children
        self._let_go(process)
        why, self._why_ended = self._why_ended, None
        said = describe_status(status)
        self._end_run(
            f"{said}: {why}" if why else said,
            has_failed=why is _UNWELL or (why is None and status != 0),
        )

    def _give_up(self, process: Process) -> None:
        """Leave a program alone that cannot be ended; a second one beside it is not started."""
        self._let_go(process)
        why, self._why_ended = self._why_ended, None
        self._is_wanted = False
        said = f"still runs as process {process.pid}, of another user: {why}, and cannot be ended"
        self._end_run(said, has_failed=True)

    def _let_go(self, process: Process) -> None:
        """Pass on the rest of its output, and close its descriptors."""
        self._supervisor.unwatch(process.descriptor)
        assert process.stdout is not None
        while not process.stdout.closed:
            before = self._output.taken
            self._read_output()
            if self._output.taken == before and not process.stdout.closed:
                # A process outside the group still has it open: do not wait for that.
                self._supervisor.unwatch(process.stdout.fileno())
                break
        self._output.flush()
        process.close()
        self._process, self._last_pid = None, process.pid
        if self._check is not None:
            self._drop_check()

    def _end_run(self, said: str, *, has_failed: bool) -> None:
        program = self.program
        self._last_end = said
        if has_failed:
            if time.monotonic() - self._started_at > program.calm:
                self._failures_in_a_row = 0
            self._failures += 1
            self._failures_in_a_row += 1
        is_asked_for, self._is_asked_for = self._is_asked_for, False
        comes_again = self._is_wanted and (
            is_asked_for
            or program.restart is Restart.ALWAYS
            or (program.restart is Restart.ON_FAILURE and has_failed)
        )
        if not comes_again:
            self.due = float("inf")
            if has_failed:
                log.error("%s %s", program.name, said)
            self._change(ProgramState.ENDED, has_ended=True)
            return
        delay = 0.0
        if not is_asked_for:
            delay = program.backoff.delay(max(1, self._failures_in_a_row), self._rng)
            log.warning("%s %s; it is started again in %.1f s", program.name, said, delay)
        self.due = time.monotonic() + delay
        self._change(ProgramState.WAITING, has_ended=True)

    def _change(self, state: ProgramState, *, has_ended: bool = False) -> None:
        self.state = state
        self._supervisor.tell_change(self, has_ended=has_ended)

    # --- health -------------------------------------------------------------------------------

    def _begin_check(self) -> None:
        health = self.program.health
        assert health is not None
        try:
            self._check = Process(
                health.command,
                directory=self.program.directory,
                environment=self.program.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except NotStarted as error:
            log.warning("the health of %s is not known: %s", self.program.name, error)
            self.due = time.monotonic() + health.every
            return
        self._supervisor.watch(self._check.descriptor, self._note_check)
        self.due = time.monotonic() + health.timeout

    def _note_check(self) -> None:
        assert self._check is not None
        status = self._check.status
        if status is not None:
            self._end_check(is_well=status == 0)

    def _end_check(self, *, is_well: bool) -> None:
        health = self.program.health
        assert health is not None
        self._drop_check()
        self.due = time.monotonic() + health.every
        self._bad_checks = 0 if is_well else self._bad_checks + 1
        if self._bad_checks >= health.failures:
            self._ask_to_end(_UNWELL)

    def _drop_check(self) -> None:
        assert self._check is not None
        self._supervisor.unwatch(self._check.descriptor)
        self._check.end(0)
        self._check.close()
        self._check = None


class _Lines:
    """Splits the output of a program into lines."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        #: Bytes so far.
        self.taken = 0
        self._tell = tell
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self.taken += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line.decode(errors="replace").rstrip("\r"))
        if len(self._rest) >= _LONGEST_LINE:
            self.flush()

    def flush(self) -> None:
        """Pass on the last line, which has no newline."""
        if self._rest:
            self._tell(self._rest.decode(errors="replace"))
            self._rest = b""
